"""The rows that operators' acts are about: who did what, what had failed, and shares on their way to another machine.

Plain data, as in `rows.py`; nothing here shows a witness field in its repr.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from helper.core.share import Share, ShareState
from helper.store.rows import HistoryEntry, PreparedReveal

MOVED: Final = "moved"
"""The stage of a share that an export handed over to another machine: failed here, for as long as nobody retries it."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who has something done.

    Attributes:
        uid: the user's number, as the kernel tells it.
        name: the user's name, or the number where it has none.
        way: "socket" through the running daemon, "file" on the database while none runs.
    """

    uid: int
    name: str
    way: str


@dataclass(frozen=True, slots=True)
class Action:
    """Something that an operator had done, as it is remembered.

    Attributes:
        id: counts up.
        actor: who.
        begun_ms: unix milliseconds at which it began.
        what: "retry", "export", "move", "import" or "purge".
        wanted: what was asked for, plain JSON values; never a share's name.
        ended_ms: unix milliseconds at which it ended, None when it was cut off or is under way.
        outcome: what came of it, plain JSON values; None with `ended_ms`.
    """

    id: int
    actor: Actor
    begun_ms: int
    what: str
    wanted: dict[str, Any]
    ended_ms: int | None
    outcome: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class PurgedFailures:
    """Shares that had failed for good when their round was purged, with nothing that could name one.

    Attributes:
        day: days since 1970 (UTC) of the purge.
        stage: where they failed.
        reason: why.
        count: how many.
    """

    day: int
    stage: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class ExportedReveal:
    """The message of a share that may have been sent, as an export carries it.

    Attributes:
        prepared: the bytes, and what they were made against.
        sends: how often sending was begun.
        first_sent_height: chain height at the first send, None when it was never begun.
        last_sent_height: chain height at the latest send.
        last_endpoint: name of the endpoint of the latest send.
        last_outcome: what the latest send came to.
    """

    prepared: PreparedReveal
    sends: int
    first_sent_height: int | None
    last_sent_height: int | None
    last_endpoint: str | None
    last_outcome: str | None


@dataclass(frozen=True, slots=True)
class ExportedShare:
    """A live share with all that another machine needs to go on with it.

    Attributes:
        share: what the wallet posted.
        received_ms: unix milliseconds of its arrival.
        state: where it stands; never SUBMITTED.
        due_ms: unix milliseconds at which it is worked on next.
        attempts: failures counted so far.
        crashes: prover workers that died over it so far.
        proved_height: chain height at its last proof, None before the first.
        stage: where its latest note comes from.
        note: the latest note.
        history: what happened to it, oldest first.
        reveal: its message, where it may have been sent.
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
    reveal: ExportedReveal | None = field(default=None, repr=False)


class ImportResult(StrEnum):
    """What an import did with one share: took it over (the first two), or left it, and why."""

    TAKEN = "taken"
    """It was not known here."""
    REVIVED = "revived"
    """It had been handed over from here (`MOVED`) and waits here again."""
    CONFIRMED = "confirmed"
    """The chain has counted it."""
    QUEUED = "queued"
    """It waits here already, or is being proven or sent."""
    FAILED = "failed"
    """It failed here, and was not handed over."""
    DAMAGED = "damaged"
    """Its row here is damaged."""
    CLOSED = "closed"
    """The chain has closed its round."""
    UNKNOWN = "unknown"
    """The chain has not told this queue of its round."""
    INVALID = "invalid"
    """No wallet could have posted it."""


@dataclass(frozen=True, slots=True)
class ImportedShare:
    """What an import did with one share.

    Attributes:
        result: what.
        ref: the share's name in this queue, None where it cannot have one (`UNKNOWN`, `INVALID`).
        round_id: its round, None where the line could not be read.
    """

    result: ImportResult
    ref: str | None = None
    round_id: bytes | None = None


Checked = tuple[ExportedShare, bytes]
"""An imported share, and its nullifier (32 bytes) as computed here."""

RowMark = tuple[int, bytes]
"""A live row as it was when it was read: its number and its check."""
