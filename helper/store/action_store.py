"""What a store does for operators' acts; `helper.operations.actions` knows this protocol only.

Each change looks at a bounded number of shares, so that wallets never wait long for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from helper.core.share import ShareState
from helper.store.action_rows import (
    MOVED,
    Action,
    Actor,
    ExportedReveal,
    ExportedShare,
    FailedBefore,
    ImportedShare,
    ImportResult,
    RowMark,
)
from helper.store.rows import FailureGroup, QueueFilter, StoredRound

__all__ = [
    "MOVED",
    "ActStore",
    "Action",
    "Actor",
    "Checked",
    "ExportedReveal",
    "ExportedShare",
    "FailedBefore",
    "ImportResult",
    "ImportedShare",
    "RowMark",
]

Checked = tuple[ExportedShare, bytes]
"""A carried share with its nullifier, as our own hashes give it."""


class ActStore(Protocol):
    """What operators' acts need."""

    async def begin_action(self, actor: Actor, what: str, wanted: Mapping[str, Any]) -> int:
        """Note that an act begins, before it does anything; its number."""
        ...

    async def end_action(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Note what came of an act."""
        ...

    async def actions(self, *, limit: int) -> list[Action]:
        """The latest acts, newest first."""
        ...

    async def failed_ids(self, round_id: bytes | None, *, after_id: int, limit: int) -> list[int]:
        """Failed shares (of one round) with an id above `after_id`, by id."""
        ...

    async def ids_of(self, ref: str) -> list[int]:
        """The live shares, at most two, whose name begins so."""
        ...

    async def retry_some(
        self, ids: Sequence[int], wanted: QueueFilter, *, closed: Collection[bytes], note: str, dry: bool
    ) -> Counter[str]:
        """FAILED -> RECEIVED at their own time, all attempts back, for those that are wanted; `dry` only counts.

        Returns:
            How many were `retried`, and how many stay as their round is `closed` (named so, or marked so here).
        """
        ...

    async def hand_over_some(self, marks: Sequence[RowMark], *, note: str, at_rest: bool) -> Counter[str]:
        """Give up shares that an export carries away: FAILED with the stage `MOVED`, unless their row changed since.

        Args:
            marks: the rows as they were carried.
            note: what their histories are told.
            at_rest: only shares that nobody works on (RECEIVED, FAILED).

        Returns:
            How many were `moved`, and how many `stayed`.
        """
        ...

    async def take_over_some(self, carried: Sequence[Checked], *, note: str, dry: bool) -> list[ImportedShare]:
        """Take over shares of another machine's export, none due before its own time; `dry` changes nothing.

        Returns:
            What was done with each, in their order.
        """
        ...

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state."""
        ...

    async def rounds(self) -> list[StoredRound]:
        """All rounds kept."""
        ...

    async def purge(self, round_id: bytes) -> int:
        """Erase everything of a closed round. Returns how many shares (with tombstones) went."""
        ...

    async def erased(self) -> None:
        """Wait until everything deleted before this call is gone from the files."""
        ...

    async def get_meta(self, key: str) -> str | None:
        """A remembered text."""
        ...

    async def failed_groups(self, wanted: QueueFilter, *, limit: int) -> list[FailureGroup]:
        """What failed for good and is not purged yet, by stage and reason, the latest first."""
        ...

    async def failed_before(self) -> list[FailedBefore]:
        """What had failed in rounds that were purged in the last days, by day, stage and reason."""
        ...
