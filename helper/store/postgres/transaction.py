"""What operations work with on PostgreSQL: one connection inside a transaction, and what this host has in hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any, Final

import psycopg

from helper.core.share import ShareState
from helper.store.postgres.row_encryption import RowEncryption
from helper.store.records import RoundRow, ShareRow
from helper.store.rows import Spent
from helper.store.sql_files import named
from helper.store.transaction import Name, Params, Transaction

IDS_AT_ONCE: Final = 64
"""Numbers of shares that are taken from the database at once."""


class ExclusiveLockRequired(Exception):
    """An operation must be the only one in its transaction; the writer runs it again by itself."""


@cache
def statements() -> dict[str, bytes]:
    """The statements of `queries.sql` by name."""
    text = (resources.files("helper.store.postgres") / "queries.sql").read_text("utf-8")
    return {name: sql.encode() for name, sql in named(text).items()}


@dataclass(slots=True)
class ClaimState:
    """The shares that this host works on, each with the fence of its claim.

    Attributes:
        host: its name.
        lease: seconds after which a host that is not heard of loses them.
        fences: by share; what is committed.
        sender: the fence under which it may send, 0 for none.
    """

    host: str
    lease: float
    fences: dict[int, int] = field(default_factory=dict)
    sender: int = 0


@dataclass(slots=True)
class PostgresTransaction(Transaction):
    """One connection inside the writer's transaction.

    Attributes:
        conn: the writing connection.
        sealing: what goes sealed.
        hands: what this host has in hand.
        alone_here: the transaction has one operation.
        changes: statements so far that were no plain query.
    """

    conn: psycopg.Connection[tuple[Any, ...]]
    sealing: RowEncryption
    hands: ClaimState
    alone_here: bool = False
    changes: int = 0
    _beside: bool = False
    _taken: dict[int, int] = field(default_factory=dict)
    _laid: set[int] = field(default_factory=set)
    _ids: list[int] = field(default_factory=list)
    _sends: bool | None = None
    _words: set[str] = field(default_factory=set)
    _over: dict[int, bool] = field(default_factory=dict)

    def run(self, name: str, params: Params = ()) -> int:
        """Run a named statement; the number of rows that it changed."""
        self.changes += 1
        return self.conn.execute(statements()[name], self.sealing.outward(name, params)).rowcount

    def all(self, name: str, params: Params = ()) -> list[tuple[Any, ...]]:
        """All rows of a named query."""
        cursor = self.conn.execute(statements()[name], self.sealing.outward(name, params))
        if not (cursor.statusmessage or "").startswith("SELECT"):
            self.changes += 1
        return self.sealing.inward(name, cursor.fetchall())

    def many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement that takes all rows at once, each column as an array.

        Not one statement a row: after several in one go (a pipeline, as `executemany` makes) PostgreSQL 15 does not
        watch for how long it hears nothing within a transaction, and a host that is stopped there would keep its locks.
        """
        columns = tuple(list(column) for column in zip(*rows, strict=True))
        if columns:
            self.run(name, columns)

    def new_id(self) -> int:
        """The number of the next share; those that a host took and did not use are left out."""
        if not self._ids:
            self._ids = [row[0] for row in reversed(self.all("new_ids", (IDS_AT_ONCE,)))]
        return self._ids.pop()

    def are_taken(self, asked: Sequence[Name]) -> set[int]:
        """Which of these names are known or spent, by their places."""
        if not asked:
            return set()
        rounds, macs, nullifiers = map(list, zip(*asked, strict=True))
        tags = [self.sealing.tags(nullifier) for nullifier in nullifiers]
        names = {
            "rounds": rounds,
            "macs": macs,
            "nullifiers": nullifiers,
            "tags": list(chain.from_iterable(tags)),
            "keys": len(tags[0]),
        }
        return {place for (place,) in self.all("are_taken", names)}

    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Put in new shares."""
        self.many("add_shares", [self.sealing.share(row.columns()) for row in rows])

    def share(self, share_id: int) -> ShareRow | None:
        """A share's row, locked until the end of the transaction."""
        found = self.one("share_by_id", (share_id,))
        return None if found is None else ShareRow(*found)

    def live(self, share_id: int) -> ShareRow | None:
        """The same, but None as well when it was set aside."""
        found = self.one("live_share", (share_id,))
        return None if found is None else ShareRow(*found)

    def owners(self, spent: Sequence[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Shares that have one of these nullifiers, found by one question."""
        by_tag: dict[bytes, list[tuple[int, bytes]]] = {}
        for one in spent:
            for tag in self.sealing.tags(one[1]):
                by_tag.setdefault(tag, []).append(one)
        found = self.all("shares_of_tags", (list(by_tag),)) if by_tag else []
        return sorted((share_id, *one) for share_id, tag in found for one in by_tag[tag])

    def index_is_wrong(self) -> None:
        """Go on: another host changed the row since it was looked for, or an index needs a REINDEX by its operator."""

    # ------------------------------------------------------------------ several hosts

    def beside(self) -> None:
        """Nothing changes what the chain has told until the commit."""
        if not self._beside:
            self.all("beside")
            self._beside = True

    def alone(self) -> None:
        """No other host takes shares in or changes what the chain has told until the commit.

        Raises:
            AloneError: there are other operations in this transaction: two such would wait for each other.
        """
        if not self.alone_here:
            raise ExclusiveLockRequired
        self.all("alone")

    def is_over(self, round_no: int) -> bool:
        """Whether another host has closed a round; it stands until the commit, so it is asked once."""
        over = self._over.get(round_no)
        if over is None:
            found = self.one("round", (round_no,))
            row = None if found is None else RoundRow(*found)
            over = row is not None and row.is_sound(self.keys.rows) and row.closed_ms is not None
            self._over[round_no] = over
        return over

    def all_spent(self, spent: Sequence[Spent]) -> bool:
        """Whether another host has told all of these, and committed what came of it.

        Nothing takes a share in whose nullifier is spent, so nothing is left to be found later.
        """
        told = set(spent)
        if not told:
            return True
        rounds, nullifiers = map(list, zip(*told, strict=True))
        return self.one("known_spent", (rounds, nullifiers)) == (len(told),)

    def acquire_claim(self, share_id: int) -> None:
        """This host works on a share from now on, under a new fence."""
        claim = {"id": share_id, "host": self.hands.host, "lease": self.hands.lease}
        ((fence,),) = self.all("take_up", claim)
        self._taken[share_id] = fence
        self._laid.discard(share_id)

    def release_claim(self, share_id: int) -> None:
        """Nobody works on a share any more."""
        self.run("lay_down", (share_id,))
        self._taken.pop(share_id, None)
        self._laid.add(share_id)

    def holds(self, row: ShareRow) -> bool:
        """Whether the claim on a share is this host's. One that it has in hand and another put back is not, nor is it
        when nobody has taken it up again yet.
        """
        fence = self._taken.get(row.id, None if row.id in self._laid else self.hands.fences.get(row.id))
        if fence is None:
            return row.state != ShareState.WITNESSED
        return self.one("holds", (row.id, fence)) is not None

    def lapsed(self, limit: int) -> list[int]:
        """Shares whose lease is over; this host's own only where it does not know of them: it would be at work on
        them still, and renews the others.
        """
        held = list(self.hands.fences.values())
        return [row[0] for row in self.all("lapsed", {"limit": limit, "held": held})]

    def orphaned_claims(self, limit: int) -> list[int]:
        """Shares that this host had in hand when it ended, and those whose lease is over."""
        return [row[0] for row in self.all("left_behind", {"host": self.hands.host, "limit": limit})]

    def sends(self) -> bool:
        """Whether the sender's row has this host's fence; nobody takes it over before the commit."""
        if self._sends is None:
            fence = self.hands.sender
            self._sends = fence != 0 and self.one("sends", (fence,)) is not None
        return self._sends

    def tell(self, word: str) -> None:
        """Have all hosts that listen hear a word."""
        self._words.add(word)

    # ------------------------------------------------------------------ the transaction

    def begin(self, operations: int) -> None:
        """Begin a transaction of so many operations. What was known of rounds may have changed."""
        self.alone_here = operations == 1
        self.forget_rounds()
        self.conn.execute("BEGIN")

    def flush_counts(self) -> None:
        """Write the gathered changes of the counters, and have the words told with the commit."""
        Transaction.flush_counts(self)
        for word in sorted(self._words):
            self.all("tell", (word,))

    def commit(self) -> None:
        """Commit; from now on this host has in hand what it took up."""
        self.conn.execute("COMMIT")
        for share_id in self._laid:
            self.hands.fences.pop(share_id, None)
        self.hands.fences.update(self._taken)
        self._forget()

    def rolled_back(self) -> None:
        """Drop all that was gathered."""
        Transaction.rolled_back(self)
        self._forget()

    def _forget(self) -> None:
        self._beside = False
        self._sends = None
        self._words.clear()
        self._over.clear()
        self._taken.clear()
        self._laid.clear()
