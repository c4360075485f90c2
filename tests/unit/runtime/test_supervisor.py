"""What is begun only while nobody stops it."""

from __future__ import annotations

import asyncio

import pytest

from helper.errors import LeaseHeld
from helper.runtime.supervisor import unless


async def test_work_that_takes_long_is_given_up_when_the_service_stops() -> None:
    stop, begun, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    waiting = asyncio.create_task(unless(stop, work()))
    await begun.wait()
    assert not waiting.done()
    stop.set()
    await waiting
    assert left.is_set()


async def test_what_it_raises_is_raised() -> None:
    async def work() -> None:
        raise LeaseHeld("another host sends")

    with pytest.raises(LeaseHeld):
        await unless(asyncio.Event(), work())
