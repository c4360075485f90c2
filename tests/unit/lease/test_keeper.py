"""Acquiring, renewing and losing the lease; its selection from the settings, and behavior on an unshared queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from helper.app.cluster import EXCHANGE_INTERVAL_SECONDS, MISSING_GRACE_SECONDS, ClusterMember
from helper.app.service import create_lease
from helper.chain.round_registry import RoundRegistry
from helper.config.sections import ROLES, Config
from helper.core.refusals import PauseReason
from helper.errors import LeaseError, LeaseHeld, StoreError
from helper.lease import DatabaseLease, Lease, LeaseKeeper
from helper.lease.s3_lease import S3Lease
from helper.observability.service_state import ServiceState
from helper.reveal.circuit_choice import CircuitChoice
from helper.store import blocks
from helper.store.postgres.store import PostgresStore
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock
from tests.support.fakes import wait_until
from tests.unit.lease.test_s3_lease import OBJECT_NAME, create_released_bucket, lease_for_host
from tests.unit.store.conformance.backends import PostgresBackend


class FakeLease(Lease):
    """A lease of the host "me".

    Attributes:
        owner: the holder, as it is stored.
        is_unavailable: whether all calls fail.
        calls: the recorded calls.
    """

    is_held = False
    seconds = holder_seconds = 10.0

    def __init__(self) -> None:
        self.owner = ""
        self.is_unavailable = False
        self.calls: list[str] = []

    def record_call(self, name: str) -> None:
        self.calls.append(name)
        if self.is_unavailable:
            raise LeaseError("no response")

    async def acquire(self) -> bool:
        self.record_call("acquire")
        if self.owner not in {"", "me"}:
            self.holder = self.owner
            return False
        self.owner, self.is_held, self.fence = "me", True, self.fence + 1
        return True

    async def renew(self) -> bool:
        self.record_call("renew")
        self.is_held = self.owner == "me"
        self.holder = "" if self.is_held else self.owner
        return self.is_held

    async def release(self) -> None:
        self.record_call("release")
        self.is_held, self.owner = False, ""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def lease() -> FakeLease:
    return FakeLease()


async def start_keeper(lease: FakeLease, **settings: Any) -> LeaseKeeper:
    keeper = LeaseKeeper(lease, **settings)
    await keeper.acquire_at_start()
    return keeper


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


@pytest.mark.parametrize("kind", [DatabaseLease, S3Lease])
def test_shared_lease_inherits_nothing_that_is_true_of_one_host(kind: type[Lease]) -> None:
    assert {"is_held", "acquire", "renew", "release"} <= vars(kind).keys()


async def test_keeper_acquires_renews_and_releases(clock: FakeClock, lease: FakeLease) -> None:
    fences: list[int] = []
    keeper = await start_keeper(lease, clock=clock, on_acquired=lambda: fences.append(lease.fence))
    assert fences == [1]
    async with run_keeper(keeper):
        await advance_until(clock, 10, lambda: lease.calls.count("renew") == 2)
    assert lease.calls == ["acquire", "renew", "renew", "release"]
    assert lease.owner == ""


async def test_second_sender_is_refused_while_first_is_running(clock: FakeClock, lease: FakeLease) -> None:
    lease.owner = "red"
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
    await advance_until(clock, 10.5, lambda: lease.calls.count("acquire") >= 10)
    assert not beginning.done()
    await advance_until(clock, 3, beginning.done)
    with pytest.raises(LeaseHeld, match="'red' holds"):
        await beginning


async def test_keeper_takes_lease_of_stopped_host_after_expiry(clock: FakeClock, lease: FakeLease) -> None:
    lease.owner = "red"
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
    await advance_until(clock, 5, lambda: lease.calls.count("acquire") >= 4)
    lease.owner = ""
    await advance_until(clock, 2, beginning.done)
    await beginning
    assert lease.is_held


async def test_keeper_waits_for_longer_lease_of_crashed_host(clock: FakeClock) -> None:
    bucket = create_released_bucket()
    assert await S3Lease(bucket, OBJECT_NAME, host="red", clock=clock, seconds=60).acquire()
    lease = S3Lease(bucket, OBJECT_NAME, host="red", clock=clock, seconds=10)
    beginning = asyncio.create_task(LeaseKeeper(lease, clock=clock).acquire_at_start())
    await advance_until(clock, 90, beginning.done)
    await beginning
    assert lease.is_held


async def test_standby_waits_and_takes_over(clock: FakeClock, lease: FakeLease) -> None:
    lease.owner = "red"
    keeper = await start_keeper(lease, clock=clock, standby=True)
    assert lease.calls == []
    async with run_keeper(keeper) as task:
        await advance_until(clock, 60, lambda: lease.calls.count("acquire") >= 40)
        assert not task.done()
        lease.owner = ""
        await advance_until(clock, 2, lambda: lease.is_held)


async def test_keeper_that_lost_lease_to_other_host_ends(clock: FakeClock, lease: FakeLease) -> None:
    keeper = await start_keeper(lease, clock=clock)
    async with run_keeper(keeper) as task:
        lease.owner = "red"
        await advance_until(clock, 20, task.done)
        with pytest.raises(LeaseHeld, match="'red' holds"):
            await task
    assert lease.owner == "red"


async def test_keeper_with_unavailable_store_continues(clock: FakeClock, lease: FakeLease) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    lease.is_unavailable = True
    await keeper.acquire_at_start()  # startup does not fail because of it
    assert lease.calls == ["acquire"]
    async with run_keeper(keeper) as task:
        await advance_until(clock, 30, lambda: lease.calls.count("acquire") >= 20)
        lease.is_unavailable = False
        await advance_until(clock, 2, lambda: lease.is_held)
        lease.is_unavailable = True
        await advance_until(clock, 30, lambda: lease.calls.count("renew") >= 5)
        assert not task.done()
        lease.is_unavailable = False
        await advance_until(clock, 10, lambda: lease.calls[-1:] == ["renew"])
        await wait_until(lambda: lease.is_held)


async def test_outage_duration_does_not_prove_holder_alive(clock: FakeClock, lease: FakeLease) -> None:
    keeper = LeaseKeeper(lease, clock=clock)
    lease.is_unavailable, lease.owner = True, "red"
    await keeper.acquire_at_start()
    async with run_keeper(keeper) as task:
        await advance_until(clock, 60, lambda: lease.calls.count("acquire") >= 40)
        lease.is_unavailable = False
        acquire_count = lease.calls.count("acquire")
        await advance_until(clock, 10.5, lambda: lease.calls.count("acquire") >= acquire_count + 10)
        assert not task.done()
        await advance_until(clock, 3, task.done)
        with pytest.raises(LeaseHeld, match="'red' holds"):
            await task


async def test_lease_lost_to_unknown_holder_is_reported_as_unknown(
    clock: FakeClock, lease: FakeLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acquire_nothing() -> bool:
        lease.record_call("acquire")
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


async def test_host_that_cannot_send_releases_and_reacquires(clock: FakeClock, lease: FakeLease) -> None:
    fit = [False]
    keeper = await start_keeper(lease, clock=clock, standby=True, can_send=lambda: fit[-1])
    async with run_keeper(keeper) as task:
        with pytest.raises(AssertionError):
            await advance_until(clock, 20, lambda: lease.calls)  # it sends no request
        fit.append(True)
        await advance_until(clock, 2, lambda: lease.is_held)
        fit.append(False)
        await advance_until(clock, 5, lambda: lease.calls[-1] == "release")
        assert (lease.owner, lease.is_held) == ("", False)
        lease.owner = "red"
        fit.append(True)
        await advance_until(clock, 20, lambda: lease.calls.count("acquire") >= 5)
        lease.owner = ""
        await advance_until(clock, 2, lambda: lease.is_held)
        assert not task.done()


async def test_host_that_cannot_send_may_start(clock: FakeClock, lease: FakeLease) -> None:
    await LeaseKeeper(lease, clock=clock, can_send=lambda: False).acquire_at_start()
    assert lease.calls == []


LEASE_URL = "s3://votes/sender.json"
DATABASE_URL = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def sqlite_store(tmp_path: Path, clock: FakeClock) -> SqliteStore:
    return SqliteStore(tmp_path / "q.db", clock=clock)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def test_create_lease_for_file_uses_configured_lease(sqlite_store: SqliteStore, clock: FakeClock) -> None:
    assert create_lease(config(), sqlite_store, clock) is None
    created = create_lease(config(sender={"lease": LEASE_URL}, store={"lease_seconds": 20}), sqlite_store, clock)
    assert isinstance(created, S3Lease)
    assert (created.seconds, created.is_held) == (20, False)


@pytest.mark.parametrize(
    ("role", "place", "outer"), [("sender", "auto", False), ("sender", LEASE_URL, True), ("api", LEASE_URL, False)]
)
def test_create_lease_for_sending_host_adds_bucket_lease(role: str, place: str, outer: bool, clock: FakeClock) -> None:
    store = PostgresBackend(DATABASE_URL, "none").create_store(clock)
    settings = config(helper={"role": role}, sender={"lease": place}, store={"url": DATABASE_URL})
    created = create_lease(settings, store, clock)
    assert isinstance(created, DatabaseLease)
    assert isinstance(created._outer, S3Lease) is outer


# Database and S3 leases


class FakeSenderTable(PostgresStore):
    """A fake sender table in the database."""

    lease_seconds = 10.0

    def __init__(self) -> None:
        self.fence = 0
        self.outer: int | None = None
        self.host = ""
        self.is_unavailable = False

    def _require_database(self) -> None:
        if self.is_unavailable:
            raise StoreError("the database is away")

    async def acquire_sender_lease(self, outer: int | None = None) -> int | None:
        self._require_database()
        if self.host:
            return None
        self.fence, self.outer = self.fence + 1, outer
        return self.fence

    async def renew_sender_lease(self) -> bool:
        self._require_database()
        return not self.host

    async def release_sender_lease(self) -> None:
        self._require_database()

    async def get_sender_host(self) -> str:
        self._require_database()
        return self.host


def create_both_leases(clock: FakeClock) -> tuple[MemoryBucket, FakeSenderTable, DatabaseLease]:
    """A lease in the database and in a bucket."""
    bucket, table = create_released_bucket(), FakeSenderTable()
    return bucket, table, DatabaseLease(table, clock=clock, outer=lease_for_host(bucket, clock))


async def test_database_lease_requires_both_and_stores_bucket_token(clock: FakeClock) -> None:
    bucket, table, first_lease = create_both_leases(clock)
    other = lease_for_host(bucket, clock, "b")
    assert await first_lease.acquire()
    assert (first_lease.is_held, first_lease.fence, table.outer) == (True, 1, 1)
    clock.advance(3)
    assert await first_lease.renew()
    clock.advance(7.9)
    assert first_lease.is_held
    clock.advance(0.2)
    assert not first_lease.is_held, "the object's lease has expired, the database's has not"
    assert not await other.acquire()
    clock.advance(10)
    assert await other.acquire()
    assert not await first_lease.renew()
    assert not await first_lease.acquire()
    assert (first_lease.is_held, first_lease.holder) == (False, "b")


async def test_database_holder_blocks_bucket_lease_holder(clock: FakeClock) -> None:
    _, table, lease = create_both_leases(clock)
    table.host = "red"
    assert not await lease.acquire()
    assert (lease.is_held, lease.holder) == (False, "red")
    table.host = ""
    assert await lease.acquire()
    table.host = "red"
    assert not await lease.renew()
    assert (lease.is_held, lease.holder) == (False, "red")


async def test_database_outage_keeps_lease_until_expiry_and_releases_bucket(clock: FakeClock) -> None:
    bucket, table, lease = create_both_leases(clock)
    table.is_unavailable = True
    with pytest.raises(LeaseError, match="could not acquire the sender lease"):
        await lease.acquire()
    table.is_unavailable = False
    assert await lease.acquire()
    table.is_unavailable = True
    with pytest.raises(LeaseError, match="could not renew the sender lease"):
        await lease.renew()
    assert lease.is_held
    with pytest.raises(LeaseError, match="could not release the sender lease"):
        await lease.release()
    assert not lease.is_held
    assert await lease_for_host(bucket, clock, "b").acquire(), "taken over immediately"


async def test_host_without_database_leaves_bucket_lease_to_another(clock: FakeClock) -> None:
    bucket, table, lease = create_both_leases(clock)
    other = lease_for_host(bucket, clock, "b")
    assert await lease.acquire()
    assert not await other.acquire()
    table.is_unavailable = True
    for _ in range(3):
        clock.advance(3.4)
        with pytest.raises(LeaseError, match="could not renew the sender lease"):
            await lease.renew()
    assert await other.acquire()
    await other.release()
    with pytest.raises(LeaseError, match="could not acquire the sender lease"):
        await lease.acquire()
    assert await other.acquire(), "also the free one"


# A single host with a file, and the effect on wallets and provers


def create_member(
    store: object,
    lease: Lease,
    clock: FakeClock,
    *,
    role: str = "all",
    agreed: object = None,
    can_reveal: Callable[[], bool] = lambda: True,
) -> ClusterMember:
    """A cluster member; `agreed` contains the circuits and rounds that the hosts agree on."""
    return ClusterMember(
        cast(Store, store),
        lease=lease,
        role=ROLES[role],
        standby=False,
        circuits=cast(CircuitChoice, agreed),
        rounds=cast(RoundRegistry, agreed),
        clock=clock,
        on_acquired=lambda: None,
        can_reveal=can_reveal,
    )


async def test_member_on_copied_file_is_blocked_by_bucket_lease(sqlite_store: SqliteStore, clock: FakeClock) -> None:
    bucket = create_released_bucket()
    first, second = lease_for_host(bucket, clock), lease_for_host(bucket, clock, "b")
    original, restored = create_member(sqlite_store, first, clock), create_member(sqlite_store, second, clock)
    assert (
        str(original.intake_blocked)
        == str(original.work_blocked)
        == "not known yet whether another host uses this queue"
    )
    await original.start()
    assert {original.intake_blocked, original.work_blocked} == {None}
    assert not await second.acquire()
    assert restored.intake_blocked == restored.work_blocked == PauseReason.QUEUE_USED_ELSEWHERE.format("a")
    assert restored.add_state(ServiceState()) == ServiceState(sends=False, sender="a")
    assert original.add_state(ServiceState()) == ServiceState(sends=True, sender="")


class FakeSharedStore(FakeSenderTable):
    """The part of a shared database that concerns its hosts."""

    is_shared = True

    def __init__(self) -> None:
        super().__init__()
        self.proves = True
        self.meta: dict[str, str] = {}

    async def get_meta(self, key: str) -> str | None:
        return self.meta.get(key)

    async def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert op is blocks.set_meta
        assert not kwargs
        self.meta.update([args])

    async def has_prover(self) -> bool:
        return self.proves

    async def measure_clock_skew(self) -> float:
        return 0.0


def reports_sender(host: ClusterMember, sender: str | None) -> bool:
    """The sender that the host reports ("": none; None: unknown)."""
    return host.add_state(ServiceState()).sender == sender


class StubAgreed:
    """No circuit to agree on, and no rounds."""

    shared_key: str | None = None

    async def reload_from_store(self) -> None:
        pass


class SenderCircuits(StubAgreed):
    """A sender's choice of the circuit."""

    shared_key = "circuit.now"

    def publish_state(self) -> str:
        return "k11+"


