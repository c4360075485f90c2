"""Types that the store accepts and returns.

Plain data: 32 raw bytes for ids of rounds, nullifiers and hashes, Unix seconds for times, Unix milliseconds if the name
ends in `_ms`. No repr contains a witness field, a nullifier or a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from helper.core.json_records import TX_HASH, fact
from helper.core.share import ShareState

MIN_REF_CHARS = 6
"""Minimum length of a prefix of a share reference or a round id in a lookup."""

MOVED = "moved"
"""Stage of a share that an export moved to another machine. It remains failed here until an operator retries it."""

SpentNullifier = tuple[bytes, bytes]
"""A nullifier that is spent on the chain: (round_id, nullifier), 32 bytes each."""


class EnqueueResult(Enum):
    """Result of enqueueing a share.

    MOVED_UP means that it is a duplicate with an earlier due time, which now applies. CLOSED means that another host
    has closed its round.
    """

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    MOVED_UP = "moved up"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StoredRound:
    """A round as the chain last listed it, and this helper's marks.

    Attributes:
        status: 1 ACTIVE, 2 TALLYING, 3 FINALIZED, 4 PENDING.
        proposals: (proposal id, its option indexes), in the chain's order.
        closed_at: Unix seconds at which the round was found to be closed by the chain, None before.
        alerted_at: Unix seconds at which unconfirmed shares were reported, None before.
    """

    round_id: bytes
    status: int
    vote_end_time: int
    created_at_height: int
    proposals: tuple[tuple[int, tuple[int, ...]], ...]
    closed_at: float | None = None
    alerted_at: float | None = None


@dataclass(frozen=True, slots=True)
class DamagedShare:
    """A row that failed its check; it is quarantined and never processed. Any of these columns may be damaged too."""

    ref: str
    round_id: bytes
    state: int


@dataclass(frozen=True, slots=True)
class QueueFilter:
    """Selects shares; None omits a condition. `stage` is that of a share's last event."""

    round_id: bytes | None = None
    state: ShareState | None = None
    due_before_ms: int | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A share, without its witness."""

    ref: str = fact("Reference of the share, used only by this helper.")
    round: str = fact("Round id, hex.")
    state: str = fact("State of the share.")
    submit_at: int = fact("`submit_at` as set by the wallet, in Unix seconds; 0 means immediately.")
    due: float = fact("Time at which the share is processed next, in Unix seconds.")
    attempts: int = fact("Number of attempts spent.")
    crashes: int = fact("Number of prover worker crashes while the share was proven.")
    stage: str = fact("Stage of the latest event.")
    note: str = fact("Text of the latest event.")
    damaged: bool = fact("Whether the row is damaged and quarantined.")


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event in the history of a share.

    Attributes:
        stage: where it happened ("accepted", "proof", "broadcast", …).
    """

    at_ms: int
    stage: str
    note: str
    spent_attempt: bool


@dataclass(frozen=True, slots=True)
class TransactionRow:
    """A stored transaction."""

    hash: str = fact("Transaction hash, hex.", pattern=TX_HASH)
    anchor_height: int = fact("Height of the tree root that the proof was made against.")
    circuit: str = fact("Circuit of the proof.")
    sends: int = fact("Number of sends started.")
    first_sent_height: int | None = fact("Chain height at the first send; null before it.")
    last_sent_height: int | None = fact("Chain height at the latest send; null before the first.")
    last_endpoint: str | None = fact("Node of the latest send; null before the first.")
    last_outcome: str | None = fact("Result of the latest send; null if unknown.")


@dataclass(frozen=True, slots=True)
class ShareDetails:
    """Details of one live share for operators.

    Attributes:
        vote_end_time: Unix seconds at which voting ends, None if the round is not known.
        history: its events, oldest first; the latest part of a very long history.
        transaction: its message, if it may have been sent.
    """

    entry: QueueEntry
    received_ms: int
    vote_end_time: int | None
    history: tuple[HistoryEntry, ...]
    attempts_by_stage: dict[str, int]
    transaction: TransactionRow | None = None


MINUTES_AHEAD = 60
"""Minutes for which a forecast has one count per minute."""


@dataclass(frozen=True, slots=True)
class DueForecast:
    """Number of pending shares of a round by due time.

    Attributes:
        minutes: shares due in each of the next `MINUTES_AHEAD` minutes; the first includes overdue shares.
        later: shares due after that.
    """

    minutes: tuple[int, ...]
    later: int


@dataclass(frozen=True, slots=True)
class DueBucket:
    """Number of shares of a round in the same state and the same interval of due times.

    Attributes:
        index: number of the interval, from 0; below 0 and beyond the end of the round too.
    """

    state: ShareState
    is_due: bool
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class FailedShares:
    """Shares that failed permanently in the same stage for the same reason."""

    stage: str = fact("Stage of the failure.")
    note: str = fact("Reason of the failure.")
    count: int = fact("Number of shares.")
    latest: float = fact("Time of the latest failure in Unix seconds.")


@dataclass(frozen=True, slots=True)
class PurgedShares:
    """Shares that had failed when their round was purged."""

    day: int = fact("Start of the day of the purge (UTC) in Unix seconds.")
    stage: str = fact("Stage of the failure.")
    reason: str = fact("Reason of the failure.")
    count: int = fact("Number of shares.")


@dataclass(frozen=True, slots=True)
class RetryingShares:
    """Shares of a round that wait for a retry after the same failure, and are due in the same minute.

    Attributes:
        round: id of the round, hex.
        stage: the stage that failed.
        minute: minutes until they are due, rounded down.
        next: Unix seconds of the first retry.
    """

    round: str
    stage: str
    reason: str
    minute: int
    count: int
    next: float
