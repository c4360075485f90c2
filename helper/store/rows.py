"""The row types that a store returns.

Everything here is plain data: raw bytes for ids and hashes, unix seconds for times, milliseconds where a name
ends in `_ms`. No repr shows a field of a witness, a nullifier or a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from helper.core.share import Share, ShareState

REF_CHARS = 12
"""Hex characters of a share's mac that operators see as its name."""
MIN_REF_CHARS = 6
"""The shortest prefix of a name that is looked up."""

Spent = tuple[bytes, bytes]
"""A nullifier that the chain has counted: (round_id, nullifier), 32 bytes each."""


class Enqueued(Enum):
    """What became of a share that was handed in: kept, known before, or of a round that another host has closed."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class QueuedShare:
    """A share taken up for work.

    Attributes:
        id: the store's number of the row; never reused.
        share: what the wallet posted.
        nullifier: 32 bytes.
        state: WITNESSED, when it comes from `claim_due`.
        due_ms: unix milliseconds at which it was due.
        attempts: failures counted so far.
        crashes: prover workers that died over it so far.
        proved_height: chain height at its last proof, None before the first.
    """

    id: int
    share: Share
    nullifier: bytes = field(repr=False)
    state: ShareState
    due_ms: int
    attempts: int
    crashes: int
    proved_height: int | None


@dataclass(frozen=True, slots=True)
class PreparedReveal:
    """A reveal as it will be sent.

    Attributes:
        message: the transaction: 0x04 and the protobuf.
        tx_hash: 32 bytes, SHA-256 of `message`.
        anchor_height: height of the root that the proof is made against.
        circuit: "k11" or "k10".
        height: the chain's height when the proof was made.
    """

    message: bytes = field(repr=False)
    tx_hash: bytes = field(repr=False)
    anchor_height: int
    circuit: str
    height: int


@dataclass(frozen=True, slots=True)
class SentReveal:
    """A reveal that is on disk and may have left the machine.

    Attributes:
        share_id: the row of its share.
        round_id: 32 bytes.
        nullifier: 32 bytes.
        prepared: the bytes, and what they were made against.
        sends: how often sending was begun.
        first_sent_height: chain height at the first send, None when it was never begun.
        last_sent_height: chain height at the latest send.
        last_endpoint: name of the endpoint of the latest send.
        last_outcome: what the latest send came to, None while unknown.
        attempts: failures of the share counted so far.
        due_ms: unix milliseconds at which the share was due.
        first_try: nothing went wrong with the share before this message.
        first_message: the share never had another message, so nothing of it was sent before this one.
    """

    share_id: int
    round_id: bytes
    nullifier: bytes = field(repr=False)
    prepared: PreparedReveal
    sends: int
    first_sent_height: int | None
    last_sent_height: int | None
    last_endpoint: str | None
    last_outcome: str | None
    attempts: int = 0
    due_ms: int = 0
    first_try: bool = True
    first_message: bool = True


class ProposalLike(Protocol):
    """The part of a chain's proposal that is stored."""

    @property
    def id(self) -> int:
        """Number of the proposal, from 1."""
        ...

    @property
    def options(self) -> Sequence[int]:
        """The option indexes."""
        ...


class RoundLike(Protocol):
    """The part of a chain's round that is stored; `helper.chain.models.Round` has it."""

    @property
    def round_id(self) -> bytes:
        """32 bytes."""
        ...

    @property
    def status(self) -> int:
        """1 ACTIVE, 2 TALLYING, 3 FINALIZED, 4 PENDING."""
        ...

    @property
    def vote_end_time(self) -> int:
        """Unix second at which voting ends."""
        ...

    @property
    def created_at_height(self) -> int:
        """Height of the block that made the round."""
        ...

    @property
    def proposals(self) -> Sequence[ProposalLike]:
        """What is voted on."""
        ...


@dataclass(frozen=True, slots=True)
class StoredRound:
    """A round as it was last seen, and what this helper has done about its end.

    Attributes:
        round_id: 32 bytes.
        status: 1 ACTIVE, 2 TALLYING, 3 FINALIZED, 4 PENDING.
        vote_end_time: unix second.
        created_at_height: block height.
        proposals: (proposal id, its option indexes), in the chain's order.
        closed_at: unix seconds at which the round was found closed by the chain's word, None until then.
        alerted_at: unix seconds at which unsubmitted shares were reported, None until then.
    """

    round_id: bytes
    status: int
    vote_end_time: int
    created_at_height: int
    proposals: tuple[tuple[int, tuple[int, ...]], ...]
    closed_at: float | None
    alerted_at: float | None


