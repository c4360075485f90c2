"""The SQLite schema: invariants for every writer, the identity of a file, and upgrades of older ones."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreCorrupt, StoreError, StoreForeign
from helper.store import shares
from helper.store.backup import restore_database
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.sqlite.opening import open_database, quick_check
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.schema import latest_version, migrations
from helper.store.sqlite.snapshot import check_image, read_contents
from helper.store.sqlite.store import SqliteStore
from helper.store.table_rows import WITNESS_FORMATS
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    StoreOpener,
    claim_all_due,
    confirm_shares,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    open_closed_database,
    query_rows,
    read_database_files,
    retry_as_operator,
    without_sends,
)

REFUSED_STATEMENTS = [
    ("shares", "tag = zeroblob(15)"),
    ("shares", "tag = NULL"),
    ("shares", "tag = '16 characters...'"),
    ("shares", "witness = zeroblob(0)"),
    ("shares", "witness = zeroblob(17201)"),
    ("shares", "witness = NULL"),
    ("shares", "witness = hex(witness)"),
    ("shares", "mac = zeroblob(16)"),
    ("shares", "due_ms = 1.5"),
    ("shares", "attempts = -1"),
    ("shares", "state = 2"),
    ("shares", "state = 5"),
    ("shares", "stage = ''"),
    ("shares", "note = hex(zeroblob(201))"),
    ("shares", "row_check = x''"),
    ("reveals", "message = zeroblob(32)"),
    ("reveals", "message = zeroblob(65701)"),
    ("reveals", "sends = 1"),
    ("reveals", "first_sent_height = 5"),
    ("reveals", "sends = 1, first_sent_height = 5, last_sent_height = 4"),
    ("reveals", "share_id = 99"),
    ("history", "counted = 2"),
    ("history", "share_id = 99"),
    ("round_keys", "mac_key = zeroblob(75)"),
    ("round_keys", "round_id = zeroblob(33)"),
    ("meta", "value = NULL"),
]


async def test_schema_refuses_invalid_rows(store: SqliteStore, path: Path) -> None:
    await enqueue_and_prepare(store, 1)
    await store.close()

    statements = [f"UPDATE {table} SET {change}" for table, change in REFUSED_STATEMENTS]
    statements += ["INSERT INTO actions (begun_ms, uid, who, way, what, wanted) VALUES (0, 0, 'x', 'tcp', 'x', '{}')"]
    with open_closed_database(path) as conn:
        conn.execute("PRAGMA foreign_keys = ON")
        accepted = []
        for statement in statements:
            with suppress(sqlite3.IntegrityError):
                conn.execute(statement)
                accepted.append(statement)
    assert accepted == []


async def test_schema_allows_one_row_per_share(store: SqliteStore, path: Path) -> None:
    await enqueue_and_prepare(store, 1)
    await store.close()

    with open_closed_database(path) as conn:
        conn.execute("DROP TRIGGER shares_begin")
        columns = [row[1] for row in conn.execute("PRAGMA table_info(shares)") if row[1] != "id"]
        names = ", ".join(columns)
        with pytest.raises(sqlite3.IntegrityError, match="mac"):
            conn.execute(f"INSERT INTO shares (id, {names}) SELECT 2, {names} FROM shares")


def test_layout_of_stored_witnesses_is_the_recorded_one() -> None:
    """With another one, every share that is stored already would count as damaged."""
    integers = {"share_index": "I", "proposal_id": "I", "vote_decision": "I", "tree_position": "I", "submit_at": "q"}
    points = {"c1": "32s", "c2": "32s", "shares_hash": "32s", "share_comms": "512s", "primary_blind": "32s"}
    recorded = {"received_ms": "q", **integers, "nullifier": "32s", **points}
    assert list(WITNESS_FORMATS.items()) == list(recorded.items())


def test_documented_transition_table_matches_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "state_machine.md").read_text()
    rows = re.findall(r"^\| (\w+) \((\d)\) \| ([^|]*) \| `(\w+)` \|", text, re.MULTILINE)
    transitions = {
        (old_state, new_state)
        for old_state, _, targets, _ in rows
        for new_state in targets.partition(":")[0].split(", ")
        if new_state != "nothing"
    }
    assert transitions == {(a.label, b.label) for a, to in TRANSITIONS.items() for b in to}
    assert {(label, int(code), json_name) for label, code, _, json_name in rows} == {
        (state.label, state.value, state.json_name) for state in ShareState
    }


# ---------------------------------------- upgrades


NEXT = "CREATE TABLE more (n INTEGER);" + "".join(
    f"ALTER TABLE {table} ADD COLUMN more INTEGER;" for table in ("round_keys", "rounds", "shares", "reveals")
)
"""A migration only of these tests, which makes this version's database an older one."""
OLD_STATE_COUNTS = {ShareState.WAITING: 2, ShareState.SENT: 1, ShareState.FAILED: 1, ShareState.CONFIRMED: 1}


