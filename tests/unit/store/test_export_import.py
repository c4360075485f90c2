"""Shares on their way to another machine: what a file carries, what stays here, and what is taken over there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.store.action_rows import MOVED, Checked, ExportedReveal, ExportedShare
from helper.store.operations.export import Selection, select_for_export
from helper.store.rows import FailureGroup, HistoryEntry, QueueFilter
from helper.store.sqlite.snapshot import take_snapshot
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.unit.store.conformance.test_chain_facts import ToldRound
from tests.unit.store.conformance.test_operator_actions import failed, retried
from tests.unit.store.fixtures import NOW, OTHER_ROUND, ROUND, Opener, claim, hands_on, posted, put, reveal, rows


def selected(path: Path, wanted: QueueFilter | None = None, *refs: str) -> Selection:
    """What an export of the file would carry."""
    return select_for_export(take_snapshot(path, FakeClock()).image, wanted or QueueFilter(), refs)


async def one_of_each(store: SqliteStore) -> None:
    """Share 1 was sent, 2 failed, 3 is being proven, 4 waits; 5 is of another round."""
    await store.save_rounds([ToldRound(), ToldRound(OTHER_ROUND)], NOW)
    await store.set_meta("chain_id", "chain-1")
    await failed(store, 2, note="refused")
    await put(store, 1)
    (queued,) = await claim(store)
    await store.prepare(queued.id, reveal(1))
    await store.mark_sending(queued.id, height=110, endpoint="node:80")
    await store.record_outcome(queued.id, outcome="ACCEPTED")
    await put(store, 3)
    await claim(store)
    await put(store, 4, submit_at=int(NOW) + 50)
    other = posted(5, round_id=OTHER_ROUND)
    await store.enqueue(other.share, other.nullifier, now=NOW)


async def test_an_export_carries_each_share_as_it_stands(store: SqliteStore, path: Path) -> None:
    await one_of_each(store)

    found = selected(path)

    assert found.chain_id == "chain-1"
    by_number = {one.share.tree_position - 70_000: one for one in found.carried}
    assert {number: one.state for number, one in by_number.items()} == {
        1: ShareState.BROADCAST,
        2: ShareState.FAILED,
        3: ShareState.RECEIVED,
        4: ShareState.RECEIVED,
        5: ShareState.RECEIVED,
    }
    assert by_number[1].reveal == ExportedReveal(reveal(1), 1, 110, 110, "node:80", "ACCEPTED")
    assert (by_number[2].attempts, by_number[2].stage, by_number[2].note) == (1, "proof", "refused")
    assert [(line.stage, line.counted) for line in by_number[2].history] == [("proof", True)]
    assert by_number[4] == ExportedShare(
        posted(4, submit_at=int(NOW) + 50).share, int(NOW * 1000), ShareState.RECEIVED, (int(NOW) + 50) * 1000, 0, 0,
        None, "accepted", "",
    )  # fmt: skip
    assert found.left == {}


async def test_an_export_can_be_narrowed_and_leaves_what_is_of_no_use(store: SqliteStore, path: Path) -> None:
    await one_of_each(store)
    assert len(selected(path, QueueFilter(round_id=OTHER_ROUND)).carried) == 1
    assert len(selected(path, QueueFilter(state=ShareState.FAILED)).carried) == 1
    entry = (await store.list_shares(QueueFilter(state=ShareState.BROADCAST), 9))[0]
    (named,) = selected(path, None, entry.ref[:6]).carried
    assert named.state is ShareState.BROADCAST

    await store.mark_closed(OTHER_ROUND, NOW)
    assert selected(path).left == {"closed": 1}
    await store.close()
    with hands_on(path) as conn:
        conn.execute("UPDATE shares SET attempts = 9 WHERE state = 3")
        conn.execute("UPDATE reveals SET sends = 2")
    found = selected(path)
    assert found.left == {"closed": 1, "damaged": 1}
    assert {one.state for one in found.carried} == {ShareState.RECEIVED}, "a message that is damaged is made anew"
    await store.open()
    await store.close()


async def test_what_is_handed_over_is_left_alone_until_it_is_taken_back_or_counted(
    store: SqliteStore, path: Path
) -> None:
    await one_of_each(store)
    found = selected(path)
    await put(store, 6)

    counts = await store.mark_moved(found.marks, note="gone", at_rest=True)

    assert counts == {"moved": 3, "stayed": 2}, "what is being proven or was sent is in hand"
    assert [one.share for one in await claim(store, now=NOW + 99)] == [posted(6).share], "only what came since"
    assert selected(path).left == {"moved": 3}
    assert await store.failed_groups(QueueFilter(stage=MOVED), limit=9) == [
        FailureGroup(int(NOW * 1000), MOVED, "gone", 3)
    ]
    again = await store.mark_moved(found.marks, note="gone", at_rest=True)
    assert again == {"stayed": 5}, "a row that changed since it was read is not touched"

    assert await store.apply_block(9, [(ROUND, posted(2).nullifier)], now=NOW), "counted by the other machine's reveal"
    ids = await store.failed_ids(None, after_id=0, limit=9)
    assert await retried(store, ids, QueueFilter(stage=MOVED)) == {"retried": 2}


# ---------------------------------------------------------------------- taking over


def checked(carried: list[ExportedShare]) -> list[Checked]:
    """Each with the nullifier that its hashes would give."""
    return [(one, posted(one.share.tree_position - 70_000, round_id=one.share.round_id).nullifier) for one in carried]


async def taken(store: SqliteStore, lot: list[Checked], *, dry: bool = False) -> dict[str, int]:
    """How many shares had each result."""
    return dict(Counter(one.result for one in await store.import_shares(lot, note="from there", dry=dry)))


@pytest.fixture
async def there(opened: Opener, tmp_path: Path) -> SqliteStore:
    """Another machine's store, that follows the same chain."""
    (tmp_path / "there").mkdir()
    other = await opened(tmp_path / "there" / "queue.db")
    await other.save_rounds([ToldRound(), ToldRound(OTHER_ROUND)], NOW)
    return other


