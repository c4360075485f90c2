"""A share whose row is damaged is stored again when a wallet posts it again."""

from __future__ import annotations

import asyncio

import pytest

from helper.core.share import ShareState
from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.operations.shares import HEALED_NOTE
from helper.store.store import Store
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.conformance.test_chain_data import ChainRound
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    claim_all_due,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
)

DAMAGE_ROW = "UPDATE shares SET due_ms = due_ms + 5000 WHERE id = (SELECT min(id) FROM shares)"
DAMAGE_MESSAGE = "UPDATE reveals SET height = height + 1"


async def reopen_damaged(store: Store, backend: StoreBackend, reopen: Reopen, change: str = DAMAGE_ROW) -> Store:
    """Change a stored row by hand, as a fault would."""
    await store.close()
    backend.execute(change)
    return await reopen()


async def post(store: Store, number: int, *, submit_at: int = 0) -> EnqueueResult:
    posted = make_posted_share(number, submit_at=submit_at)
    return await store.enqueue(posted.share, posted.nullifier, now=NOW)


@pytest.mark.rule("R10")
@pytest.mark.parametrize("is_quarantined", [False, True])
async def test_post_of_share_with_damaged_row_replaces_it(
    store: Store, backend: StoreBackend, reopen: Reopen, reported: list[DamagedShare], *, is_quarantined: bool
) -> None:
    await enqueue_shares(store, 1, 2)
    store = await reopen_damaged(store, backend, reopen)
    if is_quarantined:
        await store.verify()
        assert len(await store.list_damaged()) == 1

    assert await post(store, 1, submit_at=int(NOW) + 60) is EnqueueResult.QUEUED

    assert len(reported) == 1, "the damage is reported in any case, once"
    assert await store.list_damaged() == []
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 2}}
    assert [queued.share for queued in await claim_all_due(store)] == [make_posted_share(2).share]
    (queued,) = await claim_all_due(store, now=NOW + 60)
    assert queued.share == make_posted_share(1, submit_at=int(NOW) + 60).share
    assert await post(store, 1) is EnqueueResult.DUPLICATE
    await store.verify()
    assert await store.list_damaged() == []


async def test_post_of_share_with_damaged_message_discards_the_message(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await enqueue_and_prepare(store, 1)
    store = await reopen_damaged(store, backend, reopen, DAMAGE_MESSAGE)
    assert await store.list_unconfirmed() == []

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1}}
    assert backend.query_rows("SELECT count(*) FROM reveals") == [(0,)]
    (entry,) = await store.list_shares(QueueFilter(), 9)
    assert (entry.stage, entry.note, entry.attempts, entry.damaged) == ("accepted", HEALED_NOTE, 0, False)
    assert len(await claim_all_due(store)) == 1


async def test_posts_of_one_batch_replace_a_damaged_row_once(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await enqueue_shares(store, 1, 2)
    store = await reopen_damaged(store, backend, reopen)

    results = await asyncio.gather(*(post(store, number) for number in (1, 2, 1, 3)))

    assert sorted(result.value for result in results) == ["duplicate", "duplicate", "queued", "queued"]
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 3}}


async def test_post_of_damaged_share_that_is_spent_is_duplicate(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_shares(store, 1)
    store = await reopen_damaged(store, backend, reopen)
    await store.apply_block(5, [(ROUND, make_posted_share(1).nullifier)], now=NOW)

    assert await post(store, 1) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {ROUND: {ShareState.SUBMITTED: 1}}
