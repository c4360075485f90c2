"""What to do next with a reveal that may have been sent (pure).

A sent message is public the moment it leaves, so the same bytes may be sent again without giving anything away and
without being counted twice: the chain counts a nullifier once. A new proof is made only when the old message can no
longer get in, and not more often than every ten blocks, as each try costs the chain a verification. Blocks in which
nobody could send it, as the service or its nodes were away, say nothing against a message: it is sent first.
"""

from __future__ import annotations

from enum import Enum

from helper.chain.verdicts import Verdict

PATIENCE_BLOCKS = 3
"""Blocks that an accepted message may take to be counted before it is sent again."""
REPROVE_BLOCKS = 10
"""Blocks after its first sending in which a message is given up for a new proof."""

AT_NEXT_BLOCK = frozenset({Verdict.AMBIGUOUS, Verdict.UNAVAILABLE, Verdict.BEHIND})
"""What says nothing against the message itself: the same bytes again, one block later."""
ONE_NODES_WORD = frozenset({Verdict.BAD_PROOF, Verdict.PERMANENT})
"""What is believed only of every endpoint: the same bytes to another one, one block later."""


class Next(Enum):
    """The next step of a reveal in state broadcast."""

    WAIT = "wait for the next block"
    SEND = "send the same bytes (again)"
    PROVE = "go back for a new proof"


def next_step(
    *, sends: int, first_height: int | None, last_height: int | None, outcome: str | None, height: int
) -> Next:
    """Decide for one unconfirmed reveal.

    Args:
        sends: how often it was sent, or about to be when the service ended.
        first_height: the chain's height when it was first sent.
        last_height: the chain's height when it was last sent.
        outcome: the name of the last answer's verdict, None when no answer is known (a crash, a lost reply).
        height: the chain's height now, every block up to it processed.
    """
    if sends == 0 or first_height is None or last_height is None:
        return Next.SEND
    if height <= last_height:
        return Next.WAIT
    patience = 1 if outcome is None or outcome in _QUICK else PATIENCE_BLOCKS
    waited = height >= last_height + patience
    limit = first_height + REPROVE_BLOCKS
    # a spent nullifier stays spent, whatever proof comes with it
    if height >= limit and outcome != Verdict.SPENT.name:
        away = height >= last_height + REPROVE_BLOCKS
        sent_late = last_height >= limit  # after we were away: it is given its time as any other
        if not away and (waited or not sent_late):
            return Next.PROVE
    return Next.SEND if waited else Next.WAIT


_QUICK = frozenset(verdict.name for verdict in AT_NEXT_BLOCK | ONE_NODES_WORD)
