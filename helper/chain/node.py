"""One configured node: its clients, and what is known of its health. Pure judgement; the asking is done in
failover.py.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from helper.chain.models import BlockHead
from helper.chain.rest_client import ChainClient
from helper.chain.rpc_client import RpcClient

LONGEST_REST = 30.0
"""Seconds that a failing endpoint rests at most before it is tried again."""

WOBBLE = 5
"""Blocks that a URL may fall back without being set aside: several nodes behind one address are never quite
in step.
"""

WORD_SECONDS = 2.5
"""For how long a node's word that it is not catching up holds: one that stops to follow must be left within 5 s."""


OFFSETS_KEPT = 16
"""Heads of a node whose offsets are remembered."""

PART = 1 / 4
"""Of the interval between probes: the time between those that look for a block that should be there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a node may be off. Seconds.

    Attributes:
        stale_after: a newest block older than this makes a node stale.
        clock_skew: a newest block further in our future than this makes a node (or our clock) wrong.
    """

    stale_after: float = 90.0
    clock_skew: float = 120.0

    def exceeded(self, age: float) -> str | None:
        """What is wrong with a newest block of this age (seconds, negative in our future)."""
        if age > self.stale_after:
            return f"newest block is {age:.0f} s old"
        return f"newest block is {-age:.0f} s ahead of our clock" if -age > self.clock_skew else None


@dataclass(slots=True)
class Health:
    """What the last questions to one service (REST or RPC) of a node told.

    Attributes:
        head: its newest block, None before its first answer.
        highest: the greatest height it ever showed; a node below its own past was reset or lies.
        offset: our clock minus the block's time, when this head was first seen. Seconds.
        syncing: it says that it is catching up.
        said_at: monotonic time at which the probe began that last asked it for that.
        probed_at: monotonic time at which its last good probe began.
        before_head: monotonic time at which it did not have its newest block yet, minus infinity where none is known.
        offsets: those of its latest heads.
        absences: for each of them, our clock minus its time when it was last looked for and not there yet.
        block_seconds: between its two newest heads, by their own time and a block; infinity before there were two.
        error: what went wrong when it was last probed, None when nothing did.
        implausible: why its newest block cannot be right, None when it can.
        rest_until: monotonic time before which it is not asked anything (but probed).
        rest_reason: why it rests.
        failures: calls that failed since the last that did not.
        told: the reason that was last logged.
    """

    head: BlockHead | None = None
    highest: int = 0
    offset: float | None = None
    syncing: bool = False
    said_at: float = -math.inf
    probed_at: float = -math.inf
    before_head: float = -math.inf
    offsets: deque[float] = field(default_factory=partial(deque, maxlen=OFFSETS_KEPT))
    absences: deque[float] = field(default_factory=partial(deque, maxlen=OFFSETS_KEPT))
    block_seconds: float = math.inf
    error: str | None = "not asked yet"
    implausible: str | None = None
    rest_until: float = 0.0
    rest_reason: str = ""
    failures: int = 0
    told: str | None = "not asked yet"

    def is_known(self, monotonic: float) -> bool:
        """Whether it was well, and said just now that it is not catching up: while its newest block is the same, that
        need not be asked again.
        """
        return self.error is None and not self.syncing and monotonic - self.said_at < WORD_SECONDS

    def saw(self, head: BlockHead, *, syncing: bool | None, now: float, began: float) -> None:
        """Take in a good probe that began at a monotonic time; `syncing` is None where that was not asked."""
        if self.head is None or head.height != self.head.height:
            self.offset = now - head.time
            self.offsets.append(self.offset)
            self.absences.append(self.offset - (began - self.probed_at))
            self.before_head = self.probed_at
            if self.head is not None:
                self.block_seconds = (head.time - self.head.time) / (head.height - self.head.height)
        self.probed_at = began
        self.head = head
        if syncing is not None:
            self.syncing, self.said_at = syncing, began
        self.error = None

    def pause(self, interval: float, now: float) -> float:
        """Seconds until it should be probed again: `interval`, or less around the time at which its next block is
        expected. A block is then seen within a part of the interval, not half of one later on average.

        It is expected as long after the newest as that came after the one before, and to show as soon as any of the
        latest has: it is looked for then and, as it may be a little late, a part later; and a part before, unless it is
        known not to be there so early.
        """
        part = PART * interval
        if self.head is None or self.block_seconds < interval - part:
            return interval  # several blocks an interval: whoever asks so seldom wants no more questions
        shows = min(self.offsets)
        due = self.head.time + self.block_seconds + shows - now
        early = 0.0 if shows - max(self.absences) < 1.5 * part else part
        return min(max(due - early, part), interval) if due > -part else interval

    def rest(self, reason: str, *, monotonic: float) -> None:
        """Leave it alone for 1, 2, 4 … 30 s after the first, second, third … failure in a row."""
        self.rest_until = monotonic + min(LONGEST_REST, 2.0 ** min(self.failures, 10))
        self.rest_reason = reason
        self.failures += 1

    def reason(self, chain_id: str | None, limits: Limits, *, now: float, monotonic: float) -> str | None:
        """Why this service is set aside; None when it is fresh."""
        head = self.head
        if self.error is not None:
            return self.error
        if head is None or chain_id is None:
            return "its chain is not known yet"
        if head.chain_id != chain_id:
            return f"it serves chain {head.chain_id}, not {chain_id}"
        if head.height < self.highest - WOBBLE:
            return f"its height went back from {self.highest} to {head.height}"
        if self.syncing:
            return "it is catching up"
        resting = self.rest_reason if monotonic < self.rest_until else None
        return self.implausible or limits.exceeded(now - head.time) or resting


@dataclass(slots=True, eq=False)
class Node:
    """A node of the chain, in the operator's order of preference.

    Attributes:
        client: its REST API.
        rpc: its consensus RPC, where one is configured.
        health: of the REST API.
        rpc_health: of the RPC.
    """

    client: ChainClient
    rpc: RpcClient | None = None
    health: Health = field(default_factory=Health)
    rpc_health: Health = field(default_factory=Health)

    @property
    def name(self) -> str:
        """Host and port of its REST API, without credentials."""
        return self.client.name

    @property
    def reason(self) -> str | None:
        """Why it was set aside when that was last looked at, as it was logged; None when it is fresh."""
        return self.health.told

    @property
    def height(self) -> int:
        """The height of the newest block that its REST API showed, 0 before the first."""
        return self.health.head.height if self.health.head is not None else 0

    def rpc_in_step(self, monotonic: float) -> bool:
        """Whether the RPC has shown the block that the REST API shows, and was well just now: it need not be asked. Its
        heights are not followed, only that it is there, fresh and of this chain.
        """
        return (
            self.health.error is None
            and self.rpc_health.is_known(monotonic)
            and self.health.head == self.rpc_health.head
        )
