"""Several nodes as one: who is fresh, who is asked, who rests, and why.

A node is *fresh* when it serves our chain, is not syncing, and its newest block's time is close to our
clock. Fresh nodes are asked in the operator's order; one that gives no answer rests for a while, so that it delays
others only once, and so does one that contradicts itself or other nodes. After an error or an unreadable answer to a
single question, only that question goes on to the next node: the node's blocks and its mempool may be as good as
before. Each change of a node's state, and each kind of invalid answer, is one log line that names the node and the
reason.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import httpx
import structlog

from helper.chain.head_bounds import HeadBounds
from helper.chain.models import BlockHead
from helper.chain.node import Health, Limits, Node
from helper.chain.node_http import TIMEOUT, Unanswered
from helper.chain.rest_client import ChainClient, HeightGoneError
from helper.chain.rpc_client import RpcClient
from helper.clock import Clock
from helper.core.recent import RecentKeys
from helper.errors import ChainError, ChainUnavailable, ConfigError, InvalidAnswer

__all__ = ["Node", "NodePool", "create_nodes"]

T = TypeVar("T")

EVER = 2**62
"""A height above all blocks."""

_HEADS_KEPT = 256
_FAULT_SECONDS = 60.0  # an invalid answer is logged again if there was none to that question for this long


def create_nodes(
    urls: Sequence[str],
    rpc_urls: Sequence[str] = (),
    *,
    timeout: float = TIMEOUT,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[Node]:
    """Endpoints from an operator's two lists; the n-th RPC URL belongs to the n-th REST URL ("" for none)."""
    if len(rpc_urls) > len(urls):
        raise ConfigError("[chain] rpc names more nodes than [chain] endpoints")
    made = []
    for number, url in enumerate(urls):
        client = ChainClient(url, timeout=timeout, transport=transport)
        rpc_url = rpc_urls[number] if number < len(rpc_urls) else ""
        rpc = RpcClient(rpc_url, timeout=timeout, transport=transport) if rpc_url else None
        made.append(Node(client, rpc))
    return made


