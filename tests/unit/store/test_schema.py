"""The schema repeats what must hold, for whatever writes to the file."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from helper.core.share import TRANSITIONS, ShareState
from helper.store.sqlite.schema import migrate_schema
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.conformance.test_transitions import LIVE, bring_to
from tests.unit.store.fixtures import broadcast_one, hands_on

REFUSED = [
    ("shares", "shares_hash = x'00'"),
    ("shares", "share_comms = zeroblob(511)"),
    ("shares", "primary_blind = NULL"),
    ("shares", "c1 = zeroblob(33)"),
    ("shares", "c2 = 'text of 32 characters, not a blob'"),
    ("shares", "nullifier = zeroblob(31)"),
    ("shares", "mac = zeroblob(16)"),
    ("shares", "share_index = 16"),
    ("shares", "share_index = -1"),
    ("shares", "proposal_id = 0"),
    ("shares", "vote_decision = 256"),
    ("shares", "tree_position = 16777216"),
    ("shares", "tree_position = -1"),
    ("shares", "submit_at = -1"),
    ("shares", "due_ms = 1.5"),
    ("shares", "attempts = -1"),
    ("shares", "state = 2"),
    ("shares", "state = 5"),
    ("shares", "stage = ''"),
    ("shares", "note = hex(zeroblob(201))"),
    ("shares", "row_check = x''"),
    ("reveals", "message = x''"),
    ("reveals", "tx_hash = zeroblob(31)"),
    ("reveals", "sends = 1"),
    ("reveals", "first_sent_height = 5"),
    ("reveals", "sends = 1, first_sent_height = 5, last_sent_height = 4"),
    ("reveals", "share_id = 99"),
    ("history", "counted = 2"),
    ("history", "share_id = 99"),
    ("round_keys", "mac_key = zeroblob(31)"),
    ("round_keys", "round_id = zeroblob(33)"),
    ("meta", "value = NULL"),
]


@pytest.mark.parametrize(("table", "change"), REFUSED)
async def test_the_schema_refuses_what_is_never_written(
    store: SqliteStore, path: Path, table: str, change: str
) -> None:
    await broadcast_one(store, 1)
    await store.close()

    with hands_on(path) as conn:
        conn.execute("PRAGMA foreign_keys = ON")
        with pytest.raises(sqlite3.IntegrityError):
            conn.execute(f"UPDATE {table} SET {change}")


@pytest.mark.parametrize("state", [0, 1, 3, 4])
async def test_a_tombstone_is_submitted_and_nothing_else(store: SqliteStore, path: Path, state: int) -> None:
    await broadcast_one(store, 1)
    await store.close()

    with hands_on(path) as conn, pytest.raises(sqlite3.IntegrityError):
        conn.execute("INSERT INTO tombstones (round_no, mac, state) VALUES (1, zeroblob(32), ?)", (state,))


async def test_one_share_has_one_row(store: SqliteStore, path: Path) -> None:
    await broadcast_one(store, 1)
    await store.close()

    with hands_on(path) as conn:
        conn.execute("DROP TRIGGER shares_begin")
        columns = [row[1] for row in conn.execute("PRAGMA table_info(shares)") if row[1] != "id"]
        names = ", ".join(columns)
        with pytest.raises(sqlite3.IntegrityError, match="mac"):
            conn.execute(f"INSERT INTO shares (id, {names}) SELECT 2, {names} FROM shares")


@pytest.mark.parametrize(("was", "becomes"), list(product(LIVE, ShareState)))
async def test_the_schema_knows_the_same_moves(
    store: SqliteStore, path: Path, was: ShareState, becomes: ShareState
) -> None:
    await bring_to(store, was)
    await store.close()

    with hands_on(path) as conn:
        if becomes is ShareState.BROADCAST and was is not ShareState.BROADCAST:
            conn.execute(
                "INSERT INTO reveals (share_id, message, tx_hash, anchor_height, circuit, height, sends, row_check)"
                " VALUES (1, x'04', zeroblob(32), 1, 'k10', 1, 0, zeroblob(8))"
            )
        change = "UPDATE shares SET state = ? WHERE id = 1"
        if becomes is was or (becomes in TRANSITIONS[was] and becomes is not ShareState.SUBMITTED):
            conn.execute(change, (becomes.value,))
        else:
            with pytest.raises(sqlite3.IntegrityError):
                conn.execute(change, (becomes.value,))


async def test_the_schema_lets_no_share_be_sent_without_a_message_on_disk(store: SqliteStore, path: Path) -> None:
    await bring_to(store, ShareState.WITNESSED)
    await store.close()

    with hands_on(path) as conn, pytest.raises(sqlite3.IntegrityError, match="no message"):
        conn.execute("UPDATE shares SET state = 4 WHERE id = 1")


async def test_the_schema_lets_a_share_begin_as_received_only(store: SqliteStore, path: Path) -> None:
    await bring_to(store, ShareState.RECEIVED)
    await store.close()

    with hands_on(path) as conn:
        columns = [row[1] for row in conn.execute("PRAGMA table_info(shares)")]
        for state in (1, 3, 4):
            chosen = ", ".join(
                {"id": "2", "mac": "zeroblob(32)", "state": str(state)}.get(name, name) for name in columns
            )
            with pytest.raises(sqlite3.IntegrityError, match="begins as received"):
                conn.execute(f"INSERT INTO shares SELECT {chosen} FROM shares")


def test_the_schema_and_the_document_name_the_table() -> None:
    with closing(sqlite3.connect(":memory:")) as conn:
        migrate_schema(conn)
        ((trigger,),) = conn.execute("SELECT sql FROM sqlite_schema WHERE name = 'shares_move'").fetchall()
    live = re.search(r"NEW\.state\) NOT IN \(\s*VALUES ([^;]*?)\n\)", trigger)
    assert live is not None
    pairs = {(int(a), int(b)) for a, b in re.findall(r"\((\d), (\d)\)", live[1])}
    assert pairs == {(a.value, b.value) for a, to in TRANSITIONS.items() for b in to if b is not ShareState.SUBMITTED}

    text = (Path(__file__).parents[3] / "docs" / "state_machine.md").read_text()
    told = {
        (was, becomes)
        for was, targets in re.findall(r"^\| `(\w+)` \(\d\) \| ([^|]*) \|", text, re.MULTILINE)
        for becomes in re.findall(r"`(\w+)`", targets)
    }
    codes = dict(re.findall(r"^\| `(\w+)` \((\d)\) \|", text, re.MULTILINE))
    assert told == {(a.name.lower(), b.name.lower()) for a, to in TRANSITIONS.items() for b in to}
    assert codes == {state.name.lower(): str(state.value) for state in ShareState}


async def test_the_schema_knows_the_two_ways(store: SqliteStore, path: Path) -> None:
    await store.close()
    with hands_on(path) as conn, pytest.raises(sqlite3.IntegrityError):
        conn.execute("INSERT INTO actions (begun_ms, uid, who, way, what, wanted) VALUES (0, 0, 'x', 'tcp', 'x', '{}')")
