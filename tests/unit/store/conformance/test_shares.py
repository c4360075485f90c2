"""Enqueue, order of claims, and shares whose damaged row a wallet posts again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.store import blocks, messages, rounds, shares
from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.shares import HEALED_NOTE, LOST_MESSAGE_DELAY_MS
from helper.store.store import Store
from helper.store.table_rows import Row
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.conformance.test_transitions import create_share_in_state
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_and_claim,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    without_sends,
)


@pytest.mark.rule("R1")
async def test_claim_due_returns_all_fields_of_enqueued_share(store: Store) -> None:
    posted = make_posted_share(5, submit_at=int(NOW) + 100)

    assert await enqueue(store, posted) is EnqueueResult.QUEUED

    assert await claim_all_due(store, now=NOW + 99.9) == []
    (queued,) = await claim_all_due(store, now=NOW + 100)
    assert queued.share == posted.share
    assert queued.nullifier == posted.nullifier
    assert await store.count_unconfirmed(ROUND) == {ShareState.PROVING: 1}
    assert queued.due_ms == (int(NOW) + 100) * 1000
    assert (queued.attempts, queued.crashes, queued.proved_height) == (0, 0, None)


async def test_claim_due_returns_extra_fields_of_share(store: Store) -> None:
    posted = make_posted_share(5)
    share = replace(posted.share, kind="hidden-choice", extra=bytes(range(256)) * 2)

    await store.run(shares.EnqueueOperation(share, posted.nullifier, now=NOW))

    (queued,) = await claim_all_due(store)
    assert queued.share == share


@pytest.mark.rule("R10")
async def test_enqueue_same_share_later_changes_nothing(store: Store, backend: StoreBackend) -> None:
    posted = make_posted_share(1, submit_at=int(NOW) + 60)
    await enqueue(store, posted)
    before = backend.query_rows("SELECT * FROM shares")
    for again_at in (int(NOW) + 60, int(NOW) + 500):
        outcome = await enqueue(store, posted.with_submit_at(again_at), now=NOW + 1)
        assert outcome is EnqueueResult.DUPLICATE
        assert backend.query_rows("SELECT * FROM shares") == before
        assert await store.is_known(posted.share.key)


@pytest.mark.rule("R10")
async def test_enqueue_known_share_in_every_state_is_duplicate(store: Store) -> None:
    for number, state in enumerate(ShareState, start=1):
        await create_share_in_state(store, state, number)
    counts = await store.count_shares()
    assert counts == {ROUND: dict.fromkeys(ShareState, 1)}
    for number in range(1, len(ShareState) + 1):
        posted = make_posted_share(number)
        outcome = await enqueue(store, posted.with_submit_at(0))
        assert outcome is EnqueueResult.DUPLICATE
        assert await store.count_shares() == counts
        assert await store.is_known(posted.share.key)


@pytest.mark.rule("R10", "W6")
@pytest.mark.parametrize("again_at", [0, int(NOW) + 5])
async def test_enqueue_waiting_share_with_earlier_time_moves_it_up(reopen: Reopen, store: Store, again_at: int) -> None:
    first, other = make_posted_share(1, submit_at=int(NOW) + 3600), make_posted_share(2, submit_at=int(NOW) + 3600)
    for posted in (first, other):
        await enqueue(store, posted)

    again = first.with_submit_at(again_at)
    assert await enqueue(store, again, now=NOW + 1) is EnqueueResult.MOVED_UP
    assert await enqueue(store, first, now=NOW + 2) is EnqueueResult.DUPLICATE
    assert await enqueue(store, again, now=NOW + 2) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 2}}
    await store.close()
    store = await reopen()
    due = max(again_at, NOW + 1)
    assert await claim_all_due(store, now=due - 0.1) == []
    (queued,) = await claim_all_due(store, now=due)
    assert (queued.share, queued.nullifier, queued.due_ms) == (again.share, first.nullifier, due * 1000)


@pytest.mark.rule("R10", "W6")
async def test_enqueue_same_share_in_one_batch_takes_earliest_time(store: Store) -> None:
    times = (3600, 60, 600, 0, 3600)
    posts = [make_posted_share(1, submit_at=int(NOW) + seconds) for seconds in times]

    outcomes = await asyncio.gather(*(enqueue(store, each) for each in posts))

    moved, known = EnqueueResult.MOVED_UP, EnqueueResult.DUPLICATE
    assert outcomes == [EnqueueResult.QUEUED, moved, known, moved, known]
    (queued,) = await claim_all_due(store, now=NOW)
    assert queued.share == posts[3].share


@pytest.mark.rule("R10")
async def test_enqueue_earlier_time_does_not_shorten_a_retry(store: Store, backend: StoreBackend) -> None:
    posted = make_posted_share(1, submit_at=int(NOW) + 60)
    await enqueue(store, posted)
    (queued,) = await claim_all_due(store, now=NOW + 60)
    await store.run(shares.retry, queued.id, due_ms=int(NOW + 600) * 1000, stage="proof", note="no")
    before = backend.query_rows("SELECT * FROM shares")

    again = posted.with_submit_at(0)
    assert await enqueue(store, again, now=NOW + 61) is EnqueueResult.DUPLICATE

    assert backend.query_rows("SELECT * FROM shares") == before


@pytest.mark.parametrize("is_together", [False, True])
async def test_share_at_a_false_position_does_not_keep_it_from_being_stored_at_the_true_one(
    store: Store, *, is_together: bool
) -> None:
    posted = make_posted_share(1)
    position = posted.share.tree_position
    posts = [
        shares.EnqueueOperation(replace(posted.share, tree_position=position + shift), posted.nullifier, now=NOW)
        for shift in (50, 0)
    ]
    results = await asyncio.gather(*map(store.run, posts)) if is_together else [await store.run(op) for op in posts]
    assert results == [EnqueueResult.QUEUED] * 2
    claimed = await claim_all_due(store)
    assert sorted(queued.share.tree_position for queued in claimed) == [position, position + 50]

    confirmed = await store.run(blocks.apply_blocks, [(7, 7)], [(ROUND, posted.nullifier)])

    assert sorted(confirmed) == sorted(queued.id for queued in claimed)
    assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 2}}
    assert [await store.run(op) for op in posts] == [EnqueueResult.DUPLICATE] * 2


async def test_share_of_an_invented_leaf_does_not_keep_the_share_at_its_position_from_being_stored(
    store: Store,
) -> None:
    posted = make_posted_share(1)
    for change in ({"shares_hash": bytes(32)}, {"vote_decision": 7}):
        invented = shares.EnqueueOperation(replace(posted.share, **change), os.urandom(32), now=NOW)
        assert await store.run(invented) is EnqueueResult.QUEUED
        assert not await store.is_known(posted.share.key)

    assert await enqueue(store, posted) is EnqueueResult.QUEUED

    assert posted.share in [queued.share for queued in await claim_all_due(store)]


async def test_enqueue_unknown_share_with_spent_nullifier_is_duplicate(store: Store) -> None:
    posted = make_posted_share(1)
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await store.run(blocks.apply_blocks, [(7, 7)], [(ROUND, posted.nullifier)])

    assert await enqueue(store, posted) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {}
    assert not await store.is_known(posted.share.key)
    assert await store.is_spent(ROUND, posted.nullifier)
    assert not await store.is_spent(OTHER_ROUND, posted.nullifier)


async def test_enqueue_concurrent_shares_use_one_commit_and_survive_reopen(
    reopen: Reopen, store: Store, backend: StoreBackend
) -> None:
    numbers = range(512)
    before = backend.count_writes()

    outcomes = await asyncio.gather(*(enqueue(store, make_posted_share(n)) for n in numbers))

    assert set(outcomes) == {EnqueueResult.QUEUED}
    assert backend.count_writes() - before == 1
    await store.close()
    reopened = await reopen()
    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 512}}


async def test_enqueue_known_share_waits_for_a_sync_like_a_new_one(store: Store, backend: StoreBackend) -> None:
    posted = make_posted_share(1)
    await enqueue(store, posted)
    before = backend.read_synced_log()

    assert await enqueue(store, posted) is EnqueueResult.DUPLICATE

    assert backend.read_synced_log() != before


async def test_enqueue_with_cancelled_caller_still_stores_share(store: Store) -> None:
    posted = make_posted_share(1)
    task = asyncio.create_task(enqueue(store, posted))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert await enqueue(store, posted) is EnqueueResult.DUPLICATE


CHILD_SCRIPT = """
import asyncio, sys
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import parse_locator
from tests.unit.store.fixtures import enqueue, make_posted_share