@asynccontextmanager
async def exchange_as(host: ClusterMember, *others: str) -> AsyncIterator[ClusterMember]:
    """Run the exchange of this host with the others, without its other tasks."""
    parts = host.tasks
    for name in ("clock", *others):
        parts[name].close()
    exchanging = asyncio.create_task(parts["agreement"])
    try:
        yield host
    finally:
        exchanging.cancel()


@pytest.fixture
def shared_store() -> FakeSharedStore:
    return FakeSharedStore()


@pytest.fixture
def api_host(shared_store: FakeSharedStore, clock: FakeClock) -> ClusterMember:
    """A host that only accepts shares."""
    return create_member(
        shared_store, DatabaseLease(FakeSenderTable(), clock=clock), clock, role="api", agreed=StubAgreed()
    )


async def test_sender_publishes_its_circuit_again_after_the_database_has_lost_it(
    shared_store: FakeSharedStore, clock: FakeClock
) -> None:
    """As after the promotion of a standby that is behind."""
    lease = DatabaseLease(FakeSenderTable(), clock=clock)
    assert await lease.acquire()
    async with exchange_as(create_member(shared_store, lease, clock, agreed=SenderCircuits()), "lease"):
        for _ in range(2):
            await wait_until(lambda: shared_store.meta == {"circuit.now": "k11+"})
            shared_store.meta.clear()
            clock.advance(EXCHANGE_INTERVAL_SECONDS)


