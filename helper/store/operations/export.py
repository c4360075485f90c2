"""What an export carries: the live shares in a snapshot of the database, as they stood in one moment."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.action_rows import MOVED, ExportedReveal, ExportedShare, RowMark
from helper.store.operations.actions import matches
from helper.store.records import RevealRow, RoundRow, ShareRow
from helper.store.rows import HistoryEntry, PreparedReveal, QueueFilter
from helper.store.sql_files import queries
from helper.store.sqlite.errors import translate
from helper.store.transaction import read_fact

_CHAIN_ID: Final = "chain_id"


@dataclass(slots=True)
class Selection:
    """The shares that an export carries.

    Attributes:
        chain_id: the chain that they are for, None when it was never learnt.
        carried: the shares.
        marks: their rows as they were.
        left: how many live shares are not among them: `damaged`, of a `closed` round, or `moved` before.
    """

    chain_id: str | None
    carried: list[ExportedShare] = field(default_factory=list)
    marks: list[RowMark] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)


def select_for_export(image: bytes, wanted: QueueFilter, refs: Collection[str] = ()) -> Selection:
    """The shares in a database's bytes that an operator wants to carry away.

    Args:
        image: what `take_snapshot` gave: it was checked.
        wanted: which of them.
        refs: the beginnings of their names; none for any.

    Raises:
        StoreError: the bytes can not be read.
    """
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
            conn.text_factory = partial(str, encoding="utf-8", errors="replace")
            conn.deserialize(image)
            return _select(conn, wanted, tuple(refs))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error) from error


def _select(conn: sqlite3.Connection, wanted: QueueFilter, refs: tuple[str, ...]) -> Selection:
    key = read_fact(conn.execute(queries()["get_meta"], ("key.rows",)).fetchall())
    if key is None:
        raise StoreCorrupt("the database is damaged: the key of its rows is not what it was")
    row_key = bytes.fromhex(key)
    found = Selection(read_fact(conn.execute(queries()["get_meta"], (_CHAIN_ID,)).fetchall()))
    closed = set(_closed_rounds(conn, row_key))
    aside = {row[0] for row in conn.execute(queries()["set_aside_ids"])}
    for columns in conn.execute(queries()["every_share"]):
        row = ShareRow(*columns)
        if row.id in aside or not row.is_sound(row_key):
            found.left["damaged"] += 1
        elif matches(row, wanted) and (not refs or row.mac.hex().startswith(refs)):
            _add(conn, row, row_key, closed, found)
    return found


def _closed_rounds(conn: sqlite3.Connection, row_key: bytes) -> Iterator[bytes]:
    for round_id, *columns in conn.execute(queries()["rounds"]):
        kept = RoundRow(*columns)
        if kept.is_sound(row_key) and kept.closed_ms is not None:
            yield round_id


def _add(conn: sqlite3.Connection, row: ShareRow, row_key: bytes, closed: set[bytes], found: Selection) -> None:
    """Add a share, unless another machine has it already or it can not be counted any more."""
    if row.round_id in closed:
        found.left["closed"] += 1
    elif row.state == ShareState.FAILED and row.stage == MOVED:
        found.left["moved"] += 1
    else:
        found.carried.append(_carried(conn, row, row_key))
        found.marks.append((row.id, row.row_check))


def _carried(conn: sqlite3.Connection, row: ShareRow, row_key: bytes) -> ExportedShare:
    state = ShareState(row.state)
    reveal = _reveal(conn, row.id, row_key) if state is ShareState.BROADCAST else None
    if reveal is None and state in {ShareState.BROADCAST, ShareState.WITNESSED}:
        state = ShareState.RECEIVED  # its proof is made anew
    return ExportedShare(
        share=row.share(),
        received_ms=row.received_ms,
        state=state,
        due_ms=row.due_ms,
        attempts=row.attempts,
        crashes=row.crashes,
        proved_height=row.proved_height,
        stage=row.stage,
        note=row.note,
        history=tuple(
            HistoryEntry(at_ms, stage, note, bool(counted))
            for at_ms, stage, note, counted in conn.execute(queries()["history"], (row.id,))
        ),
        reveal=reveal,
    )


def _reveal(conn: sqlite3.Connection, share_id: int, row_key: bytes) -> ExportedReveal | None:
    """The message of a share, None where it is damaged."""
    found = conn.execute(queries()["reveal"], (share_id,)).fetchone()
    kept = None if found is None else RevealRow(*found)
    if kept is None or not kept.is_sound(row_key):
        return None
    return ExportedReveal(
        prepared=PreparedReveal(kept.message, kept.tx_hash, kept.anchor_height, kept.circuit, kept.height),
        sends=kept.sends,
        first_sent_height=kept.first_sent_height,
        last_sent_height=kept.last_sent_height,
        last_endpoint=kept.last_endpoint,
        last_outcome=kept.last_outcome,
    )
