"""The feed of states: everybody the same, whoever is slow is dropped, whoever comes back goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from helper.errors import StoreError
from helper.observability.status_feed import INTERVAL, PAUSE, SLICE, Event, Feed
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


async def unasked() -> object:
    raise AssertionError("nobody listens")


def feed(clock: FakeClock | None = None, kept: int = 4) -> Feed:
    return Feed(unasked, clock=clock or FakeClock(), name="run", kept=kept)


async def take(states: AsyncIterator[Event], number: int) -> list[str]:
    found = []
    async with asyncio.timeout(5):
        async for event in states:
            found.append(event.name)
            if len(found) == number:
                return found
    return found


async def test_a_newcomer_gets_the_newest_state_and_those_after_it() -> None:
    states = feed()
    states.publish(b"1")
    states.publish(b"2")
    listener = states.listen()
    assert await take(listener, 1) == ["run-2"]
    states.publish(b"3")
    assert await take(listener, 1) == ["run-3"]


async def test_a_state_of_long_ago_is_not_given_to_a_newcomer() -> None:
    clock = FakeClock()
    states = feed(clock)
    states.publish(b"old")
    clock.advance(3 * INTERVAL)
    waiting = asyncio.ensure_future(take(states.listen(), 1))
    await asyncio.sleep(0)
    states.publish(b"new")
    assert await waiting == ["run-2"]


async def test_whoever_comes_back_goes_on_where_it_was() -> None:
    states = feed()
    for number in range(5):
        states.publish(b"%d" % number)
    assert await take(states.listen("run-2"), 3) == ["run-3", "run-4", "run-5"]
    assert await take(states.listen("run-1"), 4) == ["run-2", "run-3", "run-4", "run-5"]


@pytest.mark.parametrize("last", ["run-0", "other-4", "run-9", "run-x", "run-" + "9" * 400, "", "-", "nonsense"])
async def test_whoever_was_away_too_long_or_lies_gets_the_newest(last: str) -> None:
    states = feed()
    for number in range(6):
        states.publish(b"%d" % number)
    assert await take(states.listen(last), 1) == ["run-6"]


async def test_a_listener_that_falls_behind_is_dropped_and_the_others_are_not() -> None:
    states = feed(kept=3)
    states.publish(b"1")
    slow, quick = states.listen(), states.listen()
    assert await take(slow, 1) == await take(quick, 1) == ["run-1"]
    for number in range(2, 7):
        states.publish(b"%d" % number)
        assert await take(quick, 1) == [f"run-{number}"]
    assert await take(slow, 1) == [], "it ended"


async def test_between_two_slices_of_listeners_everything_else_has_its_turn() -> None:
    states = feed()
    served: list[str] = []

    async def listen() -> None:
        served.extend(await take(states.listen(), 1))

    listening = [asyncio.ensure_future(listen()) for _ in range(5 * SLICE)]
    await asyncio.sleep(0)
    assert states.listeners == 5 * SLICE
    began = asyncio.get_running_loop().time()
    states.publish(b"1")
    turns = [0]
    while len(served) < 5 * SLICE:
        await asyncio.sleep(0)  # what a share that is due does
        turns.append(len(served))
    assert max(after - before for before, after in pairwise(turns)) <= SLICE
    assert asyncio.get_running_loop().time() - began >= 4 * PAUSE, "other threads had theirs"
    await asyncio.gather(*listening)
    assert served == ["run-1"] * (5 * SLICE)


async def test_closing_ends_all_listening() -> None:
    states = feed()
    waiting = [asyncio.ensure_future(take(states.listen(), 1)) for _ in range(3)]
    await asyncio.sleep(0)
    assert states.listeners == 3
    states.close()
    assert await asyncio.gather(*waiting) == [[], [], []]
    assert states.listeners == 0


async def test_states_are_made_while_somebody_listens_and_not_else() -> None:
    clock, made = FakeClock(), 0

    async def snapshot() -> object:
        nonlocal made
        made += 1
        if made == 2:
            raise StoreError("broken for a moment")
        return {"made": made}

    states = Feed(snapshot, clock=clock, name="run")
    runner = asyncio.create_task(states.run())
    try:
        await asyncio.sleep(0)
        assert made == 0
        listener = states.listen()
        first = await anext(listener)
        assert (first.name, first.data) == ("run-1", b'{"made":1}')
        waiting = asyncio.ensure_future(take(listener, 1))
        for _ in range(2):
            clock.advance(INTERVAL)
            for _ in range(5):
                await asyncio.sleep(0)
        assert await waiting == ["run-2"], "an error of the store ends nothing"
        assert made == 3
        await listener.aclose()  # type: ignore[attr-defined]
        for _ in range(3):
            clock.advance(INTERVAL)
            for _ in range(5):
                await asyncio.sleep(0)
        assert made <= 4
    finally:
        runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runner
