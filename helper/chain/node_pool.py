"""Pool of chain nodes: health checks, selection, failover and limited concurrency.

A node is *usable* if it is not in backoff, is on the configured chain, is not syncing, and its newest block time is
close to the local clock. Calls try the usable nodes in the configured order. A node that does not respond, or that
contradicts itself or other nodes, goes into backoff. After an HTTP error or an unreadable response, only that call goes
to the next node, because the node's blocks and mempool may still be valid. Each change of a node's state and each kind
of invalid response is logged once, with the node and the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Final, TypeVar

import httpx
import structlog

from helper.chain.agreement import AGREEING_NODES, agreed_fact, agreed_height, needed_nodes
from helper.chain.chain_data import BlockHead, find_same_nodes
from helper.chain.node import Health, Node
from helper.chain.node_http import DEFAULT_TIMEOUT_SECONDS, NoResponse
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.chain.rpc_client import RpcClient
from helper.clock import Clock
from helper.config.sections import Config
from helper.core.log_limits import LoggedProblem, RecentKeys
from helper.errors import ChainError, ChainResponseError, ChainUnavailable, ConfigError, HelperError, InvalidResponse

CHAIN_ID_ADVICE: Final = "Set [chain] chain_id to the id of the right chain, and restart."

F = TypeVar("F", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")

RESEND_SECONDS = 6.0
"""Seconds after which the report of one node permits to send a reveal again, whatever the others report."""
READ_ONLY_CONNECTIONS: Final = 8
"""Maximum number of connections of a `ReadOnlyNodePool` to each node."""
SLOW_SYNC_SECONDS: Final = 3.0
"""Seconds of a node's part in a sync above which it is left out of the next ones, while other nodes respond."""
_LEFT_OUT_FACTOR: Final = 4  # how long, as a multiple of those seconds: it delays a fifth of the time, at most
CLOCK_STEP_SECONDS: Final = 5.0
"""Seconds by which the wall clock must be set, against the monotonic one, to be wrong after it was right."""
CLOCK_RIGHT_SECONDS: Final = 86_400.0
"""Seconds for which a clock that is not set stays right: it drifts by seconds a day."""
_FAULT_LOG_SECONDS = 60.0  # an invalid response to a request is logged again after this long without one


