"""Pool of chain nodes: health checks, selection and failover.

A node is *usable* if it is not in backoff, is on the configured chain, is not syncing, and its newest block time is
close to the local clock. Calls try the usable nodes in the configured order. A node that does not respond, or that
contradicts itself or other nodes, goes into backoff. After an HTTP error or an unreadable response, only that call goes
to the next node, because the node's blocks and mempool may still be valid. Each change of a node's state and each kind
of invalid response is logged once, with the node and the reason.
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
from helper.chain.models import BlockHead, find_same_nodes
from helper.chain.node import HeadLimits, Health, Node
from helper.chain.node_http import DEFAULT_TIMEOUT_SECONDS, NoResponse
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.chain.rpc_client import RpcClient
from helper.clock import Clock
from helper.config import Config
from helper.core.log_limits import RecentKeys
from helper.errors import ChainError, ChainUnavailable, ConfigError, InvalidResponse

__all__ = ["Node", "NodePool", "create_node_pool", "create_nodes"]

T = TypeVar("T")

_MAX_HEADS = 256
_FAULT_LOG_SECONDS = 60.0  # an invalid response to a request is logged again after this long without one


def create_nodes(
    urls: Sequence[str],
    rpc_urls: Sequence[str] = (),
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[Node]:
    """Create nodes from the configured URLs. The n-th RPC URL belongs to the n-th REST URL ("" for none).

    With several nodes, reads are also limited by each node's recent times, because another node can respond instead.
    """
    if len(rpc_urls) > len(urls):
        raise ConfigError("[chain] rpc lists more nodes than [chain] endpoints")
    nodes, is_adaptive = [], len(urls) > 1
    for number, url in enumerate(urls):
        client = ChainClient(url, timeout=timeout, transport=transport, is_adaptive=is_adaptive)
        rpc_url = rpc_urls[number] if number < len(rpc_urls) else ""
        rpc = RpcClient(rpc_url, timeout=timeout, transport=transport, is_adaptive=is_adaptive) if rpc_url else None
        nodes.append(Node(client, rpc))
    return nodes


def create_node_pool(config: Config, clock: Clock, nodes: Sequence[Node] | None = None) -> NodePool:
    """Create the pool that the configuration describes. `nodes` replaces connections to the configured URLs.

    Raises:
        ConfigError: no node is configured.
    """
    chain = config.chain
    if nodes is None:
        config.require_nodes()
        nodes = create_nodes(config.chain_endpoints, config.chain_rpc, timeout=chain.timeout_seconds)
    return NodePool(
        nodes,
        clock=clock,
        chain_id=chain.chain_id or None,
        stale_after=chain.stale_seconds,
        clock_skew=chain.clock_skew_seconds,
    )


class NodePool:
    """The configured nodes of one chain.

    Attributes:
        chain_id: the chain's id; None until it is configured, restored, or read from the first response.
        nodes: every node, in the configured order.
        limits: maximum staleness and clock skew of a node.
        clock: source of wall and monotonic time.
        head_bounds: decides whether the heights that nodes report are plausible.
        same_nodes: names of nodes that report the id of an earlier one, with the name of that one.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        clock: Clock,
        chain_id: str | None = None,
        stale_after: float = 90.0,
        clock_skew: float = 120.0,
    ) -> None:
        self.nodes = list(nodes)
        self.chain_id = chain_id or None
        self.limits = HeadLimits(stale_after, clock_skew)
        self.clock = clock
        self._log = structlog.get_logger("helper.chain")
        self._change_callbacks: list[Callable[[], None]] = []
        self._probe_callbacks: list[Callable[[BlockHead | None], None]] = []
        self._block_times: OrderedDict[int, float] = OrderedDict()
        self._logged_faults = RecentKeys(_FAULT_LOG_SECONDS)
        self.head_bounds = HeadBounds(len(self.nodes))
        self.same_nodes: list[tuple[str, str]] = []

    async def aclose(self) -> None:
        """Close all connections."""
        for node in self.nodes:
            await node.client.aclose()
            if node.rpc is not None:
                await node.rpc.aclose()

    # ------------------------------------------------------------------ state

    @property
    def usable_nodes(self) -> list[Node]:
        """The nodes that may be called now, in the configured order. Nodes with a slow call in progress come last."""
        reason = self._create_reason_check()
        usable = [node for node in self.nodes if reason(node.health) is None]
        if len(usable) > 1:
            usable.sort(key=lambda node: node.client.is_slow)
        return usable

    @property
    def usable_rpc_nodes(self) -> list[Node]:
        """The nodes whose consensus RPC may be called now."""
        reason = self._create_reason_check()
        usable = [node for node in self.nodes if node.rpc is not None and reason(node.rpc_health) is None]
        if len(usable) > 1:
            usable.sort(key=lambda node: node.rpc is not None and node.rpc.is_slow)
        return usable

    @property
    def has_usable_node(self) -> bool:
        """Whether any node is usable."""
        reason = self._create_reason_check()
        return any(reason(node.health) is None for node in self.nodes)

    @property
    def in_sync_nodes(self) -> list[Node]:
        """The nodes that report recent blocks of this chain, including nodes in backoff."""
        now, limits = self.clock.now(), self.limits
        return [
            node
            for node in self.nodes
            if node.health.unusable_reason(self.chain_id, limits, now=now, monotonic=math.inf) is None
        ]

    @property
    def in_sync_count(self) -> int:
        """Number of `in_sync_nodes`."""
        return len(self.in_sync_nodes)

    @property
    def is_out_of_sync(self) -> bool:
        """Whether every node responds but none is usable (another chain, old blocks, a reset).

        Unlike an unreachable node, this does not resolve by waiting.
        """
        now = self.clock.monotonic()
        healths = [node.health for node in self.nodes]
        all_respond = all(h.error is None and h.head is not None and now >= h.backoff_until for h in healths)
        return all_respond and not self.has_usable_node

    @property
    def head(self) -> BlockHead | None:
        """The newest block that a usable node has reported."""
        newest = self._newest_node()
        return newest.health.head if newest is not None else None

    def is_head_newer_than(self, monotonic: float) -> bool:
        """Whether the newest block was provably produced after `monotonic`.

        Two conditions must hold. The node was probed after that time and did not have the block yet. This alone is not
        sufficient, because a stalled node lacks blocks that others have had for a while. In addition, the block's own
        time must be later, corrected by the smallest offset at which recent blocks of the node were first reported: a
        block carries the time at which its predecessor was agreed on, and the local clock may differ from the chain's.
        """
        newest = self._newest_node()
        if newest is None or newest.health.head is None or newest.health.head_absent_at < monotonic:
            return False
        wall_time = self.clock.now() - (self.clock.monotonic() - monotonic)
        return newest.health.head.time >= wall_time - min(newest.health.offsets)

    @property
    def newest_height(self) -> int:
        """The greatest recent height that a usable node has reported; 0 before the first."""
        return max(self._block_times, default=0)

    @property
    def newest_time(self) -> float | None:
        """The time of the block at `newest_height`; None before the first."""
        return self._block_times.get(self.newest_height)

    @property
    def clock_skew(self) -> float | None:
        """Smallest clock skew measured with any node, in seconds.

        The skew is the local clock minus the newest block time when that block was first reported. None before any node
        of this chain has responded. See `is_clock_suspect` for values outside ±`limits.clock_skew`.
        """
        return min(self._head_offsets(), key=abs, default=None)

    @property
    def is_clock_suspect(self) -> bool:
        """Whether the block times of all nodes indicate a wrong local clock.

        True if all responding nodes deviate in the same direction by more than the limit.
        """
        offsets, limit = self._head_offsets(), self.limits.clock_skew
        return bool(offsets) and (min(offsets) > limit or max(offsets) < -limit)

    def unusable_reasons(self) -> dict[str, str | None]:
        """Why each node is not usable, by name; None for usable nodes."""
        reason = self._create_reason_check()
        return {node.name: reason(node.health) for node in self.nodes}

    def time_at(self, height: int) -> float | None:
        """The time of the newest block up to `height` that a node has reported as its head."""
        if height in self._block_times:
            return self._block_times[height]
        heights = [known for known in self._block_times if known <= height]
        return self._block_times[max(heights)] if heights else None

    def wall_time(self) -> float:
        """The local time in Unix seconds, checked against block times.

        If the two are far apart, the newest block time is returned instead.

        Use it for times that are stored: a clock that was set years ahead must not delay them by years.
        """
        now, newest = self.clock.now(), self.newest_time
        max_difference = max(self.limits.stale_after, self.limits.clock_skew)
        return now if newest is None or abs(now - newest) <= max_difference else newest

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Register a callback for changes of which nodes are usable."""
        self._change_callbacks.append(callback)

    def subscribe_to_probes(self, callback: Callable[[BlockHead | None], None]) -> None:
        """Register a callback that receives `head` after each probe of a node."""
        self._probe_callbacks.append(callback)

    async def probe_all(self) -> None:
        """Probe all nodes concurrently. Returns when the slowest has responded or timed out.

        The health of each node is updated as soon as it has responded.
        """
        async with asyncio.TaskGroup() as group:
            for node in self.nodes:
                group.create_task(self._probe(node))
        self.apply_probes()

    async def compare_node_ids(self) -> None:
        """Ask each node for its id, and report entries that are one node: they cannot check each other.

        They are still used, because a false node could report the id of another one to exclude it.
        """

        async def request_id(node: Node) -> str:
            try:
                return (await node.client.node_info()).node_id
            except ChainError:
                return ""

        ids = await asyncio.gather(*map(request_id, self.nodes))
        same_nodes = find_same_nodes(zip((node.name for node in self.nodes), ids, strict=True))
        for name, other in same_nodes if same_nodes != self.same_nodes else ():
            self._log.warning(
                "node_listed_twice",
                endpoint=name,
                reason=f"it reports the same node id as {other}",
                advice="List two different nodes in [chain] endpoints: one node cannot confirm its own reports.",
            )
        self.same_nodes = same_nodes

    async def monitor(self, interval: float) -> None:
        """Probe each node until cancelled. A slow node does not delay the others.

        A node is probed when its next block is expected, at the latest `interval` seconds after its last probe ended.
        """

        async def monitor_node(node: Node) -> None:
            while True:
                await self.clock.sleep(node.health.next_probe_delay(interval, self.clock.now()))
                await self._probe(node)
                self.apply_probes()

        async with asyncio.TaskGroup() as group:
            for node in self.nodes:
                group.create_task(monitor_node(node))

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]], *, min_height: int = 0) -> T:
        """Call `fn` with the client of each usable node in order until one succeeds. See `call_until`."""
        return await self.call_node(lambda node: fn(node.client), min_height=min_height)

    async def call_node(self, fn: Callable[[Node], Awaitable[T]], *, min_height: int = 0) -> T:
        """Like `call`, but `fn` receives the node."""
        return (await self.call_until(fn, min_height=min_height))[-1]

    async def call_until(
        self,
        fn: Callable[[Node], Awaitable[T]],
        *,
        is_enough: Callable[[T], bool] = lambda _: True,
        min_height: int = 0,
    ) -> list[T]:
        """Call `fn` with each usable node in order until a response satisfies `is_enough`.

        Nodes that have reported `min_height` come first. After a `ChainError` the next node is called (see
        `record_error`).

        Returns:
            All responses in call order; a response that satisfied `is_enough` is the last.

        Raises:
            ChainUnavailable: no node responded.
        """
        results, reasons = [], []
        for node in sorted(self.usable_nodes, key=lambda e: e.health.head is None or e.health.head.height < min_height):
            if self._create_reason_check()(node.health) is not None:
                continue  # Another call has put it into backoff since.
            try:
                result = await fn(node)
            except ChainError as error:
                reasons.append(f"{node.name}: {error}")
                self.record_error(node, error)
            else:
                results.append(result)
                if is_enough(result):
                    node.health.failures = 0
                    break
        if results:
            return results
        if not reasons:
            reasons = [f"{name}: {reason}" for name, reason in self.unusable_reasons().items()]
        raise ChainUnavailable("no chain node responded (" + "; ".join(reasons) + ")")

    def record_error(self, node: Node, error: ChainError, *, rpc: bool = False) -> None:
        """Record an error of a node (or of its RPC).

        A missing response or a contradiction puts the node in backoff. An HTTP error or an `InvalidResponse` does not,
        because other requests may succeed; it is logged once while it repeats. `HeightPrunedError` is not a fault.
        """
        if isinstance(error, HeightPrunedError):
            return
        has_responded = isinstance(error, (InvalidResponse, ChainUnavailable)) and not isinstance(error, NoResponse)
        if not has_responded:
            self.start_backoff(node, str(error), rpc=rpc)
            return
        name = node.rpc.name if rpc and node.rpc is not None else node.name
        request = str(error).partition(":")[0]  # text of this program; the rest may be the node's
        if self._logged_faults.remember((name, request), self.clock.monotonic()):
            self._log.warning("node_response_invalid", endpoint=name, reason=str(error))

    def start_backoff(self, node: Node, reason: str, *, rpc: bool = False) -> None:
        """Start the backoff of a node (or of its RPC).

        It lasts 1 s, doubled with each consecutive failure, at most 30 s.
        """
        health = node.rpc_health if rpc else node.health
        health.start_backoff(reason, monotonic=self.clock.monotonic())
        self._report_changes()

    # ------------------------------------------------------------------ probes

    async def _probe(self, node: Node) -> None:
        if node.rpc is None or node.is_rpc_current(self.clock.monotonic()):
            await self._probe_rest(node)
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_service(node.rpc_health, node.rpc.status))
            await self._probe_rest(node)

    async def _probe_rest(self, node: Node) -> None:
        await self._probe_service(node.health, lambda: self._rest_status(node))

    async def _rest_status(self, node: Node) -> tuple[BlockHead, bool | None]:
        """Fetch the newest block and whether the node is syncing.

        The latter is None, and not requested, if it was reported recently.

        Most probes find no new block, and probes are most of the work of an idle helper.
        """
        head, health = await node.client.latest_block(), node.health
        known = head == health.head and health.has_recent_sync_status(self.clock.monotonic())
        return head, None if known else await node.client.is_syncing()

    async def _probe_service(
        self, health: Health, fetch_status: Callable[[], Awaitable[tuple[BlockHead, bool | None]]]
    ) -> None:
        started_at = self.clock.monotonic()
        try:
            head, syncing = await fetch_status()
        except ChainError as error:
            # A node in sync may respond with an error while it commits a block: the next probe decides.
            health.has_failed_once = (
                health.error is None and not health.has_failed_once and not isinstance(error, NoResponse)
            )
            if not health.has_failed_once:
                health.error = str(error)
        else:
            health.record_probe(head, is_syncing=syncing, now=self.clock.now(), started_at=started_at)
        self._check_heads()

    def _check_heads(self) -> None:
        """Check the newest block of every node against those of the others."""
        now, heads = self.clock.now(), dict[str, BlockHead]()
        for node in self.nodes:
            health, head = node.health, node.health.head
            if (
                head is None
                or health.error is not None
                or health.is_syncing
                or self.limits.exceeded_reason(now - head.time)
            ):
                continue
            if self.chain_id in (None, head.chain_id):
                heads[node.name] = head
        self.head_bounds.update(heads)
        for node in self.nodes:
            for health in (node.health, node.rpc_health):
                if health.head is not None:
                    health.implausible_reason = self.head_bounds.implausible_reason(node.name, health.head, heads)

    def apply_probes(self) -> None:
        """Update the pool after a probe.

        Sets an unknown chain id, logs changes and calls the callbacks.
        """
        if self.chain_id is None:
            self._set_chain_id()
        self._report_changes()
        head = self.head
        for callback in self._probe_callbacks:
            callback(head)

    def _set_chain_id(self) -> None:
        """Set the chain id to that of the first node that has responded."""
        for node in self.nodes:
            health = node.health
            if health.head is not None and health.error is None:
                self.chain_id = health.head.chain_id
                self._log.info("chain_id_learned", endpoint=node.name, chain_id=self.chain_id)
                return

    def _report_changes(self) -> None:
        changed, reason = False, self._create_reason_check()
        for node in self.nodes:
            changed |= self._report_change(node.health, reason, node.name, "node")
            if node.rpc is not None:
                changed |= self._report_change(node.rpc_health, reason, node.rpc.name, "rpc")
        if changed:
            for callback in self._change_callbacks:
                callback()

    def _report_change(
        self, health: Health, get_reason: Callable[[Health], str | None], name: str, service: str
    ) -> bool:
        head = health.head
        is_ours = head is not None and head.chain_id == self.chain_id
        if head is not None and is_ours and health.error is None and health.implausible_reason is None:
            health.max_height = max(health.max_height, head.height)
        reason = get_reason(health)
        if reason is None and head is not None:
            self._add_time(head)
        # Reasons contain ages that grow with every probe; compare them without digits to log only changes of state.
        previous = health.logged_reason
        if reason == previous or (reason and previous and _strip_digits(reason) == _strip_digits(previous)):
            return False
        health.logged_reason = reason
        if reason is None:
            self._log.info(f"{service}_fresh", endpoint=name, height=head.height if head else 0)
        else:
            self._log.warning(f"{service}_not_fresh", endpoint=name, reason=reason)
        return True

    def _add_time(self, head: BlockHead) -> None:
        self._block_times[head.height] = head.time
        while len(self._block_times) > _MAX_HEADS:
            self._block_times.popitem(last=False)

    def _newest_node(self) -> Node | None:
        """The usable node with the newest block."""
        reason, height = self._create_reason_check(), -1
        newest: Node | None = None
        for node in self.nodes:
            if node.height > height and reason(node.health) is None:
                newest, height = node, node.height
        return newest

    def _create_reason_check(self) -> Callable[[Health], str | None]:
        """Create a function that returns why a service is not usable now."""
        now, monotonic = self.clock.now(), self.clock.monotonic()
        return partial(Health.unusable_reason, chain_id=self.chain_id, limits=self.limits, now=now, monotonic=monotonic)

    def _head_offsets(self) -> list[float]:
        healths = [e.health for e in self.nodes if e.health.error is None and not e.health.is_syncing]
        same_chain = [h for h in healths if h.head is not None and h.head.chain_id == self.chain_id]
        return [health.offsets[-1] for health in same_chain if health.offsets]


def _strip_digits(reason: str) -> str:
    """The reason without its digits."""
    return "".join(character for character in reason if not character.isdigit())
