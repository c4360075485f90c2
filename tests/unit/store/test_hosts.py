"""Multiple hosts on one PostgreSQL database: claims, late hosts, and lost connections.
`conformance/` tests the store with a single host.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from itertools import count, product
from pathlib import Path
from secrets import token_hex
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool
from psycopg_pool.base import AttemptWithBackoff

from helper.core.share import ShareState
from helper.errors import (
    StoreDisplaced,
    StoreError,
    StoreForeign,
    StoreKeyError,
    StoreLocked,
    StoreRefused,
    StoreUnconfirmed,
    StoreUnreachable,
)
from helper.lease import DatabaseLease
from helper.store import blocks, rounds, writer_thread
from helper.store.db_copy.postgres_endpoint import PostgresEndpoint
from helper.store.keyring import Keyring
from helper.store.messages import mark_sending, prepare, record_outcome
from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.postgres import connection, opening, reader, store, writer
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.opening import check_connection, refuse_host_name_in_use
from helper.store.postgres.reader import CONNECTIONS
from helper.store.postgres.store import PostgresStore
from helper.store.postgres.transaction import PostgresTransaction
from helper.store.postgres.writer import PostgresWriter
from helper.store.shares import (
    claim_due,
    claim_listed,
    fail,
    record_crash,
    recover,
    release_claim,
    requeue,
    retry,
    retry_failed,
)
from helper.store.sql_files import FIRST_VERSION
from helper.store.table_rows import ShareRow
from tests.support.clock import FakeClock
from tests.support.command import run_refused_serve
from tests.support.database_proxy import DatabaseProxy
from tests.support.fakes import wait_until
from tests.support.postgres import REQUIRE_NO_STANDBY, REQUIRE_STANDBY, Cluster, find_binaries
from tests.support.process import TIMEOUT_SECONDS
from tests.unit.lease.test_s3_lease import create_released_bucket, lease_for_host
from tests.unit.store.conformance.backends import SEALING_KEYS, PostgresBackend
from tests.unit.store.conformance.test_backlog import create_backlog
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_and_prepare,
    enqueue_shares,
    greatest_height,
    make_posted_share,
    make_reveal,
    without_sends,
)

CLUSTER_FIXTURES = ["cluster"] if find_binaries() is not None else []
pytestmark = pytest.mark.parametrize("backend", CLUSTER_FIXTURES, indirect=True)
JoinHost = Callable[[str], Awaitable[PostgresStore]]


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PostgresBackend:
    monkeypatch.setattr(writer, "PROBE_SECONDS", 0.05)
    return PostgresBackend(request.getfixturevalue(request.param).url, f"test_{token_hex(6)}")


@pytest.fixture
async def join_host(backend: PostgresBackend, clock: FakeClock) -> AsyncIterator[JoinHost]:
    """Opens the store of a host with this name. At the end all are closed, even if closing one fails."""
    async with AsyncExitStack() as stores:

        async def open_host(host: str) -> PostgresStore:
            store_ = backend.create_store(clock, host=host)
            await store_.open()
            stores.push_async_callback(store_.close)
            return store_

        yield open_host


def wait_for_lock_waiter(backend: PostgresBackend, hosts: int = 1) -> None:
    """Wait until so many hosts wait for an advisory lock."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    waiting = "SELECT count(*) >= %s FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with backend.connect() as conn:
        while conn.execute(waiting, (hosts,)).fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def expire_claims(backend: PostgresBackend) -> None:
    """Expire every claim, as if its host had been stopped for long."""
    backend.execute("UPDATE claims SET until = now() - interval '1 second'")


# ---------------------------------------------------------------------- claims


async def test_claim_by_two_hosts_is_disjoint_and_keeps_order(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, *range(40), submit_at=int(NOW) + 5)

    claims = [await claim_all_due(host, limit=1) for _ in range(20) for host in (host_a, host_b)]

    ids = [share.id for batch in claims for share in batch]
    assert len(set(ids)) == 40
    rejoined = await join_host("three")
    ranks = [row[0] for row in await rejoined._operator_reader.run(b"SELECT id FROM shares ORDER BY due_ms, rank")]
    assert ids == ranks


async def test_concurrent_claims_take_each_share_once(join_host: JoinHost) -> None:
    hosts = [await join_host(name) for name in ("one", "two", "three")]
    await enqueue_shares(hosts[0], *range(90))

    claims = await asyncio.gather(*(claim_all_due(host, limit=10) for _ in range(4) for host in hosts))
    remaining = await claim_all_due(hosts[0])

    ids = [share.id for batch in (*claims, remaining) for share in batch]
    assert len(ids) == len(set(ids)) == 90


