"""The lease in an object store: one holder despite lost responses, delays, stops, kills and skewed clocks."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from helper.clock import Clock
from helper.errors import BucketError, BucketRefused, BucketThrottled, LeaseError
from helper.lease import Lease
from helper.lease.s3_lease import CHECK_SUFFIX, NO_HOLDER, LeaseRecord, S3Lease
from helper.object_store import StoredObject
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock

T = TypeVar("T")
OBJECT_NAME = "sender.json"
STEP_SECONDS = 0.1


def lease_for_host(bucket: MemoryBucket, clock: FakeClock, host: str = "a") -> S3Lease:
    lease = S3Lease(bucket, OBJECT_NAME, host=host, clock=clock, seconds=10)
    typed: Lease = lease
    assert typed.seconds == 10
    return lease


def create_released_bucket() -> MemoryBucket:
    bucket = MemoryBucket()
    record = LeaseRecord(holder=NO_HOLDER, host="", fence=0, beat=0, seconds=10, released=True, written=0)
    bucket.objects[OBJECT_NAME] = StoredObject(record.to_bytes(), '"used"')
    return bucket


def stored_record(bucket: MemoryBucket) -> LeaseRecord:
    return LeaseRecord.from_bytes(bucket.objects[OBJECT_NAME].body)


async def test_lease_is_held_until_expiry_less_margin() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    first, second = lease_for_host(bucket, clock), lease_for_host(bucket, clock, "b")
    assert not first.is_held
    assert first.fence == 0
    assert await first.acquire()
    assert (first.is_held, first.fence, first.holder) == (True, 1, "")
    assert not await second.acquire()
    assert (second.is_held, second.holder) == (False, "a")
    assert (stored_record(bucket).host, stored_record(bucket).fence, stored_record(bucket).seconds) == ("a", 1, 10)
    clock.advance(7.9)
    assert first.is_held
    clock.advance(0.2)
    assert not first.is_held
    assert not await second.acquire()
    clock.advance(2)
    assert await second.acquire()
    assert second.fence == 2
    assert not await first.renew()
    assert first.holder == "b"


async def test_renewed_lease_is_never_acquired() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    first, second = lease_for_host(bucket, clock), lease_for_host(bucket, clock, "b")
    assert await first.acquire()
    for _ in range(20):
        clock.advance(3)
        assert not await second.acquire()
        assert first.is_held
        assert await first.renew()
    assert (first.fence, stored_record(bucket).beat) == (1, 21)


async def test_released_lease_is_free_and_token_increases() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    first, second = lease_for_host(bucket, clock), lease_for_host(bucket, clock, "b")
    assert await first.acquire()
    await first.release()
    assert not first.is_held
    assert not await first.renew()
    assert await second.acquire()
    assert second.fence == 2
    await first.release()
    assert second.is_held
    assert await second.renew()


async def test_restarted_holder_waits_for_expiry() -> None:
    """A cloned machine has the same name and a copy of the queue."""
    bucket, clock = create_released_bucket(), FakeClock()
    assert await lease_for_host(bucket, clock).acquire()
    again = lease_for_host(bucket, clock)
    assert not await again.acquire()
    clock.advance(9.9)
    assert not await again.acquire()
    clock.advance(0.2)
    assert await again.acquire()


async def test_concurrent_acquire_succeeds_on_one_host() -> None:
    class BarrierBucket(MemoryBucket):
        """A bucket where both clients read before either writes."""

        def __init__(self) -> None:
            super().__init__()
            self.barrier = asyncio.Barrier(2)

        async def get(self, name: str) -> StoredObject | None:
            current = await super().get(name)
            if self.request_counts["get"] <= 2:
                await self.barrier.wait()
            return current

    bucket, clock = BarrierBucket(), FakeClock()
    bucket.objects |= create_released_bucket().objects
    both = lease_for_host(bucket, clock), lease_for_host(bucket, clock, "b")
    assert sorted(await asyncio.gather(*(lease.acquire() for lease in both))) == [False, True]
    assert sorted(lease.is_held for lease in both) == [False, True]
    assert {lease.holder for lease in both} <= {"", "a", "b"}
    assert sum(bool(lease.holder) for lease in both) == 1


async def test_renew_with_lost_response_keeps_lease() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    lease = lease_for_host(bucket, clock)
    assert await lease.acquire()
    clock.advance(3)
    bucket.lost_replies = 1
    with pytest.raises(LeaseError, match="answer was lost"):
        await lease.renew()
    assert lease.is_held
    assert await lease.renew()
    assert (lease.fence, stored_record(bucket).beat) == (1, 4)
    clock.advance(7.9)
    assert lease.is_held


async def test_acquire_with_lost_response_succeeds_without_waiting() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    lease = lease_for_host(bucket, clock)
    assert await lease.acquire()
    await lease.release()
    bucket.lost_replies = 1
    with pytest.raises(LeaseError):
        await lease.acquire()
    assert not lease.is_held
    assert await lease.acquire()
    assert lease.fence == 3


async def test_renew_after_handover_is_refused() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    lease = lease_for_host(bucket, clock)
    assert await lease.acquire()
    bucket.lost_replies = 1
    with pytest.raises(LeaseError):
        await lease.acquire()
    assert (lease.is_held, lease.fence, stored_record(bucket).fence) == (True, 1, 2)
    assert not await lease.renew()
    assert not lease.is_held
    assert await lease.acquire()
    assert (lease.is_held, lease.fence) == (True, 3)


async def test_bucket_outage_ends_lease_only_at_expiry() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    lease = lease_for_host(bucket, clock)
    assert await lease.acquire()
    bucket.failing_writes = 4
    for held in (True, True, False, False):
        clock.advance(3)
        with pytest.raises(LeaseError, match="away"):
            await lease.renew()
        assert lease.is_held is held
    assert await lease.renew()  # the condition shows that no host acquired it in the meantime
    assert (lease.is_held, lease.fence) == (True, 1)


async def test_acquire_with_missing_object_waits_and_token_increases() -> None:
    bucket, clock = MemoryBucket(), FakeClock()
    first_lease, other = lease_for_host(bucket, clock), lease_for_host(bucket, clock, "b")
    assert not await first_lease.acquire()
    assert (first_lease.is_held, first_lease.holder, stored_record(bucket).holder) == (False, "", NO_HOLDER)
    assert not await other.acquire()
    clock.advance(9.9)
    assert not await first_lease.acquire()
    clock.advance(0.1)
    assert await first_lease.acquire()
    first = first_lease.fence
    clock.advance(7.9)
    del bucket.objects[OBJECT_NAME]  # the object is deleted while the lease is held and cannot be renewed
    assert first_lease.is_held
    assert not await other.acquire()
    assert not await first_lease.renew()
    assert (first_lease.is_held, first_lease.holder) == (False, "")
    for _ in range(11):
        clock.advance(1)
        acquired = await other.acquire()
    assert acquired
    assert other.fence > first
    del bucket.objects[OBJECT_NAME]
    fresh = lease_for_host(bucket, clock)  # a host that has never read it
    assert not await fresh.acquire()
    clock.advance(10)
    assert await fresh.acquire()
    assert fresh.fence > other.fence


async def test_cloned_machine_loses_lease() -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    lease = lease_for_host(bucket, clock)
    assert await lease.acquire()
    duplicate = copy.copy(lease)
    duplicate._term = copy.copy(lease._term)
    duplicate._unconfirmed = []
    clock.advance(3)
    assert await lease.renew()
    assert not await duplicate.renew()
    assert not duplicate.is_held
    assert not await duplicate.acquire()
    assert lease.is_held


async def test_conflict_on_unchanged_object_keeps_lease() -> None:
    class ConflictingBucket(MemoryBucket):
        is_conflicting = False

        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            return None if self.is_conflicting else await super().replace(name, body, tag)

    bucket, clock = ConflictingBucket(), FakeClock()
    bucket.objects |= create_released_bucket().objects
    lease = lease_for_host(bucket, clock)
    bucket.is_conflicting = True
    with pytest.raises(LeaseError, match="another write was in progress"):
        await lease.acquire()
    bucket.is_conflicting = False
    assert await lease.acquire()
    bucket.is_conflicting = True
    with pytest.raises(LeaseError, match="another write was in progress"):
        await lease.renew()
    assert lease.is_held
    with pytest.raises(LeaseError, match="another write was in progress"):
        await lease.release()
    assert not lease.is_held


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"x" * 5000, b'{"format": "another"}'], ids=repr)
async def test_foreign_object_is_not_overwritten(content: bytes) -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    bucket.objects[OBJECT_NAME] = StoredObject(content, '"1"')
    with pytest.raises(LeaseError, match="is not a lease") as caught:
        await lease_for_host(bucket, clock).acquire()
    assert "another object name" in caught.value.advice
    assert bucket.objects[OBJECT_NAME].body == content


async def test_bucket_ignoring_conditions_is_refused() -> None:
    class UnconditionalBucket(MemoryBucket):
        async def create(self, name: str, body: bytes) -> str | None:
            return self._write(name, body)

    class UnconditionalReplaceBucket(MemoryBucket):
        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            return self._write(name, body)

    for bucket in (UnconditionalBucket(), UnconditionalReplaceBucket()):
        lease = lease_for_host(bucket, FakeClock())
        for _ in range(2):
            with pytest.raises(LeaseError, match="ignores If-None-Match"):
                await lease.acquire()
        assert list(bucket.objects) == [OBJECT_NAME + CHECK_SUFFIX]


async def test_bucket_with_racing_conditional_writes_is_refused() -> None:
    class RacingBucket(MemoryBucket):
        """Checks the condition and writes in two steps, as some gateways to file systems did."""

        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            if name not in self.objects or self.objects[name].etag != tag:
                return None
            await asyncio.sleep(0)
            return self._write(name, body)

    bucket = RacingBucket()
    lease = lease_for_host(bucket, FakeClock())
    for _ in range(2):
        with pytest.raises(LeaseError, match="several concurrent writes with the same If-Match"):
            await lease.acquire()
    assert list(bucket.objects) == [OBJECT_NAME + CHECK_SUFFIX]
    assert bucket.request_counts["put"] < 40, "the second call does not check again"


async def test_bucket_that_creates_on_replace_is_refused() -> None:
    class CreatingBucket(MemoryBucket):
        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            return await super().replace(name, body, tag) if name in self.objects else self._write(name, body)

    bucket = CreatingBucket()
    lease = lease_for_host(bucket, FakeClock())
    for _ in range(2):
        with pytest.raises(LeaseError, match="creates a missing object despite If-Match"):
            await lease.acquire()
    assert len(bucket.objects) == 2, "the second call does not check again"


class OneWritePerSecondBucket(MemoryBucket):
    """Refuses a second write to an object within a second, as R2 and GCS do."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self._written_at: dict[str, float] = {}

    async def create(self, name: str, body: bytes) -> str | None:
        self._limit(name)
        return await super().create(name, body)

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        self._limit(name)
        return await super().replace(name, body, tag)

    def _limit(self, name: str) -> None:
        if self._clock.monotonic() - self._written_at.get(name, -2.0) < 1:
            raise BucketThrottled("status code: 429")
        self._written_at[name] = self._clock.monotonic()


