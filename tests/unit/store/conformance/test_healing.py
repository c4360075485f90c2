"""A share whose row is damaged is stored again when a wallet posts it again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from helper.core.share import ShareState
from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.operations.shares import HEALED_NOTE, LOST_MESSAGE_DELAY_MS
from helper.store.store import Store
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.conformance.test_chain_data import ChainRound
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue_and_claim,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
)

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


async def post(store: Store, number: int, *, submit_at: int = 0, now: float = NOW) -> EnqueueResult:
    posted = make_posted_share(number, submit_at=submit_at)
    return await store.enqueue(posted.share, posted.nullifier, now=now)


async def send_message(store: Store, number: int) -> None:
    """Bring one share to BROADCAST, with one recorded send."""
    share_id = await enqueue_and_prepare(store, number)
    assert await store.mark_sending(share_id, height=110, endpoint="one")
    await store.record_outcome(share_id, outcome="ACCEPTED", decide_height=113)


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
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 2}}
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
    assert (sent.nullifier, sent.prepared) == (make_posted_share(1).nullifier, make_reveal(1))
    assert (sent.sends, sent.first_sent_height, sent.last_sent_height, sent.last_outcome) == (1, 110, 110, "ACCEPTED")
    assert await store.list_follow_ups(height=112, limit=9) == []
    assert await store.list_follow_ups(height=113, limit=9) == [sent.share_id], "sent again by the same rules"
    assert await claim_all_due(store) == [], "not proven again"
    assert await store.count_shares() == {ROUND: {ShareState.BROADCAST: 1}}
    assert await store.apply_blocks([(114, 114)], [(ROUND, sent.nullifier)], now=NOW) == [sent.share_id]
    assert await store.count_shares() == {ROUND: {ShareState.SUBMITTED: 1}}


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
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1}}
    assert backend.query_rows("SELECT count(*) FROM reveals") == [(0,)]
    again_at = NOW + LOST_MESSAGE_DELAY_MS / 1000
    assert await claim_all_due(store, now=again_at - 0.001) == [], "at most one proof in about ten blocks"
    assert len(await claim_all_due(store, now=again_at)) == 1


async def test_post_of_failed_damaged_share_proves_it_again(store: Store, damage: Damage) -> None:
    await send_message(store, 1)
    (sent,) = await store.list_unconfirmed()
    await store.fail(sent.share_id, stage="broadcast", note="refused")
    store = await damage()

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1}}
    assert len(await claim_all_due(store)) == 1, "its message was refused, so it is not sent again"


async def test_work_on_a_replaced_row_has_no_effect(store: Store, backend: StoreBackend) -> None:
    old_id = await enqueue_and_claim(store, 1)
    backend.execute(DAMAGE_ROW)

    assert await post(store, 1) is EnqueueResult.QUEUED

    assert not await store.prepare(old_id, make_reveal(1))
    assert not await store.mark_sending(old_id, height=110, endpoint="one")
    assert not await store.release_claim(old_id)
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1}}
    (queued,) = await claim_all_due(store)
    assert queued.id != old_id
    assert await store.prepare(queued.id, make_reveal(1))


async def test_posts_of_one_batch_replace_a_damaged_row_once(store: Store, damage: Damage) -> None:
    await enqueue_shares(store, 1, 2)
    store = await damage()

    results = await asyncio.gather(*(post(store, number) for number in (1, 2, 1, 3)))

    assert [result.value for result in results] == ["queued", "duplicate", "duplicate", "queued"]
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 3}}


@pytest.mark.parametrize("is_closed", [False, True], ids=["spent", "closed"])
async def test_post_of_damaged_share_that_is_spent_or_in_closed_round_is_duplicate(
    store: Store, damage: Damage, *, is_closed: bool
) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_shares(store, 1)
    store = await damage()
    if is_closed:
        await store.mark_closed(ROUND, now=NOW)
    else:
        await confirm_shares(store, 1, height=5)

    assert await post(store, 1) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED if is_closed else ShareState.SUBMITTED: 1}}
