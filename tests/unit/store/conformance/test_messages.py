"""Messages: stored before they are sent, unchanged after a restart, updated at each send."""

from __future__ import annotations

from helper.store import audit_log, messages, shares
from helper.store.audit_log import Actor
from helper.store.models import QueueFilter
from helper.store.store import Store
from tests.unit.store.conformance.backends import StoreBackend
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
    without_sends,
)


async def test_message_and_send_are_on_disk_before_and_the_outcome_after(store: Store, backend: StoreBackend) -> None:
    share_id = await enqueue_and_prepare(store, 1)
    assert backend.query_rows("SELECT sends FROM reveals") == [(0,)]
    (fresh,) = await store.list_unconfirmed()
    row = fresh.row
    assert (row.sends, row.first_sent_height, row.last_outcome, fresh.is_first_message) == (0, None, None, True)
    assert (fresh.nullifier, fresh.round_id) == (make_posted_share(1).nullifier, ROUND)
    assert without_sends(row) == make_reveal(1)

    assert await store.run(messages.mark_sending, share_id, height=110, endpoint="one")
    await store.run(messages.record_outcome, share_id, outcome="AMBIGUOUS")
    assert await store.run(messages.mark_sending, share_id, height=113, endpoint="two")
    assert backend.query_rows("SELECT sends FROM reveals") == [(2,)]
    sent = await store.get_sent_reveal(share_id)
    assert sent is not None
    row = sent.row
    assert (row.sends, row.first_sent_height, row.last_sent_height) == (2, 110, 113)
    assert (row.last_endpoint, row.last_outcome) == ("two", None), "an old response does not belong to the new send"

    await store.run(messages.record_outcome, share_id, outcome="ACCEPTED")
    assert [message.row.last_outcome for message in await store.list_unconfirmed()] == ["ACCEPTED"]


async def test_mark_sending_outside_broadcast_state_is_refused(store: Store) -> None:
    share_id = await enqueue_and_prepare(store, 1)
    await confirm_shares(store, 1, height=9)
    waiting = await enqueue_and_claim(store, 2)

    for absent_id in (share_id, waiting, 99):
        assert not await store.run(messages.mark_sending, absent_id, height=110, endpoint="one")
        await store.run(messages.record_outcome, absent_id, outcome="ACCEPTED")
        assert await store.get_sent_reveal(absent_id) is None
    assert not await store.run(messages.prepare, share_id, make_reveal(1))
    assert await store.list_unconfirmed() == []


async def test_follow_up_returns_longest_waiting_first(store: Store) -> None:
    ids = [await enqueue_and_prepare(store, number) for number in range(5)]
    assert set(await store.list_follow_ups(height=0, limit=9)) == set(ids), "the messages were never sent"
    for share_id, height in zip(ids, (113, 110, 123, 112, 111), strict=True):
        await store.run(messages.mark_sending, share_id, height=100, endpoint="one", decide_height=101)
        await store.run(messages.record_outcome, share_id, outcome="ACCEPTED", decide_height=height)
    await store.run(shares.fail, ids[4], stage="broadcast", note="refused")

    assert await store.list_follow_ups(height=115, limit=2) == [ids[1], ids[3]]
    assert await store.list_follow_ups(height=115, limit=9) == [ids[1], ids[3], ids[0]], (
        "the failed share has no follow-up"
    )
    await store.run(messages.record_outcome, ids[1], outcome="SPENT", decide_height=110)
    for limit in (1, 2, 3):
        assert await store.list_follow_ups(height=115, limit=limit) == [ids[3], ids[0], ids[1]][:limit]


async def test_share_whose_wait_may_be_for_a_false_height_is_listed(store: Store) -> None:
    ids = [await enqueue_and_prepare(store, number) for number in range(5)]
    for share_id, height in zip(ids[:4], (109, 110, 111, 160), strict=True):
        await store.run(messages.mark_sending, share_id, height=height, endpoint="one", decide_height=height + 3)

    async def waits(height: int, greatest: int = 0, limit: int = 9) -> list[int]:
        return await store.list_doubtful_waits(height=height, greatest=greatest, limit=limit)

    assert await waits(110) == [ids[1], ids[2], ids[3]]
    assert await waits(113) == [ids[3]]
    assert await waits(110, limit=2) == [ids[1], ids[2]]
    assert await waits(161) == []
    assert (await waits(112, greatest=112), await waits(112, greatest=113)) == ([ids[3]], [ids[1], ids[3]]), (
        "the agreed height may stand still"
    )
    await store.run(messages.record_outcome, ids[0], outcome="SPENT", decide_height=119)
    assert await waits(112) == [ids[0], ids[3]], "a node may have returned"


