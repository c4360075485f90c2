"""The lease in an object store: one holder, whatever is lost, late, stopped, killed or set wrong."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from helper.clock import SlicedWait
from helper.errors import BucketError, BucketRefused, ConfigError, LeaseError
from helper.lease import Lease
from helper.lease.record import LeaseObservation, LeaseRecord
from helper.lease.s3 import CHECK, NOBODY, S3Lease, s3_lease
from helper.object_store.bucket import BucketLocation, S3Settings, StoredObject
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock

T = TypeVar("T")
NAME = "sender.json"
STEP = 0.1


def lease(bucket: MemoryBucket, clock: FakeClock, host: str = "a") -> S3Lease:
    made = S3Lease(bucket, NAME, host=host, clock=clock)
    told: Lease = made
    assert told.seconds == 10
    return made


def used() -> MemoryBucket:
    """A bucket with a lease that nobody has any more."""
    bucket = MemoryBucket()
    record = LeaseRecord(holder=NOBODY, host="", fence=0, beat=0, seconds=10, released=True, written=0)
    bucket.objects[NAME] = StoredObject(record.to_bytes(), '"used"')
    return bucket


def there(bucket: MemoryBucket) -> LeaseRecord:
    return LeaseRecord.from_bytes(bucket.objects[NAME].body)


async def test_one_has_it_and_says_so_until_its_time_less_the_margin_is_over() -> None:
    bucket, clock = used(), FakeClock()
    first, second = lease(bucket, clock), lease(bucket, clock, "b")
    assert not first.held
    assert first.fence == 0
    assert await first.acquire()
    assert (first.held, first.fence, first.holder) == (True, 1, "")
    assert not await second.acquire()
    assert (second.held, second.holder) == (False, "a")
    assert (there(bucket).host, there(bucket).fence, there(bucket).seconds) == ("a", 1, 10)
    clock.advance(7.9)
    assert first.held
    clock.advance(0.2)
    assert not first.held
    assert not await second.acquire()
    clock.advance(2)
    assert await second.acquire()
    assert second.fence == 2
    assert not await first.renew()
    assert first.holder == "b"


async def test_a_renewed_one_is_kept_from_others_for_ever() -> None:
    bucket, clock = used(), FakeClock()
    first, second = lease(bucket, clock), lease(bucket, clock, "b")
    assert await first.acquire()
    for _ in range(20):
        clock.advance(3)
        assert not await second.acquire()
        assert first.held
        assert await first.renew()
    assert (first.fence, there(bucket).beat) == (1, 21)


async def test_one_that_was_let_go_is_free_at_once_and_numbers_go_on() -> None:
    bucket, clock = used(), FakeClock()
    first, second = lease(bucket, clock), lease(bucket, clock, "b")
    assert await first.acquire()
    await first.release()
    assert not first.held
    assert not await first.renew()
    assert await second.acquire()
    assert second.fence == 2
    await first.release()
    assert second.held
    assert await second.renew()


async def test_a_restarted_holder_of_the_same_name_waits_like_anybody() -> None:
    """A clone of a machine has its name, and the copy of its queue beside it."""
    bucket, clock = used(), FakeClock()
    assert await lease(bucket, clock).acquire()
    again = lease(bucket, clock)
    assert not await again.acquire()
    clock.advance(9.9)
    assert not await again.acquire()
    clock.advance(0.2)
    assert await again.acquire()


async def test_of_two_that_find_it_free_together_one_gets_it() -> None:
    class Meeting(MemoryBucket):
        """Both have read before either writes."""

        def __init__(self) -> None:
            super().__init__()
            self.barrier = asyncio.Barrier(2)

        async def get(self, name: str) -> StoredObject | None:
            found = await super().get(name)
            if self.asked["get"] <= 2:
                await self.barrier.wait()
            return found

    bucket, clock = Meeting(), FakeClock()
    bucket.objects |= used().objects
    both = lease(bucket, clock), lease(bucket, clock, "b")
    assert sorted(await asyncio.gather(*(one.acquire() for one in both))) == [False, True]
    assert sorted(one.held for one in both) == [False, True]
    assert {one.holder for one in both} <= {"", "a", "b"}
    assert sum(bool(one.holder) for one in both) == 1


async def test_a_renewal_whose_answer_was_lost_is_found_and_goes_on() -> None:
    bucket, clock = used(), FakeClock()
    one = lease(bucket, clock)
    assert await one.acquire()
    clock.advance(3)
    bucket.loses = 1
    with pytest.raises(LeaseError, match="answer was lost"):
        await one.renew()
    assert one.held
    assert await one.renew()
    assert (one.fence, there(bucket).beat) == (1, 4)
    clock.advance(7.9)
    assert one.held


async def test_a_first_write_whose_answer_was_lost_is_not_waited_for() -> None:
    bucket, clock = used(), FakeClock()
    one = lease(bucket, clock)
    assert await one.acquire()
    await one.release()
    bucket.loses = 1
    with pytest.raises(LeaseError):
        await one.acquire()
    assert not one.held
    assert await one.acquire()
    assert one.fence == 3


async def test_a_number_that_was_passed_on_is_not_renewed() -> None:
    bucket, clock = used(), FakeClock()
    one = lease(bucket, clock)
    assert await one.acquire()
    bucket.loses = 1
    with pytest.raises(LeaseError):
        await one.acquire()
    assert (one.held, one.fence, there(bucket).fence) == (True, 1, 2)
    assert not await one.renew()
    assert not one.held
    assert await one.acquire()
    assert (one.held, one.fence) == (True, 3)


async def test_a_store_that_is_away_ends_it_by_time_and_not_before() -> None:
    bucket, clock = used(), FakeClock()
    one = lease(bucket, clock)
    assert await one.acquire()
    bucket.fails = 4
    for held in (True, True, False, False):
        clock.advance(3)
        with pytest.raises(LeaseError, match="away"):
            await one.renew()
        assert one.held is held
    assert await one.renew()  # nobody took it meanwhile: the condition says so
    assert (one.held, one.fence) == (True, 1)


async def test_who_finds_no_object_waits_as_for_one_that_died_and_numbers_go_on() -> None:
    bucket, clock = MemoryBucket(), FakeClock()
    one, other = lease(bucket, clock), lease(bucket, clock, "b")
    assert not await one.acquire()
    assert (one.held, one.holder, there(bucket).holder) == (False, "", NOBODY)
    assert not await other.acquire()
    clock.advance(9.9)
    assert not await one.acquire()
    clock.advance(0.1)
    assert await one.acquire()
    first = one.fence
    clock.advance(7.9)
    del bucket.objects[NAME]  # somebody tidies up, while it is held and can not be renewed
    assert one.held
    assert not await other.acquire()
    assert not await one.renew()
    assert (one.held, one.holder) == (False, "")
    for _ in range(11):
        clock.advance(1)
        taken = await other.acquire()
    assert taken
    assert other.fence > first
    del bucket.objects[NAME]
    fresh = lease(bucket, clock)  # one that has never seen it
    assert not await fresh.acquire()
    clock.advance(10)
    assert await fresh.acquire()
    assert fresh.fence > other.fence


async def test_a_machine_that_was_copied_with_its_memory_is_another_one() -> None:
    bucket, clock = used(), FakeClock()
    one = lease(bucket, clock)
    assert await one.acquire()
    twin = copy.copy(one)
    twin._term = copy.copy(one._term)
    twin._unconfirmed = []
    clock.advance(3)
    assert await one.renew()
    assert not await twin.renew()
    assert not twin.held
    assert not await twin.acquire()
    assert one.held


async def test_a_store_that_refuses_what_stands_leaves_it_as_it_is() -> None:
    class Busy(MemoryBucket):
        busy = False

        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            return None if self.busy else await super().replace(name, body, tag)

    bucket, clock = Busy(), FakeClock()
    bucket.objects |= used().objects
    one = lease(bucket, clock)
    bucket.busy = True
    with pytest.raises(LeaseError, match="another write was in progress"):
        await one.acquire()
    bucket.busy = False
    assert await one.acquire()
    bucket.busy = True
    with pytest.raises(LeaseError, match="another write was in progress"):
        await one.renew()
    assert one.held
    with pytest.raises(LeaseError, match="another write was in progress"):
        await one.release()
    assert not one.held


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"x" * 5000, b'{"format": "another"}'], ids=repr)
async def test_an_object_of_somebody_else_is_left_alone(content: bytes) -> None:
    bucket, clock = used(), FakeClock()
    bucket.objects[NAME] = StoredObject(content, '"1"')
    with pytest.raises(LeaseError, match="is not a lease") as caught:
        await lease(bucket, clock).acquire()
    assert "another object name" in caught.value.advice
    assert bucket.objects[NAME].body == content


async def test_a_store_that_takes_no_notice_of_conditions_is_refused() -> None:
    class Deaf(MemoryBucket):
        async def create(self, name: str, body: bytes) -> str | None:
            return self._write(name, body)

    class HalfDeaf(MemoryBucket):
        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            return self._write(name, body)

    for bucket in (Deaf(), HalfDeaf()):
        one = lease(bucket, FakeClock())
        for _ in range(2):
            with pytest.raises(LeaseError, match="ignores If-None-Match"):
                await one.acquire()
        assert list(bucket.objects) == [NAME + CHECK]


async def test_a_store_that_lets_nobody_in_says_what_to_look_at() -> None:
    class Shut(MemoryBucket):
        async def create(self, name: str, body: bytes) -> str | None:
            raise BucketRefused("Forbidden")

    with pytest.raises(LeaseError, match="Forbidden") as caught:
        await lease(Shut(), FakeClock()).acquire()
    assert "credentials" in caught.value.advice


async def test_a_store_that_never_answers_is_not_waited_for() -> None:
    class Silent(MemoryBucket):
        async def create(self, name: str, body: bytes) -> str | None:
            await asyncio.Event().wait()
            return None

    one = S3Lease(Silent(), NAME, host="a", clock=FakeClock(), seconds=0.02)
    with pytest.raises(LeaseError, match=r"within 0\.02 s"):
        await one.acquire()


def test_a_lease_that_would_keep_all_others_away_for_long_is_none() -> None:
    with pytest.raises(ValueError, match="longer than 300"):
        S3Lease(MemoryBucket(), NAME, host="a", clock=FakeClock(), seconds=301)


def test_a_place_without_an_object_is_none_for_a_lease() -> None:
    with pytest.raises(ConfigError, match=r"names no object.*s3://votes/sender\.json"):
        s3_lease(S3Settings(), BucketLocation("votes", ""), host="a", clock=FakeClock(), env={})


def test_the_longer_of_both_times_is_waited_for() -> None:
    record = LeaseRecord(holder="0" * 32, host="a", fence=1, beat=1, seconds=20, written=0)
    watch = LeaseObservation()
    watch.looked("x", 5.0)
    watch.looked("x", 20.0)
    assert [watch.lapsed(record, 10, now) for now in (24.9, 25.0)] == [False, True]
    assert [watch.lapsed(record, 30, now) for now in (34.9, 35.0)] == [False, True]
    watch.looked("y", 36.0)
    assert not watch.lapsed(record, 10, 55.9)
    assert watch.lapsed(record.model_copy(update={"released": True}), 10, 36.0)


# A world of hosts


class HostClock(SlicedWait):
    """A host's clocks: set wrong, going at a pace of their own, and standing still for who is stopped."""

    def __init__(self, world: FakeClock, *, skew: float, pace: float) -> None:
        self._world, self._skew, self._pace = world, skew, pace
        self.going = asyncio.Event()
        self.going.set()

    def now(self) -> float:
        return self._world.now() + self._skew

    def monotonic(self) -> float:
        return self._world.monotonic() * self._pace

    async def sleep(self, seconds: float) -> None:
        await self._world.sleep(seconds / self._pace)
        await self.going.wait()