async def test_shares_go_on_there_as_they_stood_here(store: SqliteStore, path: Path, there: SqliteStore) -> None:
    await one_of_each(store)
    lot = checked(selected(path).carried)

    assert await taken(there, lot, dry=True) == {"taken": 5}
    assert await there.counts() == {}
    assert await taken(there, lot) == {"taken": 5}
    assert await taken(there, lot) == {"queued": 4, "failed": 1}, "twice is once"

    assert await there.counts() == {
        ROUND: {ShareState.BROADCAST: 1, ShareState.FAILED: 1, ShareState.RECEIVED: 2},
        OTHER_ROUND: {ShareState.RECEIVED: 1},
    }
    (sent,) = await there.unconfirmed()
    assert (sent.prepared, sent.sends, sent.last_sent_height, sent.last_outcome) == (reveal(1), 1, 110, "ACCEPTED")
    assert sent.nullifier == posted(1).nullifier
    assert sent.first_message, "what was never sent in another form is known to be so there too"
    (entry,) = await there.list_shares(QueueFilter(state=ShareState.FAILED), 9)
    assert (entry.stage, entry.note, entry.attempts) == ("proof", "refused", 1)
    story = await there.show(entry.ref)
    assert story is not None
    assert [(line.stage, line.note) for line in story.history] == [
        ("accepted", ""),
        ("proof", "refused"),
        ("import", "from there"),
    ]
    assert {one.share for one in await claim(there, now=NOW + 99)} == {
        posted(3).share,
        posted(4, submit_at=int(NOW) + 50).share,
    }
    assert await there.apply_block(120, [(ROUND, posted(1).nullifier)], now=NOW) == [sent.share_id]


async def test_what_is_taken_over_is_sound_and_comes_through_a_restart(
    store: SqliteStore, path: Path, there: SqliteStore
) -> None:
    await one_of_each(store)
    await taken(there, checked(selected(path).carried))
    before = await there.counts()

    assert await there.verify() == []
    assert await there.damaged() == []
    assert await there.counts() == before


async def test_what_is_known_spent_closed_or_unknown_there_is_left(
    store: SqliteStore, path: Path, there: SqliteStore
) -> None:
    await one_of_each(store)
    await put(there, 3)
    await there.apply_block(5, [(ROUND, posted(4).nullifier)], now=NOW)
    await put(there, 2)
    await there.apply_block(6, [(ROUND, posted(2).nullifier)], now=NOW)
    await there.mark_closed(OTHER_ROUND, NOW)
    strange = replace(selected(path).carried[0], share=posted(9, round_id=b"?" * 32).share)

    counts = await taken(there, [*checked(selected(path).carried), (strange, b"n" * 32)])

    assert counts == {"taken": 1, "queued": 1, "confirmed": 2, "closed": 1, "unknown": 1}


@pytest.mark.rule("R4")
async def test_no_file_makes_a_share_due_before_its_time(there: SqliteStore, path: Path) -> None:
    in_an_hour = int(NOW) + 3600
    early = ExportedShare(
        share=posted(1, submit_at=in_an_hour).share,
        received_ms=0,
        state=ShareState.RECEIVED,
        due_ms=0,
        attempts=0,
        crashes=0,
        proved_height=None,
        stage="accepted",
        note="",
    )
    sent = replace(
        early,
        share=posted(2, submit_at=in_an_hour).share,
        state=ShareState.BROADCAST,
        reveal=ExportedReveal(reveal(2), 1, 5, 5, "node", None),
    )
    never_sent = replace(
        sent, share=posted(3).share, due_ms=int(NOW * 1000), reveal=ExportedReveal(reveal(3), 0, None, None, None, None)
    )

    assert await taken(there, checked([early, sent, never_sent])) == {"taken": 3}

    assert await there.unconfirmed() == [], "a message whose time has not come, or that was never sent, is made anew"
    assert [one.share for one in await claim(there, now=in_an_hour - 1)] == [posted(3).share]
    assert len(await claim(there, now=in_an_hour)) == 2


async def test_a_long_history_is_carried_as_it_is(store: SqliteStore, path: Path, there: SqliteStore) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await put(store, 1)
    for number in range(60):
        (queued,) = await claim(store)
        await store.requeue(queued.id, stage="tree", note=f"look {number}")
    (one,) = selected(path).carried
    assert len(one.history) == 50
    await taken(there, checked([one]))

    (entry,) = await there.list_shares(QueueFilter(), 9)
    story = await there.show(entry.ref)
    assert story is not None
    assert story.history[1:-1] == one.history
    assert isinstance(story.history[-1], HistoryEntry)
    assert rows(path, "SELECT count(*) FROM shares") == [(1,)]
