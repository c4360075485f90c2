"""Which lease the settings ask for, and what a host does about one on a queue of its own."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from helper.chain.round_registry import RoundRegistry
from helper.cluster.membership import AGREE_SECONDS, ClusterMember
from helper.config import Config
from helper.core.pause import PauseCause
from helper.core.roles import ROLES
from helper.errors import LeaseError, StoreError
from helper.lease.database import DatabaseLease
from helper.lease.factory import create_lease
from helper.lease.s3 import S3Lease
from helper.reveal.circuit_selector import CircuitSelector
from helper.store.rows import DamagedShare
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock
from tests.support.fakes import until
from tests.unit.lease.test_s3 import lease, used
from tests.unit.store.conformance.backends import PostgresPlace

ENV = {"AWS_REGION": "us-east-1"}
PLACE = "s3://votes/sender.json"
SERVER = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def file(tmp_path: Path, clock: FakeClock) -> SqliteStore:
    return SqliteStore(tmp_path / "q.db", clock=clock)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def test_a_file_has_the_lease_that_is_named_or_none(file: SqliteStore, clock: FakeClock) -> None:
    assert create_lease(config(), file, clock=clock, env={}) is None
    made = create_lease(config(sender={"lease": PLACE}, store={"lease_seconds": 20}), file, clock=clock, env=ENV)
    assert isinstance(made, S3Lease)
    assert (made.seconds, made.held) == (20, False)


@pytest.mark.parametrize(
    ("role", "place", "outer"), [("sender", "auto", False), ("sender", PLACE, True), ("api", PLACE, False)]
)
def test_of_hosts_on_a_database_those_that_send_ask_the_object_too(
    role: str, place: str, outer: bool, clock: FakeClock
) -> None:
    def report(damaged: DamagedShare) -> None:
        raise AssertionError(damaged)

    store = PostgresPlace(SERVER, "none").store(clock, report)
    settings = config(helper={"role": role}, sender={"lease": place}, store={"url": SERVER})
    made = create_lease(settings, store, clock=clock, env=ENV)
    assert isinstance(made, DatabaseLease)
    assert isinstance(made._outer, S3Lease) is outer


# A database and an object


class Place:
    """The database's word, as a test wants it."""

    lease_seconds = 10.0

    def __init__(self) -> None:
        self.fence = 0
        self.outer: int | None = None
        self.host = ""
        self.away = False

    async def take_sender(self, outer: int | None = None) -> int | None:
        if self.away:
            raise StoreError("the database is away")
        if self.host:
            return None
        self.fence, self.outer = self.fence + 1, outer
        return self.fence

    async def keep_sender(self) -> bool:
        if self.away:
            raise StoreError("the database is away")
        return not self.host

    async def leave_sender(self) -> None:
        if self.away:
            raise StoreError("the database is away")

    async def sender_host(self) -> str:
        return self.host


async def test_both_must_say_so_and_the_database_learns_the_objects_number(clock: FakeClock) -> None:
    bucket, place = used(), Place()
    one, other = DatabaseLease(place, clock=clock, outer=lease(bucket, clock)), lease(bucket, clock, "b")
    assert await one.acquire()
    assert (one.held, one.fence, place.outer) == (True, 1, 1)
    clock.advance(3)
    assert await one.renew()
    clock.advance(7.9)
    assert one.held
    clock.advance(0.2)
    assert not one.held, "the object's is over; the database's is not yet"
    assert not await other.acquire()
    clock.advance(10)
    assert await other.acquire()
    assert not await one.renew()
    assert not await one.acquire()
    assert (one.held, one.holder) == (False, "b")


async def test_a_host_that_the_database_names_keeps_the_objects_holder_from_sending(clock: FakeClock) -> None:
    bucket, place = used(), Place()
    one = DatabaseLease(place, clock=clock, outer=lease(bucket, clock))
    place.host = "red"
    assert not await one.acquire()
    assert (one.held, one.holder) == (False, "red")
    place.host = ""
    assert await one.acquire()
    place.host = "red"
    assert not await one.renew()
    assert (one.held, one.holder) == (False, "red")


