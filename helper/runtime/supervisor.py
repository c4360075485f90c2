"""Supervises background tasks: runs them until stopped.

If an essential task ends, all are cancelled. An auxiliary task, on which no share depends, is restarted instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog

from helper.clock import Clock
from helper.errors import HelperError

log = structlog.get_logger("helper.runtime")

CANCEL_AGAIN_SECONDS: Final = 5.0
"""Seconds after which a component that has not ended is cancelled again. Components end within 1 s."""
FIRST_RESTART_SECONDS: Final = 1.0
"""Seconds until the first restart of an auxiliary task. The delay doubles with each restart."""
MAX_RESTART_SECONDS: Final = 60.0
"""Maximum delay in seconds. After a run of this length the next delay is the first one again."""

AuxiliaryTasks = Mapping[str, Callable[[], Awaitable[None]]]
"""Functions that run auxiliary tasks, by name. They can be called again after they have failed."""


async def supervise(
    essential: Mapping[str, Coroutine[Any, Any, None]],
    servers: Sequence[asyncio.Task[None]],
    stop: asyncio.Event,
    *,
    auxiliary: AuxiliaryTasks,
    clock: Clock,
) -> None:
    """Run the tasks until `stop` is set, then cancel them in reverse order.

    Args:
        essential: background tasks by name; all end with the first one that ends.
        servers: additional tasks to watch; the caller ends them.
        auxiliary: tasks that are restarted when they end.

    Raises:
        HelperError: an essential task ended unexpectedly. If it failed, its own error is raised.
    """
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    tasks = [
        stopping,
        *(asyncio.create_task(_keep_running(name, run, clock), name=name) for name, run in auxiliary.items()),
        *(asyncio.create_task(part, name=name) for name, part in essential.items()),
    ]
    try:
        done, _ = await asyncio.wait([*tasks, *servers], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
            if not stop.is_set():
                raise HelperError(f"{task.get_name()} ended unexpectedly", advice="Check the log and restart.")
    finally:
        await _cancel_until_done(tasks[::-1])


async def _keep_running(name: str, run: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Run a task until cancelled. Log when it ends, and run it again."""
    task, delay = asyncio.current_task(), FIRST_RESTART_SECONDS
    assert task is not None
    while True:
        started_at = clock.monotonic()
        error: BaseException | None = None
        try:
            await run()
        except asyncio.CancelledError as cancelled:
            if task.cancelling():
                raise
            error = cancelled  # of another task, on which this one waited
        except Exception as failure:  # an error of an auxiliary task must not end the service
            error = failure
        if clock.monotonic() - started_at >= MAX_RESTART_SECONDS:
            delay = FIRST_RESTART_SECONDS
        log.error("component_failed", components=[name], seconds=delay, exc_info=error)
        await clock.sleep(delay)
        delay = min(2 * delay, MAX_RESTART_SECONDS)


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
