"""Several hosts on one PostgreSQL database: who works on what, what a late host may still do, and what is lost.

What one host's store does is asked in `conformance/`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import pytest
from psycopg.conninfo import make_conninfo

from helper.core.share import ShareState
from helper.errors import StoreError, StoreForeign, StoreFull, StoreLocked
from helper.lease.database import DatabaseLease
from helper.store.migration.postgres_endpoint import PostgresEndpoint
from helper.store.postgres import PostgresStore
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.keyring import Keyring
from helper.store.postgres.opening import refuse_held_name
from helper.store.postgres.transaction import PostgresTransaction
from helper.store.rows import DamagedShare, Enqueued, QueueFilter
from tests.support.clock import FakeClock
from tests.support.command import refused_serve
from tests.support.fakes import until
from tests.support.postgres import Cluster, binaries
from tests.support.process import PATIENCE
from tests.unit.lease.test_s3 import lease, used
from tests.unit.store.conformance.backends import SEALS, PostgresPlace
from tests.unit.store.conformance.test_chain_facts import ToldRound
from tests.unit.store.fixtures import NOW, ROUND, claim, posted, put, reveal

CLUSTERS = ["cluster"] if binaries() is not None else []
pytestmark = pytest.mark.parametrize("place", CLUSTERS, indirect=True)
Join = Callable[[str], Awaitable[PostgresStore]]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> PostgresPlace:
    return PostgresPlace(request.getfixturevalue(request.param).address, f"test_{token_hex(6)}")


@pytest.fixture
async def join(place: PostgresPlace, clock: FakeClock, reported: list[DamagedShare]) -> AsyncIterator[Join]:
    """Lets a host join, by its name."""
    stores: list[PostgresStore] = []

    async def joined(host: str) -> PostgresStore:
        # No lease is over for a busy machine: tests have them run out by hand.
        one = place.store(clock, reported.append, host=host, lease=600)
        await one.open()
        stores.append(one)
        return one

    yield joined
    for one in stores:
        await one.close()


def wait_for_the_lock(place: PostgresPlace) -> None:
    """Until some host waits to be the only one that takes in what the chain tells."""
    deadline = time.monotonic() + PATIENCE
    with place.connect() as conn:
        while conn.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def run_out(place: PostgresPlace) -> None:
    """Let every lease be over, as after a host's long silence."""
    place.change("UPDATE claims SET until = now() - interval '1 second'")


# ---------------------------------------------------------------------- who works on what


async def test_hosts_take_up_different_shares_and_in_the_same_order_as_one_would(join: Join) -> None:
    one, two = await join("one"), await join("two")
    await put(one, *range(40), submit_at=int(NOW) + 5)

    taken = [await claim(host, limit=1) for _ in range(20) for host in (one, two)]

    ids = [share.id for some in taken for share in some]
    assert len(set(ids)) == 40
    again = await join("three")
    ranks = [row[0] for row in await again._operators.run(b"SELECT id FROM shares ORDER BY due_ms, rank")]
    assert ids == ranks


async def test_what_hosts_claim_at_once_is_claimed_once(join: Join) -> None:
    hosts = [await join(name) for name in ("one", "two", "three")]
    await put(hosts[0], *range(90))

    taken = await asyncio.gather(*(claim(host, limit=10) for _ in range(4) for host in hosts))
    rest = await claim(hosts[0])

    ids = [share.id for some in (*taken, rest) for share in some]
    assert len(ids) == len(set(ids)) == 90


async def test_the_same_share_posted_to_two_hosts_at_once_is_queued_once(join: Join) -> None:
    one, two = await join("one"), await join("two")
    shares = [posted(number) for number in range(40)]

    told = await asyncio.gather(
        *(host.enqueue(share.share, share.nullifier, now=NOW) for share in shares for host in (one, two))
    )

    assert told.count(Enqueued.QUEUED) == told.count(Enqueued.DUPLICATE) == 40
    assert await one.counts() == await two.counts() == {ROUND: {ShareState.RECEIVED: 40}}


