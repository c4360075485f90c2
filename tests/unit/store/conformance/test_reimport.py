"""Shares that were handed over with `queue export --move` and come home with an import."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helper.core.share import ShareState
from helper.store.action_rows import ExportedReveal, ExportedShare, ImportedShare, ImportResult
from helper.store.rows import HistoryEntry, QueueFilter
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Place, Reopen
from tests.unit.store.conformance.test_chain_facts import ToldRound
from tests.unit.store.conformance.test_operator_actions import failed
from tests.unit.store.fixtures import NOW, ROUND, broadcast_one, claim, posted, put, reveal

NOW_MS = int(NOW * 1000)
THERE = HistoryEntry(NOW_MS + 5, "proof", "no memory", counted=True)
"""A line that the other machine added."""


def carried(number: int, **changes: Any) -> ExportedShare:
    """A share as the other machine's export has it."""
    share = replace(posted(number).share, submit_at=changes.pop("submit_at", 0))
    as_received = ExportedShare(share, NOW_MS, ShareState.RECEIVED, NOW_MS, 4, 1, 88, "proof", "no memory", (THERE,))
    return replace(as_received, **changes)


async def imported(store: Store, *lot: ExportedShare, dry: bool = False) -> list[ImportedShare]:
    checked = [(one, posted(one.share.tree_position - 70_000).nullifier) for one in lot]
    return await store.import_shares(checked, note="from there", dry=dry)


async def results(store: Store, *lot: ExportedShare, dry: bool = False) -> list[ImportResult]:
    return [one.result for one in await imported(store, *lot, dry=dry)]


async def hand_over(store: Store, place: Place, *, at_rest: bool = True) -> None:
    """Hand over every share of the store."""
    marks = place.rows("SELECT id, row_check FROM shares ORDER BY id")
    counts = await store.mark_moved(marks, note="gone", at_rest=at_rest)
    assert counts == {"moved": len(marks)}


async def test_import_of_moved_share_returns_it_to_the_queue_at_its_own_time(
    store: Store, place: Place, reopen: Reopen
) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await put(store, 1, submit_at=int(NOW) + 50)
    await put(store, 2)
    await failed(store, 3)
    await hand_over(store, place)
    entries = {entry.ref for entry in await store.list_shares(QueueFilter(), 9)}
    lot = [carried(1, due_ms=0), carried(2, due_ms=2**40 * 1000), carried(3, state=ShareState.FAILED)]

    assert await results(store, *lot, dry=True) == [ImportResult.REVIVED] * 3
    assert await store.counts() == {ROUND: {ShareState.FAILED: 3}}
    done = await imported(store, *lot)

    assert [one.result for one in done] == [ImportResult.REVIVED] * 3
    assert {one.ref for one in done} == entries
    assert {one.round_id for one in done} == {ROUND}
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 3}}
    await store.close()
    again = await reopen()
    assert {one.share.tree_position - 70_000 for one in await claim(again, now=NOW + 49)} == {2, 3}
    (last,) = await claim(again, now=NOW + 50)
    assert last.share == posted(1, submit_at=int(NOW) + 50).share, "never before its own time, whatever the file says"
    assert (last.attempts, last.crashes, last.proved_height) == (0, 0, 88)
    assert await again.verify() == []


async def test_import_of_moved_share_keeps_the_history_of_both_machines(store: Store, place: Place) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await failed(store, 1)
    (entry,) = await store.list_shares(QueueFilter(), 9)
    before = await store.show(entry.ref)  # whose first line is made from the row, not stored
    assert before is not None
    await hand_over(store, place)

    await results(store, carried(1, history=(*before.history[1:], THERE)))

    story = await store.show(entry.ref)
    assert story is not None
    notes = [line.note for line in story.history]
    assert notes == [*(line.note for line in before.history), "gone", "no memory", "from there"]
    assert (story.entry.stage, story.entry.note) == ("import", "from there")


async def test_import_of_moved_share_that_was_sent_elsewhere_continues_with_that_message(
    store: Store, place: Place
) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await broadcast_one(store, 1)
    await put(store, 2, submit_at=int(NOW) + 50)
    await hand_over(store, place, at_rest=False)
    assert await store.unconfirmed() == []
    sent = carried(
        1, state=ShareState.BROADCAST, reveal=ExportedReveal(reveal(1), 3, 105, 110, "there:80", "AMBIGUOUS")
    )
    early = carried(2, state=ShareState.BROADCAST, reveal=ExportedReveal(reveal(2), 1, 105, 105, "there:80", None))

    assert await results(store, sent, early) == [ImportResult.REVIVED] * 2

    (one,) = await store.unconfirmed()
    assert (one.prepared, one.sends, one.last_sent_height) == (reveal(1), 3, 110)
    assert await claim(store, now=NOW + 49) == [], "a file with an earlier time does not make a share early"
    assert await store.apply_block(120, [(ROUND, posted(1).nullifier)], now=NOW) == [one.share_id]


async def test_import_of_moved_share_is_repeatable_and_stays_live_once(store: Store, place: Place) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await put(store, 1, 2)
    await hand_over(store, place)
    assert await results(store, carried(1)) == [ImportResult.REVIVED], "interrupted after the first"

    assert await results(store, carried(1), carried(2)) == [ImportResult.QUEUED, ImportResult.REVIVED]
    assert await results(store, carried(1), carried(2)) == [ImportResult.QUEUED] * 2
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 2}}

    await hand_over(store, place)
    assert await results(store, carried(1), carried(2)) == [ImportResult.REVIVED] * 2, "back and forth again"


async def test_import_of_known_shares_that_were_not_moved_names_each_reason(
    store: Store, place: Place, clock: FakeClock
) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await failed(store, 1)
    await broadcast_one(store, 2)
    await put(store, 3, 4, 5)
    await store.apply_block(9, [(ROUND, posted(4).nullifier)], now=NOW)
    await store.close()
    place.change(f"UPDATE shares SET attempts = 9 WHERE id = {place.rows('SELECT max(id) FROM shares')[0][0]}")
    await store.open()
    await place.begin(store)

    lot = [carried(number) for number in (1, 2, 3, 4, 5)]
    expected = ["failed", "queued", "queued", "confirmed", "damaged"]
    assert await results(store, *lot) == expected
    await store.mark_closed(ROUND, clock.now())
    assert await results(store, *lot) == ["closed"] * 5
    await store.purge(ROUND)
    assert await imported(store, carried(1)) == [ImportedShare(ImportResult.UNKNOWN, None, ROUND)]
    await store.close()


async def test_import_of_moved_share_counted_meanwhile_is_left_as_confirmed(store: Store, place: Place) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await put(store, 1)
    await hand_over(store, place)
    await store.apply_block(9, [(ROUND, posted(1).nullifier)], now=NOW)

    assert await results(store, carried(1)) == [ImportResult.CONFIRMED]
    assert await store.counts() == {ROUND: {ShareState.SUBMITTED: 1}}
