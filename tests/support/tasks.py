"""Tasks that run during a block, and waits for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run a coroutine during the block; cancel it at the end. An error that ended it is raised then."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def poll(condition: Callable[[], object]) -> None:
    """Wait without limit for a condition, which may be an awaitable, outside this process."""
    while True:
        value = condition()
        if await value if inspect.isawaitable(value) else value:
            return
        await asyncio.sleep(0.05)


async def is_met_within(seconds: float, condition: Callable[[], object]) -> bool:
    """Wait for such a condition, and return whether it is met in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await poll(condition)
        return True
    return False
