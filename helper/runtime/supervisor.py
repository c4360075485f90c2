"""Supervises background tasks: runs them until stopped; if one ends, all are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from helper.errors import HelperError


async def supervise(
    coroutines: Mapping[str, Coroutine[Any, Any, None]], servers: Sequence[asyncio.Task[None]], stop: asyncio.Event
) -> None:
    """Run the tasks until `stop` is set, then cancel them in reverse order.

    Args:
        coroutines: background tasks by name.
        servers: additional tasks to watch; the caller ends them.
        stop: requests the shutdown.

    Raises:
        HelperError: a task ended unexpectedly. If it failed, its own error is raised.
    """
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    tasks = [stopping, *(asyncio.create_task(part, name=name) for name, part in coroutines.items())]
    try:
        done, _ = await asyncio.wait([*tasks, *servers], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
            if not stop.is_set():
                raise HelperError(f"{task.get_name()} ended unexpectedly", advice="Check the log and restart.")
    finally:
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it once `stop` is set. Errors of `work` are raised."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
