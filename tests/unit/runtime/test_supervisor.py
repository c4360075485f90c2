"""Supervised tasks end when a stop is requested."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from helper.errors import LeaseHeld
from helper.runtime import supervisor
from helper.runtime.supervisor import run_until_stopped, supervise


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

    running = asyncio.create_task(supervise({"slow": lose_cancellation(), "prompt": work()}, [], stop))
    await asyncio.sleep(0)
    stop.set()
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            await running
    assert ended == ["prompt", "slow"]
    assert [(entry["event"], entry["components"]) for entry in logs] == [("components_stop_slowly", ["slow"])]
