"""What operators ask of the store: the record of acts, retries, handing over and taking over, what failed before."""

from __future__ import annotations

import pytest

from helper.core.share import ShareState
from helper.store.action_rows import Actor, PurgedFailures
from helper.store.operations.actions import ACTIONS_KEPT
from helper.store.operations.failure_counts import DAYS_KEPT, KINDS_A_DAY, OTHER
from helper.store.rows import QueueFilter
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Place, Reopen
from tests.unit.store.conformance.test_chain_facts import ToldRound
from tests.unit.store.fixtures import NOW, OTHER_ROUND, ROUND, claim, posted, put, reveal

ANN = Actor(1000, "ann", "socket")
DAY = 86_400
TODAY = int(NOW) // DAY


async def failed(store: Store, *numbers: int, stage: str = "proof", note: str = "no") -> list[int]:
    """Shares that failed for good; their ids."""
    await put(store, *numbers)
    claimed = await claim(store)
    for one in claimed:
        await store.fail(one.id, stage=stage, note=note, spend_attempt=True)
    return [one.id for one in claimed]


async def retried(
    store: Store,
    ids: list[int],
    wanted: QueueFilter | None = None,
    *,
    closed: tuple[bytes, ...] = (),
    dry: bool = False,
) -> dict[str, int]:
    return dict(await store.retry_failed(ids, wanted or QueueFilter(), closed=closed, note="by ann", dry=dry))


# ---------------------------------------------------------------------- the migration


# ---------------------------------------------------------------------- the record


async def test_an_act_is_on_record_from_its_begin_and_says_when_it_was_cut_off(
    reopen: Reopen, store: Store, place: Place, clock: FakeClock
) -> None:
    first = await store.begin_action(ANN, "retry", {"round": ROUND.hex(), "named": 3})
    clock.advance(2)
    await store.end_action(first, {"retried": 3})
    await store.begin_action(Actor(0, "root", "file"), "purge", {})
    await store.close()

    again = await reopen()
    async with place.offline() as offline:
        lists = [await reader.actions(limit=5) for reader in (again, *offline)]
    for told in lists:
        cut_off, whole = told
        assert (whole.actor, whole.what, whole.wanted) == (ANN, "retry", {"round": ROUND.hex(), "named": 3})
        assert (whole.begun_ms, whole.ended_ms) == (int(NOW * 1000), int(NOW * 1000) + 2000)
        assert whole.outcome == {"retried": 3}
        assert (cut_off.actor.name, cut_off.ended_ms, cut_off.outcome) == ("root", None, None)
    assert [act.what for act in await again.actions(limit=1)] == ["purge"]


async def test_the_record_does_not_grow_for_ever(store: Store, place: Place) -> None:
    await store.begin_action(ANN, "first", {})
    await store.close()
    columns = "id, begun_ms, uid, who, way, what, wanted"
    place.change(f"INSERT INTO actions ({columns}) VALUES ({ACTIONS_KEPT}, 0, 0, 'x', 'file', 'x', '{{}}')")
    await store.open()
    await store.begin_action(ANN, "last", {})

    assert [act.what for act in await store.actions(limit=9)] == ["last", "x"]
    await store.close()


async def test_a_record_that_a_disk_damaged_is_told_as_that(store: Store, place: Place) -> None:
    await store.begin_action(ANN, "retry", {"named": 1})
    await store.close()
    place.change("UPDATE actions SET wanted = '{\"nam'")
    await store.open()
    assert [act.wanted for act in await store.actions(limit=9)] == [{"damaged": True}]
    await store.close()


# ---------------------------------------------------------------------- retries


@pytest.mark.rule("R15")
async def test_a_retried_share_keeps_its_time_and_has_all_attempts_back(store: Store, place: Place) -> None:
    await store.save_rounds([ToldRound()], NOW)
    await put(store, 1, submit_at=int(NOW) + 5)
    (queued,) = await claim(store)
    await store.record_crash(queued.id, due_ms=queued.due_ms, note="killed")
    (queued,) = await claim(store)
    await store.prepare(queued.id, reveal(1))
    await store.fail(queued.id, stage="broadcast", note="refused", spend_attempt=True)

    assert await retried(store, [queued.id], dry=True) == {"retried": 1}
    assert place.rows("SELECT state FROM shares") == [(3,)], "a rehearsal changes nothing"
    assert await retried(store, [queued.id]) == {"retried": 1}
    assert await retried(store, [queued.id]) == {}

    found = place.rows("SELECT state, due_ms, attempts, crashes FROM shares")
    assert found == [(0, (int(NOW) + 5) * 1000, 0, 0)]
    assert place.rows("SELECT * FROM reveals") == [], "its old message is gone"
    (again,) = await claim(store)
    assert again.share == posted(1).at(int(NOW) + 5).share
    (entry,) = await store.list_shares(QueueFilter(), 9)
    story = await store.show(entry.ref)
    assert story is not None
    assert ("operator", "by ann") in [(line.stage, line.note) for line in story.history]


async def test_a_closed_rounds_shares_stay_failed(store: Store) -> None:
    await store.save_rounds([ToldRound(), ToldRound(OTHER_ROUND)], NOW)
    ids = await failed(store, 1, 2)
    assert await retried(store, ids, closed=(ROUND,)) == {"closed": 2}
    await store.mark_closed(ROUND, NOW)
    assert await retried(store, ids) == {"closed": 2}, "the round's own mark says so too"
    assert await store.counts() == {ROUND: {ShareState.FAILED: 2}}