@dataclass(frozen=True, slots=True)
class DamagedShare:
    """A row whose bytes are not those that were written; it is set aside and never worked on.

    Attributes:
        ref: the share's name as operators see it; it may itself be damaged.
        round_id: 32 bytes, or what the row says.
        state: where the row says it stood.
    """

    ref: str
    round_id: bytes
    state: int


@dataclass(frozen=True, slots=True)
class QueueFilter:
    """Which shares an operator wants to see; None leaves a condition out.

    Attributes:
        round_id: shares of this round only.
        state: shares in this state only.
        due_before_ms: shares due before this unix millisecond only.
        stage: shares whose latest note is of this stage only.
    """

    round_id: bytes | None = None
    state: ShareState | None = None
    due_before_ms: int | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One line of an operator's list: no witness, position, nullifier or hash.

    Attributes:
        ref: the share's name.
        round_id: 32 bytes.
        state: where it stands.
        submit_at: the wallet's unix second, 0 for at once.
        due_ms: unix millisecond at which it is worked on next.
        attempts: failures counted so far.
        crashes: prover workers that died over it.
        stage: where its latest note comes from.
        note: the latest note.
        damaged: whether the row was set aside.
    """

    ref: str
    round_id: bytes
    state: ShareState
    submit_at: int
    due_ms: int
    attempts: int
    crashes: int
    stage: str
    note: str
    damaged: bool


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One thing that happened to a share.

    Attributes:
        at_ms: unix milliseconds.
        stage: where it happened ("accepted", "proof", "broadcast", …).
        note: a short text.
        counted: whether an attempt was spent on it.
    """

    at_ms: int
    stage: str
    note: str
    counted: bool


@dataclass(frozen=True, slots=True)
class QueueStory:
    """All that an operator may know about one waiting share.

    Attributes:
        entry: its line in the list.
        received_ms: unix milliseconds of its arrival.
        vote_end_time: the round's end, None when the round is not known.
        history: what happened, oldest first (of a very long history the latest part).
        attempts_by_stage: attempts spent, by stage.
        tx_hash: 32 bytes while a message is on disk, else None.
        anchor_height: height of the proof's root, with `tx_hash`.
        circuit: circuit of the proof, with `tx_hash`.
        sends: how often sending was begun.
        first_sent_height: chain height at the first send.
        last_sent_height: chain height at the latest send.
        last_endpoint: endpoint of the latest send.
        last_outcome: what the latest send came to.
    """

    entry: QueueEntry
    received_ms: int
    vote_end_time: int | None
    history: tuple[HistoryEntry, ...]
    attempts_by_stage: dict[str, int]
    tx_hash: bytes | None = None
    anchor_height: int | None = None
    circuit: str | None = None
    sends: int = 0
    first_sent_height: int | None = None
    last_sent_height: int | None = None
    last_endpoint: str | None = None
    last_outcome: str | None = None


MINUTES_AHEAD = 60
"""Minutes for which the waiting shares are counted one by one."""


@dataclass(frozen=True, slots=True)
class DueAhead:
    """When the waiting shares of a round are due.

    Attributes:
        minutes: how many in each of the next `MINUTES_AHEAD` minutes; the first counts the overdue too.
        later: how many after them.
    """

    minutes: tuple[int, ...]
    later: int


@dataclass(frozen=True, slots=True)
class RoundOutlook:
    """What is kept of one round, in sums.

    Attributes:
        round_id: 32 bytes.
        status: as the chain last told it, None where that is not kept.
        vote_end_time: unix second, None where it is not kept.
        counts: shares by state.
        ahead: when those that wait are due.
    """

    round_id: bytes
    status: int | None
    vote_end_time: int | None
    counts: Mapping[ShareState, int]
    ahead: DueAhead


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Shares that failed for good in the same way.

    Attributes:
        at_ms: when the latest of them did, unix milliseconds.
        stage: where.
        note: why.
        count: how many.
    """

    at_ms: int
    stage: str
    note: str
    count: int