async def main() -> None:
    store = parse_locator(sys.argv[1:]).create_store(FakeClock())
    await store.open()

    async def one(number: int) -> None:
        await enqueue(store, make_posted_share(number))
        print(number, flush=True)

    await asyncio.gather(*(one(number) for number in range(4_000)))

asyncio.run(main())
"""


async def test_enqueue_acknowledged_shares_survive_sigkill(reopen: Reopen, backend: StoreBackend) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD_SCRIPT,
        *backend.locator,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert child.stdout is not None
    acknowledged = [int(await child.stdout.readline()) for _ in range(700)]
    os.kill(child.pid, signal.SIGKILL)
    remaining = (await child.stdout.read()).splitlines(keepends=True)
    acknowledged += [int(line) for line in remaining if line.endswith(b"\n")]
    await child.wait()

    store = await reopen()

    lost = [number for number in acknowledged if not await store.is_known(make_posted_share(number).share.key)]
    assert len(acknowledged) >= 700
    assert lost == []
    await store.close()


# ---------------------------------------- claims: which shares, when, and in which order


DUE_SECOND = int(NOW) + 5


@pytest.mark.rule("R2", "N26")
async def test_claim_due_immediate_shares_keeps_arrival_order(store: Store) -> None:
    for place, number in enumerate([5, 3, 9, 1]):
        past = 0 if number % 2 else int(NOW) - 1000
        await enqueue_shares(store, number, submit_at=past, now=NOW + place / 1000)

    claimed = await claim_all_due(store, now=NOW + 0.01)

    assert [queued.share.tree_position - 70_000 for queued in claimed] == [5, 3, 9, 1]


@pytest.mark.rule("R5", "N26")
async def test_claim_due_shares_of_one_second_are_shuffled(store: Store) -> None:
    await enqueue_shares(store, *range(64), submit_at=DUE_SECOND)

    claimed = await claim_all_due(store, now=DUE_SECOND, limit=64)

    order = [queued.share.tree_position for queued in claimed]
    assert len(order) == 64
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


@pytest.mark.rule("R4")
async def test_claim_due_before_due_second_claims_nothing(store: Store) -> None:
    await enqueue_shares(store, 1, submit_at=DUE_SECOND)

    assert await claim_all_due(store, now=DUE_SECOND - 0.001) == []
    assert await store.next_due_ms([ROUND]) == DUE_SECOND * 1000
    assert len(await claim_all_due(store, now=DUE_SECOND)) == 1
    assert await store.next_due_ms([ROUND]) is None


@pytest.mark.rule("N26")
async def test_claim_due_merges_requested_rounds_by_due_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for second in range(6):
        await enqueue(
            store, make_posted_share(second, submit_at=DUE_SECOND + second, round_id=(ROUND, OTHER_ROUND)[second % 2])
        )

    fetch, names = store._reader.fetch, list[str]()

    def fetch_counted(name: str) -> Awaitable[list[Row]]:
        names.append(name)
        return fetch(name)

    monkeypatch.setattr(store._reader, "fetch", fetch_counted)
    assert await store.next_due_ms([OTHER_ROUND]) == (DUE_SECOND + 1) * 1000
    assert await store.next_due_ms([b"?" * 32, OTHER_ROUND, ROUND]) == DUE_SECOND * 1000
    assert names == ["next_due", "next_due"], "one query, however many rounds there are"

    both = await store.run(shares.claim_due, now=DUE_SECOND + 60, limit=3, rounds=[OTHER_ROUND, ROUND, b"?" * 32])
    assert [queued.share.submit_at - DUE_SECOND for queued in both] == [0, 1, 2]
    rest = await store.run(shares.claim_due, now=DUE_SECOND + 60, limit=99, rounds=[OTHER_ROUND])
    assert [queued.share.submit_at - DUE_SECOND for queued in rest] == [3, 5]
    assert await store.run(shares.claim_due, now=DUE_SECOND + 60, limit=99, rounds=[]) == []


async def test_enqueue_after_purge_does_not_reuse_ids(store: Store) -> None:
    await enqueue_shares(store, 1)
    await confirm_shares(store, 1, height=5)

    await enqueue_shares(store, 2)

    assert [queued.id for queued in await claim_all_due(store)] == [2]


# ---------------------------------------- a damaged row is replaced when its share is posted again


DAMAGE_ROW = "UPDATE shares SET due_ms = due_ms + 5000 WHERE id = (SELECT min(id) FROM shares)"
DAMAGE_MESSAGE = "UPDATE reveals SET height = height + 1"


Damage = Callable[..., Awaitable[Store]]


@pytest.fixture
def damage(store: Store, backend: StoreBackend, reopen: Reopen) -> Damage:
    """Changes stored rows by hand, as a fault would, and reopens the store."""

    async def damage_rows(*changes: str) -> Store:
        await store.close()
        for change in changes or [DAMAGE_ROW]:
            backend.execute(change)
        return await reopen()

    return damage_rows


async def post(store: Store, number: int, *, submit_at: int = 0) -> EnqueueResult:
    return await enqueue(store, make_posted_share(number, submit_at=submit_at))


async def send_message(store: Store, number: int) -> None:
    """Bring one share to SENT, with one recorded send."""
    share_id = await enqueue_and_prepare(store, number)
    assert await store.run(messages.mark_sending, share_id, height=110, endpoint="one")
    await store.run(messages.record_outcome, share_id, outcome="ACCEPTED", decide_height=113)


@pytest.mark.rule("R10", "N25")
@pytest.mark.parametrize("is_quarantined", [False, True])
async def test_post_of_share_with_damaged_row_replaces_it(
    store: Store, damage: Damage, reported: list[DamagedShare], *, is_quarantined: bool
) -> None:
    await enqueue_shares(store, 1, 2)
    store = await damage()
    if is_quarantined:
        await store.verify()
        assert len(await store.list_damaged()) == 1

    assert await post(store, 1, submit_at=int(NOW) + 60) is EnqueueResult.QUEUED

    assert len(reported) == 1, "the damage is reported in any case, once"
    assert await store.list_damaged() == []
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 2}}
    assert [queued.share for queued in await claim_all_due(store)] == [make_posted_share(2).share]
    (queued,) = await claim_all_due(store, now=NOW + 60)
    assert queued.share == make_posted_share(1, submit_at=int(NOW) + 60).share
    assert await post(store, 1) is EnqueueResult.DUPLICATE
    await store.verify()
    assert await store.list_damaged() == []


async def test_post_of_damaged_share_keeps_the_message_that_may_have_been_sent(store: Store, damage: Damage) -> None:
    await send_message(store, 1)
    store = await damage()
    assert await store.list_unconfirmed() == []

    assert await post(store, 1) is EnqueueResult.QUEUED

    (sent,) = await store.list_unconfirmed()
    row = sent.row
    assert (sent.nullifier, without_sends(row)) == (make_posted_share(1).nullifier, make_reveal(1))
    assert (row.sends, row.first_sent_height, row.last_sent_height, row.last_outcome) == (1, 110, 110, "ACCEPTED")
    assert await store.list_follow_ups(height=112, limit=9) == []
    assert await store.list_follow_ups(height=113, limit=9) == [sent.share_id], "sent again by the same rules"
    assert await claim_all_due(store) == [], "not proven again"
    assert await store.count_shares() == {ROUND: {ShareState.SENT: 1}}
    assert await store.run(blocks.apply_blocks, [(114, 114)], [(ROUND, sent.nullifier)]) == [sent.share_id]
    assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 1}}


async def test_post_of_damaged_share_with_later_submit_at_waits_until_then(store: Store, damage: Damage) -> None:
    await send_message(store, 1)
    store = await damage()

    assert await post(store, 1, submit_at=int(NOW) + 90) is EnqueueResult.QUEUED

    assert await store.list_unconfirmed() == []
    assert await claim_all_due(store, now=NOW + 89) == []
    assert len(await claim_all_due(store, now=NOW + 90)) == 1


async def test_post_of_damaged_share_discards_a_message_that_was_never_sent(
    store: Store, backend: StoreBackend, damage: Damage
) -> None:
    await enqueue_and_prepare(store, 1)
    store = await damage()

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert backend.query_rows("SELECT count(*) FROM reveals") == [(0,)]
    (entry,) = await store.list_shares(QueueFilter(), 9)
    assert (entry.stage, entry.note, entry.attempts, entry.damaged) == ("accepted", HEALED_NOTE, 0, False)
    assert len(await claim_all_due(store)) == 1


@pytest.mark.parametrize("change", [DAMAGE_MESSAGE, "DELETE FROM reveals"])
async def test_post_of_share_with_damaged_message_delays_the_new_proof(
    store: Store, backend: StoreBackend, damage: Damage, change: str
) -> None:
    await send_message(store, 1)
    store = await damage(change)
    assert await store.list_unconfirmed() == []
    assert len(await store.list_damaged()) == 1

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert await store.list_damaged() == []
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1}}
    assert backend.query_rows("SELECT count(*) FROM reveals") == [(0,)]
    again_at = NOW + LOST_MESSAGE_DELAY_MS / 1000
    assert await claim_all_due(store, now=again_at - 0.001) == [], "at most one proof in about ten blocks"
    assert len(await claim_all_due(store, now=again_at)) == 1


async def test_post_of_failed_damaged_share_proves_it_again(store: Store, damage: Damage) -> None:
    await send_message(store, 1)
    (sent,) = await store.list_unconfirmed()
    await store.run(shares.fail, sent.share_id, stage="broadcast", note="refused")
    store = await damage()

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1}}
    assert len(await claim_all_due(store)) == 1, "its message was refused, so it is not sent again"


async def test_work_on_a_replaced_row_has_no_effect(store: Store, backend: StoreBackend) -> None:
    old_id = await enqueue_and_claim(store, 1)
    backend.execute(DAMAGE_ROW)

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert not await store.run(messages.prepare, old_id, make_reveal(1))
    assert not await store.run(messages.mark_sending, old_id, height=110, endpoint="one")
    assert not await store.run(shares.release_claim, old_id)
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1}}
    (queued,) = await claim_all_due(store)
    assert queued.id != old_id
    assert await store.run(messages.prepare, queued.id, make_reveal(1))


async def test_posts_of_one_batch_replace_a_damaged_row_once(store: Store, damage: Damage) -> None:
    await enqueue_shares(store, 1, 2)
    store = await damage()

    results = await asyncio.gather(*(post(store, number) for number in (1, 2, 1, 3)))

    assert [result.value for result in results] == ["queued", "duplicate", "duplicate", "queued"]
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 3}}


@pytest.mark.parametrize("is_closed", [False, True], ids=["spent", "closed"])
async def test_post_of_damaged_share_that_is_spent_or_in_closed_round_is_duplicate(
    store: Store, damage: Damage, *, is_closed: bool
) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1)
    store = await damage()
    if is_closed:
        await store.run(rounds.mark_closed, ROUND, now=NOW)
    else:
        await confirm_shares(store, 1, height=5)

    assert await post(store, 1) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {ROUND: {ShareState.WAITING if is_closed else ShareState.CONFIRMED: 1}}
