"""Reasons why admission or dispatch of shares is paused.

The texts are public and identify no share or node.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class PauseCause(Enum):
    """Causes of a pause."""

    STARTING = auto()
    CHAIN_NOT_READ = auto()
    QUEUE_UNWRITABLE = auto()
    DATABASE_MOVED = auto()
    CLOCK_OFF_CHAIN = auto()
    CLOCK_OFF_DATABASE = auto()
    QUEUE_USED_ELSEWHERE = auto()
    LEASE_HOLDER_UNKNOWN = auto()
    LEASE_UNREACHABLE = auto()
    NO_NODE_IN_SYNC = auto()
    BLOCKS_UNREAD = auto()
    ROUND_FROZEN = auto()
    ROUND_TREE_CONTRADICTED = auto()
    ROUND_END_UNCONFIRMED = auto()
    ROUND_STATUS_UNCONFIRMED = auto()
    CIRCUIT_REFUSED = auto()
    EVERY_CIRCUIT_REFUSED = auto()
    REFUSAL_SEEN_BY_SENDER = auto()

    def reason(self, *details: object) -> PauseReason:
        """Return a reason with this cause."""
        return PauseReason(self, details)


_TEXTS: Final = {
    PauseCause.STARTING: "starting",
    PauseCause.CHAIN_NOT_READ: "starting: chain state not read yet",
    PauseCause.QUEUE_UNWRITABLE: "the queue cannot be written",
    PauseCause.DATABASE_MOVED: "{}",
    PauseCause.CLOCK_OFF_CHAIN: "this machine's clock differs too much from the chain's",
    PauseCause.CLOCK_OFF_DATABASE: "this machine's clock is {:.1f} s {} the database's",
    PauseCause.QUEUE_USED_ELSEWHERE: "host {!r} uses this queue or a copy of it",
    PauseCause.LEASE_HOLDER_UNKNOWN: "not known yet whether another host uses this queue",
    PauseCause.LEASE_UNREACHABLE: "lease storage unreachable for too long: another host may hold the lease",
    PauseCause.NO_NODE_IN_SYNC: "no chain node is in sync",
    PauseCause.BLOCKS_UNREAD: "reading the blocks since the last shutdown",
    PauseCause.ROUND_FROZEN: "{}",
    PauseCause.ROUND_TREE_CONTRADICTED: "no node returns a consistent tree of the round",
    PauseCause.ROUND_END_UNCONFIRMED: "a change of the round's end is not confirmed yet",
    PauseCause.ROUND_STATUS_UNCONFIRMED: "a change of the round's status is not confirmed yet",
    PauseCause.CIRCUIT_REFUSED: (
        'the chain rejects valid {0} proofs: it uses the other circuit; set [prover] circuit = "auto" or "{1}"'
    ),
    PauseCause.EVERY_CIRCUIT_REFUSED: "the chain rejects valid proofs of {}: check its nodes",
    PauseCause.REFUSAL_SEEN_BY_SENDER: "{}",
}
"""The text of each cause, with a placeholder for each detail."""


@dataclass(frozen=True, slots=True)
class PauseReason:
    """Reason of a pause; `str` returns its text.

    Attributes:
        cause: the cause.
        details: values for the placeholders of the cause's text.
    """

    cause: PauseCause
    details: tuple[object, ...] = ()

    def __str__(self) -> str:
        return _TEXTS[self.cause].format(*self.details)


def text_of(reason: PauseReason | None) -> str | None:
    """Return the text of a reason, None if there is none."""
    return None if reason is None else str(reason)
