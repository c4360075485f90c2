"""Facts from the chain: rounds, blocks, leaves, and the end of a round."""

from __future__ import annotations

import pytest

from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store import blocks, messages, rounds, shares
from helper.store.ledger import Ledger, Rescan
from helper.store.models import QueueFilter, StoredRound
from helper.store.store import Store
from tests.unit.store.conformance.backends import Reopen, StoreBackend
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
)

LEAVES = b"".join(number.to_bytes(32, "big") for number in range(10))
TREE_BYTES = 1023 * 32


def make_stored_round(
    round_id: bytes = ROUND, *, status: int = 1, vote_end_time: int = int(NOW) + 100, created_at_height: int = 7
) -> StoredRound:
    return StoredRound(round_id, status, vote_end_time, created_at_height, ((1, (0, 1)), (2, (0, 1, 2))))


@pytest.mark.rule("R9")
async def test_rounds_after_reopen_keep_closed_and_alerted_times(reopen: Reopen, store: Store) -> None:
    await store.run(rounds.save_rounds, [make_stored_round(), make_stored_round(OTHER_ROUND, created_at_height=3)], NOW)
    await store.run(rounds.mark_closed, ROUND, NOW + 1)
    await store.run(rounds.mark_closed, ROUND, NOW + 2)
    await store.run(rounds.mark_alerted, ROUND, NOW + 3)
    await store.run(rounds.mark_closed, b"?" * 32, NOW)
    await store.run(rounds.save_rounds, [make_stored_round(status=2)], NOW + 4)
    await store.close()

    reopened = await reopen()
    other, first = await reopened.list_rounds()
    assert other.round_id == OTHER_ROUND
    assert first == StoredRound(
        round_id=ROUND,
        status=2,
        vote_end_time=int(NOW) + 100,
        created_at_height=7,
        proposals=((1, (0, 1)), (2, (0, 1, 2))),
        closed_at=NOW + 1,
        alerted_at=NOW + 3,
    )


async def test_save_rounds_other_end_replaces_end_and_keeps_marks(reopen: Reopen, store: Store) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await store.run(rounds.mark_closed, ROUND, NOW + 1)
    await store.run(rounds.save_rounds, [make_stored_round(vote_end_time=int(NOW) + 900)], NOW + 2)
    await store.close()
    (stored_round,) = await (await reopen()).list_rounds()
    assert (stored_round.vote_end_time, stored_round.closed_at) == (int(NOW) + 900, NOW + 1)


async def test_apply_block_twice_is_applied_once(store: Store, backend: StoreBackend) -> None:
    await enqueue_shares(store, 1, 2)
    block = [(ROUND, make_posted_share(1).nullifier), (ROUND, b"n" * 32)]

    assert await store.run(blocks.apply_blocks, [(10, 10)], block) == [1]
    before = backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")
    assert await store.run(blocks.apply_blocks, [(10, 10)], block) == []
    assert await store.run(blocks.add_spent, block) == []

    assert (backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")) == before
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1, ShareState.CONFIRMED: 1}}


async def test_blocks_compared_without_a_round_that_is_stored_since_are_read_again(store: Store) -> None:
    await store.run(blocks.begin_ledger, 4)
    ignored = [(ROUND, b"n" * 32)]
    await store.run(blocks.apply_blocks, [(4, 4)], [], ignored)
    assert await store.get_ledger() == Ledger(4, 4, ())
    await store.run(rounds.save_rounds, [make_stored_round(created_at_height=5)], NOW)
    await store.run(blocks.apply_blocks, [(5, 5)], [], ignored)
    assert await store.get_ledger() == Ledger(4, 4, ())
    await store.run(blocks.add_spent, ignored)
    await store.run(blocks.apply_blocks, [(5, 5)], [], ignored)
    assert await store.get_ledger() == Ledger(4, 5, ())


async def test_ledger_begins_at_a_round_that_was_stored_since_its_beginning_was_chosen(store: Store) -> None:
    await store.run(rounds.save_rounds, [make_stored_round(created_at_height=3)], NOW)
    await store.run(blocks.begin_ledger, 5)
    assert await store.get_ledger() == Ledger(3, 2, ())


