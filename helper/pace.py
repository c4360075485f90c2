"""How the chain's blocks come, and what an answer proves about what it does not hold. Pure.

A wallet never retries a 400, so "the chain does not have this" needs proof: an answer of a node that certainly
knew every block up to the moment at which the share came. Nodes are behind by seconds at times, and show a
block a moment before they have executed it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

from helper.chain.models import BlockHead

ALLOWANCE: Final = 0.5
"""Seconds that a block may be older than a share and still show what the share's wallet saw: clocks differ."""
SETTLED: Final = 0.1
"""Seconds after which a block that a node has shown is taken to be executed there."""
MARGIN: Final = 2.0
"""Seconds that a block may be late before the node counts as behind."""
SHORTEST: Final = 1.0
"""The least interval between blocks that is reckoned with, in seconds."""
HEADS: Final = 32
"""Blocks from which the pace is learnt."""


@dataclass(frozen=True, slots=True)
class Look:
    """One question about a round that a node answered well. Times are unix seconds.

    Attributes:
        began: when it was asked.
        first: when a question was first asked at this head.
        head: the newest block that the node had shown by then.
        before: the time of the newest block below it that was looked at, None when none was.
    """

    began: float
    first: float
    head: BlockHead
    before: float | None = None

    @property
    def settled(self) -> bool:
        """Whether the node has had the time to execute its newest block."""
        return self.began - self.first >= SETTLED

    @property
    def covered(self) -> float | None:
        """The time of the newest block whose effects the answer certainly holds; None for none."""
        return self.head.time if self.settled else self.before


def next_look(previous: Look | None, head: BlockHead, began: float) -> Look:
    """The look after `previous`."""
    if previous is None or head.height < previous.head.height:
        return Look(began, began, head)
    if head.height == previous.head.height:
        return Look(began, previous.first, head, previous.before)
    return Look(began, began, head, previous.head.time)


class Pace:
    """What is normal on this chain: the time between blocks, and how old a block is when we first see it."""

    def __init__(self) -> None:
        self._newest: BlockHead | None = None
        self._intervals: deque[float] = deque(maxlen=HEADS)
        self._ages: deque[float] = deque(maxlen=HEADS)

    def saw(self, head: BlockHead, now: float) -> None:
        """A node's newest block; one that is not newer than all before is of no interest."""
        last = self._newest
        if last is not None and head.height <= last.height:
            return
        if last is not None:
            self._intervals.append((head.time - last.time) / (head.height - last.height))
        self._ages.append(now - head.time)
        self._newest = head

    @property
    def interval(self) -> float:
        """The usual time between two blocks, in seconds."""
        return max(SHORTEST, median(self._intervals)) if self._intervals else SHORTEST

    def in_step(self, head: BlockHead, now: float) -> bool:
        """Whether a node with this newest block has what it should have by now: no block is overdue.

        A block's age alone does not tell: chains stamp blocks with different moments, so the newest is also
        compared with how old others were when they were first seen.
        """
        if self._newest is None or head.height < self._newest.height:
            return False
        late = self._ages[-1] - min(self._ages)
        return now - head.time <= self.interval + MARGIN and late <= min(MARGIN, self.interval / 2)

    def proves_absence(self, look: Look | None, arrived: float) -> bool:
        """Whether what this look did not find was not on the chain when a share arrived (unix seconds)."""
        if look is None or look.began < arrived:
            return False
        if look.covered is not None and look.covered >= arrived - ALLOWANCE:
            return True
        return look.settled and self.in_step(look.head, look.began)
