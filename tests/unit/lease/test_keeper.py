"""Acquiring, renewing and losing the lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from helper.errors import LeaseError, LeaseHeld
from helper.lease.keeper import LeaseKeeper
from helper.lease.s3 import S3Lease
from tests.support.clock import FakeClock
from tests.support.fakes import wait_until
from tests.unit.lease.test_s3 import OBJECT_NAME, create_released_bucket


class FakeLeaseStore:
    """A fake lease location.

    Attributes:
        owner: the holder.
        is_unavailable: whether all calls fail.
        calls: the recorded calls.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.is_unavailable = False
        self.calls: list[str] = []

    def record_call(self, name: str) -> None:
        self.calls.append(name)
        if self.is_unavailable:
            raise LeaseError("no response")


class FakeLease:
    """A lease in that location."""

    seconds = 10.0

    def __init__(self, store: FakeLeaseStore) -> None:
        self._store = store
        self.fence = 0
        self.is_held = False
        self.holder = ""
        self.holder_seconds = self.seconds

    async def acquire(self) -> bool:
        self._store.record_call("acquire")
        if self._store.owner not in {"", "me"}:
            self.holder = self._store.owner
            return False
        self._store.owner, self.is_held, self.fence = "me", True, self.fence + 1
        return True

    async def renew(self) -> bool:
        self._store.record_call("renew")
        self.is_held = self._store.owner == "me"
        self.holder = "" if self.is_held else self._store.owner
        return self.is_held

    async def release(self) -> None:
        self._store.record_call("release")
        self.is_held, self._store.owner = False, ""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def lease_store() -> FakeLeaseStore:
    return FakeLeaseStore()


@pytest.fixture
def lease(lease_store: FakeLeaseStore) -> FakeLease:
    return FakeLease(lease_store)


@asynccontextmanager
async def run_keeper(keeper: LeaseKeeper) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(keeper.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, LeaseHeld):
            await task


async def advance_until(clock: FakeClock, seconds: float, condition: Callable[[], object]) -> None:
    """Advance the clock in steps, each seen by all waiters, until a condition is met."""
    for _ in range(int(seconds * 4)):
        if condition():
            return
        clock.advance(0.25)
        for _ in range(5):
            await asyncio.sleep(0)
    assert condition()