async def test_only_what_is_wanted_is_retried(store: Store) -> None:
    proof = await failed(store, 1)
    other = await failed(store, 2, stage="broadcast")
    await put(store, 3)
    ids = await store.failed_ids(None, after_id=0, limit=9)
    assert ids == proof + other
    assert await store.failed_ids(ROUND, after_id=proof[0], limit=9) == other
    assert await store.failed_ids(OTHER_ROUND, after_id=0, limit=9) == []
    for wanted in (
        QueueFilter(stage="tree"),
        QueueFilter(round_id=OTHER_ROUND),
        QueueFilter(due_before_ms=int(NOW * 1000)),
        QueueFilter(state=ShareState.RECEIVED),
    ):
        assert await retried(store, ids, wanted) == {}
    assert await retried(store, ids, QueueFilter(stage="broadcast", due_before_ms=int(NOW * 1000) + 1)) == {
        "retried": 1
    }
    assert await store.failed_ids(None, after_id=0, limit=9) == proof


async def test_a_damaged_share_is_not_retried(store: Store, place: Place) -> None:
    ids = await failed(store, 1, 2)
    await store.close()
    place.change(f"UPDATE shares SET crashes = crashes + 1 WHERE id = {ids[0]}")
    await store.open()
    assert await retried(store, ids) == {"retried": 1}
    assert len(await store.damaged()) == 1
    assert await store.failed_ids(None, after_id=0, limit=9) == []
    await store.close()


# ---------------------------------------------------------------------- what failed before


async def test_of_a_purged_rounds_failed_shares_stage_and_reason_are_counted_and_nothing_else(
    store: Store, place: Place
) -> None:
    await failed(store, 1, 2, note="the node said 00112233445566778899aabbccddeeff")
    await failed(store, 3, stage="tree", note="no leaf")
    await put(store, 4)
    assert await store.purged_failures() == []
    groups = await store.failed_groups(QueueFilter(round_id=ROUND), limit=9)
    assert {(group.stage, group.count) for group in groups} == {("proof", 2), ("tree", 1)}
    assert await store.failed_groups(QueueFilter(round_id=OTHER_ROUND), limit=9) == []
    assert await store.failed_groups(QueueFilter(state=ShareState.RECEIVED), limit=9) == []

    await store.purge(ROUND)

    assert await store.failed_groups(QueueFilter(), limit=9) == []
    told = [PurgedFailures(TODAY, "proof", "the node said …", 2), PurgedFailures(TODAY, "tree", "no leaf", 1)]
    assert await store.purged_failures() == told
    async with place.offline() as offline:
        for reader in offline:
            assert await reader.purged_failures() == told


async def test_what_failed_before_is_forgotten_after_some_days(store: Store, clock: FakeClock) -> None:
    await failed(store, 1)
    await store.purge(ROUND)
    clock.advance(DAYS_KEPT * DAY)
    assert await store.delete_old_failure_counts() == 0
    clock.advance(DAY)
    assert await store.delete_old_failure_counts() == 1
    assert await store.purged_failures() == []


async def test_a_day_of_a_clock_that_was_years_ahead_is_forgotten_too(store: Store, clock: FakeClock) -> None:
    clock.advance(3650 * DAY)
    await failed(store, 1)
    await store.purge(ROUND)
    clock.advance(-3650 * DAY)
    assert await store.delete_old_failure_counts() == 1


async def test_a_days_kinds_of_failure_are_bounded(store: Store) -> None:
    await put(store, *range(KINDS_A_DAY + 3))
    for one in await claim(store, limit=1000):
        await store.fail(one.id, stage="proof", note=f"reason {one.id}", spend_attempt=True)
    await store.purge(ROUND)

    told = await store.purged_failures()
    assert len(told) == KINDS_A_DAY + 1
    assert sum(one.count for one in told) == KINDS_A_DAY + 3
    assert [one.count for one in told if (one.stage, one.reason) == OTHER] == [3]


async def test_a_damaged_share_is_counted_as_that(store: Store, place: Place) -> None:
    await failed(store, 1)
    await store.close()
    place.change("UPDATE shares SET note = 'a flipped bit'")
    await store.open()
    await store.purge(ROUND)
    assert [(one.stage, one.count) for one in await store.purged_failures()] == [("damaged", 1)]
    await store.close()


# ---------------------------------------------------------------------- small questions


async def test_names_and_sizes_are_found(store: Store) -> None:
    await put(store, *range(9))
    entries = await store.list_shares(QueueFilter(), 9)
    assert [len(await store.share_ids(entry.ref)) for entry in entries] == [1] * 9
    assert await store.share_ids("ffffff000000") == []
    assert await store.share_ids("zz") == []
    await store.save_leaves(ROUND, 5, 0, bytes(96))
    await store.save_leaves(ROUND, 6, 3, bytes(32))
    assert await store.tree_sizes() == {ROUND: 4}
    await store.add_spent([(ROUND, b"n" * 32), (OTHER_ROUND, b"n" * 32), (ROUND, b"m" * 32)])
    assert sorted(await store.rounds_of_spent(b"n" * 32)) == sorted([ROUND, OTHER_ROUND])
    assert await store.rounds_of_spent(b"x" * 32) == []
