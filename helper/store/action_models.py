"""Row types of operator actions: the audit log, failure counts, and exported and imported shares.

Plain data, as in `models.py`; no repr contains a witness field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from helper.core.json_records import fact
from helper.core.share import Share, ShareState
from helper.store.models import HistoryEntry
from helper.store.table_rows import RevealRow


@dataclass(frozen=True, slots=True)
class Actor:
    """The user who performs an operator action.

    Attributes:
        uid: reported by the kernel.
        name: the user name, or the user id if it has none.
        channel: "socket" through the running helper, "file" on the database while no helper is running.
    """

    uid: int
    name: str
    channel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """An operator action."""

    id: int = fact("Sequence number, in order of time.", ge=1)
    at: float = fact("Start time in Unix seconds.")
    ended: float | None = fact("End time in Unix seconds; null if the action was interrupted or is in progress.")
    uid: int = fact("User id, as reported by the kernel.")
    who: str = fact("User name.")
    way: str = fact("`socket`: the running helper performed it. `file`: the command performed it on the database.")
    what: str = fact("Type of the action, such as `retry`.")
    wanted: Mapping[str, Any] = fact(
        "Arguments of the action. `named` is the number of shares given; their references are not recorded."
    )
    outcome: Mapping[str, Any] | None = fact("Counters, and the error if there was one.")


@dataclass(frozen=True, slots=True)
class ExportedShare:
    """A live share with all data that another machine needs to continue processing it.

    Attributes:
        share: as the wallet posted it.
        state: never CONFIRMED.
        due_ms: Unix milliseconds at which it is processed next.
        crashes: prover workers that crashed on it so far.
        proved_height: chain height at its last proof, None before the first.
        stage: that of its last event, as `note`.
        history: its events, oldest first.
        reveal: its message, if it may have been sent, as `RevealRow.of` returns it.
    """

    share: Share
    received_ms: int
    state: ShareState
    due_ms: int
    attempts: int
    crashes: int
    proved_height: int | None
    stage: str
    note: str
    history: tuple[HistoryEntry, ...] = ()
    reveal: RevealRow | None = field(default=None, repr=False)


class ImportResult(StrEnum):
    """Result of importing a share.

    IMPORTED and RESTORED mean success; the others are reasons for skipping it.
    """

    IMPORTED = "taken"
    """It was unknown in this queue and was added."""
    RESTORED = "revived"
    """It had been moved from this queue by an export (`MOVED`) and was queued again."""
    CONFIRMED = "confirmed"
    """The chain has confirmed it."""
    QUEUED = "queued"
    """It is already pending, being proven or being sent here."""
    FAILED = "failed"
    """It failed here, and was not moved by an export."""
    DAMAGED = "damaged"
    """Its row here is damaged."""
    CONFLICT = "conflict"
    """Another content is stored here under its key."""
    CLOSED = "closed"
    """The chain has closed its round."""
    UNKNOWN = "unknown"
    """Its round is not known to this queue."""
    INVALID = "invalid"
    """It fails the validation of posted shares."""


@dataclass(frozen=True, slots=True)
class ImportedShare:
    """Result of importing one share.

    Attributes:
        ref: the share's reference in this queue, None if it has none (`UNKNOWN`, `INVALID`).
        round_id: its round, None if the line could not be parsed.
    """

    result: ImportResult
    ref: str | None = None
    round_id: bytes | None = None


ValidatedShare = tuple[ExportedShare, bytes]
"""An imported share, and its nullifier as computed by this helper."""

RowVersion = tuple[int, bytes]
"""Identifies a version of a live row: its id and its row check."""