def create_nodes(
    addresses: Sequence[tuple[str, str]],
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[Node]:
    """Create nodes from the REST and RPC URL ("" for none) of each.

    With several nodes, reads are also limited by each node's recent times, because another node can respond instead.
    Their names differ: what two nodes report under one name would count once.

    Raises:
        ConfigError: a URL is invalid, or two are those of one node, which would confirm its own reports.
    """
    nodes: list[Node] = []
    rest_paths, rpc_paths = dict[str, list[str]](), dict[str, list[str]]()
    is_adaptive = len(addresses) > 1
    for url, rpc_url in addresses:
        client = ChainClient(url, timeout=timeout, transport=transport, is_adaptive=is_adaptive)
        number = _count_at_host(rest_paths.setdefault(client.name, []), url, f"[chain] endpoints, {client.name}")
        if number > 1:
            client.name += f"#{number}"
        rpc = None
        if rpc_url:
            rpc = RpcClient(rpc_url, timeout=timeout, transport=transport, is_adaptive=is_adaptive)
            _count_at_host(rpc_paths.setdefault(rpc.name, []), rpc_url, f"[chain] rpc, {rpc.name}")
        nodes.append(Node(client, rpc))
    return nodes


def _count_at_host(paths: list[str], url: str, place: str) -> int:
    """Add a URL's path to those of the same host. Returns their number."""
    path = httpx.URL(url).path.rstrip("/")
    if path in paths:
        raise ConfigError(f"a node is listed twice: {place}", advice="List each node once, and restart.")
    paths.append(path)
    return len(paths)


def create_node_pool(config: Config, clock: Clock, nodes: Sequence[Node] | None = None) -> NodePool:
    """Create the pool that the configuration describes. `nodes` replaces connections to the configured URLs.

    Raises:
        ConfigError: no node is configured.
    """
    chain = config.chain
    if nodes is None:
        config.require_nodes()
        nodes = create_nodes(config.chain_nodes, timeout=chain.timeout_seconds)
    return NodePool(
        nodes,
        clock=clock,
        chain_id=chain.chain_id or None,
        stale_after=chain.stale_seconds,
        clock_skew=chain.clock_skew_seconds,
        agree=chain.agree,
    )


class NodePool:
    """The configured nodes of one chain.

    Attributes:
        chain_id: the chain's id; None until it is configured, restored, or reported by enough nodes. Until then no node
            is excluded for its id, because the false node's may be known first.
        reported_chain_id: the same, or until it is agreed one that a node in sync has reported.
        stale_after: maximum age of a node's newest block, in seconds; above it, the node is stale.
        max_clock_skew: maximum seconds of that block ahead of the local clock; above it, node or clock is wrong.
        needed: nodes that must report a fact alike.
        last_head: the newest `head`, also while no node is usable.
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
        agree: int = AGREEING_NODES,
    ) -> None:
        self.nodes = list(nodes)
        self.chain_id = self.reported_chain_id = chain_id or None
        self.stale_after, self.max_clock_skew = stale_after, clock_skew
        self.clock = clock
        self._log = structlog.get_logger("helper.chain")
        self._change_callbacks: list[Callable[[], None]] = []
        self._probe_callbacks: list[Callable[[BlockHead | None], None]] = []
        self._logged_faults = RecentKeys(_FAULT_LOG_SECONDS)
        self._logged_dispute = LoggedProblem()
        self.needed = needed_nodes(len(self.nodes), agree)
        self.last_head: BlockHead | None = None
        self._right_clock: tuple[float, float] | None = None  # monotonic time, and the wall clock minus it
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
        monotonic = self.clock.monotonic()
        usable = [node for node in self.in_sync_nodes if monotonic >= node.health.backoff_until]
        if len(usable) > 1:
            usable.sort(key=lambda node: node.client.is_slow)
        return usable

    @property
    def usable_rpc_nodes(self) -> list[Node]:
        """The nodes whose consensus RPC may be called now."""
        has_rpc = [node for node in self.nodes if node.rpc is not None]
        usable = [node for node in has_rpc if self.unusable_reason(node.rpc_health) is None]
        if len(usable) > 1:
            usable.sort(key=lambda node: node.rpc is not None and node.rpc.is_slow)
        return usable

    @property
    def usable_services(self) -> dict[Node, list[bool]]:
        """The usable nodes, each with its usable services; True is its RPC, which needs fewer requests and is first."""
        services: dict[Node, list[bool]] = {node: [True] for node in self.usable_rpc_nodes}
        for node in self.usable_nodes:
            services.setdefault(node, []).append(False)
        return services

    @property
    def has_usable_node(self) -> bool:
        """Whether any node is usable."""
        return self.head is not None

    @property
    def in_sync_nodes(self) -> list[Node]:
        """The nodes that report recent blocks of this chain, including nodes in backoff."""
        return [node for node in self.nodes if self._sync_fault(node.health) is None]

    def _is_ours(self, head: BlockHead | None) -> bool:
        """Whether there is a head and it is not known to be of another chain."""
        return head is not None and self.chain_id in {None, head.chain_id}

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
    def agreed_height(self) -> int | None:
        """The greatest height that enough configured nodes have reached, by their newest reports; None before that.

        It does not rise while too few nodes respond. Nothing irreversible may depend on a greater height.
        """
        heads = {node.name: node.health.head for node in self.nodes}
        ours = {name: head.height for name, head in heads.items() if head and self._is_ours(head)}
        return agreed_height(ours, self.needed)

    @property
    def in_sync_heads(self) -> dict[str, BlockHead]:
        """The newest blocks of the nodes in sync, by node."""
        return {node.name: node.health.head for node in self.in_sync_nodes if node.health.head is not None}

    @property
    def head(self) -> BlockHead | None:
        """The newest block that nodes in sync agree on; None while no node is usable.

        Its height and time are the greatest that enough of them have reached, so one false head moves nothing. If fewer
        are in sync, one is enough: to read, prove or send again is harmless. Nodes rarely report equal heads, so the
        time may be that of a later block; what needs both of one block uses `agreed_height_at`.
        """
        monotonic, heads = self.clock.monotonic(), self.in_sync_heads
        if not any(monotonic >= node.health.backoff_until for node in self.nodes if node.name in heads):
            return None
        needed = min(self.needed, len(heads))
        chain_id = self.chain_id or next(iter(heads.values())).chain_id
        height = agreed_height({name: head.height for name, head in heads.items()}, needed)
        time = agreed_height({name: head.time for name, head in heads.items()}, needed)
        return None if height is None or time is None else BlockHead(chain_id, height, time)

    @property
    def reported_heights(self) -> list[int]:
        """Heights of the nodes of this chain that responded to their last probe."""
        healths = [node.health for node in self.nodes if node.health.error is None]
        return [each.head.height for each in healths if each.head and self._is_ours(each.head)]

    @property
    def greatest_height(self) -> int:
        """The greatest height that any node in sync reports, 0 without one. Only for acts that are harmless."""
        return max((node.height for node in self.in_sync_nodes), default=0)

    def nodes_with_head_since(self, monotonic: float) -> set[str]:
        """Names of the usable nodes that report a block produced after `monotonic`; see `Health.is_head_newer_than`.

        A node behind another one reports old blocks as its newest, so the smallest offset of all nodes counts for it.
        After `RESEND_SECONDS`, its own is enough: the other may report false heights and block times.
        """
        offsets = {node: min(node.health.offsets) for node in self.usable_nodes if node.health.offsets}
        is_late = self.clock.monotonic() - monotonic >= RESEND_SECONDS
        smallest, greatest = min(offsets.values(), default=0.0), max((node.height for node in offsets), default=0)
        return {
            node.name
            for node, own in offsets.items()
            if node.health.is_head_newer_than(monotonic, own if is_late or node.height >= greatest else smallest)
        }

    @property
    def clock_skew(self) -> float | None:
        """Smallest clock skew measured with any node, in seconds.

        The skew is the local clock minus the newest block time when that block was first reported. None before any node
        of this chain has responded. See `is_clock_suspect` for values outside ±`max_clock_skew`.
        """
        return min(self._head_offsets(), key=abs, default=None)

    @property
    def is_clock_suspect(self) -> bool:
        """Whether the block times of enough nodes, and more than not, deviate alike by more than the limit.

        Not if enough nodes have agreed with the clock within a day and it was not set since: then these nodes report
        old blocks, one because it is false and another because it is behind.
        """
        if self._find_clock_side(min(self.needed, max(1, len(self._head_offsets())))) not in (-1, 1):
            return False
        if self._right_clock is None:
            return True
        (since, right), now = self._right_clock, self.clock.monotonic()
        return now - since > CLOCK_RIGHT_SECONDS or abs(self.clock.now() - now - right) > CLOCK_STEP_SECONDS

    def _find_clock_side(self, needed: int) -> int | None:
        """By how much enough nodes say that the clock is wrong: 0 within the limit, else 1 (ahead) or -1."""
        limit = self.max_clock_skew
        sides = {
            str(number): (offset > limit) - (offset < -limit) for number, offset in enumerate(self._head_offsets())
        }
        return agreed_fact(sides, needed)

    def unusable_reasons(self) -> dict[str, str | None]:
        """Why each node is not usable, by name; None for usable nodes."""
        return {node.name: self.unusable_reason(node.health) for node in self.nodes}

    def wall_time(self) -> float:
        """The local time in Unix seconds, or the newest block time if the two are far apart.

        Use it for times that are stored: a clock that was set years ahead must not delay them by years.
        """
        now, newest = self.clock.now(), None if self.last_head is None else self.last_head.time
        max_difference = max(self.stale_after, self.max_clock_skew)
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
        """Probe each node until cancelled, `interval` seconds after its last probe ended."""

        async def monitor_node(node: Node) -> None:
            while True:
                await self.clock.sleep(interval)
                await self._probe(node)
                self.apply_probes()

        async with asyncio.TaskGroup() as group:
            for node in self.nodes:
                group.create_task(monitor_node(node))

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]], *, min_height: int = 0) -> T:
        """Call `fn` with the client of each usable node in order until one succeeds. See `call_until`."""
        return (await self.call_until(lambda node: fn(node.client), min_height=min_height))[-1]

    async def call_until(
        self,
        fn: Callable[[Node], Awaitable[T]],
        *,
        is_enough: Callable[[T], bool] = lambda _: True,
        min_height: int = 0,
        turn: int = 0,
        others_seconds: Callable[[], float] = lambda: 0.0,
    ) -> list[T]:
        """Call `fn` with each usable node in order until a response satisfies `is_enough`.

        Nodes that have reported `min_height` come first. After a `ChainError` the next node is called (see
        `record_error`). `turn`, the number of the sync, rotates the order, so that no node can answer for all. Each
        node is first in two turns: the second of the two syncs of one block, and the first of another. A node that has
        just delayed a sync is left out of the next ones (`SLOW_SYNC_SECONDS`), unless no other node responds.
        `others_seconds` returns for how long `fn` has waited for other nodes than the called one.

        Returns:
            All responses in call order; a response that satisfied `is_enough` is the last.

        Raises:
            ChainUnavailable: no node responded.
        """
        results: list[T] = []
        reasons: list[str] = []
        usable, started_at = self.usable_nodes, self.clock.monotonic()
        first = turn // 2 % len(usable) if usable else 0
        left_out = {node for node in usable if turn and started_at < node.left_out_until}
        ordered = sorted(
            usable[first:] + usable[:first],
            key=lambda node: (node in left_out, node.height < min_height, node.client.is_slow),
        )
        for node in ordered:
            if self.unusable_reason(node.health) is not None:
                continue  # Another call has put it into backoff since.
            if results and node in left_out:
                break
            started_at, waited = self.clock.monotonic(), others_seconds()
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
            finally:
                self.leave_out_if_slow(node, self.clock.monotonic() - started_at - (others_seconds() - waited))
        if results:
            return results
        if not reasons:
            reasons = [f"{name}: {reason}" for name, reason in self.unusable_reasons().items()]
        raise ChainUnavailable("no chain node responded (" + "; ".join(reasons) + ")")

    def leave_out_if_slow(self, node: Node, seconds: float) -> None:
        """Leave a node out of the next syncs if its part of one, which ends now, took too long."""
        if seconds > SLOW_SYNC_SECONDS:
            node.left_out_until = self.clock.monotonic() + _LEFT_OUT_FACTOR * seconds

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
        """Start the backoff of a node (or of its RPC)."""
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

        The latter is None, and not requested, if it was reported recently: most probes find no new block, and probes
        are most of the work of an idle helper.
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
            has_responded = not isinstance(error, NoResponse)
            health.record_failed_probe(str(error), has_responded=has_responded, started_at=started_at)
        else:
            ended_at = self.clock.monotonic()
            health.record_probe(head, is_syncing=syncing, started_at=started_at, ended_at=ended_at)

    def apply_probes(self) -> None:
        """Update the pool after a probe: set an unknown chain id, log changes and call the callbacks."""
        if self.chain_id is None:
            self._set_chain_id()
        if self._find_clock_side(self.needed) == 0:
            monotonic = self.clock.monotonic()
            self._right_clock = monotonic, self.clock.now() - monotonic
        self._report_changes()
        head = self.head
        self.last_head = head or self.last_head
        for callback in self._probe_callbacks:
            callback(head)

    def _set_chain_id(self) -> None:
        ids = self._reported_chain_ids()
        self.chain_id = agreed_fact(ids, self.needed)
        reported = self.chain_id or next(iter(ids.values()), self.reported_chain_id)
        if reported != self.reported_chain_id:
            self.reported_chain_id = reported
            self._log.info("chain_id_learned", chain_id=reported)
        dispute = self.chain_id_dispute
        if dispute is None:
            self._logged_dispute.clear()
        elif self._logged_dispute.note():
            self._log.error("chain_id_disputed", reason=dispute, advice=CHAIN_ID_ADVICE)

    def _reported_chain_ids(self) -> dict[str, str]:
        healths = {node.name: node.health for node in self.nodes}
        return {name: health.head.chain_id for name, health in healths.items() if health.head and not health.error}

    @property
    def chain_id_dispute(self) -> str | None:
        """Which chain id each node reports, if they differ and none is agreed; or None."""
        ids = self._reported_chain_ids() if self.chain_id is None else {}
        is_disputed = len(set(ids.values())) > 1
        return ", ".join(f"{name} is on chain {ids[name]}" for name in sorted(ids)) if is_disputed else None

    def _report_changes(self) -> None:
        changed, height = False, self.agreed_height or 0
        for node in self.nodes:
            changed |= self._report_change(node.health, height, node.name, "node")
            # The RPC is not reported too while the whole node fails or hangs, or may have failed with it.
            has_responded = node.health.logged_reason is None and node.health.probed_at > node.rpc_health.failed_at
            if node.rpc is not None and has_responded and not node.client.is_slow:
                changed |= self._report_change(node.rpc_health, height, node.rpc.name, "rpc")
        if changed:
            for callback in self._change_callbacks:
                callback()

    def _report_change(self, health: Health, height: int, name: str, service: str) -> bool:
        head = health.head
        if head is not None and self._is_ours(head) and health.error is None:
            health.max_height = max(health.max_height, min(health.steady_height, height))
        reason = self.unusable_reason(health)
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

    def unusable_reason(self, health: Health) -> str | None:
        """Why a service is not usable now, None if it is."""
        backoff = health.backoff_reason if self.clock.monotonic() < health.backoff_until else None
        return self._sync_fault(health) or backoff

    def _sync_fault(self, health: Health) -> str | None:
        fault = health.fault(self.chain_id)
        if fault is not None or health.head is None:
            return fault
        age = self.clock.now() - health.head.time
        if age > self.stale_after:
            return f"newest block is {age:.0f} s old"
        return f"newest block is {-age:.0f} s ahead of our clock" if -age > self.max_clock_skew else None

    def _head_offsets(self) -> list[float]:
        healths = [e.health for e in self.nodes if e.health.error is None and not e.health.is_syncing]
        same_chain = [health for health in healths if self._is_ours(health.head)]
        wall_minus_monotonic = self.clock.now() - self.clock.monotonic()
        return [health.offsets[-1] + wall_minus_monotonic for health in same_chain if health.offsets]


def _strip_digits(reason: str) -> str:
    return "".join(character for character in reason if not character.isdigit())


class ReadOnlyNodePool:
    """Calls the usable nodes of a pool without affecting their health, for requests that must never delay a reveal.

    Visitors of the status page can cause requests about staking, rounds and tallies at any rate, and the archive reads
    every reveal of the chain. Therefore, errors of these requests do not put nodes into backoff, slow ones do not make
    a node count as slow, and they use a small number of separate connections.
    """

    def __init__(
        self,
        node_pool: NodePool,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.node_pool = node_pool
        self._clients = {
            node: ChainClient(node.client.url, timeout=timeout, transport=transport, connections=READ_ONLY_CONNECTIONS)
            for node in node_pool.nodes
        }

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]], *, node: Node | None = None) -> T:
        """Call `fn` with the client of each usable node in order until one succeeds. Slow ones come last.

        With `node`, no other node is called.

        Raises:
            HeightPrunedError: every usable node has pruned the height.
            ChainResponseError: no node succeeded, and at least one returned an invalid response.
            ChainUnavailable: no node responded.
        """
        results, _ = await self._ask(fn, bool, node)
        return next(iter(results.values()))

    async def call_enough(self, fn: Callable[[ChainClient], Awaitable[T]]) -> list[T] | None:
        """Like `call`, but return the results of as many nodes as an agreement needs; None if fewer succeed."""
        results, _ = await self._ask(fn, lambda results: len(results) == self.node_pool.needed)
        return list(results.values()) if len(results) == self.node_pool.needed else None

    async def call_each(self, fn: Callable[[ChainClient], Awaitable[T]]) -> list[T]:
        """Like `call`, but return the results of all nodes that succeed."""
        results, _ = await self._ask(fn, lambda _: False)
        return list(results.values())

    async def call_agreed(self, fn: Callable[[ChainClient], Awaitable[F | None]]) -> F | None:
        """Like `call`, but return the result that enough nodes report.

        A node that responds without one (None, a pruned height, an error) contradicts no other: nodes prune blocks and
        have gaps in their indexes. If all others have none, one node's result is returned; if that is not enough to
        agree, only once every configured node has responded, because this one may be false.

        Raises:
            ChainUnavailable: too few nodes responded, or they differ.
        """
        needed = self.node_pool.needed
        if len(self.node_pool.usable_nodes) < needed:
            raise ChainUnavailable(f"fewer than {needed} chain nodes are in sync")

        def agreed(results: Mapping[str, F | None]) -> F | None:
            return agreed_fact({name: result for name, result in results.items() if result is not None}, needed)

        results, errors = await self._ask(fn, lambda results: agreed(results) is not None)
        result, known = agreed(results), set(results.values()) - {None}
        if result is not None:
            return result
        if len(known) > 1:
            raise ChainUnavailable(f"{', '.join(results)} report different data")
        responded = len(results) + sum(isinstance(error, ChainResponseError) for error in errors.values())
        must_respond = 1 if needed == 1 else len(self.node_pool.nodes)
        if responded < must_respond:
            reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
            raise ChainUnavailable(
                f"fewer than {must_respond} chain nodes responded ({reasons or 'the others are not in sync'})"
            )
        return next(iter(known), None)

    async def _ask(
        self,
        fn: Callable[[ChainClient], Awaitable[T]],
        is_enough: Callable[[dict[str, T]], bool],
        only: Node | None = None,
    ) -> tuple[dict[str, T], dict[str, ChainError]]:
        """Call the nodes until the results are enough. Returns results and errors by node; raises without a result."""
        results: dict[str, T] = {}
        errors: dict[str, ChainError] = {}
        usable = [node for node in self.node_pool.usable_nodes if only in (None, node)]
        for node in sorted(usable, key=lambda node: self._clients[node].is_slow):
            try:
                results[node.name] = await fn(self._clients[node])
            except ChainError as error:
                errors[node.name] = error
            if is_enough(results):
                break
        if results:
            return results, errors
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        message = f"no chain node responded ({reasons or 'none is in sync'})"
        pruned = [error for error in errors.values() if isinstance(error, HeightPrunedError)]
        if pruned and len(pruned) == len(errors):
            raise HeightPrunedError(
                message, min((error.lowest_height for error in pruned if error.lowest_height is not None), default=None)
            )
        has_response = any(isinstance(error, ChainResponseError) for error in errors.values())
        raise (ChainResponseError if has_response else ChainUnavailable)(message)


async def gather_limited(items: Sequence[T], work: Callable[[T], Awaitable[R]], limit: int) -> list[R]:
    """Call `work` for every item, at most `limit` calls concurrently. Returns the results in the order of the items.

    Raises:
        HelperError: the first error, after all calls in progress have ended; no call starts after an error.
    """
    if len(items) <= 1:  # without a task, as in most blocks
        return [await work(item) for item in items]
    results: dict[int, R] = {}
    errors: list[HelperError] = []
    left = iter(enumerate(items))

    async def run() -> None:
        for number, item in left:
            if errors:
                return
            try:
                results[number] = await work(item)
            except HelperError as error:
                errors.append(error)

    # Not a task for each item: a node chooses how many there are, and to cancel many tasks takes minutes.
    async with asyncio.TaskGroup() as group:
        for _ in range(min(limit, len(items))):
            group.create_task(run())
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]
