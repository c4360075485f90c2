"""Which shares are claimed, when, and in which order."""

from __future__ import annotations

import pytest

from helper.store.store import Store
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue_shares,
    make_posted_share,
)

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
async def test_claim_due_merges_requested_rounds_by_due_time(store: Store) -> None:
    for second in range(6):
        posted = make_posted_share(second, submit_at=DUE_SECOND + second, round_id=(ROUND, OTHER_ROUND)[second % 2])
        await store.enqueue(posted.share, posted.nullifier, now=NOW)

    assert await store.next_due_ms([OTHER_ROUND]) == (DUE_SECOND + 1) * 1000
    both = await store.claim_due(now=DUE_SECOND + 60, limit=3, rounds=[OTHER_ROUND, ROUND, b"?" * 32])
    assert [queued.share.submit_at - DUE_SECOND for queued in both] == [0, 1, 2]
    rest = await store.claim_due(now=DUE_SECOND + 60, limit=99, rounds=[OTHER_ROUND])
    assert [queued.share.submit_at - DUE_SECOND for queued in rest] == [3, 5]
    assert await store.claim_due(now=DUE_SECOND + 60, limit=99, rounds=[]) == []


async def test_enqueue_after_purge_does_not_reuse_ids(store: Store) -> None:
    await enqueue_shares(store, 1)
    await confirm_shares(store, 1, height=5)

    await enqueue_shares(store, 2)

    assert [queued.id for queued in await claim_all_due(store)] == [2]
