"""Supervises background tasks: runs them until stopped; if one ends, all are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog

from helper.errors import HelperError

log = structlog.get_logger("helper.runtime")

CANCEL_AGAIN_SECONDS: Final = 5.0
"""Seconds after which a component that has not ended is cancelled again. Components end within 1 s."""


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
        await _cancel_until_done(tasks[::-1])


async def _cancel_until_done(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks in order and wait until they have ended.

    The cancellation is repeated, because a task can lose one: for example when a timeout expires in the same moment.
    """
    pending = tasks
    while pending:
        for task in pending:
            task.cancel()
        done, _ = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
        pending = [task for task in pending if task not in done]
        if pending:
            log.warning("components_stop_slowly", components=[task.get_name() for task in pending])


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