async def test_enqueue_same_share_on_two_hosts_queues_one(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    shares = [make_posted_share(number) for number in range(40)]

    outcomes = await asyncio.gather(*(enqueue(host, share) for share in shares for host in (host_a, host_b)))

    assert outcomes.count(EnqueueResult.QUEUED) == outcomes.count(EnqueueResult.DUPLICATE) == 40
    assert await host_a.count_shares() == await host_b.count_shares() == {ROUND: {ShareState.WAITING: 40}}


async def test_apply_block_already_applied_does_not_wait(backend: PostgresBackend, join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1)
    assert len(await confirm_shares(host_a, 1, 2, height=5)) == 1

    with backend.connect() as conn:  # as a host that applies the next block
        conn.execute("SELECT pg_advisory_lock(hashtext(current_schema()), 1)")
        async with asyncio.timeout(TIMEOUT_SECONDS / 2):
            assert await confirm_shares(host_b, 1, 2, height=5) == []
            assert await confirm_shares(host_b, height=4) == []
            assert await host_b.run(blocks.add_spent, [(ROUND, make_posted_share(1).nullifier)]) == []
        held = asyncio.create_task(confirm_shares(host_b, 1, 2, 3, height=6))
        await asyncio.to_thread(wait_for_lock_waiter, backend)
        conn.execute("SELECT pg_advisory_unlock_all()")
    assert await held == []
    assert await host_a.is_spent(ROUND, make_posted_share(3).nullifier)
    assert await greatest_height(host_a) == 6


async def test_apply_block_on_all_hosts_is_applied_once(join_host: JoinHost) -> None:
    hosts = [await join_host(name) for name in ("one", "two", "three")]
    await enqueue_shares(hosts[0], *range(30))
    applying = (confirm_shares(host, *range(30), height=height) for height in (7, 8) for host in hosts)
    confirmed = await asyncio.gather(*applying)
    assert sorted(len(shares) for shares in confirmed) == [0, 0, 0, 0, 0, 30]
    assert await hosts[0].count_shares() == {ROUND: {ShareState.CONFIRMED: 30}}
    assert await greatest_height(hosts[0]) == 8


async def test_share_enqueued_while_confirmed_elsewhere_is_not_left_waiting(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    shares = [make_posted_share(number) for number in range(60)]
    await host_a.run(rounds.save_rounds, [make_stored_round()], NOW)

    await asyncio.gather(
        *(enqueue(host_a, share) for share in shares),
        *(confirm_shares(host_b, number, height=number) for number in range(60)),
    )

    assert await claim_all_due(host_a) == []
    assert set((await host_b.count_shares()).get(ROUND, {})) <= {ShareState.CONFIRMED}
    assert await greatest_height(host_a) == 59


async def test_exclusive_operations_that_wait_with_others_need_no_rerun(
    join_host: JoinHost, backend: PostgresBackend
) -> None:
    host = await join_host("one")
    shares = [make_posted_share(number) for number in range(4)]
    writes = backend.count_writes()

    await asyncio.gather(
        *(enqueue(host, share) for share in shares[:2]),
        host.run(rounds.save_rounds, [make_stored_round()], NOW),
        *(enqueue(host, share) for share in shares[2:]),
    )

    assert backend.count_writes() - writes == 3
    assert await host.count_shares() == {ROUND: {ShareState.WAITING: 4}}


# ---------------------------------------------------------------------- the sender


def expire_sender_lease(backend: PostgresBackend) -> None:
    backend.execute("UPDATE sender SET until = now() - interval '1 second'")


async def test_mark_sending_without_sender_lease_is_refused(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    share = await enqueue_and_prepare(host_b, 1)
    before = [backend.query_rows(f"SELECT * FROM {table}") for table in ("shares", "reveals", "history")]
    assert not await host_a.run(mark_sending, share, height=1, endpoint="node")

    assert await host_a.acquire_sender_lease()

    assert await host_b.acquire_sender_lease() is None
    assert await host_b.get_sender_host() == "one"
    assert not await host_b.run(mark_sending, share, height=1, endpoint="node")
    assert not await host_b.run(requeue, share, stage="broadcast", note="late")
    assert not await host_b.run(retry, share, due_ms=0, stage="broadcast", note="late")
    assert not await host_b.run(fail, share, stage="broadcast", note="late")
    assert [backend.query_rows(f"SELECT * FROM {table}") for table in ("shares", "reveals", "history")] == before
    assert await host_a.run(mark_sending, share, height=1, endpoint="node")
    await host_b.run(record_outcome, share, outcome="ACCEPTED")
    assert backend.query_rows("SELECT sends, last_outcome FROM reveals") == [(1, None)]


async def test_mark_sending_with_expired_lease_is_refused(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    share = await enqueue_and_prepare(host_a, 1)
    first = await host_a.acquire_sender_lease()
    expire_sender_lease(backend)
    assert not await host_a.run(mark_sending, share, height=1, endpoint="node")
    assert await host_a.renew_sender_lease()
    assert await host_a.run(mark_sending, share, height=1, endpoint="node")
    expire_sender_lease(backend)

    second = await host_b.acquire_sender_lease()

    assert first is not None
    assert second is not None
    assert second > first
    assert not await host_a.run(mark_sending, share, height=2, endpoint="node")
    assert not await host_a.renew_sender_lease()
    await host_a.release_sender_lease()
    assert await host_b.run(mark_sending, share, height=2, endpoint="node")
    assert await host_b.get_sender_host() == "two"


async def test_lease_that_a_promoted_standby_lacks_is_lost(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    share = await enqueue_and_prepare(host_a, 1)
    first = await host_a.acquire_sender_lease()
    backend.execute(f"UPDATE sender SET host = '', fence = 0; ALTER SEQUENCE fence RESTART {first}")

    assert await host_b.acquire_sender_lease() == first

    assert not await host_a.run(mark_sending, share, height=1, endpoint="node")
    assert not await host_a.renew_sender_lease()
    await host_a.release_sender_lease()
    assert await host_b.run(mark_sending, share, height=1, endpoint="node")


async def test_take_sender_waits_for_send_being_recorded(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await host_a.acquire_sender_lease()
    is_noted, resume = threading.Event(), threading.Event()

    def note(tx: PostgresTransaction) -> bool:
        sends = tx.can_send()
        is_noted.set()
        assert resume.wait(TIMEOUT_SECONDS)
        return sends

    note_task = asyncio.create_task(host_a._writer.run(note))
    assert await asyncio.to_thread(is_noted.wait, TIMEOUT_SECONDS)
    # As if the lease expired now: the row is locked, so the new holder has to wait.
    taking = asyncio.create_task(host_b.acquire_sender_lease(outer=7))
    waiting = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'two' AND wait_event_type = 'Lock'"
    await wait_until(lambda: backend.query_rows(waiting))
    assert not taking.done()
    resume.set()
    assert await note_task
    assert await taking is not None
    assert not await host_a._writer.run(lambda tx: tx.can_send())


async def test_sender_lease_survives_restart_and_is_released_on_leave(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await host_a.acquire_sender_lease()
    await host_a.close()
    assert await host_b.acquire_sender_lease() is None
    rejoined = await join_host("one")
    assert await rejoined.acquire_sender_lease() is not None
    await rejoined.release_sender_lease()
    assert await rejoined.get_sender_host() == ""
    assert await host_b.acquire_sender_lease() is not None


async def test_outer_fencing_token_overrules_and_never_decreases(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    assert await host_a.acquire_sender_lease(outer=5)
    assert await host_b.acquire_sender_lease(outer=5) is None
    assert await host_b.acquire_sender_lease(outer=4) is None
    assert await host_b.acquire_sender_lease(outer=6)
    assert await host_a.acquire_sender_lease(outer=5) is None
    assert not await host_a.renew_sender_lease()


async def test_takeover_by_bucket_lease_fences_former_holder(join_host: JoinHost, clock: FakeClock) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    share, bucket = await enqueue_and_prepare(host_a, 1), create_released_bucket()
    named_hosts = ((host_a, "one"), (host_b, "two"))
    first, second = (
        DatabaseLease(at, clock=clock, outer=lease_for_host(bucket, clock, name)) for at, name in named_hosts
    )
    assert await first.acquire()
    assert await host_a.run(mark_sending, share, height=1, endpoint="node")
    assert not await second.acquire()
    assert second.holder == "one"
    clock.advance(10)  # the lease object is not renewed; the database lease would last ten minutes

    assert await second.acquire()

    assert not await host_a.run(mark_sending, share, height=2, endpoint="node")
    assert await host_b.run(mark_sending, share, height=2, endpoint="node")
    assert not await first.renew()
    assert not await first.acquire()
    assert (first.is_held, first.holder) == (False, "two")
    await second.release()
    assert await first.acquire()
    assert await host_a.run(mark_sending, share, height=3, endpoint="node")


async def test_notifications_reach_all_hosts(backend: PostgresBackend, clock: FakeClock, join_host: JoinHost) -> None:
    received: list[str] = []
    listening = backend.create_store(clock, host="listener")
    listening.listen(received.append)
    await listening.open()

    async def expect_received(*expected: str) -> None:
        await wait_until(lambda: received[-len(expected) :] == [*expected])

    try:
        host_a = await join_host("one")
        await expect_received("")
        await enqueue_shares(host_a, 1, submit_at=int(NOW) + 3600)
        await enqueue_shares(host_a, 2)
        await expect_received("", "due")
        (queued,) = await claim_all_due(host_a)
        await host_a.run(prepare, queued.id, make_reveal(2))
        await expect_received("", "due", "prepared")
        listener_filter = "application_name = 'listener' AND query LIKE 'LISTEN%'"
        backend.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listener_filter}")
        await expect_received("prepared", "")
        await enqueue_shares(host_a, 3)
        await expect_received("", "due")
    finally:
        await listening.close()


async def test_hosts_claim_backlog_of_both_rounds_without_collisions(join_host: JoinHost, clock: FakeClock) -> None:
    hosts = [await join_host("one"), await join_host("two")]
    await enqueue_shares(hosts[0], *range(30))
    for number in range(30, 60):
        posted = make_posted_share(number, round_id=OTHER_ROUND)
        await enqueue(hosts[0], posted)
    ends, late = {ROUND: math.inf, OTHER_ROUND: math.inf}, NOW + 60
    own_orders = [await host.list_due(ROUND, now=late, limit=30, by_rank=True) for host in hosts]
    assert own_orders[0][0] != own_orders[1][0], "hosts begin at different places of one order"
    assert sorted(own_orders[0]) == sorted(own_orders[1])
    backlogs = [create_backlog(host, clock) for host in hosts]

    claimed: list[ShareRow] = []
    singles = 0
    while len(claimed) < 32:  # a claim may have one share, if another host has claimed the other one since the listing
        for backlog in backlogs:
            claim = await backlog.claim(ends, now=late, chain_time=late, limit=2, first_limit=2)
            assert claim is not None
            claimed += [queued for queued, _ in claim.shares]
            singles += len(claim.shares) == 1

    assert len({queued.id for queued in claimed}) == len(claimed)
    by_round = Counter(queued.round_id for queued in claimed)
    assert abs(by_round[ROUND] - by_round[OTHER_ROUND]) <= singles, "a claim of two shares has one of each round"
    assert await hosts[0].count_claiming_hosts() == 2


async def test_claim_listed_by_two_hosts_at_once_claims_share_once(join_host: JoinHost) -> None:
    hosts = [await join_host("one"), await join_host("two")]
    await enqueue_shares(hosts[0], *range(40))
    ids = [share.id for share in await hosts[0].list_due(ROUND, now=NOW + 60, limit=40, by_rank=True)]

    claims = await asyncio.gather(
        hosts[0].run(claim_listed, ids, now=NOW + 60), hosts[1].run(claim_listed, ids[::-1], now=NOW + 60)
    )

    assert sorted(queued.id for claimed in claims for queued in claimed) == sorted(ids)


# ---------------------------------------------------------------------- leases and fencing tokens


async def test_claims_of_silent_host_go_to_others_at_due_time(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1, submit_at=int(NOW) + 3)
    (queued_a,) = await claim_all_due(host_a)
    assert await claim_all_due(host_b) == []
    seconds = backend.query_rows("SELECT extract(epoch FROM until)::float8 FROM claims")
    assert await host_b.next_due_ms([ROUND]) == pytest.approx(seconds[0][0] * 1000, abs=1)
    assert await host_a.next_due_ms([ROUND]) is None

    expire_claims(backend)
    (queued_b,) = await claim_all_due(host_b)

    assert queued_b.share == queued_a.share
    assert (queued_b.due_ms, queued_b.attempts, queued_b.crashes) == (queued_a.due_ms, 0, 0)


LATE_CALLS: dict[str, Callable[[PostgresStore, int], Awaitable[object]]] = {
    "prepare": lambda store, share: store.run(prepare, share, make_reveal(1)),
    "put_back": lambda store, share: store.run(requeue, share, stage="tree", note="late"),
    "release": lambda store, share: store.run(release_claim, share),
    "record_crash": lambda store, share: store.run(record_crash, share, due_ms=0, note="late"),
    "retry": lambda store, share: store.run(retry, share, due_ms=0, stage="proof", note="late"),
    "fail": lambda store, share: store.run(fail, share, stage="proof", note="late"),
}


async def test_host_with_expired_claim_changes_nothing(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    for number, (late_call, is_claimed_again) in enumerate(product(LATE_CALLS.values(), (True, False)), start=1):
        await enqueue_shares(host_a, number)
        (queued,) = await claim_all_due(host_a)
        expire_claims(backend)
        if is_claimed_again:
            await claim_all_due(host_b)
        else:  # this releases expired claims, and claims nothing
            assert await host_b.run(claim_due, now=NOW, limit=1, rounds=[]) == []
        tables = ("shares", "claims", "reveals", "history")
        rows = [backend.query_rows(f"SELECT * FROM {table}") for table in tables]
        assert len(rows[1]) == is_claimed_again

        assert not await late_call(host_a, queued.id)

        assert [backend.query_rows(f"SELECT * FROM {table}") for table in tables] == rows
        owner = host_b
        if not is_claimed_again:
            owner, (queued,) = host_a, await claim_all_due(host_a)
        assert await owner.run(prepare, queued.id, make_reveal(2))
        (sent,) = await host_a.list_unconfirmed()
        assert without_sends(sent.row) == make_reveal(2)
        assert await host_b.run(blocks.apply_blocks, [(number, number)], [(ROUND, queued.nullifier)]) == [queued.id]


async def test_operator_retry_on_any_host_includes_lost_claims(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1)
    (queued_a,) = await claim_all_due(host_a)
    expire_claims(backend)
    (queued_b,) = await claim_all_due(host_b)
    assert await host_b.run(fail, queued_b.id, stage="proof", note="for good")

    counts = await host_a.run(retry_failed, [queued_a.id], QueueFilter(), closed=(), note="by ann", dry_run=False)

    assert counts == {"retried": 1}
    assert await host_a.count_shares() == {ROUND: {ShareState.WAITING: 1}}


async def test_damaged_share_of_silent_host_does_not_block_others(
    join_host: JoinHost, backend: PostgresBackend
) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1, 2)
    damaged, sound = await claim_all_due(host_a)
    expire_claims(backend)
    backend.execute(f"UPDATE claims SET until = until - interval '1 minute' WHERE share_id = {damaged.id}")
    backend.execute(f"UPDATE shares SET attempts = 3 WHERE id = {damaged.id}")

    claimed_ids = [share.id for _ in range(3) for share in await claim_all_due(host_b, limit=1)]

    assert claimed_ids == [sound.id]


async def test_host_with_untaken_expired_claim_continues(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a = await join_host("one")
    await enqueue_shares(host_a, 1)
    (queued,) = await claim_all_due(host_a)
    expire_claims(backend)
    assert await claim_all_due(host_a) == []
    assert await host_a.run(prepare, queued.id, make_reveal(1))


async def test_claim_unknown_to_its_host_expires(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a = await join_host("one")
    await enqueue_shares(host_a, 1)
    (queued,) = await claim_all_due(host_a)
    host_a._claims.fences.clear()  # the response of the commit was lost
    assert await claim_all_due(host_a) == []
    assert await host_a.next_due_ms([ROUND]) is None
    expire_claims(backend)
    assert await host_a.next_due_ms([ROUND]) is not None, "its dispatcher claims only what is due"
    (reclaimed,) = await claim_all_due(host_a)
    assert reclaimed.id == queued.id


STOP_POINTS: dict[str, Callable[[PostgresTransaction], object]] = {
    "after a statement": lambda tx: tx.get_share(1),
    "after a batch of statements": lambda tx: tx.execute_many("add_count", [(1, 0, 1), (1, 1, -1), (1, 4, 0)]),
}


@pytest.mark.parametrize("where", STOP_POINTS)
async def test_host_stopped_in_transaction_does_not_block_others(
    join_host: JoinHost, backend: PostgresBackend, clock: FakeClock, where: str
) -> None:
    host_b = await join_host("two")
    stopped, resume = threading.Event(), threading.Event()

    def stop_within(tx: PostgresTransaction) -> None:
        tx.lock_shared()
        assert tx.get_share(1) is not None
        STOP_POINTS[where](tx)
        stopped.set()
        resume.wait(TIMEOUT_SECONDS)

    host_a = backend.create_store(clock, host="one", lease=1.0)
    await host_a.open()
    try:
        await enqueue_shares(host_a, 1)
        await claim_all_due(host_a)
        stopping = asyncio.create_task(host_a._writer.run(stop_within))
        assert await asyncio.to_thread(stopped.wait, TIMEOUT_SECONDS)
        expire_claims(backend)
        async with asyncio.timeout(TIMEOUT_SECONDS / 2):
            while not await claim_all_due(host_b):
                await asyncio.sleep(0.05)
            await confirm_shares(host_b, height=5)
        resume.set()
        with suppress(StoreError):
            await stopping
        await enqueue_shares(host_a, 2)
    finally:
        resume.set()
        await host_a.close()


async def test_claim_ends_with_work_and_is_not_renewed_for_other_host(
    join_host: JoinHost, backend: PostgresBackend
) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1, 2)
    first, second = await claim_all_due(host_a)
    assert await host_a.run(prepare, first.id, make_reveal(1))
    assert backend.query_rows("SELECT share_id, host FROM claims") == [(second.id, "one")]
    expire_claims(backend)
    await claim_all_due(host_b)
    (before,) = backend.query_rows("SELECT * FROM claims")

    assert (
        await host_a._writer.run(
            lambda tx: tx.execute("renew_host_lease", {"host": "one", "lease": 9.0, "fences": [1, 2, 3]})
        )
        == 0
    )

    assert backend.query_rows("SELECT * FROM claims") == [before]


async def test_recover_releases_only_own_claims(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1, 2)
    await claim_all_due(host_a, limit=1)
    await claim_all_due(host_b, limit=1)
    await host_a.close()

    rejoined = await join_host("one")

    assert await rejoined.run_batches(recover) == 1
    assert await rejoined.count_shares() == {ROUND: {ShareState.WAITING: 1, ShareState.PROVING: 1}}
    assert [row[0] for row in backend.query_rows("SELECT host FROM claims")] == ["two"]


async def test_round_closure_ends_claims_of_all_hosts(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await host_a.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(host_a, 1)
    (queued,) = await claim_all_due(host_a)

    assert await host_b.run_batches(rounds.fail_unconfirmed, ROUND, note="closed") == 1

    assert not await host_a.run(requeue, queued.id, stage="tree", note="late")
    assert await host_b.run_batches(rounds.purge, ROUND) == 1
    assert not await host_a.run(release_claim, queued.id)


async def test_enqueue_on_host_unaware_of_closed_round_is_refused(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await host_a.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(host_b, 1)
    await host_a.run(rounds.mark_closed, ROUND, NOW)
    assert await host_a.run_batches(rounds.fail_unconfirmed, ROUND, note="closed") == 1

    late, known = make_posted_share(2), make_posted_share(1)
    assert await enqueue(host_b, late) is EnqueueResult.CLOSED
    assert await enqueue(host_b, known) is EnqueueResult.DUPLICATE

    assert await host_a.count_unconfirmed(ROUND) == {ShareState.FAILED: 1}


async def test_shared_lock_shows_that_another_host_has_closed_a_round(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await host_a.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(host_a, 1)
    loop = asyncio.get_running_loop()

    def close_before_lock(tx: PostgresTransaction) -> tuple[bool, bool]:
        key = tx.round_key(ROUND)
        assert key is not None
        before = tx.is_round_closed(key.no)
        asyncio.run_coroutine_threadsafe(host_b.run(rounds.mark_closed, ROUND, NOW), loop).result(10)
        tx.lock_shared()
        return before, tx.is_round_closed(key.no)

    assert await host_a.run(close_before_lock) == (False, True)


# ---------------------------------------------------------------------- failures


async def test_read_replaces_all_lost_connections(join_host: JoinHost, backend: PostgresBackend) -> None:
    host = await join_host("one")
    await enqueue_shares(host, 1)
    waiting_read = b"SELECT pg_backend_pid(), pg_advisory_xact_lock_shared(1)::text"
    with backend.connect() as conn:
        conn.execute("SELECT pg_advisory_lock(1)")
        reads = [asyncio.create_task(host._reader.run(waiting_read)) for _ in range(CONNECTIONS)]
        await asyncio.to_thread(wait_for_lock_waiter, backend, CONNECTIONS)
    assert len({tuple(await read) for read in reads}) == CONNECTIONS

    backend.execute("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'one'")

    assert await host.is_known(make_posted_share(1).share.key)


async def test_read_succeeds_soon_after_a_long_outage(
    backend: PostgresBackend, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses of the pool between two attempts to connect double; this is one as after minutes."""
    monkeypatch.setattr(AttemptWithBackoff, "INITIAL_DELAY", 600.0)
    monkeypatch.setattr(reader, "WAIT_SECONDS", 0.2)
    role = f"host_{backend.schema}"
    backend.execute(f"CREATE ROLE {role} LOGIN")
    backend.execute(f"GRANT ALL ON DATABASE postgres TO {role}")
    host = PostgresBackend(make_conninfo(backend.address, user=role), backend.schema).create_store(clock)
    await host.open()
    try:
        backend.execute(f"ALTER ROLE {role} NOLOGIN")
        backend.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = '{role}'")
        for _ in range(2):
            with pytest.raises(StoreUnreachable):
                await host.count_shares()
        backend.execute(f"ALTER ROLE {role} LOGIN")
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                with suppress(StoreUnreachable):
                    await host.count_shares()
                    break
    finally:
        await host.close()


async def test_read_of_locked_table_ends_with_an_error(
    join_host: JoinHost, backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only reads use some tables for long: without an error, nobody would know that nothing is sent."""
    monkeypatch.setattr(connection, "LOCKED_READ_SECONDS", 0.1)
    host = await join_host("one")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        with backend.connect() as other, other.transaction():
            other.execute("LOCK TABLE reveals")
            with pytest.raises(StoreError, match="lock timeout"):
                await host.list_follow_ups(height=1, limit=1)
        assert await host.list_follow_ups(height=1, limit=1) == []


async def test_host_stops_while_its_writes_wait_for_a_lock(
    join_host: JoinHost, backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first batch, those behind it wait too."""
    monkeypatch.setattr(writer, "STALLED_SECONDS", 0.1)
    monkeypatch.setattr(writer_thread, "MAX_BATCH", 4)
    host = await join_host("one")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        with backend.connect() as other, other.transaction():
            other.execute("LOCK TABLE shares")
            posts = [asyncio.create_task(enqueue_shares(host, number)) for number in range(1, 10)]
            await wait_until(lambda: host._writer.is_stalled)
            await host.close()
        outcomes = await asyncio.gather(*posts, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreError] * len(posts)


async def test_reconnect_keeps_claims(join_host: JoinHost, backend: PostgresBackend) -> None:
    host_a = await join_host("one")
    await enqueue_shares(host_a, 1)
    (queued,) = await claim_all_due(host_a)

    backend.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'one'")
    with suppress(StoreError):
        await enqueue_shares(host_a, 2)
    await enqueue_shares(host_a, 2)

    assert await host_a.run(prepare, queued.id, make_reveal(1))
    assert host_a.write_error is None
    assert await host_a.count_shares() == {ROUND: {ShareState.SENT: 1, ShareState.WAITING: 1}}


async def test_unreachable_server_is_not_reported_as_stalled_transaction(
    join_host: JoinHost, backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, is_seen, stalls, faults = FakeClock(), threading.Event(), list[bool](), list[str | None]()
    roll_back = PostgresWriter._roll_back

    def time_out(_: object) -> None:
        faults.append(host_a.write_error)
        clock.advance(writer.STALLED_SECONDS + 1)
        is_seen.wait(TIMEOUT_SECONDS)
        raise psycopg.OperationalError("connection timeout expired")

    def record_and_roll_back(self: PostgresWriter) -> None:
        stalls.append(self.is_stalled)
        roll_back(self)

    monkeypatch.setattr(store, "_STALL_CHECK_SECONDS", 0.01)
    host_a = await join_host("one")
    host_a._writer._clock = clock
    with monkeypatch.context() as patch:
        patch.setattr(writer, "connect", time_out)
        patch.setattr(PostgresWriter, "_roll_back", record_and_roll_back)
        backend.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'one'")
        post = asyncio.create_task(enqueue_shares(host_a, 1))
        await wait_until(lambda: "has not been reachable" in str(host_a.write_error))
        is_seen.set()
        with pytest.raises(StoreError, match="is unreachable"):
            await post
    await enqueue_shares(host_a, 1)
    assert host_a.write_error is None
    assert stalls
    assert not any(stalls)
    assert faults[0] is None
    assert all(faults[1:]), "no second attempt hides the outage"
    assert "database_writes" not in capsys.readouterr().out


FAULTS = {
    "full": (
        "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE disk_full; END$$",
        "CREATE TRIGGER no_room BEFORE INSERT ON shares EXECUTE FUNCTION no_room()",
        "DROP TRIGGER no_room ON shares",
    ),
    "read-only": (
        "ALTER SYSTEM SET default_transaction_read_only = on",
        "SELECT pg_reload_conf()",
        "ALTER SYSTEM RESET default_transaction_read_only",
    ),
    "no privilege": (
        "SELECT",
        "REVOKE ALL ON SEQUENCE share_id FROM {role}",  # not used by the probe
        "GRANT ALL ON SEQUENCE share_id TO {role}",
    ),
    "no usage": (
        "SELECT",
        "REVOKE USAGE ON SCHEMA {schema} FROM {role}",
        "GRANT USAGE ON SCHEMA {schema} TO {role}",
    ),
    "name in use": (
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE objid = hashtext('host one')::oid",
        "SELECT pg_advisory_lock(hashtext(current_schema()), hashtext('host one'))",
        "SELECT pg_advisory_unlock_all()",
    ),
}
"""What makes every write fail, and what ends this."""
FAULT_TEXTS = {
    "full": ("nothing was written", "Free space"),
    "read-only": ("are read-only", "Free space"),
    "no privilege": ("no privileges on share_id", "Grant"),
    "no usage": ("no privileges on the schema", "USAGE"),
    "name in use": ("under the name 'one'", "different name"),
}
"""A part of the error and of the advice."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_failed_writes_are_reported_until_one_is_committed(
    backend: PostgresBackend, clock: FakeClock, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    role = f"host_{backend.schema}"
    backend.execute(f"CREATE ROLE {role} LOGIN")
    backend.execute(f"GRANT ALL ON DATABASE postgres TO {role}")
    role_backend = PostgresBackend(make_conninfo(backend.address, user=role), backend.schema)
    host = role_backend.create_store(clock)
    await host.open()
    first, second, end = (statement.format(role=role, schema=backend.schema) for statement in FAULTS[fault])
    with backend.connect() as conn:
        try:
            await enqueue_shares(host, 0)
            conn.execute(first.encode())
            conn.execute(second.encode())
            with pytest.raises(StoreError, match=FAULT_TEXTS[fault][0]) as refused:
                await enqueue_shares(host, *range(1, 1000))  # a new setting takes effect with a delay
            assert FAULT_TEXTS[fault][1] in refused.value.advice
            assert FAULT_TEXTS[fault][0] in str(host.write_error)
            await host.ping_writer()
            if fault != "no usage":  # then nothing can be read either
                await host.count_shares()
            assert host.write_error is not None, "a transaction that writes nothing is no evidence"
        finally:
            conn.execute(end.encode())
            conn.execute("SELECT pg_reload_conf()")
        await wait_until(lambda: host.write_error is None)
        await enqueue_shares(host, 1000)
        await host.close()
    assert backend.query_rows("SELECT key FROM meta WHERE key LIKE 'probe%'") == []
    log = capsys.readouterr().out
    assert (log.count("database_write_failed"), log.count("database_write_recovered")) == (1, 1)


async def test_lost_queue_is_not_replaced_by_an_empty_one(
    join_host: JoinHost, backend: PostgresBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    host = await join_host("one")
    await enqueue_shares(host, 1)
    backend.execute(f"ALTER SCHEMA {backend.schema} RENAME TO {backend.schema}_lost")
    backend.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'one'")

    with pytest.raises(StoreDisplaced, match="no longer contains the queue"):
        await enqueue_shares(host, 2)
    await wait_until(lambda: "no longer contains" in str(host.write_error))
    assert backend.query_rows(f"SELECT 1 FROM pg_namespace WHERE nspname = '{backend.schema}'") == []
    other_keys = PostgresBackend(backend.address, backend.schema).create_store(FakeClock(), host="two")
    await other_keys.open()
    await other_keys.close()
    with pytest.raises(StoreDisplaced, match="no longer contains the queue"):
        await enqueue_shares(host, 2)

    backend.execute(f"DROP SCHEMA {backend.schema} CASCADE")
    backend.execute(f"ALTER SCHEMA {backend.schema}_lost RENAME TO {backend.schema}")
    await wait_until(lambda: host.write_error is None)
    await enqueue_shares(host, 2)
    assert await host.count_shares() == {ROUND: {ShareState.WAITING: 2}}
    assert capsys.readouterr().out.count("database_write_failed") == 1


async def test_share_that_standby_may_lack_is_not_acknowledged(
    join_host: JoinHost, backend: PostgresBackend, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    backend.execute("ALTER DATABASE postgres SET client_min_messages = error")  # the server warns of such a commit
    host_a, host_b = await join_host("one"), await join_host("two")
    backend.execute("ALTER DATABASE postgres RESET client_min_messages")
    waiting = "SELECT pid FROM pg_stat_activity WHERE application_name = 'one' AND wait_event = 'SyncRep'"
    server.execute_all(REQUIRE_STANDBY)
    try:
        for number in count():  # a new setting takes effect with a delay
            share = make_posted_share(number)
            posting = asyncio.create_task(enqueue(host_a, share))
            while not posting.done() and backend.query_rows(waiting) == []:
                await asyncio.sleep(0.01)
            if not posting.done():
                break
        backend.execute(f"SELECT pg_cancel_backend(pid) FROM ({waiting}) AS waiting")

        with pytest.raises(StoreUnconfirmed, match="the standby may lack a commit"):
            await posting
        assert "the standby may lack" in str(host_a.write_error)
        with pytest.raises(StoreUnconfirmed):
            await host_a.is_known(share.share.key)
        asking = asyncio.create_task(host_b.is_known(share.share.key))
        waiting_b = waiting.replace("one", "two")
        await wait_until(lambda: asking.done() or backend.query_rows(waiting_b) != [])
        assert not asking.done(), "the host waits for the standby before it answers"
    finally:
        server.execute_all(REQUIRE_NO_STANDBY)
    assert await asking
    await wait_until(lambda: host_a.write_error is None)
    assert await enqueue(host_a, share) is EnqueueResult.DUPLICATE


async def test_defaults_of_role_do_not_apply(backend: PostgresBackend, clock: FakeClock, join_host: JoinHost) -> None:
    role = f"host_{backend.schema}"
    backend.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    backend.execute(f"ALTER ROLE {role} SET default_transaction_isolation = 'repeatable read'")
    backend.execute(f"ALTER ROLE {role} SET synchronous_commit = off")
    for name in ("statement_timeout", "lock_timeout", "idle_session_timeout"):
        backend.execute(f"ALTER ROLE {role} SET {name} = 1")
    for name, value in (("client_encoding", "LATIN1"), ("standard_conforming_strings", "off"), ("array_nulls", "off")):
        backend.execute(f"ALTER ROLE {role} SET {name} = {value}")
    host = PostgresBackend(make_conninfo(backend.address, user=role), backend.schema).create_store(clock)
    await host.open()
    try:
        await enqueue_shares(host, 1)
        assert await host._writer.run(lambda tx: tx.conn.execute("SHOW synchronous_commit").fetchall()) == [("on",)]
        share = make_posted_share(2)
        with backend.connect() as other, other.transaction():
            other.execute("SELECT pg_advisory_xact_lock(hashtext(current_schema()), 1)")
            posting = asyncio.create_task(enqueue(host, share))
            await asyncio.to_thread(wait_for_lock_waiter, backend)
            other.execute("INSERT INTO spent (round_no, nullifier) SELECT no, %s FROM round_keys", (share.nullifier,))
        assert await posting is EnqueueResult.DUPLICATE
        (claimed,) = await claim_all_due(host)
        assert await host.run(fail, claimed.id, stage="broadcast", note="not in LATIN1: …")
        assert [share.note for share in await host.list_shares(QueueFilter(), limit=1)] == ["not in LATIN1: …"]
    finally:
        await host.close()


async def test_role_without_triggers_is_refused(backend: PostgresBackend, clock: FakeClock) -> None:
    """Only a superuser can set this for a role, as for a restore. Messages of confirmed shares would remain."""
    role = f"host_{backend.schema}"
    backend.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    backend.execute(f"ALTER ROLE {role} SET session_replication_role = replica")
    host = PostgresBackend(make_conninfo(backend.address, user=role), backend.schema).create_store(clock)
    with pytest.raises(StoreRefused, match="session_replication_role"):
        await host.open()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_database_of_other_encoding_is_refused(backend: PostgresBackend, clock: FakeClock, encoding: str) -> None:
    name = f"{encoding}_{backend.schema}".lower()
    backend.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    address = make_conninfo(backend.address, dbname=name)
    with pytest.raises(StoreError, match=f"has the encoding {encoding}") as refused:
        await PostgresBackend(address, backend.schema).create_store(clock).open()
    assert "UTF8" in refused.value.advice


async def test_pooler_is_refused(backend: PostgresBackend, clock: FakeClock, request: pytest.FixtureRequest) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    proxy = DatabaseProxy(server.directory / f".s.PGSQL.{server.settings['port']}")
    async with proxy.listen():
        address = f"postgresql://tests@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable"
        await (direct := PostgresBackend(address, backend.schema).create_store(clock)).open()
        await direct.close()
        proxy.reports_own_id = True
        with pytest.raises(StoreRefused, match="a pooler is in between"):
            await PostgresBackend(address, backend.schema).create_store(clock).open()


async def test_row_with_flipped_key_id_is_quarantined(
    join_host: JoinHost, backend: PostgresBackend, reported: list[DamagedShare]
) -> None:
    host = await join_host("one")
    await enqueue_shares(host, 1, 2, 3)
    first_byte = "set_byte(witness, 0, get_byte(witness, 0) # 1)"
    backend.execute(f"UPDATE shares SET witness = {first_byte} WHERE id = (SELECT min(id) FROM shares)")

    listed = await host.list_shares(QueueFilter(), limit=10)
    assert len(listed) == 3
    assert await host.verify() == []
    assert len(await claim_all_due(host)) == 2
    assert len(reported) == 1


async def test_host_that_lacks_key_of_rows_is_refused(
    backend: PostgresBackend, clock: FakeClock, reported: list[DamagedShare]
) -> None:
    new = b"n" * 32
    for keys in ([*SEALING_KEYS, new], [new, *SEALING_KEYS]):
        host = backend.create_store(clock, sealing_keys=keys)
        await host.open()
        await enqueue_shares(host, 1)
        await host.close()
    late = backend.create_store(clock, sealing_keys=[new])
    with pytest.raises(StoreKeyError, match="a key that this host does not have"):
        await late.open()
    backend.execute("UPDATE shares SET witness = '\\xffffffff' || substr(witness, 5)")
    with pytest.raises(StoreKeyError):  # the round
        await late.open()
    backend.execute("UPDATE round_keys SET mac_key = '\\xffffffff' || substr(mac_key, 5)")
    await late.open()
    await late.close()
    assert reported == []


async def test_rows_that_need_missing_key_later_are_not_damaged(
    backend: PostgresBackend, clock: FakeClock, reported: list[DamagedShare]
) -> None:
    new = b"n" * 32
    first = backend.create_store(clock, host="one", sealing_keys=[*SEALING_KEYS, new])
    second = backend.create_store(clock, host="two", sealing_keys=[new, *SEALING_KEYS])
    late = backend.create_store(clock, host="three", sealing_keys=[new])
    for host in (first, second, late):
        await host.open()
    try:
        await enqueue_shares(first, 1)
        with pytest.raises(StoreKeyError):
            await claim_all_due(late)
    finally:
        for host in (first, second, late):
            await host.close()
    assert reported == []


async def test_claims_of_shares_confirmed_elsewhere_are_forgotten(join_host: JoinHost) -> None:
    host_a, host_b = await join_host("one"), await join_host("two")
    await enqueue_shares(host_a, 1, 2)
    claimed = {queued.nullifier: queued.id for queued in await claim_all_due(host_a)}
    await confirm_shares(host_b, 1, height=5)

    assert await host_a._writer.run(store.renew_claims) == 1

    del claimed[make_posted_share(1).nullifier]
    assert list(host_a._claims.fences) == list(claimed.values())


async def test_failed_background_task_is_started_again(
    join_host: JoinHost, backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = asyncio.Event()

    async def listen(_: object) -> None:
        if "store_task_failed" in capsys.readouterr().out:
            began.set()
        raise RuntimeError

    monkeypatch.setattr(store.PostgresStore, "_receive_notifications", listen)
    monkeypatch.setattr(store, "_RESTART_SECONDS", 0.01)
    host = backend.create_store(FakeClock())
    host.listen(print)
    await host.open()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await began.wait()
    await host.close()


async def test_acknowledged_shares_survive_server_crash(
    backend: PostgresBackend, join_host: JoinHost, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    host_a = await join_host("one")
    acknowledged: list[int] = []

    async def post(number: int) -> None:
        with suppress(StoreError):
            await enqueue_shares(host_a, number)
            acknowledged.append(number)

    posts = [asyncio.create_task(post(number)) for number in range(600)]
    await wait_until(lambda: acknowledged)
    server.stop(signal.SIGQUIT)
    await asyncio.gather(*posts)
    with pytest.raises(StoreError, match="is unreachable"):
        await enqueue_shares(host_a, 1000)
    assert host_a.write_error is not None
    server.start()

    await enqueue_shares(host_a, 1000)
    assert host_a.write_error is None
    known = [await host_a.is_known(make_posted_share(number).share.key) for number in (*acknowledged, 1000)]
    assert all(known)


# ---------------------------------------------------------------------- refused operations


async def test_open_with_host_name_in_use_is_refused(
    join_host: JoinHost, backend: PostgresBackend, clock: FakeClock
) -> None:
    host_a = await join_host("one")
    with pytest.raises(StoreLocked, match="'one'"):
        await backend.create_store(clock, host="one").open()
    await host_a.close()
    await (await join_host("one")).close()


async def test_refuse_held_name_leaves_name_unchanged(join_host: JoinHost, backend: PostgresBackend) -> None:
    link = create_connection_settings(backend.address, schema=backend.schema, host="one")
    refuse_host_name_in_use(link)
    host_a, _ = await join_host("one"), await join_host("another")
    with pytest.raises(StoreLocked, match="'one'"):
        await asyncio.to_thread(refuse_host_name_in_use, link)
    await host_a.close()
    refuse_host_name_in_use(link)
    await (await join_host("one")).close()


def test_refuse_held_name_without_database_passes(backend: PostgresBackend) -> None:
    refuse_host_name_in_use(
        create_connection_settings(make_conninfo(backend.address, port="1"), schema=backend.schema, host="one")
    )


def test_serve_with_host_name_in_use_is_refused_before_loading(backend: PostgresBackend, tmp_path: Path) -> None:
    """Loading takes a second of CPU time or more, which the second host must not spend."""
    (keys := tmp_path / "keys").touch(0o600)
    keys.write_text(token_hex(32))
    (settings := tmp_path / "helper.toml").write_text(
        f'[helper]\nport = 0\n[chain]\nendpoints = ["http://127.0.0.1:9"]\n'
        f'[store]\nurl = "{backend.address}"\nschema_name = "{backend.schema}"\nhost = "one"\nkey_file = "{keys}"\n'
    )
    with backend.connect() as old_conn:
        old_conn.execute("SELECT pg_advisory_lock(hashtext(%s), hashtext('host one'))", (backend.schema,))
        loaded, messages = run_refused_serve(settings, "helper.app.service", "uvicorn", "httpx", "google.protobuf")
    assert loaded == "[]"
    assert "under the name 'one'" in messages
    assert "a different name on each host" in messages


async def test_host_name_is_free_shortly_after_holder_exits(join_host: JoinHost, backend: PostgresBackend) -> None:
    with backend.connect() as old_conn:
        old_conn.execute("SELECT pg_advisory_lock(hashtext(%s), hashtext('host one'))", (backend.schema,))
        opening = asyncio.ensure_future(join_host("one"))
        waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        await wait_until(lambda: old_conn.execute(waits).fetchone() is not None)
    await (await opening).close()


async def test_open_with_other_key_is_refused_and_keys_rotate(
    backend: PostgresBackend, clock: FakeClock, join_host: JoinHost
) -> None:
    host_a = await join_host("one")
    await enqueue_shares(host_a, 1)
    await host_a.close()
    with pytest.raises(StoreError, match="key"):
        await backend.create_store(clock, sealing_keys=[b"x" * 32]).open()

    both = backend.create_store(clock, sealing_keys=[b"x" * 32, *SEALING_KEYS])
    await both.open()
    assert await enqueue(both, make_posted_share(1)) is EnqueueResult.DUPLICATE
    await enqueue_shares(both, 2)
    assert {queued.share for queued in await claim_all_due(both)} == {
        make_posted_share(1).share,
        make_posted_share(2).share,
    }
    assert len(await confirm_shares(both, 1, 2, height=1)) == 2
    await both.close()
    with pytest.raises(StoreError, match="key"):
        await backend.create_store(clock, sealing_keys=SEALING_KEYS).open()


async def test_new_key_seals_only_when_all_live_hosts_have_it(backend: PostgresBackend, clock: FakeClock) -> None:
    new = b"n" * 32
    old = backend.create_store(clock, host="two")
    await old.open()
    with pytest.raises(StoreError, match="lacks the first key") as refused:
        await backend.create_store(clock, sealing_keys=[new, *SEALING_KEYS]).open()
    assert "second" in refused.value.advice
    await old.close()

    receiver = backend.create_store(clock, host="two", sealing_keys=[*SEALING_KEYS, new])
    sealer = backend.create_store(clock, sealing_keys=[new, *SEALING_KEYS])
    await receiver.open()
    await sealer.open()
    await enqueue_shares(sealer, 1)
    assert len(await confirm_shares(receiver, 1, height=1)) == 1
    await sealer.close()
    await receiver.close()


async def test_open_foreign_or_newer_schema_is_refused(
    backend: PostgresBackend, clock: FakeClock, join_host: JoinHost
) -> None:
    await (await join_host("one")).close()
    backend.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(StoreForeign, match="newer"):
        await backend.create_store(clock).open()
    link = create_connection_settings(backend.address, schema=backend.schema, host="move")
    endpoint = PostgresEndpoint(link, Keyring(SEALING_KEYS))
    for version, text in ((99, "newer version"), (1, "before the first release"), (0, "older version")):
        backend.execute(f"UPDATE schema_version SET version = {version}")
        with pytest.raises(StoreForeign, match=text):
            endpoint.connect_read_only()
    backend.execute("DROP TABLE schema_version")
    with pytest.raises(StoreForeign, match="another program"):
        await backend.create_store(clock).open()


async def test_start_upgrades_the_schema_and_keeps_the_shares(
    backend: PostgresBackend, join_host: JoinHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await join_host("one")
    await enqueue_shares(host, 1)
    tables = ("round_keys", "rounds", "shares", "reveals")
    steps = (*opening.migrations(), "".join(f"ALTER TABLE {table} ADD COLUMN more BIGINT;" for table in tables))
    monkeypatch.setattr(opening, "migrations", lambda: steps)
    with pytest.raises(StoreLocked, match="hosts of an older version"):
        await join_host("two")
    await host.close()
    upgraded = await join_host("one")
    assert backend.query_rows("SELECT version FROM schema_version") == [(FIRST_VERSION - 1 + len(steps),)]
    (queued,) = await claim_all_due(upgraded)
    assert queued.share == make_posted_share(1).share
    assert await upgraded.run(prepare, queued.id, make_reveal(1))
    assert [without_sends(sent.row) for sent in await upgraded.list_unconfirmed()] == [make_reveal(1)]


async def test_hosts_that_start_together_upgrade_the_schema_once(
    backend: PostgresBackend, join_host: JoinHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await join_host("one")).close()
    steps = (*opening.migrations(), "ALTER TABLE rounds ADD COLUMN more BIGINT;")
    monkeypatch.setattr(opening, "migrations", lambda: steps)
    with backend.connect() as conn:
        conn.execute("SELECT pg_advisory_lock(hashtext(%s), 2)", (backend.schema,))
        starts = asyncio.gather(join_host("one"), join_host("two"))
        await asyncio.to_thread(wait_for_lock_waiter, backend, 2)
    await starts
    assert backend.query_rows("SELECT version FROM schema_version") == [(FIRST_VERSION - 1 + len(steps),)]


@pytest.mark.parametrize("lock", ["pg_advisory_lock", "pg_advisory_lock_shared"], ids=["upgrade", "older host"])
async def test_host_waits_for_a_lock_that_is_released_late(
    backend: PostgresBackend, join_host: JoinHost, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    """That of a host that has just upgraded the schema, or, if this one upgrades it, of one that has just ended."""
    await (await join_host("one")).close()
    monkeypatch.setattr(opening, "_LOCK_SECONDS", TIMEOUT_SECONDS)
    if lock == "pg_advisory_lock_shared":
        steps = (*opening.migrations(), "ALTER TABLE rounds ADD COLUMN more BIGINT;")
        monkeypatch.setattr(opening, "migrations", lambda: steps)
    with backend.connect() as conn:
        conn.execute(f"SELECT {lock}(hashtext(%s), 3)", (backend.schema,))
        start = asyncio.ensure_future(join_host("one"))
        await asyncio.to_thread(wait_for_lock_waiter, backend)
    await start


async def test_cancelled_start_ends_the_tasks_of_the_readers(
    backend: PostgresBackend, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a service that is stopped while it starts would not end: these tasks ignore cancellation."""
    is_connecting = asyncio.Event()

    async def hang(_pool: object, **_options: object) -> None:
        is_connecting.set()
        await asyncio.Event().wait()

    def find_readers() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("store-readers")]

    monkeypatch.setattr(AsyncConnectionPool, "wait", hang)
    start = asyncio.ensure_future(backend.create_store(clock).open())
    await is_connecting.wait()
    assert find_readers()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not find_readers()


async def test_witness_never_reaches_server_disk_in_plain(
    join_host: JoinHost, backend: PostgresBackend, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    host_a = await join_host("one")
    await enqueue_shares(host_a, 901, 902)
    first, _ = await claim_all_due(host_a)
    await host_a.run(prepare, first.id, make_reveal(901))
    backend.execute("CHECKPOINT")

    disk = b"".join(file.read_bytes() for file in server.data_directory.rglob("*") if file.is_file())
    assert backend.schema.encode() in disk
    for number in (901, 902):
        share = make_posted_share(number).share
        secrets = [share.shares_hash, share.share_comms[:32], share.primary_blind, share.c1, share.c2]
        secrets += [
            make_posted_share(number).nullifier,
            make_reveal(number).tx_hash,
            make_reveal(number).message[40:80],
        ]
        leaked = [n for n, secret in enumerate(secrets) if secret in disk or secret.hex().encode() in disk]
        assert leaked == []
    await confirm_shares(host_a, 901, height=1)
    await host_a.wait_for_erasure()
    assert backend.query_rows("SELECT id FROM shares") == [(2,)]


async def test_open_on_server_logging_parameters_is_refused(
    backend: PostgresBackend, clock: FakeClock, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    role = f"told_{backend.schema}"
    backend.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    backend.execute(f"ALTER ROLE {role} SET log_min_duration_statement = 0")
    role_backend = PostgresBackend(make_conninfo(backend.address, user=role), backend.schema)
    with pytest.raises(StoreError, match="log_min_duration_statement") as refused:
        await role_backend.create_store(clock).open()
    assert "log_parameter_max_length = 0" in refused.value.advice

    backend.execute(f"ALTER ROLE {role} SET log_parameter_max_length = 0")
    host_a = role_backend.create_store(clock)
    await host_a.open()
    await enqueue_shares(host_a, 903)
    await host_a.close()

    written = (server.directory / "log").read_bytes()
    assert b"FROM tombstones" in written
    assert make_posted_share(903).nullifier.hex().encode() not in written


async def test_skew_compares_host_and_database_clock(join_host: JoinHost, clock: FakeClock) -> None:
    host_a = await join_host("one")
    ahead = await host_a.measure_clock_skew()
    clock.advance(100)
    assert await host_a.measure_clock_skew() == pytest.approx(ahead - 100, abs=30)


async def test_connection_check_and_start_refuse_the_same(backend: PostgresBackend, clock: FakeClock) -> None:
    role = f"host_{backend.schema}"
    backend.execute(f"CREATE ROLE {role} LOGIN")
    address = make_conninfo(backend.address, user=role)
    settings = create_connection_settings(address, schema=backend.schema, host="doctor")
    owner = PostgresBackend(backend.address, backend.schema).create_store(clock)
    grant = f"GRANT ALL ON ALL {{}} IN SCHEMA {backend.schema} TO {role}"
    for statements, error in (
        (["SELECT"], "may not create the schema"),
        ([], f"no privileges on the schema {backend.schema}"),
        ([f"GRANT USAGE ON SCHEMA {backend.schema} TO {role}"], "no privileges on .*, shares"),
        (
            [
                grant.format("TABLES"),
                grant.format("SEQUENCES"),
                f"UPDATE {backend.schema}.schema_version SET version = 99",
            ],
            "was written by a newer version",
        ),
    ):
        for statement in statements:
            backend.execute(statement)
        if not statements:  # the schema of another role
            await owner.open()
            await owner.close()
        with pytest.raises(StoreError, match=error):
            check_connection(settings)
        with pytest.raises(StoreError, match=error):
            await PostgresBackend(address, backend.schema).create_store(clock).open()