class NodePool:
    """The configured nodes of one chain.

    Attributes:
        chain_id: the chain's id; None until configured, remembered, or learnt from the first answer.
        all: every endpoint in order of preference.
        limits: how stale or skewed a node may be.
        clock: the time that everything here goes by.
        bounds: judges whether the heights that nodes show are plausible.
    """

    def __init__(
        self,
        endpoints: Sequence[Node],
        *,
        clock: Clock,
        chain_id: str | None = None,
        stale_after: float = 90.0,
        clock_skew: float = 120.0,
    ) -> None:
        self.all = list(endpoints)
        self.chain_id = chain_id or None
        self.limits = Limits(stale_after, clock_skew)
        self.clock = clock
        self._log = structlog.get_logger("helper.chain")
        self._subscribers: list[Callable[[], None]] = []
        self._listeners: list[Callable[[BlockHead | None], None]] = []
        self._times: OrderedDict[int, float] = OrderedDict()
        self._faults = RecentKeys(_FAULT_SECONDS)
        self.bounds = HeadBounds(len(self.all))

    async def aclose(self) -> None:
        """Close all connections."""
        for endpoint in self.all:
            await endpoint.client.aclose()
            if endpoint.rpc is not None:
                await endpoint.rpc.aclose()

    # What is known

    @property
    def fresh(self) -> list[Node]:
        """The endpoints that may be asked now, in order of preference; those that keep a call waiting come last."""
        reason = self._judge()
        fresh = [endpoint for endpoint in self.all if reason(endpoint.health) is None]
        if len(fresh) > 1:
            fresh.sort(key=lambda endpoint: endpoint.client.slow)
        return fresh

    @property
    def fresh_rpc(self) -> list[Node]:
        """The endpoints whose consensus RPC may be asked now."""
        reason = self._judge()
        fresh = [e for e in self.all if e.rpc is not None and reason(e.rpc_health) is None]
        if len(fresh) > 1:
            fresh.sort(key=lambda endpoint: endpoint.rpc is not None and endpoint.rpc.slow)
        return fresh

    @property
    def usable(self) -> bool:
        """Whether any endpoint is fresh."""
        reason = self._judge()
        return any(reason(endpoint.health) is None for endpoint in self.all)

    @property
    def in_sync(self) -> int:
        """Number of nodes that answer with new blocks of this chain, those that rest after an error among them."""
        now, limits = self.clock.now(), self.limits
        reasons = [e.health.reason(self.chain_id, limits, now=now, monotonic=math.inf) for e in self.all]
        return reasons.count(None)

    @property
    def out_of_step(self) -> bool:
        """Whether every node answers and none is of use (another chain, old blocks, a reset): waiting does not help,
        as it may with nodes that are away.
        """
        now = self.clock.monotonic()
        healths = [endpoint.health for endpoint in self.all]
        answering = all(h.error is None and h.head is not None and now >= h.rest_until for h in healths)
        return answering and not self.usable

    @property
    def head(self) -> BlockHead | None:
        """The newest block that a fresh endpoint showed."""
        newest = self._newest()
        return newest.health.head if newest is not None else None

    def made_since(self, monotonic: float) -> bool:
        """Whether the newest block was certainly made after this time: its node was asked later, and did not have it,
        and the block's own time says so, too.

        The height that we know of a node may lag behind its own by the interval of our probes; and a node that stood
        still has not, when it is asked, what the others have had for long. Times are compared as far apart as that
        node's blocks were at the least when we first saw them: a block has the time at which the one before it was
        agreed on, and our clock may differ from the chain's.
        """
        newest = self._newest()
        if newest is None or newest.health.head is None or newest.health.before_head < monotonic:
            return False
        then = self.clock.now() - (self.clock.monotonic() - monotonic)
        return newest.health.head.time >= then - min(newest.health.offsets)

    @property
    def newest_height(self) -> int:
        """The greatest recent height that a usable node has shown; 0 before the first."""
        return max(self._times, default=0)

    @property
    def smallest_offset(self) -> float:
        """Our clock minus the block time of a recent head when it was first seen, the smallest of all nodes of our
        chain whose head is neither stale nor ahead. Seconds; infinity before the first head.

        Our clock is ahead of the chain's by at most this much. A negative value means that it is behind.
        """
        now = self.clock.now()
        heads = [(health.head, health.offsets) for health in (endpoint.health for endpoint in self.all)]
        usable = [
            offsets
            for head, offsets in heads
            if head is not None and head.chain_id == self.chain_id and not self.limits.exceeded(now - head.time)
        ]
        return min((min(offsets) for offsets in usable if offsets), default=math.inf)

    @property
    def clock_skew(self) -> float | None:
        """Our clock minus the chain's newest block time when it was first seen, in seconds, by the node
        nearest to our clock.

        None before any node of our chain answered. Beyond ±`limits.clock_skew` all nodes disagree with us:
        see `clock_suspect`.
        """
        return min(self._offsets(), key=abs, default=None)

    @property
    def clock_suspect(self) -> bool:
        """Whether every answering node's blocks are off our clock in the same direction by more than the
        limit.
        """
        offsets, limit = self._offsets(), self.limits.clock_skew
        return bool(offsets) and (min(offsets) > limit or max(offsets) < -limit)

    def reasons(self) -> dict[str, str | None]:
        """Why each endpoint is set aside, by name; None for fresh ones."""
        reason = self._judge()
        return {endpoint.name: reason(endpoint.health) for endpoint in self.all}

    def time_at(self, height: int) -> float | None:
        """The time of the newest block up to `height` that was seen as some node's head."""
        if height in self._times:
            return self._times[height]
        heights = [seen for seen in self._times if seen <= height]
        return self._times[max(heights)] if heights else None

    def wall(self) -> float:
        """Our wall clock, in unix seconds, or the time of the newest block that was seen where the two are far apart.

        For times that are kept: what is put off by a clock that was set years ahead must not wait for those years.
        """
        now, newest = self.clock.now(), self.time_at(EVER)
        apart = max(self.limits.stale_after, self.limits.clock_skew)
        return now if newest is None or abs(now - newest) <= apart else newest

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call back whenever an endpoint becomes fresh or is set aside."""
        self._subscribers.append(callback)

    def on_probe(self, callback: Callable[[BlockHead | None], None]) -> None:
        """Call back after each probe of a node with the newest block of all that are fresh (`head`)."""
        self._listeners.append(callback)

    async def check(self) -> None:
        """Probe every endpoint once, all at the same time; returns when the slowest has answered or timed
        out.

        The health of each is up to date as soon as its own answer is there.
        """
        async with asyncio.TaskGroup() as group:
            for endpoint in self.all:
                group.create_task(self._probe(endpoint))
        self.settle()

    async def monitor(self, interval: float) -> None:
        """Probe each endpoint for ever, at the latest `interval` seconds after its last probe ended, and when its next
        block is expected; a slow one delays no other.
        """

        async def watch(endpoint: Node) -> None:
            while True:
                await self.clock.sleep(endpoint.health.pause(interval, self.clock.now()))
                await self._probe(endpoint)
                self.settle()

        async with asyncio.TaskGroup() as group:
            for endpoint in self.all:
                group.create_task(watch(endpoint))

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]], *, min_height: int = 0) -> T:
        """Ask the fresh endpoints in order until one answers; see `call_endpoint`."""
        return await self.call_endpoint(lambda endpoint: fn(endpoint.client), min_height=min_height)

    async def call_endpoint(self, fn: Callable[[Node], Awaitable[T]], *, min_height: int = 0) -> T:
        """The same with the endpoint itself; see `ask`."""
        return (await self.ask(fn, min_height=min_height))[-1]

    async def ask(
        self,
        fn: Callable[[Node], Awaitable[T]],
        *,
        enough: Callable[[T], bool] = lambda _: True,
        min_height: int = 0,
    ) -> list[T]:
        """Ask the fresh endpoints in order until an answer is enough; all answers, that one last. Those that
        have shown `min_height` are asked before those that have not.

        After a `ChainError` the next one is asked (see `failed`); `ChainUnavailable` when none answered.
        """
        answers, problems = [], []
        for endpoint in sorted(self.fresh, key=lambda e: e.health.head is None or e.health.head.height < min_height):
            if self._reason(endpoint.health) is not None:
                continue  # it was set aside by another call meanwhile
            try:
                result = await fn(endpoint)
            except ChainError as error:
                problems.append(f"{endpoint.name}: {error}")
                self.failed(endpoint, error)
            else:
                answers.append(result)
                if enough(result):
                    endpoint.health.failures = 0
                    break
        if answers:
            return answers
        if not problems:
            problems = [f"{name}: {reason}" for name, reason in self.reasons().items()]
        raise ChainUnavailable("no endpoint could be asked (" + "; ".join(problems) + ")")

    def failed(self, endpoint: Node, error: ChainError, *, rpc: bool = False) -> None:
        """Take in what an endpoint (or its RPC) failed with.

        No answer, or a contradiction, rests it. An HTTP error or an `InvalidAnswer` does not, as other questions may be
        answered well; it is logged, and not again while it repeats. `HeightGoneError` is no fault.
        """
        if isinstance(error, HeightGoneError):
            return
        is_answer = isinstance(error, (InvalidAnswer, ChainUnavailable)) and not isinstance(error, Unanswered)
        if not is_answer:
            self.rest(endpoint, str(error), rpc=rpc)
            return
        name = endpoint.rpc.name if rpc and endpoint.rpc is not None else endpoint.name
        question = str(error).partition(":")[0]  # our own text; what follows may be the node's
        if self._faults.note((name, question), self.clock.monotonic()):
            self._log.warning("node_answer_invalid", endpoint=name, reason=str(error))

    def rest(self, endpoint: Node, reason: str, *, rpc: bool = False) -> None:
        """Ask an endpoint (or its RPC) nothing for 1 s, and twice as long after each failure in a row, up
        to 30 s.
        """
        health = endpoint.rpc_health if rpc else endpoint.health
        health.rest(reason, monotonic=self.clock.monotonic())
        self._tell_all()

    # Inside

    async def _probe(self, endpoint: Node) -> None:
        if endpoint.rpc is None or endpoint.rpc_in_step(self.clock.monotonic()):
            await self._probe_rest(endpoint)
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_one(endpoint.rpc_health, endpoint.rpc.status))
            await self._probe_rest(endpoint)

    async def _probe_rest(self, endpoint: Node) -> None:
        await self._probe_one(endpoint.health, lambda: self._rest_status(endpoint))

    async def _rest_status(self, endpoint: Node) -> tuple[BlockHead, bool | None]:
        """The newest block, and whether the node is catching up, None where that was said just now: most probes find
        nothing new, and their questions are most of what an idle helper does.
        """
        head, health = await endpoint.client.latest_block(), endpoint.health
        known = head == health.head and health.is_known(self.clock.monotonic())
        return head, None if known else await endpoint.client.syncing()

    async def _probe_one(self, health: Health, ask: Callable[[], Awaitable[tuple[BlockHead, bool | None]]]) -> None:
        began = self.clock.monotonic()
        try:
            head, syncing = await ask()
        except ChainError as error:
            health.error = str(error)
        else:
            health.saw(head, syncing=syncing, now=self.clock.now(), began=began)
        self._judge_heads()

    def _judge_heads(self) -> None:
        """Judge the newest block of every node by those of the others."""
        now, heads = self.clock.now(), dict[str, BlockHead]()
        for endpoint in self.all:
            health, head = endpoint.health, endpoint.health.head
            if head is None or health.error is not None or health.syncing or self.limits.exceeded(now - head.time):
                continue
            if self.chain_id in (None, head.chain_id):
                heads[endpoint.name] = head
        self.bounds.update(heads)
        for endpoint in self.all:
            for health in (endpoint.health, endpoint.rpc_health):
                if health.head is not None:
                    health.implausible = self.bounds.problem(endpoint.name, health.head, heads)

    def settle(self) -> None:
        """After a probe: learn the chain's id if it is open, log what changed, tell who listens."""
        if self.chain_id is None:
            self._learn()
        self._tell_all()
        head = self.head
        for callback in self._listeners:
            callback(head)

    def _learn(self) -> None:
        """Which chain this is, from the first endpoint that answered."""
        for endpoint in self.all:
            health = endpoint.health
            if health.head is not None and health.error is None:
                self.chain_id = health.head.chain_id
                self._log.info("chain learnt", endpoint=endpoint.name, chain_id=self.chain_id)
                return

    def _tell_all(self) -> None:
        changed, reason = False, self._judge()
        for endpoint in self.all:
            changed |= self._tell(endpoint.health, reason, endpoint.name, "endpoint")
            if endpoint.rpc is not None:
                changed |= self._tell(endpoint.rpc_health, reason, endpoint.rpc.name, "rpc")
        if changed:
            for callback in self._subscribers:
                callback()

    def _tell(self, health: Health, judge: Callable[[Health], str | None], name: str, what: str) -> bool:
        head = health.head
        is_ours = head is not None and head.chain_id == self.chain_id
        if head is not None and is_ours and health.error is None and health.implausible is None:
            health.highest = max(health.highest, head.height)
        reason = judge(health)
        if reason is None and head is not None:
            self._remember(head)
        # Ages in the reason grow with every look: one line a change of state, not a line a second.
        if reason == health.told or (reason and health.told and _kind(reason) == _kind(health.told)):
            return False
        health.told = reason
        if reason is None:
            self._log.info(f"{what} is fresh", endpoint=name, height=head.height if head else 0)
        else:
            self._log.warning(f"{what} set aside", endpoint=name, reason=reason)
        return True

    def _remember(self, head: BlockHead) -> None:
        self._times[head.height] = head.time
        while len(self._times) > _HEADS_KEPT:
            self._times.popitem(last=False)

    def _newest(self) -> Node | None:
        """The fresh endpoint that showed the newest block."""
        reason, height = self._judge(), -1
        newest: Node | None = None
        for endpoint in self.all:
            if endpoint.height > height and reason(endpoint.health) is None:
                newest, height = endpoint, endpoint.height
        return newest

    def _judge(self) -> Callable[[Health], str | None]:
        """What tells why a service is set aside at this moment."""
        now, monotonic = self.clock.now(), self.clock.monotonic()
        return partial(Health.reason, chain_id=self.chain_id, limits=self.limits, now=now, monotonic=monotonic)

    def _reason(self, health: Health) -> str | None:
        return self._judge()(health)

    def _offsets(self) -> list[float]:
        healths = [e.health for e in self.all if e.health.error is None and not e.health.syncing]
        ours = [h for h in healths if h.head is not None and h.head.chain_id == self.chain_id]
        return [health.offset for health in ours if health.offset is not None]


def _kind(reason: str) -> str:
    """A reason without its figures."""
    return "".join(character for character in reason if not character.isdigit())