async def test_bucket_with_one_write_per_second_holds_lease() -> None:
    clock = FakeClock()
    bucket = OneWritePerSecondBucket(clock)
    bucket.objects |= create_released_bucket().objects
    lease = lease_for_host(bucket, clock)
    acquiring = asyncio.create_task(lease.acquire())
    async with asyncio.timeout(20):
        while not acquiring.done():
            await asyncio.sleep(0)
            clock.advance(0.1)
    assert await acquiring
    with pytest.raises(LeaseError, match="429") as caught:
        await lease.renew()
    assert "one write per second" in caught.value.advice


async def test_failed_writes_of_the_check_do_not_refuse_bucket() -> None:
    class BusyBucket(MemoryBucket):
        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            if name.endswith(CHECK_SUFFIX) and self.request_counts["put"] % 2:
                self.request_counts["put"] += 1
                raise BucketError("slow down")
            return await super().replace(name, body, tag)

    bucket = BusyBucket()
    bucket.objects |= create_released_bucket().objects
    assert await lease_for_host(bucket, FakeClock()).acquire()


async def test_bucket_whose_check_writes_all_fail_is_checked_again() -> None:
    class FailingBucket(MemoryBucket):
        is_failing = True

        async def replace(self, name: str, body: bytes, tag: str) -> str | None:
            if self.is_failing and len(body) > 100:
                raise BucketError("slow down")
            return await super().replace(name, body, tag)

    bucket = FailingBucket()
    bucket.objects |= create_released_bucket().objects
    lease = lease_for_host(bucket, FakeClock())
    with pytest.raises(LeaseError, match="slow down"):
        await lease.acquire()
    bucket.is_failing = False
    assert await lease.acquire()