async def fill(store: SqliteStore) -> int:
    """Enqueue shares in every state; return the id of the failed one."""
    await enqueue_and_prepare(store, 3)
    await confirm_shares(store, 3, height=1)
    await enqueue_and_prepare(store, 4)
    await enqueue_shares(store, 5)
    (failed,) = await claim_all_due(store)
    await store.run(shares.fail, failed.id, stage="proof", note="invalid")
    await enqueue_shares(store, 1, 2)
    return failed.id


def add_migration(monkeypatch: pytest.MonkeyPatch, step: str = NEXT) -> None:
    steps = (*migrations(), step)
    monkeypatch.setattr("helper.store.sqlite.schema.migrations", lambda: steps)


@pytest.fixture
async def failed_id(store: SqliteStore) -> int:
    """Fill and close the database; return the id of the failed share."""
    share_id = await fill(store)
    await store.close()
    return share_id


@pytest.fixture
def old_database(path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database whose schema is one version behind."""
    assert failed_id
    add_migration(monkeypatch)
    return path


def read_schema_version(path: Path) -> int:
    with open_closed_database(path) as conn:
        return int(conn.execute("PRAGMA user_version").fetchone()[0])


async def test_start_upgrades_the_schema_and_keeps_the_shares(
    old_database: Path, failed_id: int, open_sqlite_store: StoreOpener
) -> None:
    assert read_schema_version(old_database) == latest_version() - 1
    store = await open_sqlite_store(old_database)
    assert await store.count_shares() == {ROUND: OLD_STATE_COUNTS}
    await enqueue_shares(store, 1, 3)  # known: share 1 is pending, share 3 is confirmed
    assert await store.count_shares() == {ROUND: OLD_STATE_COUNTS}
    assert await retry_as_operator(store, failed_id) == 1
    assert [without_sends(sent.row) for sent in await store.list_unconfirmed()] == [make_reveal(4)]
    assert {queued.share for queued in await claim_all_due(store, now=NOW + 100)} == {
        make_posted_share(number).share for number in (1, 2, 5)
    }
    await store.close()
    assert read_schema_version(old_database) == latest_version()
    assert query_rows(old_database, "SELECT * FROM more") == []


async def test_failed_upgrade_changes_nothing(path: Path, failed_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed_id
    before = query_rows(path, "SELECT * FROM shares")
    with monkeypatch.context() as newer:
        add_migration(newer, f"{NEXT} DELETE FROM shares; INSERT INTO nowhere VALUES (1);")
        with pytest.raises(StoreError, match="nowhere"):
            open_database(path, SystemClock())
    open_database(path, SystemClock()).close()
    assert query_rows(path, "SELECT * FROM shares") == before


async def test_damaged_row_stays_damaged_and_is_reported(old_database: Path) -> None:
    with open_closed_database(old_database) as conn:
        conn.execute(
            "UPDATE shares SET witness = flip(witness, 'submit_at') WHERE field(witness, 'tree_position') = ?",
            (make_posted_share(1).share.tree_position,),
        )
    assert read_contents(old_database, SystemClock()).damaged == 1
    open_database(old_database, SystemClock()).close()
    assert read_contents(old_database, SystemClock()).damaged == 1


# ---------------------------------------- identity: every function that opens a file applies the same check


CLOCK = SystemClock()


async def by_daemon(path: Path) -> None:
    open_database(path, CLOCK).close()


async def by_operator_query(path: Path) -> None:
    async with open_queue_file(path):
        pass


async def by_backup(path: Path) -> None:
    read_contents(path, CLOCK)


async def by_restore(path: Path) -> None:
    check_image(path.read_bytes(), str(path))


async def by_doctor(path: Path) -> None:
    quick_check(path, CLOCK, seconds=60)


async def by_migration(path: Path) -> None:
    endpoint = SqliteEndpoint(path, CLOCK)
    try:
        endpoint.connect_read_only()
    finally:
        endpoint.close()


Use = Callable[[Path], Awaitable[None]]
USES = [by_daemon, by_operator_query, by_backup, by_restore, by_doctor, by_migration]


def set_header(path: Path, pragma: str, value: int) -> None:
    open_database(path, CLOCK).close()
    with open_closed_database(path) as conn:
        conn.execute("PRAGMA journal_mode = DELETE")  # as in a backup
        conn.execute(f"PRAGMA {pragma} = {value}")


def foreign(path: Path) -> None:
    with open_closed_database(path) as conn:
        conn.execute("CREATE TABLE songs (title TEXT)")


REFUSED: list[tuple[Callable[[Path], object], type[StoreError], str]] = [
    (lambda path: path.write_text("not a database\n" * 500), StoreForeign, "is not a database"),
    (foreign, StoreForeign, "is a database of another program"),
    (lambda path: set_header(path, "user_version", 99), StoreForeign, "was written by a newer version"),
    (lambda path: set_header(path, "user_version", 1), StoreForeign, "was written before the first release"),
    (lambda path: set_header(path, "user_version", 0), StoreCorrupt, "is damaged: its schema version is 0"),
]


@pytest.mark.parametrize("operation", USES)
@pytest.mark.parametrize(
    ("make", "kind", "text"), REFUSED, ids=["text", "foreign", "newer", "before-release", "no-version"]
)
async def test_every_operation_refuses_foreign_file_with_same_error(
    path: Path, operation: Use, make: Callable[[Path], object], kind: type[StoreError], text: str
) -> None:
    make(path)
    before = path.read_bytes()

    with pytest.raises(kind) as refused:
        await operation(path)

    assert str(refused.value).startswith(f"{path} {text}")
    assert refused.value.advice
    assert kind is not StoreForeign or "db_path" in refused.value.advice or "newer" in text or "release" in text
    assert path.read_bytes() == before


@pytest.mark.parametrize("operation", [by_operator_query, by_migration])
async def test_older_database_is_refused_by_what_reads_the_latest_schema_only(
    path: Path, operation: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_database(path, CLOCK).close()
    add_migration(monkeypatch)
    before = read_database_files(path)[path.name]

    with pytest.raises(StoreForeign, match=rf"older version \(schema {latest_version() - 1}") as refused:
        await operation(path)

    assert "svote-helper db migrate" in refused.value.advice
    assert read_database_files(path)[path.name] == before


@pytest.mark.parametrize("operation", [by_operator_query, by_doctor, by_migration])
async def test_empty_file_is_a_new_database_for_the_helper_only(path: Path, operation: Use) -> None:
    path.touch()
    with pytest.raises(StoreForeign, match="is an empty database"):
        await operation(path)
    await by_daemon(path)
    await operation(path)


async def over_existing_path(path: Path) -> None:
    restore_database(b"image", path, set_aside=True)


@pytest.mark.parametrize("operation", [*(use for use in USES if use != by_restore), over_existing_path])
@pytest.mark.parametrize("make", [Path.mkdir, foreign, lambda path: path.write_text("a letter")])
async def test_nothing_is_created_beside_or_instead_of_what_is_no_queue(
    path: Path, operation: Use, make: Callable[[Path], object]
) -> None:
    make(path)
    mode = path.stat().st_mode
    with pytest.raises(StoreForeign, match=r"is not a file|is not a database|is a database of another program"):
        await operation(path)
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode == mode