async def test_a_block_that_another_host_has_taken_in_waits_for_nobody(place: PostgresPlace, join: Join) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1)
    spent = [(ROUND, posted(number).nullifier) for number in (1, 2)]
    assert len(await one.apply_block(5, spent, now=NOW)) == 1

    with place.connect() as conn:  # as a host that takes the next block in
        conn.execute("SELECT pg_advisory_lock(hashtext(current_schema()), 1)")
        async with asyncio.timeout(PATIENCE / 2):
            assert await two.apply_block(5, spent, now=NOW) == []
            assert await two.apply_block(4, [], now=NOW) == []
            assert await two.add_spent(spent) == []
        held = asyncio.create_task(two.apply_block(6, [(ROUND, posted(3).nullifier), *spent], now=NOW))
        await asyncio.to_thread(wait_for_the_lock, place)
        conn.execute("SELECT pg_advisory_unlock_all()")
    assert await held == []
    assert await one.is_spent(ROUND, posted(3).nullifier)
    assert await one.cursor() == 6


async def test_a_block_that_all_hosts_read_at_once_is_counted_by_one(join: Join) -> None:
    hosts = [await join(name) for name in ("one", "two", "three")]
    await put(hosts[0], *range(30))
    spent = [(ROUND, posted(number).nullifier) for number in range(30)]
    found = await asyncio.gather(*(host.apply_block(height, spent, now=NOW) for height in (7, 8) for host in hosts))
    assert sorted(len(one) for one in found) == [0, 0, 0, 0, 0, 30]
    assert await hosts[0].counts() == {ROUND: {ShareState.SUBMITTED: 30}}
    assert await hosts[0].cursor() == 8


async def test_a_share_that_comes_while_another_host_sees_it_counted_is_never_left_waiting(join: Join) -> None:
    one, two = await join("one"), await join("two")
    shares = [posted(number) for number in range(60)]

    await asyncio.gather(
        *(one.enqueue(share.share, share.nullifier, now=NOW) for share in shares),
        *(two.apply_block(n, [(ROUND, share.nullifier)], now=NOW) for n, share in enumerate(shares)),
    )

    assert await claim(one) == []
    assert set((await two.counts()).get(ROUND, {})) <= {ShareState.SUBMITTED}
    assert await one.cursor() == 59


# ---------------------------------------------------------------------- who sends


def sender_runs_out(place: PostgresPlace) -> None:
    """Let the sender's lease be over."""
    place.change("UPDATE sender SET until = now() - interval '1 second'")


async def kept(host: PostgresStore, number: int = 1) -> int:
    """A share whose message this host has kept; its id."""
    await put(host, number)
    (mine,) = await claim(host)
    assert await host.prepare(mine.id, reveal(number))
    return mine.id


