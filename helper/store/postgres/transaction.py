"""A transaction on PostgreSQL, and the claims of this host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import psycopg
from psycopg.errors import Diagnostic

from helper.core.share import ShareState
from helper.errors import StoreUnconfirmed
from helper.store.models import SpentNullifier
from helper.store.row_encryption import RowEncryption
from helper.store.sql_files import postgres_statements
from helper.store.table_rows import Row, ShareRow
from helper.store.transaction import Params, ShareIdentity, StoredShare, TakenShare, Transaction

ID_BATCH: Final = 64
"""Number of share numbers reserved per query."""


@contextmanager
def require_confirmed_commit(conn: psycopg.Connection[Row]) -> Iterator[None]:
    """Refuse a commit in the block about which the server warns.

    A cancelled wait for a synchronous standby ends a commit with a warning only. Other warnings are not expected.

    Raises:
        StoreUnconfirmed: the commit is on this server, and a standby that is promoted may lack it.
    """
    warnings: list[str | None] = []

    def note(notice: Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            warnings.append(notice.message_primary)

    conn.add_notice_handler(note)
    try:
        yield
    finally:
        conn.remove_notice_handler(note)
    if warnings:
        raise StoreUnconfirmed(f"the standby may lack a commit: {warnings[0]}")


@dataclass(slots=True)
class ClaimState:
    """The shares that this host has claimed, each with the fencing token of its claim.

    Attributes:
        fences: fencing token by share number, for committed claims.
        sender_fence: fencing token of the sender lease, 0 for none.
    """

    host: str
    lease_seconds: float
    fences: dict[int, int] = field(default_factory=dict)
    sender_fence: int = 0


@dataclass(slots=True)
class PostgresTransaction(Transaction):
    """A transaction on the writing connection.

    Attributes:
        change_count: number of statements so far that were not plain queries.
    """

    conn: psycopg.Connection[Row]
    encryption: RowEncryption
    claims: ClaimState
    is_single_operation: bool = False
    change_count: int = 0
    _shared_lock: bool = False
    _acquired: dict[int, int] = field(default_factory=dict)
    _released: set[int] = field(default_factory=set)
    _ids: list[int] = field(default_factory=list)
    _can_send: bool | None = None
    _notifications: set[str] = field(default_factory=set)

    def execute(self, name: str, params: Params = ()) -> int:
        """Run a named statement. Returns the number of changed rows."""
        self.change_count += 1
        return self.conn.execute(postgres_statements()[name], self.encryption.encrypt_params(name, params)).rowcount

    def fetch_all(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query."""
        cursor = self.conn.execute(postgres_statements()[name], params)
        if not (cursor.statusmessage or "").startswith("SELECT"):
            self.change_count += 1
        return self.encryption.decrypt_rows(name, cursor.fetchall())

    def execute_many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement that takes all rows together, each column as an array.

        `executemany` would use a pipeline. PostgreSQL 15 does not apply `idle_in_transaction_session_timeout` after a
        pipeline, so a host paused at that point would keep its locks.
        """
        columns = tuple(list(column) for column in zip(*rows, strict=True))
        if columns:
            self.execute(name, columns)

    def allocate_id(self) -> int:
        """Return the number of the next share. Reserved numbers that a host does not use are skipped."""
        if not self._ids:
            self._ids = [row[0] for row in reversed(self.fetch_all("new_ids", (ID_BATCH,)))]
        return self._ids.pop()

    def find_taken(self, identities: Sequence[ShareIdentity]) -> dict[int, TakenShare]:
        """Return the identities that are known or spent, by index."""
        if not identities:
            return {}
        rounds, macs, nullifiers = map(list, zip(*identities, strict=True))
        tags = [self.encryption.nullifier_tags(nullifier) for nullifier in nullifiers]
        params = {
            "rounds": rounds,
            "macs": macs,
            "nullifiers": nullifiers,
            "tags": list(chain.from_iterable(tags)),
            "keys": len(tags[0]),
        }
        return {index: TakenShare(*known) for index, *known in self.fetch_all("find_taken", params)}

    def read_stored_shares(self, share_ids: Sequence[int]) -> list[StoredShare]:
        """Return these rows, damaged or not, without locking them."""
        return [StoredShare(*columns) for columns in self.fetch_all("stored_shares", (list(share_ids),))]

    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Insert shares."""
        self.execute_many("add_shares", [self.encryption.encrypt_share(row) for row in rows])

    def get_share(self, share_id: int) -> ShareRow | None:
        """Return a share's row, locked until the end of the transaction."""
        row = self.fetch_one("share_by_id", (share_id,))
        return None if row is None else ShareRow(*row)

    def get_live_share(self, share_id: int) -> ShareRow | None:
        """Like `get_share`, but return None if the share was quarantined as damaged."""
        row = self.fetch_one("live_share", (share_id,))
        return None if row is None else ShareRow(*row)

    def find_shares_by_nullifier(self, spent: Sequence[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Return the shares that have one of these nullifiers, with one query."""
        by_tag: dict[bytes, list[tuple[int, bytes]]] = {}
        for entry in spent:
            for tag in self.encryption.nullifier_tags(entry[1]):
                by_tag.setdefault(tag, []).append(entry)
        rows = self.fetch_all("shares_of_tags", (list(by_tag),)) if by_tag else []
        return sorted((share_id, *entry) for share_id, tag in rows for entry in by_tag[tag])

    def force_sync(self) -> None:
        """Write an unused message to the WAL."""
        self.fetch_all("force_sync")

    # ------------------------------------------------------------------ coordination of hosts

    def lock_shared(self) -> None:
        """Acquire the shared lock: no host records blocks or closes rounds until the commit."""
        if not self._shared_lock:
            self.fetch_all("lock_shared")
            self._shared_lock = True
            self._closed.clear()  # another host may have closed a round since it was read

    def lock_exclusive(self) -> None:
        """Acquire the exclusive lock: no other host accepts shares or records blocks until the commit."""
        assert self.is_single_operation, "the operation is not marked as exclusive"
        self.fetch_all("lock_exclusive")

    def are_all_spent(self, spent: Sequence[SpentNullifier]) -> bool:
        """Return whether another host has recorded all of these and committed the confirmations.

        Shares with a spent nullifier are never accepted, so these nullifiers need no more processing.
        """
        distinct = set(spent)
        if not distinct:
            return True
        rounds, nullifiers = map(list, zip(*distinct, strict=True))
        return self.fetch_one("known_spent", (rounds, nullifiers)) == (len(distinct),)

    def acquire_claim(self, share_id: int) -> None:
        """Claim a share for this host, with a new fencing token."""
        claim = {"id": share_id, "host": self.claims.host, "lease": self.claims.lease_seconds}
        ((fence,),) = self.fetch_all("acquire_claim", claim)
        self._acquired[share_id] = fence
        self._released.discard(share_id)

    def release_claim(self, share_id: int) -> None:
        """Release the claim on a share."""
        self.execute("release_claim", (share_id,))
        self._acquired.pop(share_id, None)
        self._released.add(share_id)

    def forget_claims_except(self, share_ids: Iterable[int]) -> None:
        """Forget the claims on all other shares at the commit: another host has confirmed these."""
        self._released.update(self.claims.fences.keys() - set(share_ids))

    def has_claim(self, row: ShareRow) -> bool:
        """Return whether this host holds the claim on a share. False if another host has released it."""
        fence = self._acquired.get(row.id, None if row.id in self._released else self.claims.fences.get(row.id))
        if fence is None:
            return row.state != ShareState.PROVING
        return self.fetch_one("holds_claim", (row.id, fence)) is not None

    def expired_claims(self, limit: int) -> list[int]:
        """Return shares whose claims have expired, except those that this host is still working on."""
        held = list(self.claims.fences.values())
        return [row[0] for row in self.fetch_all("expired_claims", {"limit": limit, "held": held})]

    def orphaned_claims(self, limit: int) -> list[int]:
        """Return shares that this host had claimed before its restart, and those with expired claims."""
        return [row[0] for row in self.fetch_all("orphaned_claims", {"host": self.claims.host, "limit": limit})]

    def can_send(self) -> bool:
        """Return whether this host holds the sender lease. No other host can acquire it before the commit."""
        if self._can_send is None:
            lease = {"fence": self.claims.sender_fence, "host": self.claims.host}
            self._can_send = self.claims.sender_fence != 0 and self.fetch_one("can_send", lease) is not None
        return self._can_send

    def notify(self, payload: str) -> None:
        """Notify all listening hosts at the commit."""
        self._notifications.add(payload)

    # ------------------------------------------------------------------ the transaction

    def begin(self, operations: int) -> None:
        """Begin a transaction of `operations` operations. Cached rounds may be stale and are dropped."""
        self.is_single_operation = operations == 1
        self.clear_round_cache()
        self.conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED")

    def flush_counts(self) -> None:
        """Write the collected counter changes and queue the notifications."""
        Transaction.flush_counts(self)
        for payload in sorted(self._notifications):
            self.fetch_all("notify", (payload,))

    def commit(self) -> None:
        """Commit, then update the claims of this host.

        Raises:
            StoreUnconfirmed: the commit is not confirmed by the standby; the claims are unchanged.
        """
        with require_confirmed_commit(self.conn):
            self.conn.execute("COMMIT")
        for share_id in self._released:
            self.claims.fences.pop(share_id, None)
        self.claims.fences.update(self._acquired)
        self._reset()

    def reset_after_rollback(self) -> None:
        """Drop the collected changes."""
        Transaction.reset_after_rollback(self)
        self._reset()

    def _reset(self) -> None:
        self._shared_lock = False
        self._can_send = None
        self._notifications.clear()
        self._closed.clear()
        self._acquired.clear()
        self._released.clear()