async def test_member_facts_follow_sender_host(
    shared_store: FakeSharedStore, api_host: ClusterMember, clock: FakeClock
) -> None:
    assert api_host.add_state(ServiceState()).sender is None
    async with exchange_as(api_host) as host:
        for shared_store.host, shared_store.is_unavailable, known in (
            ("red", False, "red"),
            ("", False, ""),
            ("red", True, None),
        ):
            clock.advance(EXCHANGE_INTERVAL_SECONDS)
            await wait_until(partial(reports_sender, host, known))


async def test_member_names_missing_sender_and_prover_after_a_takeover_would_have_ended(
    shared_store: FakeSharedStore, api_host: ClusterMember, clock: FakeClock
) -> None:
    shared_store.proves = False
    async with exchange_as(api_host) as host:
        for shared_store.host, sender, missing in (("red", "red", None), ("", "", None), ("", "", "sender")):
            clock.advance(MISSING_GRACE_SECONDS if missing else EXCHANGE_INTERVAL_SECONDS)
            await wait_until(partial(reports_sender, host, sender))
            assert (host.find_missing("sender") is not None) is (missing is not None)
            assert (host.find_missing("prover") is not None) is (missing is not None)
        assert "svote-helper serve --role sender" in str(host.find_missing("sender"))
        shared_store.host, shared_store.proves = "red", True
        clock.advance(EXCHANGE_INTERVAL_SECONDS)
        await wait_until(lambda: host.find_missing("sender") is None and host.find_missing("prover") is None)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_sender_without_node_or_prover_for_long_leaves_the_lease_of_a_shared_queue(
    shared_store: FakeSharedStore, lease: FakeLease, clock: FakeClock, *, is_shared: bool
) -> None:
    able = [True]
    shared_store.is_shared = is_shared
    member = create_member(shared_store, lease, clock, can_reveal=lambda: able[-1])
    assert member.keeper is not None
    await member.keeper.acquire_at_start()
    async with run_keeper(member.keeper):
        able.append(False)
        await advance_until(clock, MISSING_GRACE_SECONDS, lambda: lease.calls.count("renew") >= 8)
        assert lease.is_held, "a restart of the node or a prover takes some seconds"
        await advance_until(clock, 15, lambda: lease.owner == "" or lease.calls.count("renew") >= 11)
        assert (lease.owner, lease.is_held) == (("", False) if is_shared else ("me", True))
        able.append(True)
        await advance_until(clock, 2, lambda: lease.is_held)


