"""Decides when a node's response proves that a round or leaf was absent. Pure.

Wallets never retry a 400, so a missing round or leaf is rejected with 400 only if the chain provably did not have it
when the share was posted. A node may lag seconds or blocks behind the node that the wallet reads, permanently and
without any sign of it, and it reports a block shortly before it has executed it. Therefore a constant block age proves
nothing.

A response proves absence when it covers a block that meets both conditions:

- The block's time is later than the arrival. Block times are the chain's clock and the arrival is measured by the local
  clock; if the local clock is known to be behind, the arrival is corrected. This holds for any lag of the node.
- The block is at least `ABSENCE_BLOCKS` above the newest block that was known at the arrival. This uses no clock. It
  holds even if a node's lag hides that the local clock is behind: a lag of one second with a correct clock cannot be
  distinguished from a lag of six seconds with a clock that is five seconds behind.

The second condition is rarely met while one request waits. `FirstArrivals` stores the first arrival, and later retries
are checked against it. A wallet learns the leaf's position from a block before it posts, so a share whose leaf was
missing at the first arrival is invalid on a retry too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from helper.chain.models import BlockHead

CLOCK_TOLERANCE_SECONDS: Final = 0.5
"""Seconds that a block must be later than a share's arrival: the clocks of chain and wallets differ slightly."""
ABSENCE_BLOCKS: Final = 10
"""Blocks by which a response must exceed the height known at the arrival.

Covers a lagging node, and two nodes behind one load balancer, each up to `helper.chain.node.MAX_HEIGHT_DROP` blocks
behind.
"""
EXECUTION_DELAY_SECONDS: Final = 0.1
"""Seconds after which a node is assumed to have executed the newest block that it reports."""
MAX_ARRIVALS: Final = 10_000
"""Maximum number of stored first arrivals. Above it, the oldest are dropped, and their retries start over."""
ARRIVAL_TTL_SECONDS: Final = 300.0
"""Seconds for which a first arrival is stored; longer than `ABSENCE_BLOCKS` blocks of any chain in use."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A valid response of a node about a round or the list of rounds. Times are monotonic seconds.

    Attributes:
        node: name of the node.
        requested_at: when the request was sent.
        first_requested_at: when a request was first sent to this node while it reported this head.
        head: the newest block that the node had reported before the request.
        previous_head: the newest known block below the head; None if there is none.
    """

    node: str
    requested_at: float
    first_requested_at: float
    head: BlockHead
    previous_head: BlockHead | None = None

    @property
    def has_executed_head(self) -> bool:
        """Whether the node has had time to execute its newest block."""
        return self.requested_at - self.first_requested_at >= EXECUTION_DELAY_SECONDS

    @property
    def covered_head(self) -> BlockHead | None:
        """The newest block whose effects the response certainly includes; None if unknown."""
        return self.head if self.has_executed_head else self.previous_head


def next_observation(previous: Observation | None, node: str, head: BlockHead, requested_at: float) -> Observation:
    """Return the observation that follows `previous`.

    `requested_at` is the monotonic time at which the request was sent.
    """
    if previous is None or head.height < previous.head.height:
        return Observation(node, requested_at, requested_at, head)
    if head.height > previous.head.height:
        return Observation(node, requested_at, requested_at, head, previous.head)
    first = previous.first_requested_at if node == previous.node else requested_at
    return Observation(node, requested_at, first, head, previous.previous_head)


@dataclass(frozen=True, slots=True)
class ShareArrival:
    """When a share was first posted, by the local clock and by the chain's blocks.

    Attributes:
        time: Unix seconds by the local clock.
        height: the newest block that any node had reported; 0 before the first.
        offset: the smallest difference between the local clock and a recent block's time when that block was first
            seen, in seconds. It is an upper bound of the local clock minus the chain's, because a node reports a block
            only after its time.
    """

    time: float
    height: int
    offset: float


def proves_absence(observation: Observation | None, arrival: ShareArrival, offset: float) -> bool:
    """Whether anything missing from the observation was absent from the chain at the arrival.

    Args:
        observation: the last response; None if there is none.
        arrival: when the share was first posted.
        offset: the current clock offset, measured like `ShareArrival.offset`.
    """
    covered = observation.covered_head if observation is not None else None
    if covered is None or covered.height < arrival.height + ABSENCE_BLOCKS:
        return False
    clock_lag = max(0.0, -min(offset, arrival.offset))
    return covered.time >= arrival.time + clock_lag + CLOCK_TOLERANCE_SECONDS


@dataclass(frozen=True, slots=True)
class ArrivalKey:
    """Identifies the vote whose round or leaf is missing. Only its owner can compute the vote commitment."""

    round_id: bytes
    tree_position: int
    vote_commitment: bytes


class FirstArrivals:
    """First arrivals of shares whose round or leaf is missing. In memory only.

    The vote commitment is part of the key. With the position alone, another client could post a future position,
    and the share of the voter who gets that position would be checked against an arrival before the vote.
    """

    def __init__(self) -> None:
        # Each with the monotonic time at which it was added.
        self._arrivals: OrderedDict[ArrivalKey, tuple[ShareArrival, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._arrivals)

    def get_or_add(self, key: ArrivalKey, arrival: ShareArrival, monotonic: float) -> ShareArrival:
        """Return the stored first arrival of the key; store this arrival if there is none."""
        self._drop_expired(monotonic)
        if key not in self._arrivals and len(self._arrivals) >= MAX_ARRIVALS:
            self._arrivals.popitem(last=False)
        return self._arrivals.setdefault(key, (arrival, monotonic))[0]

    def _drop_expired(self, monotonic: float) -> None:
        while self._arrivals:
            _, since = next(iter(self._arrivals.values()))
            if monotonic - since < ARRIVAL_TTL_SECONDS:
                return
            self._arrivals.popitem(last=False)

    def forget(self, key: ArrivalKey) -> None:
        """Remove a key, because its leaf was found."""
        self._arrivals.pop(key, None)