async def test_keeper_acquires_renews_and_releases(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    fences: list[int] = []
    keeper = LeaseKeeper(lease, clock=clock, on_acquired=lambda: fences.append(lease.fence))
    await keeper.acquire_at_start()
    assert fences == [1]
    async with run_keeper(keeper):
        await advance_until(clock, 10, lambda: lease_store.calls.count("renew") == 2)
    assert lease_store.calls == ["acquire", "renew", "renew", "release"]
    assert lease_store.owner == ""


async def test_second_sender_is_refused_while_first_is_running(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    lease_store.owner = "red"
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
    await advance_until(clock, 10.5, lambda: lease_store.calls.count("acquire") >= 10)
    assert not beginning.done()
    await advance_until(clock, 3, beginning.done)
    with pytest.raises(LeaseHeld, match="'red' holds"):
        await beginning


async def test_keeper_takes_lease_of_stopped_host_after_expiry(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    lease_store.owner = "red"
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
    await advance_until(clock, 5, lambda: lease_store.calls.count("acquire") >= 4)
    lease_store.owner = ""
    await advance_until(clock, 2, beginning.done)
    await beginning
    assert lease.is_held


async def test_keeper_waits_for_longer_lease_of_crashed_host(clock: FakeClock) -> None:
    bucket = create_released_bucket()
    assert await S3Lease(bucket, OBJECT_NAME, host="red", clock=clock, seconds=60).acquire()
    lease = S3Lease(bucket, OBJECT_NAME, host="red", clock=clock)
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
    await advance_until(clock, 90, beginning.done)
    await beginning
    assert lease.is_held


async def test_standby_waits_and_takes_over(clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease) -> None:
    lease_store.owner = "red"
    keeper = LeaseKeeper(lease, clock=clock, standby=True)
    await keeper.acquire_at_start()
    assert lease_store.calls == []
    async with run_keeper(keeper) as task:
        await advance_until(clock, 60, lambda: lease_store.calls.count("acquire") >= 40)
        assert not task.done()
        lease_store.owner = ""
        await advance_until(clock, 2, lambda: lease.is_held)


async def test_keeper_that_lost_lease_to_other_host_ends(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    await keeper.acquire_at_start()
    async with run_keeper(keeper) as task:
        lease_store.owner = "red"
        await advance_until(clock, 20, task.done)
        with pytest.raises(LeaseHeld, match="'red' holds"):
            await task
    assert lease_store.owner == "red"


async def test_keeper_with_unavailable_store_continues(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    lease_store.is_unavailable = True
    await keeper.acquire_at_start()  # startup does not fail because of it
    assert lease_store.calls == ["acquire"]
    async with run_keeper(keeper) as task:
        await advance_until(clock, 30, lambda: lease_store.calls.count("acquire") >= 20)
        lease_store.is_unavailable = False
        await advance_until(clock, 2, lambda: lease.is_held)
        lease_store.is_unavailable = True
        await advance_until(clock, 30, lambda: lease_store.calls.count("renew") >= 5)
        assert not task.done()
        lease_store.is_unavailable = False
        await advance_until(clock, 10, lambda: lease_store.calls[-1:] == ["renew"])
        await wait_until(lambda: lease.is_held)


async def test_outage_duration_does_not_prove_holder_alive(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    lease_store.is_unavailable, lease_store.owner = True, "red"
    await keeper.acquire_at_start()
    async with run_keeper(keeper) as task:
        await advance_until(clock, 60, lambda: lease_store.calls.count("acquire") >= 40)
        lease_store.is_unavailable = False
        acquire_count = lease_store.calls.count("acquire")
        await advance_until(clock, 10.5, lambda: lease_store.calls.count("acquire") >= acquire_count + 10)
        assert not task.done()
        await advance_until(clock, 3, task.done)
        with pytest.raises(LeaseHeld, match="'red' holds"):
            await task


async def test_lease_lost_to_unknown_holder_is_reported_as_unknown(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acquire_nothing() -> bool:
        lease_store.record_call("acquire")
        return False

    monkeypatch.setattr(lease, "acquire", acquire_nothing)
    with capture_logs() as logs:
        beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
        await advance_until(clock, 20, beginning.done)
        with pytest.raises(LeaseHeld, match="another host holds the sender lease of this queue"):
            await beginning
    (entry,) = logs
    assert entry["reason"] == "waiting to see whether another host holds the lease"
    assert entry["advice"] == "This takes 10 s."


async def test_host_that_cannot_send_releases_and_reacquires(
    clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease
) -> None:
    fit = [False]
    keeper = LeaseKeeper(lease, clock=clock, standby=True, can_send=lambda: fit[-1])
    await keeper.acquire_at_start()
    async with run_keeper(keeper) as task:
        with pytest.raises(AssertionError):
            await advance_until(clock, 20, lambda: lease_store.calls)  # it sends no request
        fit.append(True)
        await advance_until(clock, 2, lambda: lease.is_held)
        fit.append(False)
        await advance_until(clock, 5, lambda: lease_store.calls[-1] == "release")
        assert (lease_store.owner, lease.is_held) == ("", False)
        lease_store.owner = "red"
        fit.append(True)
        await advance_until(clock, 20, lambda: lease_store.calls.count("acquire") >= 5)
        lease_store.owner = ""
        await advance_until(clock, 2, lambda: lease.is_held)
        assert not task.done()


async def test_host_that_cannot_send_may_start(clock: FakeClock, lease_store: FakeLeaseStore, lease: FakeLease) -> None:
    await LeaseKeeper(lease, clock=clock, can_send=lambda: False).acquire_at_start()
    assert lease_store.calls == []