async def test_sender_that_left_the_lease_waits_for_it_like_a_standby(clock: FakeClock, lease: FakeLease) -> None:
    fit = [True]
    keeper = await start_keeper(lease, clock=clock, standby=False, can_send=lambda: fit[-1])
    async with run_keeper(keeper) as running:
        fit.append(False)
        await advance_until(clock, 4, lambda: lease.owner == "")
        lease.owner = "red"
        fit.append(True)
        await advance_until(clock, 31, lambda: lease.calls.count("acquire") >= 30)
        assert not running.done(), "its API and provers work"
        lease.owner = ""
        await advance_until(clock, 2, lambda: lease.is_held)


async def test_member_reports_a_database_that_cannot_be_read_for_long(
    shared_store: FakeSharedStore, api_host: ClusterMember, clock: FakeClock
) -> None:
    async with exchange_as(api_host) as host:
        for host_name, is_unavailable in (("red", False), ("blue", True), ("green", False)):
            shared_store.host, shared_store.is_unavailable = host_name, is_unavailable
            clock.advance(EXCHANGE_INTERVAL_SECONDS)
            await wait_until(partial(reports_sender, host, None if is_unavailable else host_name))
            assert host.find_missing("database") is None
            clock.advance(MISSING_GRACE_SECONDS)
            assert (host.find_missing("database") is not None) is is_unavailable


async def test_member_with_expired_lease_blocks_work_but_not_intake(
    sqlite_store: SqliteStore, clock: FakeClock
) -> None:
    bucket: MemoryBucket = create_released_bucket()
    member = create_member(sqlite_store, lease_for_host(bucket, clock), clock)
    await member.start()
    clock.advance(9)
    assert member.intake_blocked is None
    assert "lease storage unreachable for too long" in str(member.work_blocked)


async def test_member_alone_ignores_clock_jump(sqlite_store: SqliteStore, clock: FakeClock) -> None:
    member = create_member(sqlite_store, lease_for_host(create_released_bucket(), clock), clock)
    await member.start()
    clock.set_wall_clock(60)
    assert member.clock_fault is None
    parts = member.tasks
    for part in parts.values():
        part.close()
    assert list(parts) == ["lease"]