async def test_follow_up_with_equal_wait_uses_claim_order(store: Store) -> None:
    await enqueue_shares(store, *range(12))
    claimed = [queued.id for queued in await claim_all_due(store)]
    assert claimed != sorted(claimed), "row ids show the order of arrival"
    for share_id in reversed(claimed):
        await store.run(messages.prepare, share_id, make_reveal(share_id))

    assert await store.list_follow_ups(height=0, limit=99) == claimed
    for share_id in sorted(claimed):
        await store.run(messages.mark_sending, share_id, height=100, endpoint="one", decide_height=101)
    assert await store.list_follow_ups(height=100, limit=99) == []
    assert await store.list_follow_ups(height=101, limit=99) == claimed


async def test_unconfirmed_shares_are_paged(store: Store) -> None:
    await enqueue_shares(store, *range(7))
    for queued in await claim_all_due(store):
        await store.run(messages.prepare, queued.id, make_reveal(queued.id))

    first = await store.list_unconfirmed(limit=4)
    second = await store.list_unconfirmed(limit=4, after_id=first[-1].share_id)

    assert [message.share_id for message in first + second] == list(range(1, 8))
    assert await store.list_unconfirmed(after_id=7) == []


async def test_unconfirmed_shares_are_selected_by_their_first_send(store: Store) -> None:
    await enqueue_shares(store, 1, 2, 3)
    for queued in await claim_all_due(store):
        await store.run(messages.prepare, queued.id, make_reveal(queued.id))
    for share_id, heights in {2: (100,), 3: (101, 100)}.items():
        for height in heights:
            await store.run(messages.mark_sending, share_id, height=height, endpoint="one", decide_height=height + 1)

    assert [message.share_id for message in await store.list_unconfirmed(sent_by=100)] == [1, 2]
    assert [message.share_id for message in await store.list_unconfirmed(sent_by=101)] == [1, 2, 3]


def test_prepared_reveal_repr_hides_its_content() -> None:
    assert "message" not in repr(make_reveal(1))
    assert repr(make_reveal(1).tx_hash) not in repr(make_reveal(1))


async def test_long_note_and_history_are_truncated_but_keep_attempts(store: Store) -> None:
    await enqueue_shares(store, 1)
    for n in range(60):
        (queued,) = await claim_all_due(store, now=NOW + 1000)
        if n == 1:
            await store.run(shares.retry, queued.id, due_ms=int(NOW), stage="proof", note="x" * 1000)
        else:
            await store.run(shares.requeue, queued.id, stage="tree", note=f"{n}")

    (entry,) = await store.list_shares(QueueFilter(), 1)
    details = await store.get_share_details(entry.ref)

    assert details is not None
    assert [line.note for line in details.history if line.spent_attempt] == ["x" * 399 + "…"]
    assert len(details.history) == 52, "the acceptance, the attempt and the latest fifty entries"
    assert details.history[-1].note == "59"
    assert details.attempts_by_stage == {"proof": 1}


async def test_message_that_replaces_another_is_distinguished_from_the_first_one(
    store: Store, backend: StoreBackend
) -> None:
    share = await enqueue_and_claim(store, 1)
    await store.run(shares.requeue, share, stage="tree", note="no root yet")
    await claim_all_due(store)
    await store.run(messages.prepare, share, make_reveal(1))
    (sent,) = await store.list_unconfirmed()
    assert sent.is_first_message
    await store.run(shares.requeue, share, stage="broadcast", note="not counted")
    assert backend.query_rows("SELECT * FROM reveals") == []
    (queued,) = await claim_all_due(store)
    assert queued.proved_height == make_reveal(1).height
    await store.run(messages.prepare, share, make_reveal(2))
    (sent,) = await store.list_unconfirmed()
    assert (without_sends(sent.row), sent.row.sends) == (make_reveal(2), 0)
    assert not sent.is_first_message


UNSAFE_TEXTS = "out of gas\x00 \x1b[2J \x9b one\ntwo \ud800\u202e"


async def test_notes_with_control_characters_are_sanitized_and_spend_attempt(store: Store) -> None:
    share_id = await enqueue_and_prepare(store, 1)
    await store.run(messages.mark_sending, share_id, height=110, endpoint=UNSAFE_TEXTS)
    await store.run(messages.record_outcome, share_id, outcome=UNSAFE_TEXTS)
    (sent,) = await store.list_unconfirmed()
    assert (sent.row.last_endpoint or "").isprintable()
    assert (sent.row.last_outcome or "").isprintable()

    assert (
        await store.run(shares.retry, share_id, due_ms=int(NOW * 1000), stage=UNSAFE_TEXTS[:20], note=UNSAFE_TEXTS) == 1
    )

    (entry,) = await store.list_shares(QueueFilter(), 9)
    assert entry.attempts == 1
    assert entry.note == "out of gas   [2J   one two   "
    assert entry.stage.isprintable()
    details = await store.get_share_details(entry.ref)
    assert details is not None
    assert details.history[-1].note == entry.note


async def test_audit_log_with_control_characters_is_sanitized(store: Store) -> None:
    number = await store.run(audit_log.begin_action, Actor(1000, "ann\x1b\udcff\x00", "socket"), "retry", {})
    await store.run(audit_log.end_action, number, {"error": "a\x00"})
    (action,) = await store.list_actions(limit=1)
    assert action.who == "ann   "