async def test_bucket_access_denied_gives_advice() -> None:
    class DeniedBucket(MemoryBucket):
        async def create(self, name: str, body: bytes) -> str | None:
            raise BucketRefused("Forbidden")

    with pytest.raises(LeaseError, match="Forbidden") as caught:
        await lease_for_host(DeniedBucket(), FakeClock()).acquire()
    assert "credentials" in caught.value.advice


@pytest.mark.parametrize(("stored_seconds", "expires_after"), [(20, 20), (5, 10)])
async def test_lease_of_another_host_expires_after_the_longer_of_both_durations(
    stored_seconds: float, expires_after: float
) -> None:
    bucket, clock = create_released_bucket(), FakeClock()
    lease = lease_for_host(bucket, clock)

    def store_version(etag: str, *, released: bool = False) -> None:
        record = LeaseRecord(
            holder="1" * 32, host="b", fence=1, beat=1, seconds=stored_seconds, written=0, released=released
        )
        bucket.objects[OBJECT_NAME] = StoredObject(record.to_bytes(), etag)

    for etag in ('"x"', '"y"'):
        store_version(etag)
        assert not await lease.acquire()
        clock.advance(expires_after - 0.1)
        assert not await lease.acquire()
    store_version('"z"', released=True)
    assert await lease.acquire()
    store_version('"x"')
    assert not await lease.acquire()
    clock.advance(expires_after)
    assert await lease.acquire()


