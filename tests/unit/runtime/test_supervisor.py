"""`run_until_stopped`: abandons its work when a stop is requested."""

from __future__ import annotations

import asyncio

import pytest

from helper.errors import LeaseHeld
from helper.runtime.supervisor import run_until_stopped


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
