"""The status feed: same states for all, and a slow client misses some."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from helper.errors import StoreError
from helper.observability.status_feed import (
    INTERVAL_SECONDS,
    WAKE_BATCH_SIZE,
    WAKE_PAUSE_SECONDS,
    StatusFeed,
)
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


async def fail_snapshot() -> object:
    raise AssertionError("no listener")


def create_feed(clock: FakeClock | None = None) -> StatusFeed:
    return StatusFeed(fail_snapshot, clock=clock or FakeClock())


async def take(states: AsyncIterator[bytes], number: int) -> list[bytes]:
    events = []
    async with asyncio.timeout(5):
        async for event in states:
            events.append(event)
            if len(events) == number:
                return events
    return events


async def test_new_listener_gets_newest_state_and_later_ones() -> None:
    states = create_feed()
    states.publish(b"1")
    states.publish(b"2")
    listener = states.subscribe()
    assert await take(listener, 1) == [b"2"]
    states.publish(b"3")
    assert await take(listener, 1) == [b"3"]


async def test_new_listener_does_not_get_old_state() -> None:
    clock = FakeClock()
    states = create_feed(clock)
    states.publish(b"old")
    clock.advance(3 * INTERVAL_SECONDS)
    waiting = asyncio.ensure_future(take(states.subscribe(), 1))
    await asyncio.sleep(0)
    states.publish(b"new")
    assert await waiting == [b"new"]


async def test_slow_listener_misses_states_and_delays_no_other() -> None:
    states = create_feed()
    states.publish(b"1")
    slow, quick = states.subscribe(), states.subscribe()
    assert await take(slow, 1) == await take(quick, 1) == [b"1"]
    for number in range(2, 7):
        states.publish(b"%d" % number)
        assert await take(quick, 1) == [b"%d" % number]
    assert await take(slow, 1) == [b"6"]


async def test_publish_yields_between_slices_of_listeners() -> None:
    states = create_feed()
    served: list[bytes] = []

    async def listen() -> None:
        served.extend(await take(states.subscribe(), 1))

    listening = [asyncio.ensure_future(listen()) for _ in range(5 * WAKE_BATCH_SIZE)]
    await asyncio.sleep(0)
    assert states.listener_count == 5 * WAKE_BATCH_SIZE
    started_at = asyncio.get_running_loop().time()
    states.publish(b"1")
    turns = [0]
    while len(served) < 5 * WAKE_BATCH_SIZE:
        await asyncio.sleep(0)  # a due share yields to the event loop like this
        turns.append(len(served))
    assert max(after - before for before, after in pairwise(turns)) <= WAKE_BATCH_SIZE
    assert asyncio.get_running_loop().time() - started_at >= 4 * WAKE_PAUSE_SECONDS, "other threads made progress"
    await asyncio.gather(*listening)
    assert served == [b"1"] * (5 * WAKE_BATCH_SIZE)


async def test_close_ends_all_listeners() -> None:
    states = create_feed()
    waiting = [asyncio.ensure_future(take(states.subscribe(), 1)) for _ in range(3)]
    await asyncio.sleep(0)
    assert states.listener_count == 3
    states.close()
    assert await asyncio.gather(*waiting) == [[], [], []]
    assert states.listener_count == 0


async def test_snapshots_are_taken_only_while_someone_listens() -> None:
    clock, snapshot_count = FakeClock(), 0

    async def snapshot() -> object:
        nonlocal snapshot_count
        snapshot_count += 1
        if snapshot_count == 2:
            raise StoreError("broken for a moment")
        return {"made": snapshot_count}

    states = StatusFeed(snapshot, clock=clock)
    runner = asyncio.create_task(states.run())
    try:
        await asyncio.sleep(0)
        assert snapshot_count == 0
        listener = states.subscribe()
        assert await anext(listener) == b'{"made":1}'
        waiting = asyncio.ensure_future(take(listener, 1))
        for _ in range(2):
            clock.advance(INTERVAL_SECONDS)
            for _ in range(5):
                await asyncio.sleep(0)
        assert await waiting == [b'{"made":3}'], "a store error does not end the stream"
        assert snapshot_count == 3
        await listener.aclose()  # type: ignore[attr-defined]
        for _ in range(3):
            clock.advance(INTERVAL_SECONDS)
            for _ in range(5):
                await asyncio.sleep(0)
        assert snapshot_count <= 4
    finally:
        runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runner
