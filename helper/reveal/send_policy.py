"""Decides the next step for a reveal that may have been sent. Pure.

A message is public once it is sent. Resending the same bytes reveals nothing more and is safe, because the chain counts
a nullifier once. A new proof is made only if the old message can no longer be included, and at most once in ten blocks,
because the chain must verify each one. After blocks in which the message could not be sent (the service or its nodes
were down), it is resent before a new proof is considered.
"""

from __future__ import annotations

from enum import Enum

from helper.chain.verdicts import MESSAGE_REFUSALS, Verdict

INCLUSION_WAIT_BLOCKS = 3
"""Blocks to wait for the inclusion of an accepted message before it is resent."""
REPROVE_BLOCKS = 10
"""Blocks after the first send until an unconfirmed message is replaced by a new proof."""

NEXT_BLOCK_VERDICTS = frozenset({Verdict.AMBIGUOUS, Verdict.UNAVAILABLE, Verdict.BEHIND})
"""Verdicts that are not about the message itself: the same bytes are resent one block later."""


class NextStep(Enum):
    """Next step of a reveal in state BROADCAST."""

    WAIT = "wait for the next block"
    SEND = "send the same bytes (again)"
    PROVE = "return to the queue for a new proof"


def next_step(
    *, sends: int, first_height: int | None, last_height: int | None, outcome: str | None, height: int
) -> NextStep:
    """Return the next step for one unconfirmed reveal.

    Args:
        sends: recorded sends, including one that a crash may have interrupted.
        first_height: the chain's height at the first send.
        last_height: the chain's height at the last send.
        outcome: name of the last verdict; None if there is none (a crash or a lost response).
        height: the chain's current height; every block up to it was processed.
    """
    if sends == 0 or first_height is None or last_height is None:
        return NextStep.SEND
    if height <= last_height:
        return NextStep.WAIT
    wait_blocks = 1 if outcome is None or outcome in _NEXT_BLOCK_OUTCOMES else INCLUSION_WAIT_BLOCKS
    has_waited = height >= last_height + wait_blocks
    reprove_height = first_height + REPROVE_BLOCKS
    # A spent nullifier stays spent: a new proof would be refused too.
    if height >= reprove_height and outcome != Verdict.SPENT.name:
        was_down = height >= last_height + REPROVE_BLOCKS
        was_resent_late = last_height >= reprove_height  # resent after downtime: wait for its inclusion as usual
        if not was_down and (has_waited or not was_resent_late):
            return NextStep.PROVE
    return NextStep.SEND if has_waited else NextStep.WAIT


def decide_height(*, sends: int, first_height: int, last_height: int, outcome: str | None) -> int:
    """Return the lowest height at which `next_step` is not to wait. It is stored with each send and outcome."""
    return next(
        height
        for height in range(last_height + 1, last_height + INCLUSION_WAIT_BLOCKS + 1)
        if next_step(sends=sends, first_height=first_height, last_height=last_height, outcome=outcome, height=height)
        is not NextStep.WAIT
    )


# Every node must confirm a refusal of the message, so it is sent to another node one block later.
_NEXT_BLOCK_OUTCOMES = frozenset(verdict.name for verdict in NEXT_BLOCK_VERDICTS | MESSAGE_REFUSALS)
