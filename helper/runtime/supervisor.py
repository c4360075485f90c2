"""Run parts that go on for ever, until told to stop; one that ends by itself ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from helper.errors import HelperError


async def supervise(
    parts: Mapping[str, Coroutine[Any, Any, None]], servers: Sequence[asyncio.Task[None]], stop: asyncio.Event
) -> None:
    """Run the parts until `stop` is set, then end them, the last first.

    Args:
        parts: what goes on for ever, by name.
        servers: tasks that are watched as well, and left to the caller.
        stop: ends it all in order.

    Raises:
        HelperError: a part ended by itself; one that failed raises its own error.
    """
    stopping = asyncio.create_task(_wait(stop))
    tasks = [stopping, *(asyncio.create_task(part, name=name) for name, part in parts.items())]
    try:
        done, _ = await asyncio.wait([*tasks, *servers], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
            if not stop.is_set():
                raise HelperError(f"the {task.get_name()} ended by itself", advice="Look into the log and restart.")
    finally:
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Work that may take long, given up once `stop` is set; raises what it raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(_wait(stop))
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
