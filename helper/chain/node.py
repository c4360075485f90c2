"""A configured chain node: its clients and its health. Does no I/O; `NodePool` sends the probes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from helper.chain.chain_data import BlockHead
from helper.chain.rest_client import ChainClient
from helper.chain.rpc_client import RpcClient

MAX_BACKOFF_SECONDS = 30.0
"""Maximum backoff of a failing node, or of the tree of a round, in seconds."""

MAX_HEIGHT_DROP = 5
"""Blocks by which the height of a URL may decrease: nodes behind one load balancer are rarely at the same height."""

SYNC_STATUS_SECONDS = 2.5
"""Seconds for which a report of not syncing remains valid. A lagging node must become unusable within 5 s."""

MAX_OFFSETS = 16
"""Number of recent heads whose offsets are stored."""

MAX_ROUND_FRACTION = 0.1
"""Maximum delay of reveals that a node asks for, as a fraction of the time that was left until the round's end."""


def backoff_seconds(failures: int) -> float:
    """Return the backoff after this many earlier consecutive failures: 1, 2, 4 … 30 s."""
    return min(MAX_BACKOFF_SECONDS, 2.0 ** min(failures, 10))


@dataclass(slots=True)
class Health:
    """Health of one service (REST or RPC) of a node.

    Attributes:
        head: the newest block, None before the first response.
        steady_height: the lower height of the last two probes: a single false report does not count.
        max_height: the greatest agreed height that the node has reached; far below it, it was reset or returns false
            data.
        sync_checked_at: monotonic start of the last probe that requested `is_syncing`.
        probed_at: monotonic start of the last successful probe.
        head_absent_at: monotonic time at which the node did not have its newest block yet; minus infinity if unknown.
        offsets: for each of the most recent heads, monotonic time when it was first reported minus block time. They do
            not depend on the wall clock, which may be set.
        failed_at: monotonic start of the probe that failed after one that succeeded.
        has_failed_once: whether the node responded with an error to the last probe, after one that succeeded.
    """

    head: BlockHead | None = None
    steady_height: int = 0
    max_height: int = 0
    is_syncing: bool = False
    sync_checked_at: float = -math.inf
    probed_at: float = -math.inf
    head_absent_at: float = -math.inf
    offsets: deque[float] = field(default_factory=partial(deque, maxlen=MAX_OFFSETS))
    error: str | None = "not probed yet"
    failed_at: float = -math.inf
    has_failed_once: bool = False
    backoff_until: float = 0.0
    backoff_reason: str = ""
    failures: int = 0
    logged_reason: str | None = "not probed yet"

    def has_recent_sync_status(self, monotonic: float) -> bool:
        """Whether the node recently reported that it is not syncing.

        False if the last probe failed. If True, `is_syncing` is not requested again while the newest block is the same.
        """
        is_known = self.error is None and not self.has_failed_once and not self.is_syncing
        return is_known and monotonic - self.sync_checked_at < SYNC_STATUS_SECONDS

    def record_probe(self, head: BlockHead, *, is_syncing: bool | None, started_at: float, ended_at: float) -> None:
        """Record a successful probe between two monotonic times.

        `is_syncing` is None if it was not requested.
        """
        if self.head is None or head.height != self.head.height:
            self.offsets.append(ended_at - head.time)
            self.head_absent_at = self.probed_at
        self.steady_height = 0 if self.head is None else min(head.height, self.head.height)
        self.probed_at = started_at
        self.head = head
        if is_syncing is not None:
            self.is_syncing, self.sync_checked_at = is_syncing, started_at
        self.error, self.has_failed_once = None, False

    def record_failed_probe(self, reason: str, *, has_responded: bool, started_at: float) -> None:
        """Record a failed probe. After an error of a node in sync, which may commit a block, the next decides."""
        self.has_failed_once = has_responded and self.error is None and not self.has_failed_once
        if not self.has_failed_once:
            self.failed_at = started_at if self.error is None else self.failed_at
            self.error = reason

    def is_head_newer_than(self, monotonic: float, offset: float) -> bool:
        """Whether the newest block was provably produced after `monotonic`, if the node reports correctly.

        Two conditions must hold. The node was probed after that time and did not have the block yet. This alone is not
        sufficient, because a stalled node lacks blocks that others have had for a while. In addition, the block's own
        time must be later, corrected by the smallest `offset` at which recent blocks were first reported: a block
        carries the time at which its predecessor was agreed on, and the local clock may differ from the chain's.
        """
        return self.head is not None and self.head_absent_at >= monotonic and self.head.time + offset >= monotonic

    def start_backoff(self, reason: str, *, monotonic: float) -> None:
        """Start a backoff, longer with each consecutive failure."""
        self.backoff_until = monotonic + backoff_seconds(self.failures)
        self.backoff_reason = reason
        self.failures += 1

    def fault(self, chain_id: str | None) -> str | None:
        """Why this service is not usable whatever the time is, None if that depends on its newest block's age.

        `chain_id` is the id of the chain, None if it is not agreed yet.
        """
        head = self.head
        if self.error is not None or head is None:
            return self.error or "no block known yet"
        if chain_id not in {None, head.chain_id}:
            return f"is on chain {head.chain_id}, expected {chain_id}"
        if head.height < self.max_height - MAX_HEIGHT_DROP:
            drop = f"height decreased from {self.max_height} to {head.height}"
            return f"{drop}: if the chain was reset, restart the helper"
        return "node is syncing" if self.is_syncing else None


class Penalty(NamedTuple):
    """What a node's last responses to reveals cost it. Times are monotonic.

    Attributes:
        held_at: time at which the node asked for a delay before the next reveal, or was found not ready.
        hold_seconds: that delay, 0 if there is none.
        probe_at: time from which one reveal may be sent to it while every node asks for a delay.
        avoid_until: time until which it is tried last, after an inconclusive response.
    """

    held_at: float = 0.0
    hold_seconds: float = 0.0
    probe_at: float = 0.0
    avoid_until: float = -math.inf

    def is_held(self, now: float, seconds_left: float = math.inf) -> bool:
        """Whether the node gets no reveal now of a round that ends in `seconds_left`."""
        passed = now - self.held_at
        return passed < min(self.hold_seconds, MAX_ROUND_FRACTION * (seconds_left + passed))


NO_PENALTY = Penalty()


@dataclass(slots=True, eq=False)
class Node:
    """A chain node: its REST API, and its consensus RPC if one is configured.

    Attributes:
        left_out_until: monotonic time until which syncs leave it out while other nodes respond, because it delayed one.
    """

    client: ChainClient
    rpc: RpcClient | None = None
    health: Health = field(default_factory=Health)
    rpc_health: Health = field(default_factory=Health)
    penalty: Penalty = NO_PENALTY
    left_out_until: float = -math.inf

    @property
    def name(self) -> str:
        """Host and port of the REST API, without credentials."""
        return self.client.name

    @property
    def height(self) -> int:
        """Height of the newest block that the REST API has reported, 0 before the first."""
        return self.health.head.height if self.health.head is not None else 0

    def is_rpc_current(self, monotonic: float) -> bool:
        """Whether the RPC is healthy and has the REST API's newest block.

        If so, it is not probed: its heights are not used, only that it is reachable, current and on this chain.
        """
        return (
            self.health.error is None
            and not self.health.has_failed_once
            and self.rpc_health.has_recent_sync_status(monotonic)
            and self.health.head == self.rpc_health.head
        )
