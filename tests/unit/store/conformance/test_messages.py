"""Messages: on disk before they are sent, the same bytes after a restart, noted at each send."""

from __future__ import annotations

from functools import partial

import pytest

from helper.chain.verdicts import Verdict
from helper.reveal.resend_policy import Next, next_step
from helper.store.action_rows import Actor
from helper.store.rows import QueueFilter
from helper.store.store import Store
from tests.unit.store.conformance.backends import Place
from tests.unit.store.fixtures import NOW, ROUND, broadcast_one, claim, claim_one, posted, put, reveal


async def test_the_message_is_on_disk_when_prepare_returns(store: Store, place: Place) -> None:
    share_id = await claim_one(store, 1)

    assert await store.prepare(share_id, reveal(1))

    assert place.rows("SELECT sends FROM reveals") == [(0,)]
    (sent,) = await store.unconfirmed()
    assert sent.prepared == reveal(1)


async def test_each_send_is_noted_before_it_begins_and_its_outcome_after(store: Store) -> None:
    share_id = await broadcast_one(store, 1)
    (fresh,) = await store.unconfirmed()
    assert (fresh.sends, fresh.first_sent_height, fresh.last_outcome, fresh.first_try) == (0, None, None, True)
    assert (fresh.nullifier, fresh.round_id, fresh.prepared) == (posted(1).nullifier, ROUND, reveal(1))

    assert await store.mark_sending(share_id, height=110, endpoint="one")
    await store.record_outcome(share_id, outcome="AMBIGUOUS")
    assert await store.mark_sending(share_id, height=113, endpoint="two")
    sent = await store.sent_reveal(share_id)
    assert sent is not None
    assert (sent.sends, sent.first_sent_height, sent.last_sent_height) == (2, 110, 113)
    assert (sent.last_endpoint, sent.last_outcome) == ("two", None), "an old answer is not the new send's"

    await store.record_outcome(share_id, outcome="ACCEPTED")
    assert [one.last_outcome for one in await store.unconfirmed()] == ["ACCEPTED"]


async def test_a_share_that_is_not_in_broadcast_is_not_sent(store: Store) -> None:
    share_id = await broadcast_one(store, 1)
    await store.apply_block(9, [(ROUND, posted(1).nullifier)], now=NOW)
    waiting = await claim_one(store, 2)

    for gone in (share_id, waiting, 99):
        assert not await store.mark_sending(gone, height=110, endpoint="one")
        await store.record_outcome(gone, outcome="ACCEPTED")
        assert await store.sent_reveal(gone) is None
    assert not await store.prepare(share_id, reveal(1))
    assert await store.unconfirmed() == []


HEIGHTS = range(95, 126)


@pytest.mark.parametrize(("first", "last"), [(100, 100), (100, 101), (100, 106), (100, 109), (100, 110), (100, 113)])
async def test_a_message_is_followed_up_when_something_is_to_be_done_about_it(
    store: Store, first: int, last: int
) -> None:
    outcomes = [None, *(verdict.name for verdict in Verdict)]
    shares = {await broadcast_one(store, number): outcome for number, outcome in enumerate(outcomes)}
    assert set(await store.follow_ups(height=0, limit=99)) == set(shares), "they were never sent"
    for share_id, outcome in shares.items():
        for height in sorted({first, last}):
            await store.mark_sending(share_id, height=height, endpoint="one")
        if outcome is not None:
            await store.record_outcome(share_id, outcome=outcome)

    found = {height: set(await store.follow_ups(height=height, limit=99)) for height in HEIGHTS}

    step = partial(next_step, sends=2, first_height=first, last_height=last)
    assert found == {
        height: {share for share, outcome in shares.items() if step(outcome=outcome, height=height) is not Next.WAIT}
        for height in HEIGHTS
    }


async def test_those_that_wait_longest_are_followed_up_first(store: Store) -> None:
    ids = [await broadcast_one(store, number) for number in range(5)]
    for share_id, height in zip(ids, (110, 107, 120, 109, 108), strict=True):
        await store.mark_sending(share_id, height=height, endpoint="one")
    await store.fail(ids[4], stage="broadcast", note="refused", spend_attempt=True)

    assert await store.follow_ups(height=115, limit=2) == [ids[1], ids[3]]
    assert await store.follow_ups(height=115, limit=9) == [ids[1], ids[3], ids[0]], "the failed one waits for nobody"