async def test_a_database_that_is_away_ends_nothing_before_its_time_and_the_object_is_let_go(clock: FakeClock) -> None:
    bucket, place = used(), Place()
    one = DatabaseLease(place, clock=clock, outer=lease(bucket, clock))
    place.away = True
    with pytest.raises(LeaseError, match="could not acquire the sender lease"):
        await one.acquire()
    place.away = False
    assert await one.acquire()
    place.away = True
    with pytest.raises(LeaseError, match="could not renew the sender lease"):
        await one.renew()
    assert one.held
    with pytest.raises(LeaseError, match="could not release the sender lease"):
        await one.release()
    assert not one.held
    assert await lease(bucket, clock, "b").acquire(), "at once"


# One host with a file, and what wallets and provers learn


def among(
    store: object, own: S3Lease | DatabaseLease, clock: FakeClock, *, role: str = "all", others: object = None
) -> ClusterMember:
    """What a host knows of the others; `others` stands for the circuits and rounds that they agree on."""
    return ClusterMember(
        cast(Store, store),
        lease=own,
        role=ROLES[role],
        standby=False,
        circuits=cast(CircuitSelector, others),
        rounds=cast(RoundRegistry, others),
        clock=clock,
        changed=lambda: None,
    )


async def test_a_copy_of_a_file_does_nothing_beside_its_original(file: SqliteStore, clock: FakeClock) -> None:
    bucket = used()
    first, second = lease(bucket, clock), lease(bucket, clock, "b")
    original, restored = among(file, first, clock), among(file, second, clock)
    assert (
        str(original.elsewhere) == str(original.waits) == "it is not known yet whether another host works on this queue"
    )
    await original.begin()
    assert {original.elsewhere, original.waits} == {None}
    assert not await second.acquire()
    assert restored.elsewhere == restored.waits == PauseCause.QUEUE_USED_ELSEWHERE.reason("a")
    assert restored.facts() == {"sends": False, "sender": "a"}
    assert original.facts() == {"sends": True, "sender": ""}


class Asked:
    """A shared database as far as a host asks it who sends."""

    shared = True

    def __init__(self) -> None:
        self.host = ""
        self.away = False

    async def sender_host(self) -> str:
        if self.away:
            raise StoreError("the database is away")
        return self.host

    async def skew(self) -> float:
        return 0.0


def knows(host: ClusterMember, sender: str | None) -> bool:
    """Whether this is what the host says of who sends ("": nobody; None: it cannot know)."""
    known: bool = host.facts()["sender"] == sender
    return known


class NothingShared:
    """No circuit to agree on, and no rounds."""

    shared_key = None

    async def reread(self) -> None:
        pass


async def test_every_host_of_a_shared_queue_knows_who_sends_and_that_nobody_does(clock: FakeClock) -> None:
    place = Asked()
    host = among(place, DatabaseLease(Place(), clock=clock), clock, role="api", others=NothingShared())
    parts = host.parts
    parts["clock"].close()
    assert host.facts()["sender"] is None
    agreeing = asyncio.create_task(parts["agreement"])
    for place.host, place.away, known in (("red", False, "red"), ("", False, ""), ("red", True, None)):
        clock.advance(AGREE_SECONDS)
        await until(partial(knows, host, known))
    agreeing.cancel()


async def test_a_place_that_is_away_for_long_stops_the_proving_and_not_the_taking(
    file: SqliteStore, clock: FakeClock
) -> None:
    bucket: MemoryBucket = used()
    one = among(file, lease(bucket, clock), clock)
    await one.begin()
    clock.advance(9)
    assert one.elsewhere is None
    assert "has not answered for so long" in str(one.waits)


async def test_a_clock_that_is_set_is_no_matter_where_there_is_one_host(file: SqliteStore, clock: FakeClock) -> None:
    one = among(file, lease(used(), clock), clock)
    await one.begin()
    clock.jump(60)
    assert one.off is None
    parts = one.parts
    for part in parts.values():
        part.close()
    assert list(parts) == ["lease"]