# Simulation of hosts


class HostClock(Clock):
    """A host's clocks: wall clock offset and clock rate; sleeps do not end while the host is stopped."""

    def __init__(self, real_clock: FakeClock, *, skew: float, pace: float) -> None:
        self._real_clock, self._skew, self._pace = real_clock, skew, pace
        self.is_running = asyncio.Event()
        self.is_running.set()

    def now(self) -> float:
        return self._real_clock.now() + self._skew

    def monotonic(self) -> float:
        return self._real_clock.monotonic() * self._pace

    async def sleep(self, seconds: float) -> None:
        await self._real_clock.sleep(seconds / self._pace)
        await self.is_running.wait()


class SharedBucket(MemoryBucket):
    """The shared bucket, with network delays and a timeout after which the outcome is unknown."""

    TIMEOUT_SECONDS = 2.5

    def __init__(self, real_clock: FakeClock, rng: random.Random, fault_probability: float) -> None:
        super().__init__()
        self._real_clock, self._rng, self._fault_probability = real_clock, rng, fault_probability
        self._in_flight: set[asyncio.Task[object]] = set()

    async def request(self, kind: str, operation: Callable[[], T]) -> T:
        self.request_counts[kind] += 1
        bad = self._rng.random() < self._fault_probability
        request_delay, response_delay = (self._rng.uniform(0, 3 if bad else 0.2) for _ in range(2))
        lost = bad and self._rng.random() < 0.3

        async def arrive() -> T:
            await self._real_clock.sleep(request_delay)
            if lost:
                raise BucketError("503")
            return operation()

        arriving = asyncio.create_task(arrive())
        self._in_flight.add(arriving)
        arriving.add_done_callback(self._in_flight.discard)
        arriving.add_done_callback(lambda task: task.cancelled() or task.exception())
        if request_delay + response_delay > self.TIMEOUT_SECONDS:
            await self._real_clock.sleep(self.TIMEOUT_SECONDS)
            raise BucketError("no answer")  # the request still arrives
        result = await asyncio.shield(arriving)
        await self._real_clock.sleep(response_delay)
        return result


class HostBucket(MemoryBucket):
    """A host's connection to the bucket; a stopped host receives nothing."""

    def __init__(self, bucket: SharedBucket, clock: HostClock) -> None:
        super().__init__()
        self.objects, self._tags, self._far, self._clock = bucket.objects, bucket._tags, bucket, clock

    async def request(self, kind: str, operation: Callable[[], T]) -> T:
        try:
            return await self._far.request(kind, operation)
        finally:
            await self._clock.is_running.wait()


