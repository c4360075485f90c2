"""Facts from the chain: rounds, blocks, leaves, and the end of a round."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store.models import QueueFilter, StoredRound
from helper.store.store import Store
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    enqueue_shares,
    make_posted_share,
    make_reveal,
)

LEAVES = b"".join(number.to_bytes(32, "big") for number in range(10))
TREE_BYTES = 1023 * 32


@dataclass
class ChainProposal:
    id: int
    options: tuple[int, ...]


@dataclass
class ChainRound:
    round_id: bytes = ROUND
    status: int = 1
    vote_end_time: int = int(NOW) + 100
    created_at_height: int = 7
    proposals: tuple[ChainProposal, ...] = (ChainProposal(1, (0, 1)), ChainProposal(2, (0, 1, 2)))


@pytest.mark.rule("R9")
async def test_rounds_after_reopen_keep_closed_and_alerted_times(
    reopen: Reopen, store: Store, backend: StoreBackend
) -> None:
    await store.save_rounds([ChainRound(), ChainRound(OTHER_ROUND, created_at_height=3)], NOW)
    await store.mark_closed(ROUND, NOW + 1)
    await store.mark_closed(ROUND, NOW + 2)
    await store.mark_alerted(ROUND, NOW + 3)
    await store.mark_closed(b"?" * 32, NOW)
    await store.save_rounds([ChainRound(status=2)], NOW + 4)
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
    await store.save_rounds([ChainRound()], NOW)
    await store.mark_closed(ROUND, NOW + 1)
    await store.save_rounds([ChainRound(vote_end_time=int(NOW) + 900)], NOW + 2)
    await store.close()
    (stored_round,) = await (await reopen()).list_rounds()
    assert (stored_round.vote_end_time, stored_round.closed_at) == (int(NOW) + 900, NOW + 1)


async def test_apply_block_twice_is_applied_once(store: Store, backend: StoreBackend) -> None:
    await enqueue_shares(store, 1, 2)
    block = [(ROUND, make_posted_share(1).nullifier), (ROUND, b"n" * 32)]

    assert await store.apply_block(10, block, now=NOW) == [1]
    before = backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")
    assert await store.apply_block(10, block, now=NOW) == []
    assert await store.add_spent(block) == []

    assert (backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")) == before
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1, ShareState.SUBMITTED: 1}}


async def test_apply_block_older_height_does_not_move_cursor(store: Store) -> None:
    assert await store.get_cursor() is None
    await store.add_spent([(ROUND, b"n" * 32)])
    assert await store.get_cursor() is None
    for height, expected in ((5, 5), (9, 9), (6, 9)):
        await store.apply_block(height, [], now=NOW)
        assert await store.get_cursor() == expected


async def test_apply_block_records_the_blocks_of_lost_commits_as_unread(store: Store) -> None:
    await store.apply_block(5, [], now=NOW)
    await store.apply_block(9, [], now=NOW)  # a host applied 6 to 8 to a primary whose standby lacks them
    await store.apply_block(10, [], now=NOW)

    assert (await store.get_cursor(), await store.list_unread_blocks()) == (10, [(6, 8)])


async def test_skip_to_records_the_blocks_between_as_unread(store: Store, reopen: Reopen) -> None:
    await store.skip_to(100, first=41)
    assert (await store.get_cursor(), await store.list_unread_blocks()) == (100, [(41, 100)])
    await store.apply_block(101, [], now=NOW)
    await store.skip_to(200, first=1)
    assert (await store.get_cursor(), await store.list_unread_blocks()) == (200, [(41, 100), (102, 200)])
    for height in (200, 150):
        await store.skip_to(height, first=1)
    await store.close()
    store = await reopen()
    assert (await store.get_cursor(), await store.list_unread_blocks()) == (200, [(41, 100), (102, 200)])


async def test_skip_to_in_a_new_database_without_rounds_records_nothing(store: Store) -> None:
    await store.skip_to(100, first=101)
    assert (await store.get_cursor(), await store.list_unread_blocks()) == (100, [])


async def test_move_back_lowers_the_cursor_and_records_blocks_as_unread(store: Store, reopen: Reopen) -> None:
    await store.skip_to(50, first=41)
    await store.apply_unread(41, 50, [], now=NOW)
    await store.skip_to(2**60, first=1)
    await store.rewind_to(90, first=45)
    await store.rewind_to(95, first=1)
    await store.close()
    store = await reopen()
    assert (await store.get_cursor(), await store.list_unread_blocks()) == (90, [(45, 90)])
    await store.apply_block(91, [], now=NOW)
    assert await store.get_cursor() == 91


@pytest.mark.rule("R12")
async def test_add_spent_of_unread_blocks_confirms_shares_and_keeps_cursor(store: Store) -> None:
    await enqueue_shares(store, 1, 2)
    await store.skip_to(100, first=41)
    spent = [(ROUND, make_posted_share(1).nullifier)]

    assert await store.apply_unread(93, 100, spent, now=NOW) == [1]
    assert await store.apply_unread(93, 100, spent, now=NOW) == []
    assert await store.apply_unread(60, 69, [], now=NOW) == []

    assert (await store.get_cursor(), await store.list_unread_blocks()) == (100, [(41, 59), (70, 92)])
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1, ShareState.SUBMITTED: 1}}
    await store.apply_unread(1, 100, [], now=NOW)
    assert await store.list_unread_blocks() == []


async def test_rescan_twice_confirms_missed_shares_once_and_keeps_confirmed_ones(
    store: Store, backend: StoreBackend, reopen: Reopen
) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await enqueue_shares(store, 1, 2, 3)
    found, missed = make_posted_share(1).nullifier, make_posted_share(2).nullifier
    await store.apply_block(50, [(ROUND, found)], now=NOW)
    tombstones = backend.query_rows("SELECT * FROM tombstones")
    spent = [(ROUND, found), (ROUND, missed), (ROUND, b"n" * 32), (OTHER_ROUND, b"p" * 32)]

    rescan = await store.begin_rescan(1)
    assert (rescan.requested, rescan.left) == (((7, 50),), 44), "not before the oldest round"
    assert await store.apply_unread(43, 50, spent, now=NOW, rescan=rescan.number) == [2]
    await store.close()
    store = await reopen()
    half_read = await store.get_rescan()
    assert half_read is not None
    assert half_read.unread == ((7, 42),)
    await store.apply_unread(7, 42, [], now=NOW, rescan=rescan.number)
    finished = await store.get_rescan()
    assert finished is not None
    assert finished.counts == {"read": 44, "pruned": 0, "added": 2, "confirmed": 1}

    before = backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")
    again = await store.begin_rescan(1)
    assert await store.apply_unread(7, 50, spent, now=NOW, rescan=again.number) == []
    finished = await store.get_rescan()
    assert finished is not None
    assert finished.counts == {"read": 44, "pruned": 0, "added": 0, "confirmed": 0}
    after = backend.query_rows("SELECT * FROM spent"), backend.query_rows("SELECT * FROM tombstones")
    assert after == before
    assert set(tombstones) < set(after[1]), "the tombstone of a confirmed share does not change"
    assert len(after[0]) == 3, "nullifiers of rounds without stored data are not stored again"
    assert await store.get_cursor() == 50
    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1, ShareState.SUBMITTED: 2}}


async def test_rescan_only_reads_of_its_number_count(store: Store) -> None:
    await store.save_rounds([ChainRound()], NOW)
    await store.skip_to(100, first=41)
    first = await store.begin_rescan(91)
    await store.apply_unread(41, 100, [], now=NOW)
    assert await store.list_unread_blocks() == []
    second = await store.begin_rescan(96)
    assert second.unread == ((91, 100),), "an unfinished rescan is included"
    await store.apply_unread(91, 100, [], now=NOW, rescan=first.number)
    assert await store.get_rescan() == second
    await store.rewind_to(97, first=50)
    await store.abandon_unread(94)
    state = await store.get_rescan()
    assert state is not None
    assert (state.requested, state.unread, state.pruned) == (((91, 97),), ((95, 97),), ((91, 94),))
    assert await store.list_unread_blocks() == [(95, 97)]


async def test_rescan_without_stored_rounds_has_no_blocks(store: Store) -> None:
    await store.apply_block(100, [], now=NOW)
    rescan = await store.begin_rescan(1)
    assert (rescan.requested, rescan.blocks, rescan.left) == ((), 0, 0)


async def test_apply_block_nullifier_confirms_only_in_its_round(store: Store) -> None:
    await enqueue_shares(store, 1)

    assert await store.apply_block(5, [(OTHER_ROUND, make_posted_share(1).nullifier)], now=NOW) == []

    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 1}}


async def test_save_leaves_twice_stores_them_once_in_order(store: Store) -> None:
    await store.save_leaves(ROUND, 3, 0, LEAVES[:96])
    await store.save_leaves(ROUND, 5, 3, LEAVES[96:160])
    await store.save_leaves(ROUND, 5, 3, LEAVES[96:160])
    await store.save_leaves(ROUND, 5, 0, LEAVES[:160])
    await store.save_leaves(ROUND, 9, 4, LEAVES[128:])
    await store.save_leaves(ROUND, 9, 0, b"")

    assert await store.load_leaves(ROUND) == (LEAVES, 9)
    assert await store.load_leaves(OTHER_ROUND) == (b"", 0)


async def test_save_leaves_conflicting_or_with_gap_is_refused(store: Store) -> None:
    await store.save_leaves(ROUND, 3, 0, LEAVES[:128])
    for start, leaves, message in (
        (0, b"?" * 32, "contradict"),
        (2, LEAVES[64:96] + b"?" * 32, "contradict"),
        (1, LEAVES[:160], "contradict"),
        (5, b"?" * 32, "missing"),
        (4, b"?" * 31, "32 bytes"),
        (-1, b"?" * 32, "32 bytes"),
    ):
        with pytest.raises(StoreError, match=message):
            await store.save_leaves(ROUND, 4, start, leaves)
        assert await store.load_leaves(ROUND) == (LEAVES[:128], 3)


async def test_subtrees_are_returned_up_to_first_missing(store: Store) -> None:
    first, second, fourth = (bytes([n]) * TREE_BYTES for n in (1, 2, 4))
    await store.save_subtrees(ROUND, 0, first + second)
    await store.save_subtrees(ROUND, 3, fourth)

    assert await store.load_subtrees(ROUND) == first + second
    await store.save_subtrees(ROUND, 1, fourth)
    assert await store.load_subtrees(ROUND) == first + fourth
    with pytest.raises(StoreError, match="must be complete"):
        await store.save_subtrees(ROUND, 0, b"?")

    await store.save_leaves(ROUND, 3, 0, LEAVES)
    await store.delete_tree(ROUND)
    assert (await store.load_subtrees(ROUND), await store.load_leaves(ROUND)) == (b"", (b"", 0))


@pytest.mark.rule("R15")
async def test_fail_unspent_of_closed_round_fails_and_keeps_unconfirmed_shares(store: Store) -> None:
    await enqueue_shares(store, *range(250))
    other = make_posted_share(1, round_id=OTHER_ROUND)
    await store.enqueue(other.share, other.nullifier, now=NOW)
    for queued in await claim_all_due(store, limit=3):
        if queued.id % 2:
            await store.prepare(queued.id, make_reveal(1))
    await store.fail(250, stage="proof", note="its own reason")
    await store.apply_block(5, [(ROUND, make_posted_share(100).nullifier)], now=NOW)
    waiting = sum((await store.count_unconfirmed(ROUND)).values())

    assert waiting == 249
    assert await store.fail_unspent(ROUND, note="closed") == 248
    assert await store.count_unconfirmed(ROUND) == {ShareState.FAILED: 249}
    assert await store.fail_unspent(ROUND, note="closed") == 0
    assert await store.count_shares() == {
        ROUND: {ShareState.FAILED: 249, ShareState.SUBMITTED: 1},
        OTHER_ROUND: {ShareState.RECEIVED: 1},
    }
    notes = {entry.note for entry in await store.list_shares(QueueFilter(state=ShareState.FAILED), 999)}
    assert notes == {"closed", "its own reason"}


async def test_set_meta_is_readable_after_reopen(store: Store) -> None:
    assert await store.get_meta("chain") is None
    await store.set_meta("chain", "svote-1")
    await store.set_meta("chain", "svote-2")
    assert await store.get_meta("chain") == "svote-2"