async def test_ledger_records_read_blocks_in_any_order(store: Store, reopen: Reopen) -> None:
    assert await store.get_ledger() is None
    await store.run(blocks.add_spent, [(ROUND, b"n" * 32)])
    assert await store.get_ledger() is None
    await store.run(blocks.begin_ledger, 4)
    await store.run(blocks.begin_ledger, 9)
    for height, ledger in (
        (5, Ledger(4, 5, ((4, 4),))),
        (9, Ledger(4, 9, ((4, 4), (6, 8)))),
        (4, Ledger(4, 9, ((6, 8),))),
    ):
        await confirm_shares(store, height=height)
        assert await store.get_ledger() == ledger
    await store.run(blocks.apply_blocks, [(6, 7), (11, 12)], [])
    await store.close()
    assert await (await reopen()).get_ledger() == Ledger(4, 12, ((8, 8), (10, 10)))


async def test_move_back_forgets_blocks_above_and_reads_the_others_again(store: Store) -> None:
    await store.run(blocks.begin_ledger, 41)
    await store.run(blocks.apply_blocks, [(41, 50), (2**60, 2**60)], [])
    await store.run(blocks.move_back, 90, first=45)
    await store.run(blocks.move_back, 95, first=1)
    assert await store.get_ledger() == Ledger(41, 44)


@pytest.mark.rule("R12")
async def test_apply_blocks_confirms_shares_in_gaps(store: Store) -> None:
    await enqueue_shares(store, 1, 2)
    await store.run(blocks.begin_ledger, 41)
    await confirm_shares(store, height=100)
    spent = [(ROUND, make_posted_share(1).nullifier)]

    assert await store.run(blocks.apply_blocks, [(93, 99)], spent) == [1]
    assert await store.run(blocks.apply_blocks, [(93, 99)], spent) == []
    await store.run(blocks.give_up_blocks, 60)

    assert await store.get_ledger() == Ledger(41, 100, ((61, 92),))
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1, ShareState.CONFIRMED: 1}}


async def test_nullifiers_of_rounds_that_are_not_stored_are_found_again_when_the_round_is(
    store: Store, backend: StoreBackend
) -> None:
    spent = [(ROUND, b"n" * 32)]
    await store.run(blocks.begin_ledger, 1)
    await store.run(blocks.apply_blocks, [(1, 20)], spent)
    assert backend.query_rows("SELECT * FROM spent") == []
    assert await store.run(blocks.list_unspent, spent) == []
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    assert await store.get_ledger() == Ledger(1, 6), "the blocks since the round's creation are read again"
    assert await store.run(blocks.list_unspent, spent) == spent
    await store.run(blocks.apply_blocks, [(7, 20)], spent)
    assert await store.run(blocks.list_unspent, spent) == []
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    assert await store.get_ledger() == Ledger(1, 20)


