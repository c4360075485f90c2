"""Taking the lease, renewing it, losing it: what a host does about each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from helper.errors import LeaseError, LeaseHeld
from helper.lease.keeper import LeaseKeeper
from tests.support.clock import FakeClock
from tests.support.fakes import until


class Place:
    """Where a lease is kept, as a test arranges it.

    Attributes:
        owner: who has it.
        away: it can not be asked.
        words: what it was told.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.away = False
        self.words: list[str] = []

    def hear(self, word: str) -> None:
        self.words.append(word)
        if self.away:
            raise LeaseError("nobody answers")


class PlacedLease:
    """A lease in that place."""

    seconds = 10.0

    def __init__(self, place: Place) -> None:
        self._place = place
        self.fence = 0
        self.held = False
        self.holder = ""

    async def acquire(self) -> bool:
        self._place.hear("acquire")
        if self._place.owner not in {"", "me"}:
            self.holder = self._place.owner
            return False
        self._place.owner, self.held, self.fence = "me", True, self.fence + 1
        return True

    async def renew(self) -> bool:
        self._place.hear("renew")
        self.held = self._place.owner == "me"
        self.holder = "" if self.held else self._place.owner
        return self.held

    async def release(self) -> None:
        self._place.hear("release")
        self.held, self._place.owner = False, ""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def lease(place: Place) -> PlacedLease:
    return PlacedLease(place)


@asynccontextmanager
async def running(keeper: LeaseKeeper) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(keeper.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, LeaseHeld):
            await task


async def passes(clock: FakeClock, seconds: float, arrived: Callable[[], object]) -> None:
    """Let time pass in steps, each seen by whoever waits for it, until something is so."""
    for _ in range(int(seconds * 4)):
        if arrived():
            return
        clock.advance(0.25)
        for _ in range(5):
            await asyncio.sleep(0)
    assert arrived()


async def test_it_is_taken_renewed_and_let_go(clock: FakeClock, place: Place, lease: PlacedLease) -> None:
    taken: list[int] = []
    keeper = LeaseKeeper(lease, clock=clock, changed=lambda: taken.append(lease.fence))
    await keeper.begin()
    assert taken == [1]
    async with running(keeper):
        await passes(clock, 10, lambda: place.words.count("renew") == 2)
    assert place.words == ["acquire", "renew", "renew", "release"]
    assert place.owner == ""


async def test_a_second_sender_refuses_to_run_once_the_first_has_proved_to_live(
    clock: FakeClock, place: Place, lease: PlacedLease
) -> None:
    place.owner = "red"
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).begin())
    await passes(clock, 10.5, lambda: place.words.count("acquire") >= 10)
    assert not beginning.done()
    await passes(clock, 3, beginning.done)
    with pytest.raises(LeaseHeld, match="'red' sends"):
        await beginning


async def test_what_a_dead_host_left_is_taken_when_its_time_is_over(
    clock: FakeClock, place: Place, lease: PlacedLease
) -> None:
    place.owner = "red"
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).begin())
    await passes(clock, 5, lambda: place.words.count("acquire") >= 4)
    place.owner = ""
    await passes(clock, 2, beginning.done)
    await beginning
    assert lease.held


async def test_a_host_on_standby_waits_and_takes_over(clock: FakeClock, place: Place, lease: PlacedLease) -> None:
    place.owner = "red"
    keeper = LeaseKeeper(lease, clock=clock, standby=True)
    await keeper.begin()
    assert place.words == []
    async with running(keeper) as task:
        await passes(clock, 60, lambda: place.words.count("acquire") >= 40)
        assert not task.done()
        place.owner = ""
        await passes(clock, 2, lambda: lease.held)


async def test_a_sender_that_finds_another_in_its_place_ends(
    clock: FakeClock, place: Place, lease: PlacedLease
) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    await keeper.begin()
    async with running(keeper) as task:
        place.owner = "red"
        await passes(clock, 20, task.done)
        with pytest.raises(LeaseHeld, match="'red' sends"):
            await task
    assert place.owner == "red"


async def test_a_place_that_can_not_be_asked_ends_nothing(clock: FakeClock, place: Place, lease: PlacedLease) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    place.away = True
    await keeper.begin()  # a start is not refused for it
    assert place.words == ["acquire"]
    async with running(keeper) as task:
        await passes(clock, 30, lambda: place.words.count("acquire") >= 20)
        place.away = False
        await passes(clock, 2, lambda: lease.held)
        place.away = True
        await passes(clock, 30, lambda: place.words.count("renew") >= 5)
        assert not task.done()
        place.away = False
        await passes(clock, 10, lambda: place.words[-1:] == ["renew"])
        await until(lambda: lease.held)


async def test_how_long_a_place_was_away_says_nothing_about_who_lives(
    clock: FakeClock, place: Place, lease: PlacedLease
) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    place.away, place.owner = True, "red"
    await keeper.begin()
    async with running(keeper) as task:
        await passes(clock, 60, lambda: place.words.count("acquire") >= 40)
        place.away = False
        asked = place.words.count("acquire")
        await passes(clock, 10.5, lambda: place.words.count("acquire") >= asked + 10)
        assert not task.done()
        await passes(clock, 3, task.done)
        with pytest.raises(LeaseHeld, match="'red' sends"):
            await task


async def test_where_nothing_says_who_had_it_that_is_what_is_told(
    clock: FakeClock, place: Place, lease: PlacedLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobodys() -> bool:
        place.hear("acquire")
        return False

    monkeypatch.setattr(lease, "acquire", nobodys)
    with capture_logs() as logs:
        beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).begin())
        await passes(clock, 20, beginning.done)
        with pytest.raises(LeaseHeld, match="another host sends for this queue"):
            await beginning
    (told,) = logs
    assert (told["reason"], told["advice"]) == ("waiting to learn whether another host sends", "This takes 10 s.")


async def test_a_host_that_may_not_send_leaves_it_to_others_and_takes_it_again(
    clock: FakeClock, place: Place, lease: PlacedLease
) -> None:
    fit = [False]
    keeper = LeaseKeeper(lease, clock=clock, standby=True, fit=lambda: fit[-1])
    await keeper.begin()
    async with running(keeper) as task:
        with pytest.raises(AssertionError):
            await passes(clock, 20, lambda: place.words)  # it does not even ask
        fit.append(True)
        await passes(clock, 2, lambda: lease.held)
        fit.append(False)
        await passes(clock, 5, lambda: place.words[-1] == "release")
        assert (place.owner, lease.held) == ("", False)
        place.owner = "red"
        fit.append(True)
        await passes(clock, 20, lambda: place.words.count("acquire") >= 5)
        place.owner = ""
        await passes(clock, 2, lambda: lease.held)
        assert not task.done()


async def test_a_host_that_may_not_send_is_not_refused_its_start(
    clock: FakeClock, place: Place, lease: PlacedLease
) -> None:
    await LeaseKeeper(lease, clock=clock, fit=lambda: False).begin()
    assert place.words == []