class Far(MemoryBucket):
    """One store for all, a way there and back, and a patience after which who asked knows nothing."""

    PATIENCE = 2.5

    def __init__(self, world: FakeClock, dice: random.Random, trouble: float) -> None:
        super().__init__()
        self._world, self._dice, self._trouble = world, dice, trouble
        self._under_way: set[asyncio.Task[object]] = set()

    async def way(self, kind: str, act: Callable[[], T]) -> T:
        self.asked[kind] += 1
        bad = self._dice.random() < self._trouble
        there, back = (self._dice.uniform(0, 3 if bad else 0.2) for _ in range(2))
        lost = bad and self._dice.random() < 0.3

        async def arrive() -> T:
            await self._world.sleep(there)
            if lost:
                raise BucketError("503")
            return act()

        arriving = asyncio.create_task(arrive())
        self._under_way.add(arriving)
        arriving.add_done_callback(self._under_way.discard)
        arriving.add_done_callback(lambda task: task.cancelled() or task.exception())
        if there + back > self.PATIENCE:
            await self._world.sleep(self.PATIENCE)
            raise BucketError("no answer")  # what was sent goes on its way all the same
        result = await asyncio.shield(arriving)
        await self._world.sleep(back)
        return result


class Line(MemoryBucket):
    """A host's line to the store: a host that is stopped hears nothing."""

    def __init__(self, far: Far, clock: HostClock) -> None:
        super().__init__()
        self.objects, self._tags, self._far, self._clock = far.objects, far._tags, far, clock

    async def way(self, kind: str, act: Callable[[], T]) -> T:
        try:
            return await self._far.way(kind, act)
        finally:
            await self._clock.going.wait()


