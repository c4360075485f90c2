"""What an operation works with inside the writer's transaction."""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helper.core.share import ShareKey, ShareState
from helper.errors import StoreCorrupt
from helper.store.records import FACTS_KEY, Column, ShareRow, is_sound
from helper.store.rows import DamagedShare, Spent
from proofs import row_check

UNREADABLE = DamagedShare("", b"", -1)
"""What is told of a share whose row can not be read at all."""

Name = tuple[int, bytes, bytes]
"""What a share is known by: its round's number, its mac, its nullifier."""
Params = tuple[Any, ...] | Mapping[str, Any]
"""What a statement is given, by place or by name."""


class RoundKey:
    """A round's number in this database, and the key of its shares' macs.

    Args:
        no: the number.
        mac_key: 32 bytes.
    """

    __slots__ = ("_mac", "no")

    def __init__(self, no: int, mac_key: bytes) -> None:
        self.no = no
        self._mac = hmac.new(mac_key, digestmod="sha256")

    def mac(self, key: ShareKey) -> bytes:
        """A share's name in this database: HMAC-SHA256, 32 bytes."""
        mac = self._mac.copy()  # begun with the key once, as that is most of what a short name costs
        mac.update(key.encode())
        return mac.digest()


@dataclass(frozen=True, slots=True)
class Keys:
    """The database's own keys.

    Attributes:
        rows: 32 bytes, for the checks of rows.
        order: 32 bytes, for the order of shares within a millisecond.
    """

    rows: bytes = field(repr=False)
    order: bytes = field(repr=False)


def read_round_key(row: tuple[Any, ...], keys: Keys) -> RoundKey:
    """The key of a round from its row: no, round_id, mac_key, row_check.

    Raises:
        StoreCorrupt: the row is not as it was written.
    """
    if not is_sound(keys.rows, row):
        raise StoreCorrupt("the database is damaged: the key of a round is not what it was")
    return RoundKey(row[0], row[2])


def read_fact(rows: Sequence[tuple[Any, ...]]) -> str | None:
    """A remembered text from its row (key, value, row_check); None when there is none, or a damaged one."""
    return str(rows[0][1]) if rows and is_sound(FACTS_KEY, rows[0]) else None


def fact_row(key: str, value: str) -> tuple[str, str, bytes]:
    """The row of a text to be remembered."""
    return key, value, row_check(FACTS_KEY, (key, value))