async def test_those_that_have_waited_as_long_go_in_the_order_of_claims(store: Store) -> None:
    await put(store, *range(12))
    claimed = [queued.id for queued in await claim(store)]
    assert claimed != sorted(claimed), "the numbers of shares tell the order in which they came"
    for share_id in reversed(claimed):
        await store.prepare(share_id, reveal(share_id))

    assert await store.follow_ups(height=0, limit=99) == claimed
    for share_id in sorted(claimed):
        await store.mark_sending(share_id, height=100, endpoint="one")
    assert await store.follow_ups(height=101, limit=99) == claimed


async def test_unconfirmed_shares_come_in_pages(store: Store) -> None:
    await put(store, *range(7))
    for queued in await claim(store):
        await store.prepare(queued.id, reveal(queued.id))

    first = await store.unconfirmed(limit=4)
    second = await store.unconfirmed(limit=4, after_id=first[-1].share_id)

    assert [one.share_id for one in first + second] == list(range(1, 8))
    assert await store.unconfirmed(after_id=7) == []


def test_a_message_shows_nothing_of_itself() -> None:
    assert "message" not in repr(reveal(1))
    assert repr(reveal(1).tx_hash) not in repr(reveal(1))


async def test_a_long_note_is_cut_and_a_long_history_trimmed_but_for_attempts(store: Store) -> None:
    await put(store, 1)
    for n in range(60):
        (queued,) = await claim(store, now=NOW + 1000)
        if n == 1:
            await store.retry(queued.id, due_ms=int(NOW), stage="proof", note="x" * 1000)
        else:
            await store.requeue(queued.id, stage="tree", note=f"{n}")

    (entry,) = await store.list_shares(QueueFilter(), 1)
    story = await store.show(entry.ref)

    assert story is not None
    assert [line.note for line in story.history if line.counted] == ["x" * 399 + "…"]
    assert len(story.history) == 52, "the acceptance, the attempt, and the latest fifty"
    assert story.history[-1].note == "59"
    assert story.attempts_by_stage == {"proof": 1}


async def test_a_share_that_had_no_message_is_told_from_one_that_had(store: Store) -> None:
    share = await claim_one(store, 1)
    await store.requeue(share, stage="tree", note="no root yet")
    await claim(store)
    await store.prepare(share, reveal(1))
    (sent,) = await store.unconfirmed()
    assert (sent.first_try, sent.first_message) == (False, True)
    await store.requeue(share, stage="broadcast", note="not counted")
    await claim(store)
    await store.prepare(share, reveal(1))
    (sent,) = await store.unconfirmed()
    assert (sent.first_try, sent.first_message) == (False, False)


UNSAFE = "out of gas\x00 \x1b[2J \x9b one\ntwo \ud800\u202e"


async def test_notes_with_control_characters_are_stored_cleaned_and_spend_their_attempt(store: Store) -> None:
    share_id = await broadcast_one(store, 1)
    await store.mark_sending(share_id, height=110, endpoint=UNSAFE)
    await store.record_outcome(share_id, outcome=UNSAFE)
    (sent,) = await store.unconfirmed()
    assert (sent.last_endpoint or "").isprintable()
    assert (sent.last_outcome or "").isprintable()

    assert await store.retry(share_id, due_ms=int(NOW * 1000), stage=UNSAFE[:20], note=UNSAFE) == 1

    (entry,) = await store.list_shares(QueueFilter(), 9)
    assert entry.attempts == 1
    assert entry.note == "out of gas   [2J   one two   "
    assert entry.stage.isprintable()
    story = await store.show(entry.ref)
    assert story is not None
    assert story.history[-1].note == entry.note


async def test_audit_log_with_control_characters_is_stored_cleaned(store: Store) -> None:
    number = await store.begin_action(Actor(1000, "ann\x1b\udcff\x00", "socket"), "retry", {})
    await store.end_action(number, {"error": "a\x00"})
    (act,) = await store.actions(limit=1)
    assert act.actor.name == "ann   "