async def test_rescan_twice_confirms_missed_shares_once_and_keeps_confirmed_ones(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await store.run(rounds.save_rounds, [make_stored_round()], NOW)
    await enqueue_shares(store, 1, 2, 3)
    found, missed = make_posted_share(1).nullifier, make_posted_share(2).nullifier
    await store.run(blocks.begin_ledger, 1)
    await store.run(blocks.apply_blocks, [(1, 50)], [(ROUND, found)])
    tombstones = backend.query_rows("SELECT * FROM tombstones")
    spent = [(ROUND, found), (ROUND, missed), (ROUND, b"n" * 32), (OTHER_ROUND, b"p" * 32)]

    assert await store.run(blocks.begin_rescan, 1) == Ledger(1, 6, (), Rescan(7, 50)), "not before the oldest round"
    assert await store.run(blocks.apply_blocks, [(43, 50)], spent) == [2]
    await store.close()
    store = await reopen()
    assert await store.get_ledger() == Ledger(1, 50, ((7, 42),), Rescan(7, 50, added=2, confirmed=1))
    await store.run(blocks.give_up_blocks, 9)
    await store.run(blocks.apply_blocks, [(10, 42)], [])
    assert await store.get_ledger() == Ledger(1, 50, (), Rescan(7, 50, 2, 1, ((7, 9),)))

    before = backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")
    await store.run(blocks.begin_rescan, 1)
    assert await store.run(blocks.apply_blocks, [(7, 50)], spent) == []
    assert await store.get_ledger() == Ledger(1, 50, (), Rescan(7, 50))
    after = backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")
    assert after == before
    assert set(tombstones) < set(after[1]), "the tombstone of a confirmed share does not change"
    assert len(after[0]) == 3, "nullifiers of rounds without stored data are not stored again"
    assert await store.count_shares() == {ROUND: {ShareState.WAITING: 1, ShareState.CONFIRMED: 2}}


async def test_rescan_without_stored_rounds_has_no_blocks(store: Store) -> None:
    await confirm_shares(store, height=100)
    assert await store.run(blocks.begin_rescan, 1) == Ledger(100, 100, (), Rescan(101, 100))


async def test_save_leaves_twice_stores_them_once_in_order(store: Store) -> None:
    await store.run(rounds.save_leaves, ROUND, 3, 0, LEAVES[:96])
    await store.run(rounds.save_leaves, ROUND, 5, 3, LEAVES[96:160])
    await store.run(rounds.save_leaves, ROUND, 5, 3, LEAVES[96:160])
    await store.run(rounds.save_leaves, ROUND, 5, 0, LEAVES[:160])
    await store.run(rounds.save_leaves, ROUND, 9, 4, LEAVES[128:])
    await store.run(rounds.save_leaves, ROUND, 9, 0, b"")

    assert await store.load_leaves(ROUND) == (LEAVES, 9)
    assert await store.load_leaves(OTHER_ROUND) == (b"", 0)


async def test_save_leaves_conflicting_or_with_gap_is_refused(store: Store) -> None:
    await store.run(rounds.save_leaves, ROUND, 3, 0, LEAVES[:128])
    for start, leaves, message in (
        (0, b"?" * 32, "contradict"),
        (2, LEAVES[64:96] + b"?" * 32, "contradict"),
        (1, LEAVES[:160], "contradict"),
        (5, b"?" * 32, "missing"),
        (4, b"?" * 31, "32 bytes"),
        (-1, b"?" * 32, "32 bytes"),
    ):
        with pytest.raises(StoreError, match=message):
            await store.run(rounds.save_leaves, ROUND, 4, start, leaves)
        assert await store.load_leaves(ROUND) == (LEAVES[:128], 3)


async def test_subtrees_are_returned_up_to_first_missing(store: Store) -> None:
    first, second, fourth = (bytes([n]) * TREE_BYTES for n in (1, 2, 4))
    await store.run(rounds.save_subtrees, ROUND, 0, first + second)
    await store.run(rounds.save_subtrees, ROUND, 3, fourth)

    assert await store.load_subtrees(ROUND) == first + second
    await store.run(rounds.save_subtrees, ROUND, 1, fourth)
    assert await store.load_subtrees(ROUND) == first + fourth
    with pytest.raises(StoreError, match="must be complete"):
        await store.run(rounds.save_subtrees, ROUND, 0, b"?")

    await store.run(rounds.save_leaves, ROUND, 3, 0, LEAVES)
    await store.run(rounds.delete_tree, ROUND)
    assert (await store.load_subtrees(ROUND), await store.load_leaves(ROUND)) == (b"", (b"", 0))


@pytest.mark.rule("R15")
async def test_fail_unspent_of_closed_round_fails_and_keeps_unconfirmed_shares(store: Store) -> None:
    await enqueue_shares(store, *range(250))
    await enqueue(store, make_posted_share(1, round_id=OTHER_ROUND))
    for queued in await claim_all_due(store, limit=3):
        if queued.id % 2:
            await store.run(messages.prepare, queued.id, make_reveal(1))
    await store.run(shares.fail, 250, stage="proof", note="its own reason")
    await confirm_shares(store, 100, height=5)
    waiting = sum((await store.count_unconfirmed(ROUND)).values())

    assert waiting == 249
    assert await store.run_batches(rounds.fail_unconfirmed, ROUND, note="closed") == 248
    assert await store.count_unconfirmed(ROUND) == {ShareState.FAILED: 249}
    assert await store.run_batches(rounds.fail_unconfirmed, ROUND, note="closed") == 0
    assert await store.count_shares() == {
        ROUND: {ShareState.FAILED: 249, ShareState.CONFIRMED: 1},
        OTHER_ROUND: {ShareState.WAITING: 1},
    }
    notes = {entry.note for entry in await store.list_shares(QueueFilter(state=ShareState.FAILED), 999)}
    assert notes == {"closed", "its own reason"}


async def test_set_meta_is_readable_after_reopen(store: Store) -> None:
    assert await store.get_meta("chain") is None
    await store.run(blocks.set_meta, "chain", "svote-1")
    await store.run(blocks.set_meta, "chain", "svote-2")
    assert await store.get_meta("chain") == "svote-2"