@dataclass(slots=True)
class Transaction(ABC):
    """What operations work with, whatever the database: named statements, and what a batch gathers before its commit.

    Attributes:
        keys: the database's own keys.
        counts: changes of the counters, by round number and state.
        found: rows that were set aside in this batch.
        erased: something was deleted whose bytes must go from the files soon.
    """

    keys: Keys
    counts: Counter[tuple[int, int]] = field(default_factory=Counter, kw_only=True)
    found: list[DamagedShare] = field(default_factory=list, kw_only=True)
    erased: bool = field(default=False, kw_only=True)
    _rounds: dict[bytes, RoundKey] = field(default_factory=dict, kw_only=True)

    # ------------------------------------------------------------------ what a database brings

    @abstractmethod
    def run(self, name: str, params: Params = ()) -> int:
        """Run a named statement; the number of rows that it changed."""

    @abstractmethod
    def all(self, name: str, params: Params = ()) -> list[tuple[Any, ...]]:
        """All rows of a named query."""

    @abstractmethod
    def many(self, name: str, rows: Iterable[Params]) -> None:
        """Run a named statement once a row."""

    @abstractmethod
    def new_id(self) -> int:
        """The number of the next share: none is used twice, and they go up."""

    @abstractmethod
    def are_taken(self, asked: Sequence[Name]) -> set[int]:
        """Which of these names are known or spent, by their places in the sequence."""

    @abstractmethod
    def add_shares(self, rows: Sequence[ShareRow]) -> None:
        """Put in new shares."""

    @abstractmethod
    def share(self, share_id: int) -> ShareRow | None:
        """A share's row as it stands, sound or not, for as long as the transaction; None when there is none."""

    @abstractmethod
    def live(self, share_id: int) -> ShareRow | None:
        """The same, but None as well when it was set aside."""

    @abstractmethod
    def index_is_wrong(self) -> None:
        """An index named a row that is not what it says: have that mended, or go on if it was."""

    # ------------------------------------------------------------------ what only several hosts on one database need

    @abstractmethod
    def beside(self) -> None:
        """From here on nothing changes what the chain has told, until the commit: other hosts read blocks too."""

    @abstractmethod
    def alone(self) -> None:
        """From here on no other host takes shares in or changes what the chain has told, until the commit."""

    @abstractmethod
    def is_over(self, round_no: int) -> bool:
        """Whether another host has closed a round; after `beside`: what comes later nobody would ever report."""

    @abstractmethod
    def all_spent(self, spent: Sequence[Spent]) -> bool:
        """Whether another host has told all of these nullifiers, so that there is nothing left to do about them."""

    @abstractmethod
    def acquire_claim(self, share_id: int) -> None:
        """This host works on a share from now on."""

    @abstractmethod
    def release_claim(self, share_id: int) -> None:
        """Nobody works on a share any more."""

    @abstractmethod
    def holds(self, row: ShareRow) -> bool:
        """Whether it is this host that works on a share; another may have taken it up meanwhile."""

    @abstractmethod
    def lapsed(self, limit: int) -> list[int]:
        """Shares whose host has not been heard of for too long, at most `limit`."""

    @abstractmethod
    def orphaned_claims(self, limit: int) -> list[int]:
        """Shares that were in hand when this host ended the last time, at most `limit`."""

    @abstractmethod
    def sends(self) -> bool:
        """Whether this host is the one that sends, and stays it until the commit."""

    @abstractmethod
    def tell(self, word: str) -> None:
        """Have all hosts hear a word once this is committed; said twice it is heard once."""

    # ------------------------------------------------------------------ the same for all

    def one(self, name: str, params: Params = ()) -> tuple[Any, ...] | None:
        """The first row of a named query, read to its end, or None."""
        rows = self.all(name, params)
        return rows[0] if rows else None

    def owners(self, spent: Sequence[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Shares that have one of these nullifiers, by number, each with the round's number and the nullifier."""
        return sorted(
            (share_id, round_no, nullifier)
            for round_no, nullifier in spent
            for (share_id,) in self.all("shares_of_nullifier", (nullifier,))
        )

    def round_key(self, round_id: bytes) -> RoundKey | None:
        """Number and key of a round, None when nothing of it is kept."""
        known = self._rounds.get(round_id)
        if known is None:
            row = self.one("round_key", (round_id,))
            if row is None:
                return None
            known = self._rounds[round_id] = read_round_key(row, self.keys)
        return known

    def need_round(self, round_id: bytes) -> RoundKey:
        """Number and key of a round, made when there is none yet."""
        known = self.round_key(round_id)
        if known is None:
            mac_key = secrets.token_bytes(32)
            (last,) = self.one("last_round_no") or (0,)
            row: tuple[Column, ...] = (last + 1, round_id, mac_key)
            if not self.run("add_round_key", (*row, row_check(self.keys.rows, row))):
                return self.need_round(round_id)  # another host was first
            known = self._rounds[round_id] = RoundKey(last + 1, mac_key)
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

    def set_aside(self, share_id: int, what: DamagedShare, at_ms: int) -> None:
        """Keep a damaged row out of all work, and have it reported (once)."""
        if self.run("set_aside", (share_id, at_ms, what.ref, what.round_id, what.state)):
            self.found.append(what)

    def forget_rounds(self) -> None:
        """Drop what is remembered of rounds: the transaction was rolled back, or a round purged."""
        self._rounds.clear()

    def rolled_back(self) -> None:
        """Drop all that was gathered."""
        self.counts.clear()
        self.found.clear()
        self.erased = False
        self.forget_rounds()
