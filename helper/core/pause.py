"""Reasons why admission or dispatch of shares is paused.

The texts are public and name no share or node.
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
    BOTH_CIRCUITS_REFUSED = auto()
    REFUSAL_SEEN_BY_SENDER = auto()

    def reason(self, *details: object) -> PauseReason:
        """Return a reason with this cause."""
        return PauseReason(self, details)


_TEXTS: Final = {
    PauseCause.STARTING: "starting",
    PauseCause.CHAIN_NOT_READ: "starting: the chain was not read yet",
    PauseCause.QUEUE_UNWRITABLE: "the queue cannot be written",
    PauseCause.DATABASE_MOVED: "{}",
    PauseCause.CLOCK_OFF_CHAIN: "this machine's clock differs too much from the chain's",
    PauseCause.CLOCK_OFF_DATABASE: "this machine's clock is {:.1f} s {} the database's",
    PauseCause.QUEUE_USED_ELSEWHERE: "the host {!r} works on this queue, or on a copy of it",
    PauseCause.LEASE_HOLDER_UNKNOWN: "it is not known yet whether another host works on this queue",
    PauseCause.LEASE_UNREACHABLE: "the lease storage has not answered for so long that another host may send",
    PauseCause.NO_NODE_IN_SYNC: "no chain node is in sync",
    PauseCause.BLOCKS_UNREAD: "the blocks since the last stop are not read yet",
    PauseCause.ROUND_FROZEN: "{}",
    PauseCause.ROUND_TREE_CONTRADICTED: "no node returns a consistent tree of the round",
    PauseCause.ROUND_END_UNCONFIRMED: "a change of the round's end is not confirmed yet",
    PauseCause.ROUND_STATUS_UNCONFIRMED: "a change of the round's status is not confirmed yet",
    PauseCause.CIRCUIT_REFUSED: (
        'the chain refuses {0} proofs that are valid: it runs the other circuit; set [prover] circuit = "auto" or "{1}"'
    ),
    PauseCause.BOTH_CIRCUITS_REFUSED: "the chain refuses valid proofs of both circuits: check whether its nodes work",
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

    @property
    def refusal(self) -> str:
        """The text of a response that refuses a share for this reason."""
        return f"shares cannot be accepted now: {self}"


def text_of(reason: PauseReason | None) -> str | None:
    """Return the text of a reason, None if there is none."""
    return None if reason is None else str(reason)