async def test_nothing_is_sent_but_by_the_sender(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    share = await kept(two)
    before = [place.rows(f"SELECT * FROM {table}") for table in ("shares", "reveals", "history")]
    assert not await one.mark_sending(share, height=1, endpoint="node")

    assert await one.take_sender()

    assert await two.take_sender() is None
    assert await two.sender_host() == "one"
    assert not await two.mark_sending(share, height=1, endpoint="node")
    assert not await two.requeue(share, stage="broadcast", note="late")
    assert not await two.retry(share, due_ms=0, stage="broadcast", note="late")
    assert not await two.fail(share, stage="broadcast", note="late", spend_attempt=True)
    assert [place.rows(f"SELECT * FROM {table}") for table in ("shares", "reveals", "history")] == before
    assert await one.mark_sending(share, height=1, endpoint="node")
    await two.record_outcome(share, outcome="ACCEPTED")
    assert place.rows("SELECT sends, last_outcome FROM reveals") == [(1, None)]


async def test_a_sender_that_slept_through_its_lease_sends_nothing(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    share = await kept(one)
    first = await one.take_sender()
    sender_runs_out(place)
    assert not await one.mark_sending(share, height=1, endpoint="node")
    assert await one.keep_sender()
    assert await one.mark_sending(share, height=1, endpoint="node")
    sender_runs_out(place)

    second = await two.take_sender()

    assert first is not None
    assert second is not None
    assert second > first
    assert not await one.mark_sending(share, height=2, endpoint="node")
    assert not await one.keep_sender()
    await one.leave_sender()
    assert await two.mark_sending(share, height=2, endpoint="node")
    assert await two.sender_host() == "two"


async def test_a_send_that_is_being_noted_holds_up_who_takes_over(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    await one.take_sender()
    noted, go_on = threading.Event(), threading.Event()

    def note(tx: PostgresTransaction) -> bool:
        sends = tx.sends()
        noted.set()
        assert go_on.wait(PATIENCE)
        return sends

    noting = asyncio.create_task(one._writer.run(note))
    assert await asyncio.to_thread(noted.wait, PATIENCE)
    # As if the lease was over from now on: the row is locked, so the change of hands has to wait.
    taking = asyncio.create_task(two.take_sender(outer=7))
    waiting = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'two' AND wait_event_type = 'Lock'"
    async with asyncio.timeout(PATIENCE):
        while not place.rows(waiting):
            await asyncio.sleep(0.01)
    assert not taking.done()
    go_on.set()
    assert await noting
    assert await taking is not None
    assert not await one._writer.run(lambda tx: tx.sends())


async def test_a_host_that_starts_again_sends_again_at_once_and_one_that_leaves_lets_others(join: Join) -> None:
    one, two = await join("one"), await join("two")
    await one.take_sender()
    await one.close()
    assert await two.take_sender() is None
    again = await join("one")
    assert await again.take_sender() is not None
    await again.leave_sender()
    assert await again.sender_host() == ""
    assert await two.take_sender() is not None


async def test_a_lease_kept_elsewhere_overrules_and_never_goes_back(join: Join) -> None:
    one, two = await join("one"), await join("two")
    assert await one.take_sender(outer=5)
    assert await two.take_sender(outer=5) is None
    assert await two.take_sender(outer=4) is None
    assert await two.take_sender(outer=6)
    assert await one.take_sender(outer=5) is None
    assert not await one.keep_sender()


async def test_an_object_in_a_bucket_hands_the_right_on_and_who_had_it_notes_no_send(
    join: Join, clock: FakeClock
) -> None:
    one, two = await join("one"), await join("two")
    share, bucket = await kept(one), used()
    places = ((one, "one"), (two, "two"))
    first, second = (DatabaseLease(at, clock=clock, outer=lease(bucket, clock, name)) for at, name in places)
    assert await first.acquire()
    assert await one.mark_sending(share, height=1, endpoint="node")
    assert not await second.acquire()
    assert second.holder == "one"
    clock.advance(10)  # nothing is heard of it there; the database would leave it the row for ten minutes

    assert await second.acquire()

    assert not await one.mark_sending(share, height=2, endpoint="node")
    assert await two.mark_sending(share, height=2, endpoint="node")
    assert not await first.renew()
    assert not await first.acquire()
    assert (first.held, first.holder) == (False, "two")
    await second.release()
    assert await first.acquire()
    assert await one.mark_sending(share, height=3, endpoint="node")


async def test_what_hosts_say_is_heard_by_all(
    place: PostgresPlace, clock: FakeClock, reported: list[DamagedShare], join: Join
) -> None:
    heard: list[str] = []
    listening = place.store(clock, reported.append, host="ears")
    listening.listen(heard.append)
    await listening.open()

    async def hears(*words: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while heard[-len(words) :] != [*words]:
                await asyncio.sleep(0.01)

    try:
        one = await join("one")
        await hears("")
        await put(one, 1, submit_at=int(NOW) + 3600)
        await put(one, 2)
        await hears("", "due")
        (mine,) = await claim(one)
        await one.prepare(mine.id, reveal(2))
        await hears("", "due", "prepared")
        ears = "application_name = 'ears' AND query LIKE 'LISTEN%'"
        place.change(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ears}")
        await hears("prepared", "")
        await put(one, 3)
        await hears("", "due")
    finally:
        await listening.close()


# ---------------------------------------------------------------------- leases and fences


async def test_a_silent_hosts_shares_are_another_hosts_at_their_own_times(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1, submit_at=int(NOW) + 3)
    (mine,) = await claim(one)
    assert await claim(two) == []
    seconds = place.rows("SELECT extract(epoch FROM until)::float8 FROM claims")
    assert await two.next_due_ms([ROUND]) == pytest.approx(seconds[0][0] * 1000, abs=1)
    assert await one.next_due_ms([ROUND]) is None

    run_out(place)
    (theirs,) = await claim(two)

    assert theirs.share == mine.share
    assert (theirs.due_ms, theirs.attempts, theirs.crashes) == (mine.due_ms, 0, 0)


STALE: dict[str, Callable[[PostgresStore, int], Awaitable[object]]] = {
    "prepare": lambda store, share: store.prepare(share, reveal(1)),
    "put_back": lambda store, share: store.requeue(share, stage="tree", note="late"),
    "release": lambda store, share: store.release_claim(share),
    "record_crash": lambda store, share: store.record_crash(share, due_ms=0, note="late"),
    "retry": lambda store, share: store.retry(share, due_ms=0, stage="proof", note="late"),
    "fail": lambda store, share: store.fail(share, stage="proof", note="late", spend_attempt=True),
}


@pytest.mark.parametrize("name", STALE)
async def test_a_host_that_comes_back_too_late_changes_nothing(join: Join, place: PostgresPlace, name: str) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1)
    (mine,) = await claim(one)
    run_out(place)
    (theirs,) = await claim(two)
    kept = [place.rows(f"SELECT * FROM {table}") for table in ("shares", "claims", "reveals", "history")]

    assert not await STALE[name](one, mine.id)

    assert [place.rows(f"SELECT * FROM {table}") for table in ("shares", "claims", "reveals", "history")] == kept
    assert await two.prepare(theirs.id, reveal(2))
    (sent,) = await one.unconfirmed()
    assert sent.prepared == reveal(2)


@pytest.mark.parametrize("name", STALE)
async def test_what_another_host_has_put_back_is_nobodys_to_change(join: Join, place: PostgresPlace, name: str) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1)
    (mine,) = await claim(one)
    run_out(place)
    assert await two.claim_due(now=NOW, limit=1, rounds=[]) == []  # it takes back, and up nothing
    kept = [place.rows(f"SELECT * FROM {table}") for table in ("shares", "reveals", "history")]
    assert place.rows("SELECT * FROM claims") == []

    assert not await STALE[name](one, mine.id)

    assert [place.rows(f"SELECT * FROM {table}") for table in ("shares", "reveals", "history")] == kept
    (again,) = await claim(one)
    assert await one.prepare(again.id, reveal(1))


async def test_an_operator_retries_on_any_host_also_what_that_host_has_lost(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1)
    (mine,) = await claim(one)
    run_out(place)
    (theirs,) = await claim(two)
    assert await two.fail(theirs.id, stage="proof", note="for good", spend_attempt=True)

    told = await one.retry_failed([mine.id], QueueFilter(), closed=(), note="by ann", dry=False)

    assert told == {"retried": 1}
    assert await one.counts() == {ROUND: {ShareState.RECEIVED: 1}}


async def test_a_damaged_share_that_a_silent_host_had_keeps_back_no_other(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1, 2)
    damaged, sound = await claim(one)
    run_out(place)
    place.change(f"UPDATE claims SET until = until - interval '1 minute' WHERE share_id = {damaged.id}")
    place.change(f"UPDATE shares SET attempts = 3 WHERE id = {damaged.id}")

    taken = [share.id for _ in range(3) for share in await claim(two, limit=1)]

    assert taken == [sound.id]


async def test_a_host_goes_on_with_what_it_has_in_hand_after_its_own_lease_if_nobody_took_it(
    join: Join, place: PostgresPlace
) -> None:
    one = await join("one")
    await put(one, 1)
    (mine,) = await claim(one)
    run_out(place)
    assert await claim(one) == []
    assert await one.prepare(mine.id, reveal(1))


async def test_a_claim_that_its_own_host_does_not_know_of_ends_with_its_lease(join: Join, place: PostgresPlace) -> None:
    one = await join("one")
    await put(one, 1)
    (mine,) = await claim(one)
    one._hands.fences.clear()  # the commit's answer was lost
    assert await claim(one) == []
    run_out(place)
    (again,) = await claim(one)
    assert again.id == mine.id


STOPPED: dict[str, Callable[[PostgresTransaction], object]] = {
    "after a statement": lambda tx: tx.share(1),
    "after many at once": lambda tx: tx.many("add_count", [(1, 0, 1), (1, 1, -1), (1, 4, 0)]),
}


@pytest.mark.parametrize("where", STOPPED)
async def test_a_host_that_is_stopped_in_a_transaction_holds_up_nobody(
    join: Join, place: PostgresPlace, clock: FakeClock, where: str
) -> None:
    two = await join("two")
    stopped, go_on = threading.Event(), threading.Event()

    def stop_within(tx: PostgresTransaction) -> None:
        tx.beside()
        assert tx.share(1) is not None
        STOPPED[where](tx)
        stopped.set()
        go_on.wait(PATIENCE)

    one = place.store(clock, print, host="one", lease=1.0)
    await one.open()
    try:
        await put(one, 1)
        await claim(one)
        stopping = asyncio.create_task(one._writer.run(stop_within))
        assert await asyncio.to_thread(stopped.wait, PATIENCE)
        run_out(place)
        async with asyncio.timeout(PATIENCE / 2):
            while not await claim(two):
                await asyncio.sleep(0.05)
            await two.apply_block(5, [], now=NOW)
        go_on.set()
        with suppress(StoreError):
            await stopping
        await put(one, 2)
    finally:
        go_on.set()
        await one.close()


async def test_a_claim_ends_with_the_work_and_is_not_renewed_for_another_host(join: Join, place: PostgresPlace) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1, 2)
    first, second = await claim(one)
    assert await one.prepare(first.id, reveal(1))
    assert place.rows("SELECT share_id, host FROM claims") == [(second.id, "one")]
    run_out(place)
    await claim(two)
    (before,) = place.rows("SELECT * FROM claims")

    assert await one._writer.run(lambda tx: tx.run("renew", {"host": "one", "lease": 9.0, "fences": [1, 2, 3]})) == 0

    assert place.rows("SELECT * FROM claims") == [before]


async def test_a_host_that_lives_keeps_what_it_has_in_hand(
    place: PostgresPlace, clock: FakeClock, reported: list[DamagedShare]
) -> None:
    store = place.store(clock, reported.append, lease=0.3)
    await store.open()
    try:
        await put(store, 1)
        await claim(store)
        ((first,),) = place.rows("SELECT until FROM claims")
        async with asyncio.timeout(PATIENCE):
            while place.rows("SELECT until FROM claims")[0][0] <= first:
                await asyncio.sleep(0.05)
    finally:
        await store.close()


async def test_a_hosts_own_shares_go_back_when_it_starts_again_and_others_stay(
    join: Join, place: PostgresPlace
) -> None:
    one, two = await join("one"), await join("two")
    await put(one, 1, 2)
    await claim(one, limit=1)
    await claim(two, limit=1)
    await one.close()

    again = await join("one")

    assert await again.recover() == 1
    assert await again.counts() == {ROUND: {ShareState.RECEIVED: 1, ShareState.WITNESSED: 1}}
    assert [row[0] for row in place.rows("SELECT host FROM claims")] == ["two"]


async def test_the_end_of_a_round_takes_shares_out_of_any_hosts_hands(join: Join) -> None:
    one, two = await join("one"), await join("two")
    await one.save_rounds([ToldRound()], NOW)
    await put(one, 1)
    (mine,) = await claim(one)

    assert await two.fail_unspent(ROUND, note="closed") == 1

    assert not await one.requeue(mine.id, stage="tree", note="late")
    assert await two.purge(ROUND) == 1
    assert not await one.release_claim(mine.id)


async def test_a_share_that_comes_to_a_host_that_does_not_know_of_the_rounds_end_is_not_taken(join: Join) -> None:
    one, two = await join("one"), await join("two")
    await one.save_rounds([ToldRound()], NOW)
    await put(two, 1)
    await one.mark_closed(ROUND, NOW)
    assert await one.fail_unspent(ROUND, note="closed") == 1

    late, known = posted(2), posted(1)
    assert await two.enqueue(late.share, late.nullifier, now=NOW) is Enqueued.CLOSED
    assert await two.enqueue(known.share, known.nullifier, now=NOW) is Enqueued.DUPLICATE

    assert await one.unsubmitted(ROUND) == {ShareState.FAILED: 1}


# ---------------------------------------------------------------------- what is lost


async def test_a_lost_connection_is_made_anew_and_a_host_keeps_its_claims(join: Join, place: PostgresPlace) -> None:
    one = await join("one")
    await put(one, 1)
    (mine,) = await claim(one)

    place.change("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'one'")
    with suppress(StoreError):
        await put(one, 2)
    await put(one, 2)

    assert await one.prepare(mine.id, reveal(1))
    assert one.trouble is None
    assert await one.counts() == {ROUND: {ShareState.BROADCAST: 1, ShareState.RECEIVED: 1}}


async def test_a_full_server_is_told_and_over_with_the_next_share_that_is_kept(
    join: Join, place: PostgresPlace
) -> None:
    one = await join("one")
    await put(one, 1)
    place.change("CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE disk_full; END$$")
    place.change("CREATE TRIGGER no_room BEFORE INSERT ON shares EXECUTE FUNCTION no_room()")

    with pytest.raises(StoreFull, match="nothing was written"):
        await put(one, 2)
    assert "nothing was written" in str(one.trouble)

    place.change("DROP TRIGGER no_room ON shares")
    await put(one, 2)
    assert one.trouble is None
    assert await one.counts() == {ROUND: {ShareState.RECEIVED: 2}}


async def test_nothing_that_was_answered_is_lost_with_the_server(
    place: PostgresPlace, join: Join, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    one = await join("one")
    answered: list[int] = []

    async def post(number: int) -> None:
        with suppress(StoreError):
            await put(one, number)
            answered.append(number)

    posts = [asyncio.create_task(post(number)) for number in range(600)]
    async with asyncio.timeout(PATIENCE):
        while not answered:
            await asyncio.sleep(0)
    server.stop(signal.SIGQUIT)
    await asyncio.gather(*posts)
    with pytest.raises(StoreError, match="is unreachable"):
        await put(one, 1000)
    assert one.trouble is not None
    server.start()

    await put(one, 1000)
    assert one.trouble is None
    known = [await one.is_known(posted(number).share.key) for number in (*answered, 1000)]
    assert all(known)


# ---------------------------------------------------------------------- what may not be


async def test_a_name_is_one_hosts_alone(join: Join, place: PostgresPlace, clock: FakeClock) -> None:
    one = await join("one")
    with pytest.raises(StoreLocked, match="'one'"):
        await place.store(clock, print, host="one").open()
    await one.close()
    await (await join("one")).close()


async def test_whether_a_name_is_held_is_seen_and_it_is_as_it_was(join: Join, place: PostgresPlace) -> None:
    link = create_connection_settings(place.address, schema=place.schema, host="one")
    refuse_held_name(link)
    one, _ = await join("one"), await join("another")
    with pytest.raises(StoreLocked, match="'one'"):
        await asyncio.to_thread(refuse_held_name, link)
    await one.close()
    refuse_held_name(link)
    await (await join("one")).close()


def test_a_database_that_can_not_be_reached_holds_no_name(place: PostgresPlace) -> None:
    refuse_held_name(
        create_connection_settings(make_conninfo(place.address, port="1"), schema=place.schema, host="one")
    )


def test_a_second_service_is_refused_before_it_is_loaded(place: PostgresPlace, tmp_path: Path) -> None:
    """Loading takes a second of CPU and more, where the first has a machine to itself."""
    (keys := tmp_path / "keys").touch(0o600)
    keys.write_text(token_hex(32))
    (settings := tmp_path / "helper.toml").write_text(
        f'[helper]\nport = 0\n[store]\nurl = "{place.address}"\nschema_name = "{place.schema}"\n'
        f'host = "one"\nkey_file = "{keys}"\n'
    )
    with place.connect() as former:
        former.execute("SELECT pg_advisory_lock(hashtext(%s), hashtext('host one'))", (place.schema,))
        loaded, said = refused_serve(settings, "helper.app.service", "uvicorn", "httpx", "google.protobuf")
    assert loaded == "[]"
    assert "under the name 'one'" in said
    assert "a different name on each host" in said


async def test_a_name_is_free_a_moment_after_its_holder_has_gone(join: Join, place: PostgresPlace) -> None:
    with place.connect() as former:
        former.execute("SELECT pg_advisory_lock(hashtext(%s), hashtext('host one'))", (place.schema,))
        opening = asyncio.ensure_future(join("one"))
        waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        await until(lambda: former.execute(waits).fetchone() is not None)
    await (await opening).close()


async def test_a_host_with_another_key_is_refused_and_keys_can_be_changed(
    place: PostgresPlace, clock: FakeClock, join: Join
) -> None:
    one = await join("one")
    await put(one, 1)
    await one.close()
    with pytest.raises(StoreError, match="key"):
        await place.store(clock, print, seals=[b"x" * 32]).open()

    both = place.store(clock, print, seals=[b"x" * 32, *SEALS])
    await both.open()
    assert await both.enqueue(posted(1).share, posted(1).nullifier, now=NOW) is Enqueued.DUPLICATE
    await put(both, 2)
    assert {one.share for one in await claim(both)} == {posted(1).share, posted(2).share}
    assert len(await both.apply_block(1, [(ROUND, posted(n).nullifier) for n in (1, 2)], now=NOW)) == 2
    await both.close()
    with pytest.raises(StoreError, match="key"):
        await place.store(clock, print, seals=SEALS).open()


async def test_a_new_key_seals_only_when_every_host_that_lives_has_it(place: PostgresPlace, clock: FakeClock) -> None:
    new = b"n" * 32
    old = place.store(clock, print, host="two")
    await old.open()
    with pytest.raises(StoreError, match="does not have") as refused:
        await place.store(clock, print, seals=[new, *SEALS]).open()
    assert "second" in refused.value.advice
    await old.close()

    knows = place.store(clock, print, host="two", seals=[*SEALS, new])
    seals = place.store(clock, print, seals=[new, *SEALS])
    await knows.open()
    await seals.open()
    await put(seals, 1)
    assert len(await knows.apply_block(1, [(ROUND, posted(1).nullifier)], now=NOW)) == 1
    await seals.close()
    await knows.close()


async def test_another_programs_schema_and_a_newer_versions_are_refused(
    place: PostgresPlace, clock: FakeClock, join: Join
) -> None:
    await (await join("one")).close()
    place.change("UPDATE schema_version SET version = 99")
    with pytest.raises(StoreForeign, match="newer"):
        await place.store(clock, print).open()
    link = create_connection_settings(place.address, schema=place.schema, host="move")
    endpoint = PostgresEndpoint(link, Keyring(SEALS))
    for version, text in ((99, "newer version"), (0, "older version")):
        place.change(f"UPDATE schema_version SET version = {version}")
        with pytest.raises(StoreForeign, match=text):
            endpoint.look()
    place.change("DROP TABLE schema_version")
    with pytest.raises(StoreForeign, match="another program"):
        await place.store(clock, print).open()


async def test_no_witness_ever_reaches_the_servers_disk(
    join: Join, place: PostgresPlace, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    one = await join("one")
    await put(one, 901, 902)
    first, _ = await claim(one)
    await one.prepare(first.id, reveal(901))
    place.change("CHECKPOINT")

    disk = b"".join(file.read_bytes() for file in server.data.rglob("*") if file.is_file())
    assert place.schema.encode() in disk
    for number in (901, 902):
        share = posted(number).share
        secrets = [share.shares_hash, share.share_comms[:32], share.primary_blind, share.c1, share.c2]
        secrets += [posted(number).nullifier, reveal(number).tx_hash, reveal(number).message[40:80]]
        found = [n for n, secret in enumerate(secrets) if secret in disk or secret.hex().encode() in disk]
        assert found == []
    await one.apply_block(1, [(ROUND, posted(901).nullifier)], now=NOW)
    await one.erased()
    assert place.rows("SELECT id FROM shares") == [(2,)]


async def test_a_server_that_writes_parameters_into_its_log_is_refused(
    place: PostgresPlace, clock: FakeClock, request: pytest.FixtureRequest
) -> None:
    server: Cluster = request.getfixturevalue("cluster")
    role = f"told_{place.schema}"
    place.change(f"CREATE ROLE {role} LOGIN SUPERUSER")
    place.change(f"ALTER ROLE {role} SET log_min_duration_statement = 0")
    theirs = PostgresPlace(make_conninfo(place.address, user=role), place.schema)
    with pytest.raises(StoreError, match="log_min_duration_statement") as refused:
        await theirs.store(clock, print).open()
    assert "log_parameter_max_length = 0" in refused.value.advice

    place.change(f"ALTER ROLE {role} SET log_parameter_max_length = 0")
    one = theirs.store(clock, print)
    await one.open()
    await put(one, 903)
    await one.close()

    written = (server.folder / "log").read_bytes()
    assert b"FROM tombstones" in written
    assert posted(903).nullifier.hex().encode() not in written


async def test_the_clocks_are_compared(join: Join, clock: FakeClock) -> None:
    one = await join("one")
    ahead = await one.skew()
    clock.advance(100)
    assert await one.skew() == pytest.approx(ahead - 100, abs=30)
