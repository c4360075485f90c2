"""Moving a queue from one store to the other: what is carried, what is found, and that it can be cut off anywhere."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.share import ShareState
from helper.errors import NothingThere, StoreCopyDiffers, StoreForeign, StoreLocked, StoreMoved
from helper.store.migration.endpoint import MigrationEndpoint, copying
from helper.store.migration.migration import Migration, MigrationResult
from helper.store.migration.postgres_endpoint import PostgresEndpoint
from helper.store.migration.source_cleanup import erase, moved_to, undo
from helper.store.migration.sqlite_endpoint import SqliteEndpoint
from helper.store.migration.tables import (
    SHARES,
    TABLES,
    Table,
    compare,
    last_common,
    up_to,
)
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.keyring import Keyring
from helper.store.postgres.opening import migrations as postgres_migrations
from helper.store.records import ShareRow
from helper.store.rows import QueueFilter
from helper.store.sqlite.schema import migrations
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.support.fakes import PATIENCE
from tests.unit.store.conformance.backends import SEALS, Place, PostgresPlace, SqlitePlace
from tests.unit.store.conformance.conftest import KINDS
from tests.unit.store.conformance.test_chain_facts import ToldRound
from tests.unit.store.conformance.test_operator_actions import ANN, failed
from tests.unit.store.fixtures import NOW, OTHER_ROUND, ROUND, broadcast_one, claim, claim_one, hands_on, posted, put

LEAVES = bytes(range(32)) * 3
SUBTREE = b"n" * 32_736
Open = Callable[[Place], Awaitable[Store]]
CROSSINGS = list(itertools.permutations(KINDS, 2)) or [("sqlite", "sqlite")]
WAYS = [*CROSSINGS, *((kind, kind) for kind in KINDS)]


def place_for(kind: str, name: str, request: pytest.FixtureRequest, folder: Path) -> Place:
    if kind == "postgres":
        return PostgresPlace(request.getfixturevalue("cluster").address, f"test_{secrets.token_hex(6)}")
    (folder / name).mkdir()
    return SqlitePlace(folder / name)


def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[Place, Place]:
    first, second = (
        place_for(kind, name, request, folder) for kind, name in zip(request.param, ("here", "there"), strict=True)
    )
    return first, second


@pytest.fixture(params=CROSSINGS, ids=["-".join(way) for way in CROSSINGS])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, Place]:
    """Where a queue is, and where it is to be: of two kinds."""
    return pair(request, tmp_path)


@pytest.fixture(params=WAYS, ids=["-".join(way) for way in WAYS])
def any_places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, Place]:
    """The same, of one kind too."""
    return pair(request, tmp_path)


@pytest.fixture
async def opening(clock: FakeClock) -> AsyncIterator[Open]:
    """Opens stores, and closes them all at the end."""
    stores: list[Store] = []

    async def opened(place: Place) -> Store:
        one = place.store(clock, lambda _: None)
        await one.open()
        stores.append(one)
        await place.begin(one)
        return one

    yield opened
    for one in stores:
        await one.close()


def side_of(place: Place) -> MigrationEndpoint:
    if isinstance(place, SqlitePlace):
        return SqliteEndpoint(place.path, FakeClock())
    assert isinstance(place, PostgresPlace)
    return PostgresEndpoint(
        create_connection_settings(place.address, schema=place.schema, host="mover", patience=60), Keyring(SEALS)
    )


@pytest.fixture
def sides(places: tuple[Place, Place]) -> Iterator[tuple[MigrationEndpoint, MigrationEndpoint]]:
    both = side_of(places[0]), side_of(places[1])
    yield both
    for one in both:
        one.close()


async def filled(opening: Open, place: Place) -> None:
    """Have a queue there, and nobody who serves it."""
    here = await opening(place)
    await fill(here)
    await here.close()


def hold(one: Migration) -> None:
    """Keep every daemon off the source; a server notices a moment later that the last one has gone."""
    enough = time.monotonic() + PATIENCE
    while not one.try_hold():
        assert time.monotonic() < enough
        time.sleep(0.01)


def held_move(ends: tuple[MigrationEndpoint, MigrationEndpoint]) -> Migration:
    """A move between two sides that is about to end: the source is held."""
    one = Migration(*ends, clock=FakeClock(), say=lambda _: None)
    one.begin()
    hold(one)
    return one


def move(source: Place, target: Place) -> MigrationResult:
    """A whole move while nobody works on either."""
    ends = side_of(source), side_of(target)
    try:
        one = Migration(*ends, clock=FakeClock(), say=lambda _: None)
        one.begin()
        hold(one)
        return one.finish()
    finally:
        for end in ends:
            end.close()


def everything(place: Place) -> dict[str, list[Any]]:
    """All rows that a move carries."""
    side = side_of(place)
    try:
        side.look()
        found: dict[str, list[Any]] = {}
        for table in TABLES:
            after: Any = table.start or ()
            while after is not None:
                page = side.page(table, after)
                found.setdefault(table.name, []).extend(page)
                after = last_common(table, page, [])
        return found
    finally:
        side.close()


async def fill(store: Store) -> None:
    """Of everything something: a share in each state, tombstones, trees, acts, and what a purge leaves."""
    await failed(store, 20, note="no leaf")
    await store.purge(ROUND)
    act = await store.begin_action(ANN, "purge", {"round": ROUND.hex()})
    await store.end_action(act, {"purged": 1})
    await store.begin_action(ANN, "retry", {})
    await store.save_rounds([ToldRound(), ToldRound(OTHER_ROUND, created_at_height=3)], NOW)
    await store.set_meta("chain_id", "chain-1")
    await put(store, 8)
    assert await store.apply_block(90, [(ROUND, posted(8).nullifier), (ROUND, b"n" * 32)], now=NOW) != []
    share_id = await broadcast_one(store, 1)  # may have been sent
    assert await store.mark_sending(share_id, height=110, endpoint="node:80")
    await failed(store, 2, note="refused")
    await claim_one(store, 3)  # is being proven
    await put(store, 4, 5, 6, submit_at=int(NOW) + 50)
    other = posted(7, round_id=OTHER_ROUND)
    await store.enqueue(other.share, other.nullifier, now=NOW)
    await store.save_leaves(ROUND, 7, 0, LEAVES)
    await store.save_subtrees(ROUND, 0, SUBTREE)


async def names(store: Store) -> list[tuple[str, ShareState]]:
    listed = await store.list_shares(QueueFilter(), 100)
    return sorted((one.ref, one.state) for one in listed)


async def test_all_of_a_queue_arrives_as_it_was_and_its_old_place_is_not_served_any_more(
    any_places: tuple[Place, Place], opening: Open
) -> None:
    source, target = any_places
    here = await opening(source)
    await fill(here)
    named, counted = await names(here), await here.counts()
    await here.close()
    before = everything(source)
    assert [name for name, rows in before.items() if not rows] == []
    assert {one.share.state for one in before["shares"]} == set(ShareState) - {ShareState.SUBMITTED}

    moved = move(source, target)

    assert (moved.finished, moved.live, moved.confirmed, moved.damaged, moved.uncounted) == (True, 7, 1, [], 0)
    assert everything(target) == before
    with pytest.raises(StoreMoved, match="was moved to") as told:
        await opening(source)
    assert "--undo" in told.value.advice
    there = await opening(target)
    assert await names(there) == named
    assert await there.counts() == counted
    assert await there.verify() == []


async def test_what_was_in_hand_is_taken_up_at_the_new_place_as_after_a_crash(
    places: tuple[Place, Place], opening: Open
) -> None:
    source, target = places
    here = await opening(source)
    await fill(here)
    (sent,) = await here.unconfirmed()
    await here.close()
    move(source, target)

    there = await opening(target)
    assert await there.recover() == 1  # the one that was being proven; what may have been sent stays so

    assert await there.unconfirmed() == [sent]
    assert await there.counts() == {
        ROUND: {
            ShareState.RECEIVED: 4,
            ShareState.BROADCAST: 1,
            ShareState.FAILED: 1,
            ShareState.SUBMITTED: 1,
        },
        OTHER_ROUND: {ShareState.RECEIVED: 1},
    }
    claimed = await claim(there, now=NOW + 60)
    assert claimed[0].share.tree_position - 70_000 == 3
    assert sorted(one.share.tree_position - 70_000 for one in claimed) == [3, 4, 5, 6]
    for number in (1, 8):  # known there: live, and confirmed
        one = posted(number)
        assert (await there.enqueue(one.share, one.nullifier, now=NOW)).name == "DUPLICATE"
    await put(there, 30)
    (fresh,) = await claim(there, now=NOW + 60)
    assert fresh.id > max(one.id for one in claimed)


async def test_there_and_back_nothing_that_was_erased_comes_again(places: tuple[Place, Place], opening: Open) -> None:
    source, target = places
    await filled(opening, source)
    move(source, target)
    there = await opening(target)
    spent = [(ROUND, posted(number).nullifier) for number in (1, 3, 4)]
    assert len(await there.apply_block(120, spent, now=NOW + 70)) == 3
    await put(there, 40, 41)
    await there.mark_closed(OTHER_ROUND, NOW)
    await there.purge(OTHER_ROUND)
    counted = await there.counts()
    await there.close()
    stands = everything(target)

    move(target, source)

    assert everything(source) == stands
    if isinstance(source, SqlitePlace):
        left = b"".join(file.read_bytes() for file in source.path.parent.iterdir())
        assert posted(5).share.shares_hash in left
        for number in (1, 3, 4, 7, 8):
            one = posted(number, round_id=OTHER_ROUND if number == 7 else ROUND)
            assert one.share.shares_hash not in left
    again = await opening(source)
    assert await again.counts() == counted
    assert await again.enqueue(posted(4).share, posted(4).nullifier, now=NOW) is not None
    assert await again.counts() == counted
    with pytest.raises(StoreMoved):
        await opening(target)


def cut_after(ends: tuple[MigrationEndpoint, MigrationEndpoint], steps: int) -> None:
    """Have a move cut off once it has begun so many transactions."""
    left = itertools.count(steps, -1)
    for end in ends:
        for name in ("changing", "reading"):
            meant = getattr(end, name)

            def cut(meant: Any = meant) -> Any:
                if next(left) <= 0:
                    raise KeyboardInterrupt
                return meant()

            setattr(end, name, cut)


async def test_cut_off_anywhere_it_goes_on_and_leaves_nothing_twice(places: tuple[Place, Place], opening: Open) -> None:
    source, target = places
    await filled(opening, source)
    before = everything(source)
    cuts = 0
    for steps in itertools.count():
        ends = side_of(source), side_of(target)
        cut_after(ends, steps)
        one = Migration(*ends, clock=FakeClock(), say=lambda _: None)
        with suppress(KeyboardInterrupt):
            one.begin()
            hold(one)
            one.finish()
        for end in ends:
            end.close()
        if one.told.finished:
            break
        cuts += 1
        if steps:
            with pytest.raises(StoreMoved):
                await opening(target)
    assert cuts >= 8
    assert everything(target) == before
    await opening(target)


async def test_cut_off_between_the_marks_neither_is_served_and_the_same_command_ends_it(
    places: tuple[Place, Place], opening: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = places
    await filled(opening, source)
    ends = side_of(source), side_of(target)
    one = held_move(ends)

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ends[1], "set_mark", cut)
    with pytest.raises(KeyboardInterrupt):
        one.finish()
    for end in ends:
        end.close()
    for place in places:
        with pytest.raises(StoreMoved):
            await opening(place)

    assert move(source, target).finished
    await opening(target)
    with pytest.raises(StoreMoved, match="was moved to"):
        await opening(source)


async def test_beside_a_daemon_that_goes_on_passes_follow_and_the_last_waits_for_its_end(
    places: tuple[Place, Place], sides: tuple[MigrationEndpoint, MigrationEndpoint], opening: Open
) -> None:
    source, target = places
    here = await opening(source)
    await fill(here)
    one = Migration(*sides, clock=FakeClock(), say=lambda _: None)
    with ThreadPoolExecutor(1) as alone:  # connections belong to the thread that made them
        run = partial(asyncio.get_running_loop().run_in_executor, alone)
        await run(one.begin)
        with pytest.raises((StoreMoved, StoreLocked)):
            await opening(target)

        working = asyncio.create_task(work_on(here))
        await run(one.catch_up)
        await working
        await run(one.pass_beside)
        assert await run(one.pass_beside) == 0
        assert not await run(one.try_hold)
        await put(here, 90)
        assert await run(one.pass_beside) == 1  # still read, after the lock was not to be had
        await put(here, 91)
        await here.close()
        await run(hold, one)
        with pytest.raises(StoreLocked):
            await opening(source)
        moved = await run(one.finish)
        for end in sides:
            await run(end.close)

    assert moved.finished
    assert moved.live == 7 + 20 - 10 + 2
    assert everything(target) == everything(source)
    await opening(target)


async def work_on(store: Store) -> None:
    """What a daemon does: shares come, and some are counted."""
    for number in range(50, 70):
        await put(store, number)
        if number % 2:
            await store.apply_block(number, [(ROUND, posted(number).nullifier)], now=NOW)


TAMPERED = {
    "a time": "UPDATE shares SET due_ms = due_ms - 1 WHERE id = (SELECT max(id) FROM shares)",
    "a share": "DELETE FROM shares WHERE state = 3",
    "a tombstone": "DELETE FROM tombstones",
    "what is spent": "UPDATE spent SET round_no = round_no + 1 WHERE round_no = (SELECT min(round_no) FROM spent)",
    "a leaf": "UPDATE tree_leaves SET height = height + 1",
    "a line of a history": "UPDATE history SET note = 'x'",
    "a fact": "UPDATE meta SET value = 'chain-2' WHERE key = 'chain_id'",
    "a round": "UPDATE rounds SET status = status + 1",
    "a message": "UPDATE reveals SET anchor_height = anchor_height + 1",
    "an act": "UPDATE actions SET who = 'bob'",
    "what failed before": "UPDATE failed_before SET n = n + 1",
    "the counts": "UPDATE counters SET n = n + 1 WHERE state = 0",
}
BYTES: dict[type[MigrationEndpoint], str] = {
    SqliteEndpoint: "UPDATE shares SET shares_hash = zeroblob(32)",
    PostgresEndpoint: "UPDATE shares SET witness = set_byte(witness, 300, get_byte(witness, 300) # 1)",
}


async def test_a_copy_that_was_changed_is_found_nothing_is_moved_and_the_next_run_mends_it(
    places: tuple[Place, Place], opening: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = places
    await filled(opening, source)
    for what in [*TAMPERED, "a witness"]:
        ends = side_of(source), side_of(target)
        one = held_move(ends)
        ended = ends[1].end_copy

        def tampered(what: str = what, end: Any = ends[1], ended: Callable[[], None] = ended) -> None:
            ended()
            assert end._open.execute(TAMPERED.get(what) or BYTES[type(end)]).rowcount > 0, what

        monkeypatch.setattr(ends[1], "end_copy", tampered)
        with pytest.raises(StoreCopyDiffers, match="differs from"):
            one.finish()
        for end in ends:
            end.close()

    with pytest.raises(StoreMoved, match="unfinished copy"):
        await opening(target)
    await (await opening(source)).close()
    assert move(source, target).finished
    assert everything(target) == everything(source)


async def test_damaged_rows_stay_behind_and_are_named(places: tuple[Place, Place], opening: Open) -> None:
    source, target = places
    here = await opening(source)
    await fill(here)
    named = await names(here)
    await here.close()
    source.change("UPDATE shares SET due_ms = due_ms + 1 WHERE round_no = (SELECT max(no) FROM round_keys)")
    source.change("UPDATE reveals SET height = height + 1")

    moved = move(source, target)

    assert (moved.live, moved.uncounted) == (5, 0)
    assert len(moved.damaged) == 2
    there = await opening(target)
    left = await names(there)
    assert {one.ref for one in moved.damaged} == {ref for ref, _ in named} - {ref for ref, _ in left}
    assert await there.verify() == []
    assert await there.damaged() == []


async def test_only_an_empty_database_or_one_of_the_same_queue_is_written_to(
    places: tuple[Place, Place], opening: Open
) -> None:
    source, target = places
    for place in places:
        one = await opening(place)
        await fill(one)
        await one.close()
    before = everything(target)
    with pytest.raises(StoreForeign, match="already has another queue"):
        move(source, target)
    assert everything(target) == before
    with pytest.raises(StoreForeign, match="onto itself"):
        move(source, source)
    for place in places:
        await opening(place)


async def test_hosts_or_a_daemon_on_the_target_are_seen(places: tuple[Place, Place], opening: Open) -> None:
    source, target = places
    await fill(await opening(source))
    there = await opening(target)
    with pytest.raises(StoreLocked):
        move(source, target)
    await there.close()


async def test_two_moves_at_once_do_not_both_take_the_queue(
    places: tuple[Place, Place], sides: tuple[MigrationEndpoint, MigrationEndpoint], opening: Open, tmp_path: Path
) -> None:
    source, target = places
    here = await opening(source)
    await fill(here)
    slower = Migration(*sides, clock=FakeClock(), say=lambda _: None)
    slower.begin()
    await here.close()
    (tmp_path / "third").mkdir()
    third = SqlitePlace(tmp_path / "third")
    move(source, third)
    with pytest.raises(StoreMoved, match=str(third.path)):
        slower.try_hold()
    for end in sides:
        end.close()
    await opening(third)
    with pytest.raises(StoreMoved, match="unfinished copy"):
        await opening(target)


async def test_a_survey_tells_and_makes_nothing(places: tuple[Place, Place], opening: Open) -> None:
    source, target = places
    await fill(await opening(source))
    told = []
    for _ in range(2):
        ends = side_of(source), side_of(target)
        told.append(Migration(*ends, clock=FakeClock(), say=lambda _: None).survey())
        for end in ends:
            end.close()
    assert [(one.live, one.confirmed, one.finished) for one in told] == [(7, 1, False)] * 2
    with pytest.raises(NothingThere):
        side_of(target).look()


async def test_what_a_move_left_is_erased_and_the_queue_comes_back_all_the_same(
    places: tuple[Place, Place], opening: Open
) -> None:
    source, target = places
    await filled(opening, source)
    side = side_of(source)
    with pytest.raises(StoreForeign, match="not marked"):
        erase(side, say=lambda _: None)
    side.close()
    before = everything(source)
    move(source, target)
    side = side_of(source)
    erase(side, say=lambda _: None)
    side.close()

    assert {name for name, rows in everything(source).items() if rows} == {"meta"}
    if isinstance(source, SqlitePlace):
        left = b"".join(file.read_bytes() for file in source.path.parent.iterdir())
        for number in range(1, 9):
            one = posted(number, round_id=OTHER_ROUND if number == 7 else ROUND)
            assert one.share.shares_hash not in left
            assert one.nullifier not in left
    with pytest.raises(StoreMoved):
        await opening(source)
    move(target, source)
    assert everything(source) == before
    await opening(source)


async def test_the_mark_can_be_taken_away_where_the_copy_is_lost(places: tuple[Place, Place], opening: Open) -> None:
    source, target = places
    await filled(opening, source)
    move(source, target)
    with pytest.raises(StoreMoved):
        move(source, target)
    side = side_of(source)
    assert moved_to(side).other == side_of(target).label
    undo(side)
    with pytest.raises(StoreForeign, match="not marked"):
        undo(side)
    side.close()
    await opening(source)


async def test_what_only_a_file_keeps_in_a_text_is_carried_without_it(
    places: tuple[Place, Place], opening: Open
) -> None:
    source, target = places
    await filled(opening, source)
    if not isinstance(source, SqlitePlace):
        return
    key = bytes.fromhex(source.rows("SELECT value FROM meta WHERE key = 'key.rows'")[0][0])
    with hands_on(source.path) as conn:
        columns = conn.execute(f"{copying()['page_shares']}", (0, 1)).fetchone()
        row = ShareRow(*columns)._replace(note="a\0b").sealed(key)
        conn.execute("UPDATE shares SET note = ?, row_check = ? WHERE id = ?", (row.note, row.row_check, row.id))
        conn.execute("UPDATE history SET note = char(97, 0, 98)")
    moved = move(source, target)
    assert moved.damaged == []
    (there,) = [one for one in everything(target)["shares"] if one.id == row.id]
    assert there.share.note == "a\ufffdb"
    assert all(line[3] == "a\ufffdb" for line in there.history)


# ---------------------------------------------------------------------- the comparing, without databases

KEYS = st.tuples(st.integers(0, 5), st.binary(max_size=2))
CONTENTS = st.dictionaries(KEYS, st.integers(0, 2), max_size=25)


@given(source=CONTENTS, target=CONTENTS, rows=st.integers(1, 9))
def test_passing_over_two_tables_by_pages_makes_them_the_same_and_touches_no_other_row(
    source: dict[Any, int], target: dict[Any, int], rows: int
) -> None:
    table = Table("any", 2, (-1, b""), rows)

    def page(of: dict[Any, int], after: Any) -> list[Any]:
        return [(*key, value) for key, value in sorted(of.items()) if key > after][:rows]

    there, touched = dict(target), []
    after: Any = table.start
    while after is not None:
        ours, theirs = page(source, after), page(there, after)
        last = last_common(table, ours, theirs)
        assert last is None or last > after
        missing, changed, gone = compare(table, up_to(table, ours, last), up_to(table, theirs, last))
        for row in gone:
            del there[table.key(row)]
        there |= {table.key(row): row[2] for row in (*missing, *changed)}
        touched += [table.key(row) for row in (*missing, *changed, *gone)]
        after = last
    assert there == source
    assert sorted(touched) == sorted(key for key in source | target if source.get(key) != target.get(key))


def test_every_table_is_carried_or_made_anew() -> None:
    made_anew = {"counters", "damaged"}
    with_its_share = {"reveals", "history"}
    known = {table.name for table in TABLES} | made_anew | with_its_share
    assert tables_of(migrations()) == known
    assert tables_of(postgres_migrations()) == known | {"claims", "sender"}  # a file has one host


def tables_of(texts: Iterable[str]) -> set[str]:
    return {name for text in texts for name in re.findall(r"^CREATE TABLE (\w+)", text, re.MULTILINE)}


def test_every_table_has_its_statements() -> None:
    names = {f"{word}_{table.name}" for table in TABLES if table is not SHARES for word in ("page", "drop", "write")}
    assert names <= set(copying())
