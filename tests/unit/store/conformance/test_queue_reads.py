"""Reads for operators: lists, share histories and counts, never a witness."""

from __future__ import annotations

import asyncio

from helper.core.share import ShareState
from helper.store import messages, rounds, shares
from helper.store.models import DueBucket, DueForecast, QueueFilter, RetryingShares, TransactionRow
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import StoreBackend
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    retry_as_operator,
)


def secrets_of(number: int) -> list[bytes]:
    share = make_posted_share(number).share
    fields = [share.shares_hash, share.share_comms[:32], share.primary_blind, share.c1, share.c2]
    return [*fields, make_posted_share(number).nullifier, make_reveal(number).message[:40]]


async def test_share_details_contain_all_but_the_witness(store: Store, backend: StoreBackend, clock: FakeClock) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1)
    clock.advance(5)
    (queued,) = await claim_all_due(store)
    await store.run(shares.retry, queued.id, due_ms=int(NOW + 7) * 1000, stage="proof", note="it failed")
    clock.advance(5)
    (queued,) = await claim_all_due(store)
    await store.run(messages.prepare, queued.id, make_reveal(1))
    await store.run(messages.mark_sending, queued.id, height=110, endpoint="one")
    await store.run(messages.record_outcome, queued.id, outcome="ACCEPTED")
    (entry,) = await store.list_shares(QueueFilter(), 5)

    async with backend.open_offline_readers() as offline:
        for queue in (store, *offline):
            details = await queue.get_share_details(entry.ref)

            assert details is not None
            assert details.entry == entry
            assert details.received_ms == int(NOW * 1000)
            assert details.vote_end_time == make_stored_round().vote_end_time
            assert [(line.stage, line.note, line.spent_attempt) for line in details.history] == [
                ("accepted", "", False),
                ("proof", "it failed", True),
                ("broadcast", "proven with k10, message stored", False),
            ]
            assert [line.at_ms for line in details.history] == [int(NOW * 1000) + 5000 * n for n in range(3)]
            assert details.attempts_by_stage == {"proof": 1}
            tx_hash = make_reveal(1).tx_hash.hex().upper()
            assert details.transaction == TransactionRow(tx_hash, 100, "k10", 1, 110, 110, "one", "ACCEPTED")
            shown = repr(details)
            for secret in secrets_of(1):
                assert repr(secret)[2:-1] not in shown
                assert secret.hex() not in shown
            assert "tree_position" not in shown
            assert str(make_posted_share(1).share.tree_position) not in shown


async def test_share_details_by_unique_prefix_are_found(store: Store) -> None:
    await enqueue_shares(store, *range(40))
    refs = [entry.ref for entry in await store.list_shares(QueueFilter(), 99)]
    assert len(set(refs)) == 40

    details = await store.get_share_details(refs[7][:6].upper())

    assert details is not None
    assert details.entry.ref == refs[7]
    assert await store.get_share_details(refs[7][:5]) is None
    assert await store.get_share_details("zzzzzz") is None
    assert await store.get_share_details("0" * 65) is None
    assert await store.get_share_details("' OR 1=1") is None


async def test_queue_reads_after_confirmation_show_only_a_count(store: Store) -> None:
    await enqueue_shares(store, 1)
    (entry,) = await store.list_shares(QueueFilter(), 5)
    await confirm_shares(store, 1, height=5)

    assert await store.get_share_details(entry.ref) is None
    assert await store.list_shares(QueueFilter(), 5) == []
    assert await store.list_shares(QueueFilter(state=ShareState.CONFIRMED), 5) == []
    assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 1}}


async def test_list_shares_includes_shares_that_change_state_meanwhile(store: Store) -> None:
    await enqueue_shares(store, *range(9))

    async def claim_and_release() -> None:
        while True:
            for queued in await claim_all_due(store):
                await store.run(shares.release_claim, queued.id)

    changing = asyncio.create_task(claim_and_release())
    try:
        lengths = [len(await store.list_shares(QueueFilter(), 99)) for _ in range(200)]
    finally:
        changing.cancel()
        await asyncio.wait([changing])
    assert set(lengths) == {9}


