"""The chain on disk: the inputs of every block, from which `Chain.apply_block` restores the chain.

The mempool is not stored, as on a real node: accepted transactions that are not in a block are lost on restart.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from devnet.chain import Chain, Totals

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS blocks (height INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, totals TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS transactions (
  height INTEGER NOT NULL, position INTEGER NOT NULL, raw BLOB NOT NULL, PRIMARY KEY (height, position)
);
"""
_TABLES = {"meta", "blocks", "transactions"}


class JournalError(RuntimeError):
    """The file is not one of this chain."""


class Journal:
    """An append-only log of blocks in SQLite; in memory if `path` is None."""

    def __init__(self, path: Path | None, chain_id: str) -> None:
        try:
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        except sqlite3.Error as error:
            raise JournalError(f"{path} cannot be used: {error}") from None
        if not tables <= _TABLES:  # the option of other commands with this name is the queue's database
            self._db.close()
            raise JournalError(f"{path} is not a file of a dev chain: use another file")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        known = self.get("chain_id")
        if known is None:
            self.set("chain_id", chain_id)
        elif known != chain_id:
            self._db.close()
            raise JournalError(f"{path} contains chain {known}, not {chain_id}: use another file or chain id")

    def get(self, key: str) -> str | None:
        """Return a stored value."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def append(self, height: int, time_ns: int, transactions: Sequence[bytes], totals: Totals) -> None:
        """Write the inputs of one block. They survive a kill of the process."""
        shown = {
            round_id.hex(): [[proposal, option, total] for (proposal, option), total in values.items()]
            for round_id, values in totals.items()
        }
        self._db.execute("BEGIN")
        self._db.execute("INSERT INTO blocks VALUES (?, ?, ?)", (height, time_ns, json.dumps(shown)))
        rows = [(height, position, raw) for position, raw in enumerate(transactions)]
        self._db.executemany("INSERT INTO transactions VALUES (?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def replay(self, chain: Chain) -> None:
        """Apply all stored blocks to an empty chain."""
        for height, time_ns, shown in self._db.execute("SELECT * FROM blocks ORDER BY height").fetchall():
            rows = self._db.execute(
                "SELECT raw FROM transactions WHERE height = ? ORDER BY position", (height,)
            ).fetchall()
            totals = {
                bytes.fromhex(round_id): {(proposal, option): total for proposal, option, total in values}
                for round_id, values in json.loads(shown).items()
            }
            chain.apply_block(time_ns, [bytes(row[0]) for row in rows], totals)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