class World:
    """Some hosts that want the lease, in time that goes from one event to the next."""

    def __init__(self, seed: int, *, trouble: float = 0.0, hosts: int = 3) -> None:
        self.dice = random.Random(seed)
        self.time = FakeClock()
        self.bucket = Far(self.time, self.dice, trouble)
        self.clocks = [
            HostClock(self.time, skew=self.dice.uniform(-5, 5), pace=self.dice.uniform(0.99, 1.01))
            for _ in range(hosts)
        ]
        self.leases: list[S3Lease] = [self._lease(host) for host in range(hosts)]
        self.lives = [asyncio.create_task(self._live(host)) for host in range(hosts)]
        self.fences: list[int] = []
        self.held_for = 0.0

    def _lease(self, host: int) -> S3Lease:
        clock = self.clocks[host]
        return S3Lease(Line(self.bucket, clock), NAME, host=f"host {host}", clock=clock)

    async def _live(self, host: int) -> None:
        own, clock, mine = self.leases[host], self.clocks[host], False
        while True:
            try:
                if mine:
                    await clock.sleep(own.seconds / 3)
                    mine = await own.renew()
                else:
                    mine = await own.acquire()
                    if mine:
                        self.fences.append(own.fence)
                    await clock.sleep(0 if mine else own.seconds / 10)
            except LeaseError:
                await clock.sleep(0.5)

    async def kill(self, host: int) -> None:
        """SIGKILL, and a start at once."""
        self.lives[host].cancel()
        await asyncio.gather(self.lives[host], return_exceptions=True)
        self.clocks[host].going.set()
        self.leases[host] = self._lease(host)
        self.lives[host] = asyncio.create_task(self._live(host))

    @property
    def holders(self) -> list[int]:
        return [host for host, one in enumerate(self.leases) if one.held]

    async def go_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Let time pass, never with two holders; how much did."""
        begun = self.time.monotonic()
        while (passed := self.time.monotonic() - begun) < seconds and not until():
            for _ in range(12):
                await asyncio.sleep(0)
            assert len(self.holders) <= 1
            if NAME in self.bucket.objects and there(self.bucket).holder != NOBODY:
                assert all(self.leases[host].fence == there(self.bucket).fence for host in self.holders)
            self.held_for += STEP * len(self.holders)
            self.time.advance(STEP)
        return passed

    async def end(self) -> None:
        for life in self.lives:
            life.cancel()
        await asyncio.gather(*self.lives, return_exceptions=True)


@pytest.mark.parametrize("seed", range(4))
async def test_never_two_whatever_happens_and_mostly_one(seed: int) -> None:
    world = World(seed, trouble=0.1)
    for _ in range(15):
        await world.go_on(world.dice.uniform(5, 25))
        victim = (world.holders or [0])[0] if world.dice.random() < 0.7 else world.dice.randrange(3)
        kind = world.dice.random()
        if kind < 0.2:
            world.bucket.objects.pop(NAME, None)  # somebody deletes it
        elif kind < 0.6:
            await world.kill(victim)
        else:
            world.clocks[victim].going.clear()  # SIGSTOP past the lease, then SIGCONT
            await world.go_on(world.dice.uniform(5, 25))
            world.clocks[victim].going.set()
    await world.end()
    assert len(set(world.fences)) == len(world.fences)
    assert len(world.fences) > 5
    assert world.held_for > 60


async def test_it_is_taken_over_within_15_seconds_and_asked_for_as_often_as_is_said() -> None:
    world = World(1)
    await world.go_on(30, until=lambda: bool(world.holders))
    before = dict(world.bucket.asked)
    await world.go_on(360)
    writes, reads = (10 * (world.bucket.asked[kind] - before.get(kind, 0)) for kind in ("put", "get"))
    assert 950 < writes <= 1080 * 1.02
    assert 2 * 2400 < reads <= 2 * 3600
    for _ in range(5):
        (holder,) = world.holders
        await world.kill(holder)
        took = await world.go_on(30, until=lambda: bool(world.holders))
        assert 6 < took <= 15
    await world.end()
