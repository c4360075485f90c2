"""Selection of the lease from the settings, and behavior on an unshared queue."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from helper.chain.round_registry import RoundRegistry
from helper.cluster.membership import EXCHANGE_INTERVAL_SECONDS, MISSING_GRACE_SECONDS, ClusterMember
from helper.config import Config
from helper.core.pause import PauseCause
from helper.core.roles import ROLES
from helper.errors import LeaseError, StoreError
from helper.lease.database import DatabaseLease
from helper.lease.factory import create_lease
from helper.lease.s3 import S3Lease
from helper.observability.service_state import ServiceState
from helper.reveal.circuit_choice import CircuitChoice
from helper.store.models import DamagedShare
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock
from tests.support.fakes import wait_until
from tests.unit.lease.test_s3 import create_released_bucket, lease_for_host
from tests.unit.store.conformance.backends import PostgresBackend

ENV = {"AWS_REGION": "us-east-1"}
LEASE_URL = "s3://votes/sender.json"
DATABASE_URL = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sqlite_store(tmp_path: Path, clock: FakeClock) -> SqliteStore:
    return SqliteStore(tmp_path / "q.db", clock=clock)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def test_create_lease_for_file_uses_configured_lease(sqlite_store: SqliteStore, clock: FakeClock) -> None:
    assert create_lease(config(), sqlite_store, clock=clock, env={}) is None
    created = create_lease(
        config(sender={"lease": LEASE_URL}, store={"lease_seconds": 20}), sqlite_store, clock=clock, env=ENV
    )
    assert isinstance(created, S3Lease)
    assert (created.seconds, created.is_held) == (20, False)


@pytest.mark.parametrize(
    ("role", "place", "outer"), [("sender", "auto", False), ("sender", LEASE_URL, True), ("api", LEASE_URL, False)]
)
def test_create_lease_for_sending_host_adds_bucket_lease(role: str, place: str, outer: bool, clock: FakeClock) -> None:
    def report(damaged: DamagedShare) -> None:
        raise AssertionError(damaged)

    store = PostgresBackend(DATABASE_URL, "none").create_store(clock, report)
    settings = config(helper={"role": role}, sender={"lease": place}, store={"url": DATABASE_URL})
    created = create_lease(settings, store, clock=clock, env=ENV)
    assert isinstance(created, DatabaseLease)
    assert isinstance(created._outer, S3Lease) is outer


# Database and S3 leases


class FakeSenderTable:
    """A fake sender table in the database."""

    lease_seconds = 10.0

    def __init__(self) -> None:
        self.fence = 0
        self.outer: int | None = None
        self.host = ""
        self.is_unavailable = False

    async def acquire_sender_lease(self, outer: int | None = None) -> int | None:
        if self.is_unavailable:
            raise StoreError("the database is away")
        if self.host:
            return None
        self.fence, self.outer = self.fence + 1, outer
        return self.fence

    async def renew_sender_lease(self) -> bool:
        if self.is_unavailable:
            raise StoreError("the database is away")
        return not self.host

    async def release_sender_lease(self) -> None:
        if self.is_unavailable:
            raise StoreError("the database is away")

    async def get_sender_host(self) -> str:
        return self.host


async def test_database_lease_requires_both_and_stores_bucket_token(clock: FakeClock) -> None:
    bucket, table = create_released_bucket(), FakeSenderTable()
    first_lease, other = (
        DatabaseLease(table, clock=clock, outer=lease_for_host(bucket, clock)),
        lease_for_host(bucket, clock, "b"),
    )
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
    bucket, table = create_released_bucket(), FakeSenderTable()
    lease = DatabaseLease(table, clock=clock, outer=lease_for_host(bucket, clock))
    table.host = "red"
    assert not await lease.acquire()
    assert (lease.is_held, lease.holder) == (False, "red")
    table.host = ""
    assert await lease.acquire()
    table.host = "red"
    assert not await lease.renew()
    assert (lease.is_held, lease.holder) == (False, "red")


async def test_database_outage_keeps_lease_until_expiry_and_releases_bucket(clock: FakeClock) -> None:
    bucket, table = create_released_bucket(), FakeSenderTable()
    lease = DatabaseLease(table, clock=clock, outer=lease_for_host(bucket, clock))
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


# A single host with a file, and the effect on wallets and provers


def create_member(
    store: object, lease: S3Lease | DatabaseLease, clock: FakeClock, *, role: str = "all", agreed: object = None
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
    assert restored.intake_blocked == restored.work_blocked == PauseCause.QUEUE_USED_ELSEWHERE.reason("a")
    assert restored.add_state(ServiceState()) == ServiceState(sends=False, sender="a")
    assert original.add_state(ServiceState()) == ServiceState(sends=True, sender="")


class FakeSharedStore:
    """The part of a shared database that concerns the sender."""

    is_shared = True

    def __init__(self) -> None:
        self.host = ""
        self.proves = True
        self.is_unavailable = False

    async def get_sender_host(self) -> str:
        if self.is_unavailable:
            raise StoreError("the database is away")
        return self.host

    async def has_prover(self) -> bool:
        return self.proves

    async def measure_clock_skew(self) -> float:
        return 0.0


def reports_sender(host: ClusterMember, sender: str | None) -> bool:
    """The sender that the host reports ("": none; None: unknown)."""
    return host.add_state(ServiceState()).sender == sender


class StubAgreed:
    """No circuit to agree on, and no rounds."""

    shared_key = None

    async def reload_from_store(self) -> None:
        pass


async def test_member_facts_follow_sender_host(clock: FakeClock) -> None:
    shared_store = FakeSharedStore()
    host = create_member(
        shared_store, DatabaseLease(FakeSenderTable(), clock=clock), clock, role="api", agreed=StubAgreed()
    )
    parts = host.tasks
    parts["clock"].close()
    assert host.add_state(ServiceState()).sender is None
    agreeing = asyncio.create_task(parts["agreement"])
    for shared_store.host, shared_store.is_unavailable, known in (
        ("red", False, "red"),
        ("", False, ""),
        ("red", True, None),
    ):
        clock.advance(EXCHANGE_INTERVAL_SECONDS)
        await wait_until(partial(reports_sender, host, known))
    agreeing.cancel()


async def test_member_names_missing_sender_and_prover_after_a_takeover_would_have_ended(clock: FakeClock) -> None:
    shared_store = FakeSharedStore()
    lease = DatabaseLease(FakeSenderTable(), clock=clock)
    host = create_member(shared_store, lease, clock, role="api", agreed=StubAgreed())
    parts = host.tasks
    parts["clock"].close()
    agreeing = asyncio.create_task(parts["agreement"])
    shared_store.proves = False
    for shared_store.host, sender, missing in (("red", "red", None), ("", "", None), ("", "", "sender")):
        clock.advance(MISSING_GRACE_SECONDS if missing else EXCHANGE_INTERVAL_SECONDS)
        await wait_until(partial(reports_sender, host, sender))
        assert (host.missing_host("sender") is not None) is (missing is not None)
        assert (host.missing_host("prover") is not None) is (missing is not None)
    assert "svote-helper serve --role sender" in str(host.missing_host("sender"))
    shared_store.host, shared_store.proves = "red", True
    clock.advance(EXCHANGE_INTERVAL_SECONDS)
    await wait_until(lambda: host.missing_host("sender") is None and host.missing_host("prover") is None)
    agreeing.cancel()


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
