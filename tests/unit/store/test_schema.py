"""The schema enforces the invariants for every writer."""

from __future__ import annotations

import re
import sqlite3
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from helper.core.share import TRANSITIONS, ShareState
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.conformance.test_transitions import LIVE_STATES, create_share_in_state
from tests.unit.store.fixtures import enqueue_and_prepare, open_closed_database

REFUSED_STATEMENTS = [
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
    ("shares", "kind = 'seventeen letters'"),
    ("shares", "extra = zeroblob(16385)"),
    ("shares", "extra = NULL"),
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


async def test_schema_refuses_invalid_rows(store: SqliteStore, path: Path) -> None:
    await enqueue_and_prepare(store, 1)
    await store.close()

    statements = [f"UPDATE {table} SET {change}" for table, change in REFUSED_STATEMENTS]
    statements += [
        f"INSERT INTO tombstones (round_no, mac, state) VALUES (1, zeroblob(32), {state})" for state in (0, 1, 3, 4)
    ]
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


@pytest.mark.parametrize("old_state", LIVE_STATES)
async def test_schema_transitions_match_code(store: SqliteStore, path: Path, old_state: ShareState) -> None:
    await create_share_in_state(store, old_state)
    await store.close()

    with open_closed_database(path) as conn:
        for new_state in ShareState:
            conn.execute("BEGIN")
            if new_state is ShareState.BROADCAST and old_state is not ShareState.BROADCAST:
                conn.execute(
                    "INSERT INTO reveals (share_id, message, tx_hash, anchor_height, circuit, height, sends,"
                    " decide_height, row_check) VALUES (1, x'04', zeroblob(32), 1, 'k10', 1, 0, 0, zeroblob(8))"
                )
            is_legal = new_state in TRANSITIONS[old_state] and new_state is not ShareState.SUBMITTED
            with nullcontext() if is_legal or new_state is old_state else pytest.raises(sqlite3.IntegrityError):
                conn.execute("UPDATE shares SET state = ? WHERE id = 1", (new_state.value,))
            conn.execute("ROLLBACK")


async def test_schema_refuses_broadcast_without_stored_message(store: SqliteStore, path: Path) -> None:
    await create_share_in_state(store, ShareState.WITNESSED)
    await store.close()

    with open_closed_database(path) as conn, pytest.raises(sqlite3.IntegrityError, match="no message"):
        conn.execute("UPDATE shares SET state = 4 WHERE id = 1")


async def test_schema_refuses_insert_in_state_other_than_received(store: SqliteStore, path: Path) -> None:
    await create_share_in_state(store, ShareState.RECEIVED)
    await store.close()

    with open_closed_database(path) as conn:
        columns = [row[1] for row in conn.execute("PRAGMA table_info(shares)")]
        for state in (1, 3, 4):
            chosen = ", ".join(
                {"id": "2", "mac": "zeroblob(32)", "state": str(state)}.get(name, name) for name in columns
            )
            with pytest.raises(sqlite3.IntegrityError, match="begins as received"):
                conn.execute(f"INSERT INTO shares SELECT {chosen} FROM shares")


def test_documented_transition_table_matches_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "state_machine.md").read_text()
    transitions = {
        (old_state, new_state)
        for old_state, targets in re.findall(r"^\| `(\w+)` \(\d\) \| ([^|]*) \|", text, re.MULTILINE)
        for new_state in re.findall(r"`(\w+)`", targets)
    }
    codes = dict(re.findall(r"^\| `(\w+)` \((\d)\) \|", text, re.MULTILINE))
    assert transitions == {(a.name.lower(), b.name.lower()) for a, to in TRANSITIONS.items() for b in to}
    assert codes == {state.name.lower(): str(state.value) for state in ShareState}
