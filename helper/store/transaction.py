"""Interfaces of store transactions and read-only connections, and the database's own keys."""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from helper.clock import Clock
from helper.core.share import ShareKey, ShareState
from helper.errors import StoreCorrupt
from helper.store.models import DamagedShare, SpentNullifier
from helper.store.table_rows import RoundKeyRow, RoundRow, Row, ShareRow, is_sound, with_check

UNREADABLE_SHARE = DamagedShare("", b"", -1)
"""Reported for a share whose row cannot be read at all."""

ShareIdentity = tuple[int, bytes, bytes]
"""Identifies a share: its round's number, its mac and its nullifier."""
Params = tuple[Any, ...] | Mapping[str, Any]
"""Parameters of a statement, positional or named."""


class RowReader(Protocol):
    """Runs named queries on a read-only database connection."""

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query.

        Raises:
            StoreError: the database cannot be read.
        """

    async def fetch_snapshot(self, queries: Sequence[tuple[str, Params]]) -> list[Row]:
        """Return the rows of all these named queries, one after the other, as of one moment.

        Raises:
            StoreError: the database cannot be read.
        """


class TakenShare(NamedTuple):
    """Rows that the indexes already contain for a share.

    Attributes:
        is_confirmed: whether it has a tombstone or its nullifier is spent.
        id_by_mac: the live row with the MAC of its share key, None if there is none.
    """

    is_confirmed: bool
    id_by_mac: int | None


class StoredShare(NamedTuple):
    """A live row, damaged or not."""

    row: ShareRow
    is_quarantined: bool

    def is_damaged(self, key: bytes) -> bool:
        """Return whether the row is quarantined or fails its check."""
        return self.is_quarantined or not is_sound(key, self.row)


class RoundKey:
    """A round's number in this database, and the MAC key of its shares."""

    __slots__ = ("_mac", "no")

    def __init__(self, no: int, mac_key: bytes) -> None:
        self.no = no
        self._mac = hmac.new(mac_key, digestmod="sha256")

    def mac(self, key: ShareKey) -> bytes:
        """Return the share's identifier in this database: HMAC-SHA256, 32 bytes."""
        mac = self._mac.copy()  # keyed once, because keying is most of the cost for a short input
        mac.update(key.encode())
        return mac.digest()


@dataclass(frozen=True, slots=True)
class DatabaseKeys:
    """The database's own keys.

    Attributes:
        row_check: 32 bytes, for the row checks.
        rank: 32 bytes, for the order of shares within a millisecond.
    """

    row_check: bytes = field(repr=False)
    rank: bytes = field(repr=False)


def read_round_key(columns: Row, keys: DatabaseKeys) -> RoundKey:
    """Return the key of a round from its row in `round_keys`.

    Raises:
        StoreCorrupt: the row fails its check.
    """
    row = RoundKeyRow(*columns)
    if not is_sound(keys.row_check, row):
        raise StoreCorrupt("the database is damaged: the key of a round fails its check")
    return RoundKey(row.no, row.mac_key)


OperationT = TypeVar("OperationT", bound=Callable[..., Any])


def exclusive(operation: OperationT) -> OperationT:
    """Mark an operation that needs its own transaction on a shared database.

    Such operations lock what other operations lock in another order, so they could deadlock in a common transaction.
    """
    vars(operation)["exclusive"] = True
    return operation


def is_exclusive(operation: Callable[..., Any]) -> bool:
    """Return whether an operation is marked as `exclusive`."""
    return getattr(operation, "exclusive", False)