class Simulation:
    """Hosts that compete for the lease, in simulated time that advances from event to event."""

    def __init__(self, seed: int, *, fault_probability: float = 0.0, hosts: int = 3) -> None:
        self.rng = random.Random(seed)
        self.time = FakeClock()
        self.bucket = SharedBucket(self.time, self.rng, fault_probability)
        self.clocks = [
            HostClock(self.time, skew=self.rng.uniform(-5, 5), pace=self.rng.uniform(0.99, 1.01)) for _ in range(hosts)
        ]
        self.leases: list[S3Lease] = [self._lease(host) for host in range(hosts)]
        self.host_tasks = [asyncio.create_task(self._run_host(host)) for host in range(hosts)]
        self.fences: list[int] = []
        self.held_seconds = 0.0

    def _lease(self, host: int) -> S3Lease:
        clock = self.clocks[host]
        return S3Lease(HostBucket(self.bucket, clock), OBJECT_NAME, host=f"host {host}", clock=clock, seconds=10)

    async def _run_host(self, host: int) -> None:
        own, clock, is_mine = self.leases[host], self.clocks[host], False
        while True:
            try:
                if is_mine:
                    await clock.sleep(own.seconds / 3)
                    is_mine = await own.renew()
                else:
                    is_mine = await own.acquire()
                    if is_mine:
                        self.fences.append(own.fence)
                    await clock.sleep(0 if is_mine else own.seconds / 10)
            except LeaseError:
                await clock.sleep(0.5)

    async def restart_host(self, host: int) -> None:
        """Kill a host with SIGKILL and restart it immediately."""
        self.host_tasks[host].cancel()
        await asyncio.gather(self.host_tasks[host], return_exceptions=True)
        self.clocks[host].is_running.set()
        self.leases[host] = self._lease(host)
        self.host_tasks[host] = asyncio.create_task(self._run_host(host))

    @property
    def holders(self) -> list[int]:
        return [host for host, lease in enumerate(self.leases) if lease.is_held]

    async def advance(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Advance the time, asserting at most one holder; return the seconds that passed."""
        started_at = self.time.monotonic()
        while (passed := self.time.monotonic() - started_at) < seconds and not until():
            for _ in range(12):
                await asyncio.sleep(0)
            assert len(self.holders) <= 1
            if OBJECT_NAME in self.bucket.objects and stored_record(self.bucket).holder != NO_HOLDER:
                assert all(self.leases[host].fence == stored_record(self.bucket).fence for host in self.holders)
            self.held_seconds += STEP_SECONDS * len(self.holders)
            self.time.advance(STEP_SECONDS)
        return passed

    async def stop(self) -> None:
        for task in self.host_tasks:
            task.cancel()
        await asyncio.gather(*self.host_tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(4))
async def test_simulated_hosts_never_hold_lease_together(seed: int) -> None:
    simulation = Simulation(seed, fault_probability=0.1)
    for _ in range(15):
        await simulation.advance(simulation.rng.uniform(5, 25))
        victim = (simulation.holders or [0])[0] if simulation.rng.random() < 0.7 else simulation.rng.randrange(3)
        kind = simulation.rng.random()
        if kind < 0.2:
            simulation.bucket.objects.pop(OBJECT_NAME, None)  # the object is deleted
        elif kind < 0.6:
            await simulation.restart_host(victim)
        else:
            simulation.clocks[victim].is_running.clear()  # SIGSTOP past the lease, then SIGCONT
            await simulation.advance(simulation.rng.uniform(5, 25))
            simulation.clocks[victim].is_running.set()
    await simulation.stop()
    assert len(set(simulation.fences)) == len(simulation.fences)
    assert len(simulation.fences) > 5
    assert simulation.held_seconds > 60


async def test_takeover_time_and_request_rate_are_documented() -> None:
    simulation = Simulation(1)
    await simulation.advance(30, until=lambda: bool(simulation.holders))
    before = dict(simulation.bucket.request_counts)
    await simulation.advance(360)
    writes, reads = (10 * (simulation.bucket.request_counts[kind] - before.get(kind, 0)) for kind in ("put", "get"))
    assert 950 < writes <= 1080 * 1.02
    assert 2 * 2400 < reads <= 2 * 3600
    for _ in range(5):
        (holder,) = simulation.holders
        await simulation.restart_host(holder)
        seconds = await simulation.advance(30, until=lambda: bool(simulation.holders))
        assert 6 < seconds <= 15
    await simulation.stop()
