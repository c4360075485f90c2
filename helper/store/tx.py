"""What an operation works with inside the writer's transaction."""

from __future__ import annotations

import hmac
import secrets
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from helper.share import ShareKey, ShareState
from helper.store.queries import queries
from helper.store.records import Column, ShareRow
from helper.store.rows import DamagedShare

Params = tuple[Column, ...] | Mapping[str, Column]


class RoundKey(NamedTuple):
    """A round's number in this database, and the key of its shares' macs."""

    no: int
    mac_key: bytes

    def mac(self, key: ShareKey) -> bytes:
        """A share's name in this database: HMAC-SHA256, 32 bytes."""
        return hmac.digest(self.mac_key, key.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class Keys:
    """The database's own keys.

    Attributes:
        rows: 32 bytes, for the checks of rows.
        order: 32 bytes, for the order of shares within a millisecond.
    """

    rows: bytes = field(repr=False)
    order: bytes = field(repr=False)


@dataclass(slots=True)
class Tx:
    """One connection and what a batch of operations gathers before it is committed.

    Attributes:
        conn: the writing connection, inside a transaction.
        keys: the database's own keys.
        next_id: the number of the next share; never goes back while the process lives, so none is used twice.
        counts: changes of the counters, by round number and state.
        found: rows that were set aside in this batch.
        erased: something was deleted whose bytes must go from the files soon.
    """

    conn: sqlite3.Connection
    keys: Keys
    next_id: int
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    found: list[DamagedShare] = field(default_factory=list)
    erased: bool = False
    _rounds: dict[bytes, RoundKey] = field(default_factory=dict)

    def run(self, name: str, params: Params = ()) -> int:
        """Run a named statement; the number of rows that it changed."""
        return self.conn.execute(queries()[name], params).rowcount

    def one(self, name: str, params: Params = ()) -> tuple[Any, ...] | None:
        """The first row of a named query, read to its end, or None."""
        rows = self.conn.execute(queries()[name], params).fetchall()
        return rows[0] if rows else None

    def all(self, name: str, params: Params = ()) -> list[tuple[Any, ...]]:
        """All rows of a named query."""
        return self.conn.execute(queries()[name], params).fetchall()

    def many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement once a row."""
        self.conn.executemany(queries()[name], rows)

    def round_key(self, round_id: bytes) -> RoundKey | None:
        """Number and key of a round, None when nothing of it is kept."""
        known = self._rounds.get(round_id)
        if known is None:
            row = self.one("round_key", (round_id,))
            if row is None:
                return None
            known = self._rounds[round_id] = RoundKey(*row)
        return known

    def need_round(self, round_id: bytes) -> RoundKey:
        """Number and key of a round, made when there is none yet."""
        known = self.round_key(round_id)
        if known is None:
            mac_key = secrets.token_bytes(32)
            row = self.one("add_round_key", (round_id, mac_key))
            assert row is not None
            known = self._rounds[round_id] = RoundKey(row[0], mac_key)
        return known

    def count(self, round_no: int, state: ShareState | int, change: int) -> None:
        """Note that a round has more or fewer shares in a state."""
        self.counts[round_no, int(state)] += change

    def flush_counts(self) -> None:
        """Write the gathered changes of the counters; the last statement before the commit."""
        changes = [(no, state, n) for (no, state), n in sorted(self.counts.items()) if n]
        self.counts.clear()
        if changes:
            self.many("add_count", changes)

    def set_aside(self, row: ShareRow, now_ms: int) -> None:
        """Keep a damaged row out of all work, and have it reported."""
        if self.run("set_aside", (row.id, now_ms)):
            self.found.append(row.damaged())

    def forget_rounds(self) -> None:
        """Drop what is remembered of rounds: the transaction was rolled back, or a round purged."""
        self._rounds.clear()

    def rolled_back(self) -> None:
        """Drop all that was gathered."""
        self.counts.clear()
        self.found.clear()
        self.erased = False
        self.forget_rounds()