@dataclass(slots=True)
class Transaction(ABC):
    """Database interface of operations: named statements, and state collected until the commit.

    Attributes:
        clock: source of the times in history entries.
        pending_counts: pending changes of the counters, by round number and state.
        damaged_shares: rows that were quarantined in this batch.
        has_deleted_rows: whether rows were deleted whose bytes must be erased from the files.
    """

    keys: DatabaseKeys
    clock: Clock = field(kw_only=True)
    pending_counts: Counter[tuple[int, int]] = field(default_factory=Counter, kw_only=True)
    damaged_shares: list[DamagedShare] = field(default_factory=list, kw_only=True)
    has_deleted_rows: bool = field(default=False, kw_only=True)
    _rounds: dict[bytes, RoundKey] = field(default_factory=dict, kw_only=True)
    _closed: dict[int, bool] = field(default_factory=dict, kw_only=True)  # by round number

    # ------------------------------------------------------------------ implemented by each database

    @abstractmethod
    def execute(self, name: str, params: Params = ()) -> int:
        """Run a named statement. Returns the number of changed rows."""

    @abstractmethod
    def fetch_all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query."""

    @abstractmethod
    def execute_many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement once per row."""

    @abstractmethod
    def allocate_id(self) -> int:
        """Return a new share id: ascending, never reused."""

    @abstractmethod
    def find_taken(self, identities: Sequence[ShareIdentity]) -> dict[int, TakenShare]:
        """Return the identities that are already stored or spent, by index."""

    @abstractmethod
    def read_stored_shares(self, share_ids: Sequence[int]) -> list[StoredShare]:
        """Return these rows with one query and without locking them.

        Missing rows are omitted, and those that were quarantined as unreadable.
        """

    @abstractmethod
    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Insert new shares."""

    @abstractmethod
    def get_share(self, share_id: int) -> ShareRow | None:
        """Return a share's row, damaged or not, locked until the transaction ends; None if it does not exist."""

    @abstractmethod
    def get_live_share(self, share_id: int) -> ShareRow | None:
        """Like `get_share`, but also return None if the row was quarantined."""

    @abstractmethod
    def find_shares_by_nullifier(self, spent: Sequence[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Return live shares with one of these nullifiers, by id: (share id, round number, nullifier)."""

    @abstractmethod
    def force_sync(self) -> None:
        """Write to the log without changing data, so that the commit waits for the disk."""

    # ------------------------------------------------------------------ coordination of hosts; by default there is one

    def lock_shared(self) -> None:  # noqa: B027 - nothing to do
        """Acquire a shared lock until the commit: no other host changes rounds or spent nullifiers."""

    def lock_exclusive(self) -> None:  # noqa: B027
        """Acquire an exclusive lock until the commit: no other host enqueues shares or changes rounds or nullifiers.

        Only operations that are marked as `exclusive` may call this.
        """

    def are_all_spent(self, spent: Sequence[SpentNullifier]) -> bool:  # noqa: ARG002
        """Return whether another host has already applied all of these nullifiers."""
        return False

    def acquire_claim(self, share_id: int) -> None:  # noqa: B027
        """Claim a share for this host."""

    def release_claim(self, share_id: int) -> None:  # noqa: B027
        """Remove the claim on a share."""

    def has_claim(self, row: ShareRow) -> bool:  # noqa: ARG002
        """Return whether this host still holds the claim on a share. Another host may have claimed it since."""
        return True

    def expired_claims(self, limit: int) -> list[int]:  # noqa: ARG002
        """Return shares whose claim has expired, at most `limit`."""
        return []

    def orphaned_claims(self, limit: int) -> list[int]:
        """Return shares that this host had claimed when it last stopped, at most `limit`."""
        params = {"state": ShareState.PROVING.value, "limit": limit}
        return [row[0] for row in self.fetch_all("shares_in_state", params)]

    def can_send(self) -> bool:
        """Return whether this host holds the sender lease, and holds it until the commit."""
        return True

    def notify(self, payload: str) -> None:  # noqa: B027
        """Notify all hosts after the commit; repeated notifications of a transaction coalesce."""

    # ------------------------------------------------------------------ common to all databases

    @property
    def now_ms(self) -> int:
        """Unix milliseconds now."""
        return int(self.clock.now() * 1000)

    def fetch_one(self, name: str, params: Params = ()) -> Row | None:
        """Return the first row of a named query, None without rows. Reads all rows, so that the query is complete."""
        rows = self.fetch_all(name, params)
        return rows[0] if rows else None

    def round_key(self, round_id: bytes) -> RoundKey | None:
        """Return the number and key of a round, None if it has no stored data."""
        round_key = self._rounds.get(round_id)
        if round_key is None:
            row = self.fetch_one("round_key", (round_id,))
            if row is None:
                return None
            round_key = self._rounds[round_id] = read_round_key(row, self.keys)
        return round_key

    def ensure_round(self, round_id: bytes) -> RoundKey:
        """Return the number and key of a round; create them if the round is new."""
        round_key = self.round_key(round_id)
        if round_key is None:
            mac_key = secrets.token_bytes(32)
            (last,) = self.fetch_one("last_round_no") or (0,)
            row = with_check(self.keys.row_check, RoundKeyRow(last + 1, round_id, mac_key))
            if not self.execute("add_round_key", row):
                return self.ensure_round(round_id)  # another host was first
            round_key = self._rounds[round_id] = RoundKey(row.no, mac_key)
        return round_key

    def read_round(self, round_no: int) -> RoundRow | None:
        """Return a stored round; None if there is none or its row is damaged."""
        columns = self.fetch_one("round", (round_no,))
        row = None if columns is None else RoundRow(*columns)
        return row if row is not None and is_sound(self.keys.row_check, row) else None

    def is_round_closed(self, round_no: int) -> bool:
        """Return whether a round is marked as closed. Call this after `lock_shared`.

        A share that is enqueued after its round was closed would never be reported.
        """
        closed = self._closed.get(round_no)
        if closed is None:
            row = self.read_round(round_no)
            closed = self._closed[round_no] = row is not None and row.closed_ms is not None
        return closed

    def adjust_count(self, round_no: int, state: ShareState | int, change: int) -> None:
        """Add to the counter of a round's shares in a state; written by `flush_counts`."""
        self.pending_counts[round_no, int(state)] += change

    def flush_counts(self) -> None:
        """Write the pending changes of the counters, as the last statement before the commit."""
        changes = [(no, state, n) for (no, state), n in sorted(self.pending_counts.items()) if n]
        self.pending_counts.clear()
        if changes:
            self.execute_many("add_count", changes)

    def quarantine(self, share_id: int, damaged: DamagedShare) -> None:
        """Exclude a damaged row from all processing, and report it once."""
        if self.execute("quarantine", (share_id, self.now_ms, damaged.ref, damaged.round_id, damaged.state)):
            self.damaged_shares.append(damaged)

    def clear_round_cache(self) -> None:
        """Clear the cache of rounds: the transaction was rolled back, or a round closed or purged."""
        self._rounds.clear()
        self._closed.clear()

    def reset_after_rollback(self) -> None:
        """Reset the state collected by a transaction that was rolled back."""
        self.pending_counts.clear()
        self.damaged_shares.clear()
        self.has_deleted_rows = False
        self.clear_round_cache()