async def test_list_shares_is_ordered_by_due_time_and_filtered(store: Store) -> None:
    start = int(NOW)
    for number in (3, 1, 2):
        await enqueue_shares(store, number, submit_at=start + number)
    await enqueue(store, make_posted_share(9, submit_at=start + 2, round_id=OTHER_ROUND))
    (first,) = await claim_all_due(store, limit=1)
    await store.run(shares.fail, first.id, stage="proof", note="no")

    async def listed(query: QueueFilter, limit: int = 99) -> list[int]:
        return [entry.submit_at - start for entry in await store.list_shares(query, limit)]

    assert await listed(QueueFilter()) == [1, 2, 2, 3]
    assert await listed(QueueFilter(), 2) == [1, 2]
    assert await listed(QueueFilter(), 0) == []
    assert await listed(QueueFilter(round_id=ROUND)) == [1, 2, 3]
    assert await listed(QueueFilter(round_id=b"?" * 32)) == []
    assert await listed(QueueFilter(state=ShareState.WAITING)) == [2, 2, 3]
    assert await listed(QueueFilter(state=ShareState.FAILED)) == [1]
    assert await listed(QueueFilter(due_before_ms=(start + 2) * 1000)) == [1]
    assert await listed(QueueFilter(stage="proof")) == [1]
    assert await listed(QueueFilter(stage="accepted", round_id=OTHER_ROUND)) == [2]


async def test_queue_counts_waiting_by_minute_and_failed_by_reason(store: Store) -> None:
    start = int(NOW)
    await enqueue_shares(store, 1, 2)
    await enqueue_shares(store, 3, submit_at=start + 59)
    await enqueue_shares(store, 4, submit_at=start + 60)
    await enqueue_shares(store, 5, 6, submit_at=start + 3600)
    assert await store.count_due_ahead(now=NOW) == {ROUND: DueForecast((3, 1, *[0] * 58), 2)}

    for queued in await claim_all_due(store, now=NOW + 60):
        reason = "refused" if queued.id % 2 else "no leaf"
        await store.run(shares.fail, queued.id, stage="proof", note=reason)

    assert await store.count_due_ahead(now=NOW) == {ROUND: DueForecast((0,) * 60, 2)}
    failures = {
        (group.stage, group.note, group.count) for group in await store.list_matching_failures(QueueFilter(), limit=9)
    }
    assert failures == {("proof", "refused", 2), ("proof", "no leaf", 2)}
    assert len(await store.list_matching_failures(QueueFilter(), limit=1)) == 1


async def test_list_retries_groups_waiting_shares_by_failure_and_minute(store: Store) -> None:
    await enqueue_shares(store, 1, 2, 3, 4, 5)
    first, second, third, fourth, fifth = await claim_all_due(store)
    now_ms = int(NOW * 1000)
    for queued, delay_ms, note in ((first, 70_000, "no memory"), (second, 119_000, "no memory"), (third, 90_000, "x")):
        await store.run(shares.retry, queued.id, due_ms=now_ms + delay_ms, stage="proof", note=note)
    await store.run(shares.retry, fourth.id, due_ms=now_ms - 1, stage="proof", note="due now")
    await store.run(shares.requeue, fifth.id, due_ms=now_ms + 5_000, stage="tree", note="no attempt spent")

    assert await store.list_retries(now=NOW) == [
        RetryingShares(ROUND.hex(), "proof", "no memory", 1, 2, (now_ms + 70_000) / 1000),
        RetryingShares(ROUND.hex(), "proof", "x", 1, 1, (now_ms + 90_000) / 1000),
    ]
    assert len(await retry_and_list(store, first.id)) == 2, "an operator's retry makes a share due at once"


async def retry_and_list(store: Store, share_id: int) -> list[RetryingShares]:
    await retry_as_operator(store, share_id)
    return await store.list_retries(now=NOW)


async def test_due_buckets_and_ready_counts(store: Store) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1, 2, 3)
    await enqueue_shares(store, 4, submit_at=int(NOW) + 90)
    await enqueue_shares(store, 5, submit_at=int(NOW) + 150)
    first, *_ = await claim_all_due(store)
    await store.run(shares.fail, first.id, stage="proof", note="no")

    assert await store.count_ready(now=NOW) == {ROUND: 0}
    assert await store.count_ready(now=NOW + 100) == {ROUND: 1}
    buckets = await store.count_by_due_bucket(ROUND, start=int(NOW) - 60, width=60, now=NOW + 100)
    assert sorted(buckets, key=lambda group: (group.state, group.index)) == [
        DueBucket(ShareState.WAITING, is_due=True, index=2, count=1),
        DueBucket(ShareState.WAITING, is_due=False, index=3, count=1),
        DueBucket(ShareState.PROVING, is_due=True, index=1, count=2),
        DueBucket(ShareState.FAILED, is_due=True, index=1, count=1),
    ]
    assert await store.count_by_due_bucket(b"\x77" * 32, start=0, width=60, now=NOW) == []
