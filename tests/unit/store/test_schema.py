"""The schema repeats what must hold, for whatever writes to the file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from helper.store import SqliteStore
from tests.unit.store.parts import broadcast_one, hands_on

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
