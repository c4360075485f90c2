"""Supervised tasks end when a stop is requested; auxiliary ones are restarted until then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from helper.errors import HelperError, LeaseHeld
from helper.runtime import supervisor
from helper.runtime.supervisor import MAX_RESTART_SECONDS, AuxiliaryTasks, run_until_stopped, supervise
from tests.support.clock import FakeClock, JumpingClock


async def test_long_work_is_abandoned_on_shutdown() -> None:
    stop, entered, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    waiting = asyncio.create_task(run_until_stopped(stop, work()))
    await entered.wait()
    assert not waiting.done()
    stop.set()
    await waiting
    assert left.is_set()


async def test_exception_of_work_is_raised() -> None:
    async def work() -> None:
        raise LeaseHeld("another host sends")

    with pytest.raises(LeaseHeld):
        await run_until_stopped(asyncio.Event(), work())


async def test_component_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_AGAIN_SECONDS", 0.05)
    stop, ended = asyncio.Event(), list[str]()

    async def lose_cancellation() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("prompt")

    running = asyncio.create_task(
        supervise({"slow": lose_cancellation(), "prompt": work()}, [], stop, auxiliary={}, clock=FakeClock())
    )
    await asyncio.sleep(0)
    stop.set()
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            await running
    assert ended == ["prompt", "slow"]
    assert [(entry["event"], entry["components"]) for entry in logs] == [("components_stop_slowly", ["slow"])]


async def lose_other_task() -> None:
    """Wait on a task that something else cancels."""
    other = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(other.cancel)
    await other


async def fail() -> None:
    raise ValueError("secret")


async def fail_with_advice() -> None:
    raise HelperError("unreadable", advice="Repair it.")


async def end() -> None:
    pass


@pytest.mark.parametrize("run", [fail, fail_with_advice, end, lose_other_task])
async def test_auxiliary_task_is_restarted_and_never_ends_the_service(run: Callable[[], Awaitable[None]]) -> None:
    stop, clock, starts, is_cancelled = asyncio.Event(), JumpingClock(), list[float](), list[str]()

    async def dispatch() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.append("dispatcher")

    async def feed() -> None:
        starts.append(clock.monotonic())
        if len(starts) == 10:
            clock.advance(MAX_RESTART_SECONDS)  # ran for long
        if len(starts) == 12:
            stop.set()
            assert not is_cancelled
        await run()

    auxiliary: AuxiliaryTasks = {"feed": feed}
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            await supervise({"dispatcher": dispatch()}, [], stop, auxiliary=auxiliary, clock=clock)
    assert is_cancelled == ["dispatcher"]
    assert clock.sleeps[:11] == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2]
    reports = [(entry["event"], entry["components"], entry["seconds"]) for entry in logs]
    assert reports[:2] == [("component_failed", ["feed"], 1), ("component_failed", ["feed"], 2)]


async def test_essential_task_ends_the_service() -> None:
    async def run_feed() -> None:
        await asyncio.Event().wait()

    for run, error in ((fail, ValueError), (end, HelperError)):
        with pytest.raises(error):
            await supervise({"sync": run()}, [], asyncio.Event(), auxiliary={"feed": run_feed}, clock=FakeClock())
