"""Queries all nodes concurrently and checks their state. No request contains share data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from helper.chain.chain_data import find_same_nodes
from helper.chain.node import HeadLimits
from helper.chain.node_http import SLOW_CALL_SECONDS
from helper.chain.rest_client import ChainClient
from helper.chain.rpc_client import RpcClient
from helper.clock import Clock
from helper.config.sections import Config
from helper.doctor.result import CheckResult, Level, fail, ok, warn
from helper.errors import ChainError, ConfigError

T = TypeVar("T")

TIMEOUT_SECONDS: Final = 5.0
"""Request timeout in seconds."""
INTERVAL_BLOCKS: Final = 20
"""Number of blocks over which the block interval is measured."""
AHEAD_WARNING_SECONDS: Final = 5.0
"""Seconds a block time may be ahead of our clock before the clock check warns."""


@dataclass(slots=True)
class NodeReport:
    """State reported by one node.

    Attributes:
        name: host and port.
        problem: why the request failed, None if it succeeded.
        chain_id: the chain it serves.
        height: height of its newest block.
        block_time: time of that block, Unix seconds.
        syncing: whether it reports that it is catching up.
        version: its software version, "" if it reports none.
        node_id: its id, "" if it reports none.
        seconds: latency of the request for its newest block.
        block_seconds: interval between two blocks, None if unknown.
        unready_reason: why it accepts no reveals yet, None if it does or does not report it.
        rpc: state reported by its consensus RPC, None if none is configured.
    """

    name: str
    problem: str | None = None
    chain_id: str = ""
    height: int = 0
    block_time: float = 0.0
    syncing: bool = False
    version: str = ""
    node_id: str = ""
    seconds: float = 0.0
    block_seconds: float | None = None
    unready_reason: str | None = None
    rpc: NodeReport | None = None


async def query_nodes(nodes: Sequence[tuple[str, str]], clock: Clock) -> list[NodeReport]:
    """Query all nodes (REST and RPC URL, "" for none) concurrently. Never raises for node errors."""
    return list(await asyncio.gather(*(_query_node(rest, rpc, clock) for rest, rpc in nodes)))


async def check_nodes(config: Config, clock: Clock, chain_id: str | None = None) -> NodeResults:
    """Query all configured nodes, and evaluate them and this machine's clock.

    Args:
        config: the settings.
        clock: this machine's clock.
        chain_id: the chain id if none is configured; None for that of the first node.
    """
    nodes, limits = await query_nodes(config.chain_nodes, clock), config.chain
    now, ages = clock.now(), HeadLimits(limits.stale_seconds, limits.clock_skew_seconds)
    results = evaluate_nodes(nodes, NodeCriteria(limits.chain_id or chain_id, now, ages))
    results.findings.append(evaluate_clock(results.same_chain, now, limit=ages.clock_skew))
    return results


async def query_authority_keys(nodes: Sequence[tuple[str, str]]) -> dict[bytes, bytes]:
    """Query the election authorities' keys by round id. If nodes differ, the first counts. Errors are ignored."""
    keys: dict[bytes, bytes] = {}
    for reported in await asyncio.gather(*(_query_keys(rest) for rest, _ in nodes)):
        keys = reported | keys
    return keys


async def _query_keys(rest: str) -> dict[bytes, bytes]:
    try:
        client = ChainClient(rest, timeout=TIMEOUT_SECONDS)
    except ConfigError:
        return {}
    try:
        listed = await client.rounds()
        return {known.round_id: known.authority_key for known in listed.rounds if known.authority_key}
    except ChainError:
        return {}
    finally:
        await client.aclose()


async def _query_node(rest: str, rpc: str, clock: Clock) -> NodeReport:
    try:
        client = ChainClient(rest, timeout=TIMEOUT_SECONDS)
    except ConfigError as error:
        return NodeReport(rest, problem=str(error))
    node = NodeReport(client.name)
    try:
        if rpc:
            node.rpc, _ = await asyncio.gather(_query_rpc(rpc, clock), _query_rest(node, client, clock))
        else:
            await _query_rest(node, client, clock)
    finally:
        await client.aclose()
    return node


async def _query_rest(node: NodeReport, client: ChainClient, clock: Clock) -> None:
    try:
        began = clock.monotonic()
        head = await client.latest_block()
        node.seconds = clock.monotonic() - began
        node.chain_id, node.height, node.block_time = head.chain_id, head.height, head.time
        node.syncing = await client.is_syncing()
    except ChainError as error:
        node.problem = str(error)
        return
    info, block, node.unready_reason = await asyncio.gather(
        _or_none(client.node_info()),
        _or_none(client.block(max(1, head.height - INTERVAL_BLOCKS))),
        _or_none(client.unready_reason()),
    )
    if info is not None:
        node.version, node.node_id = info.version, info.node_id
    if block is not None and block.head.height < head.height:
        node.block_seconds = (head.time - block.head.time) / (head.height - block.head.height)


async def _or_none(request: Awaitable[T]) -> T | None:
    try:
        return await request
    except ChainError:
        return None


async def _query_rpc(url: str, clock: Clock) -> NodeReport:
    try:
        client = RpcClient(url, timeout=TIMEOUT_SECONDS)
    except ConfigError as error:
        return NodeReport(url, problem=str(error))
    node = NodeReport(client.name)
    try:
        began = clock.monotonic()
        head, node.syncing = await client.status()
        node.seconds = clock.monotonic() - began
        node.chain_id, node.height, node.block_time = head.chain_id, head.height, head.time
    except ChainError as error:
        node.problem = str(error)
    finally:
        await client.aclose()
    return node


# ---------------------------------------------------------------- evaluation of the reports


@dataclass(frozen=True, slots=True)
class NodeCriteria:
    """Criteria for the evaluation of nodes.

    Attributes:
        chain_id: the chain id; if None, that of the first node is used.
        now: our clock, Unix seconds.
        limits: the limits of the newest block's age, as of the node pool.
    """

    chain_id: str | None
    now: float
    limits: HeadLimits


@dataclass(frozen=True, slots=True)
class NodeResults:
    """Results, and nodes for other checks.

    Attributes:
        findings: one result for each node, and one for all.
        usable: the usable nodes.
        same_chain: nodes on our chain, usable or not.
    """

    findings: list[CheckResult]
    usable: list[NodeReport] = field(default_factory=list)
    same_chain: list[NodeReport] = field(default_factory=list)


def evaluate_nodes(nodes: Sequence[NodeReport], criteria: NodeCriteria) -> NodeResults:
    """Evaluate each node. An unusable node is only a warning while another node is usable."""
    chain_id = criteria.chain_id or next((node.chain_id for node in nodes if node.chain_id), None)
    problems = [_find_problem(node, chain_id, criteria) for node in nodes]
    usable = [node for node, problem in zip(nodes, problems, strict=True) if problem is None]
    findings = [
        _evaluate_node(node, problem, bool(usable), criteria) for node, problem in zip(nodes, problems, strict=True)
    ]
    for node in nodes:
        if node.rpc is not None:
            findings.append(_evaluate_rpc(node.rpc, _find_problem(node.rpc, chain_id, criteria)))
    for name, other in find_same_nodes((node.name, node.node_id) for node in nodes):
        advice = "List two different nodes in [chain] endpoints: one node cannot confirm its own reports."
        findings.append(warn(f"node {name}", f"it reports the same node id as {other}", advice, endpoint=name))
    same_chain = [node for node in nodes if node.problem is None and node.chain_id == chain_id]
    return NodeResults([*findings, _evaluate_chain(nodes, usable, chain_id)], usable, same_chain)


def _find_problem(node: NodeReport, chain_id: str | None, criteria: NodeCriteria) -> tuple[str, str] | None:
    """Return the problem of a node and the advice, or None."""
    if node.problem is not None:
        return node.problem, "Check that the node is running and that its URL in [chain] is correct."
    if node.chain_id != chain_id:
        return (
            f"the node is on chain {node.chain_id}, expected {chain_id}",
            "Replace it in [chain] endpoints, or correct [chain] chain_id.",
        )
    if node.syncing:
        return "the node is catching up", "Wait until it has caught up; the helper does not use it until then."
    age = criteria.now - node.block_time
    reason = criteria.limits.exceeded_reason(age)
    if reason is None:
        return None
    if age < 0:
        return reason, "Correct this machine's clock: run an NTP service."
    return reason, "Check whether only the node or the entire chain has stopped, or this machine's clock is ahead."


def _evaluate_node(
    node: NodeReport, problem: tuple[str, str] | None, has_usable_node: bool, criteria: NodeCriteria
) -> CheckResult:
    subject = f"node {node.name}"
    facts: dict[str, Any] = {
        "endpoint": node.name,
        "chain_id": node.chain_id or None,
        "height": node.height or None,
        "block_age": round(criteria.now - node.block_time, 1) if node.block_time else None,
        "syncing": node.syncing,
        "version": node.version or None,
        "latency_ms": round(node.seconds * 1000, 1) if node.chain_id else None,
    }
    if problem is not None:
        level = Level.WARN if has_usable_node else Level.FAIL
        return CheckResult(subject, level, problem[0], problem[1], facts)
    age = max(0.0, criteria.now - node.block_time)
    text = (
        f"chain {node.chain_id}, height {node.height}, block {age:.0f} s old, response in {node.seconds * 1000:.0f} ms"
    )
    text += f", version {node.version}" if node.version else ", no version reported"
    if node.unready_reason is not None:
        return warn(
            subject,
            f"the node accepts no reveals yet: {node.unready_reason}",
            "Wait until its keys are ready, or restart it if that failed. Reveals go to the other nodes meanwhile.",
            **facts,
        )
    if node.seconds > SLOW_CALL_SECONDS:
        return warn(subject, text, "The node is slow: put a faster node before it in [chain] endpoints.", **facts)
    return ok(subject, text, **facts)


def _evaluate_rpc(node: NodeReport, problem: tuple[str, str] | None) -> CheckResult:
    subject = f"rpc {node.name}"
    facts = {"endpoint": node.name, "height": node.height or None, "latency_ms": round(node.seconds * 1000, 1)}
    if problem is not None:
        advice = f"{problem[1]} Without RPC, blocks are read over REST, which needs more requests."
        return warn(subject, problem[0], advice, **facts)
    return ok(subject, f"height {node.height}, response in {node.seconds * 1000:.0f} ms", **facts)


def _evaluate_chain(nodes: Sequence[NodeReport], usable: Sequence[NodeReport], chain_id: str | None) -> CheckResult:
    facts = {"chain_id": chain_id, "endpoints": len(nodes), "of_use": len(usable)}
    if not nodes:
        return fail(
            "chain",
            "no node is configured: the helper does not start",
            "Set [chain] endpoints to the REST URLs of at least two nodes of the vote chain.",
            **facts,
        )
    if not usable:
        return fail(
            "chain",
            f"none of {len(nodes)} nodes is usable: shares are neither accepted nor revealed; no attempts are spent",
            "Fix one of the nodes listed above, or add another to [chain] endpoints.",
            **facts,
        )
    text = f"{chain_id}, {len(usable)} of {len(nodes)} nodes usable"
    if len(nodes) == 1:
        text += "; add a second one for failover and for detecting false responses"
    return ok("chain", text, **facts)


def evaluate_clock(nodes: Sequence[NodeReport], now: float, *, limit: float) -> CheckResult:
    """Compare this machine's clock with the nearest of the nodes' newest block times.

    Args:
        nodes: reports of nodes on the right chain.
        now: our clock at the time of the queries.
        limit: difference in seconds above which dispatch pauses.
    """
    ages = [now - node.block_time for node in nodes if node.problem is None and node.block_time and not node.syncing]
    if not ages:
        return warn("clock", "no block time to compare with", "Fix a node first.")
    age = min(ages, key=abs)
    facts = {"block_age": round(age, 1)}
    if age > limit:
        advice = "Compare it with `date -u` on another machine and run an NTP service; if the chain has halted, wait."
        return fail(
            "clock",
            f"{age:.0f} s ahead of the newest block: it is wrong, or the chain has halted",
            advice,
            **facts,
        )
    if age < -limit:
        return fail("clock", f"{-age:.0f} s behind the chain", "Correct it, and run an NTP service.", **facts)
    if age < -AHEAD_WARNING_SECONDS:
        return warn("clock", f"{-age:.0f} s behind the chain", "Correct it, and run an NTP service.", **facts)
    return ok("clock", f"newest block is {max(0.0, age):.0f} s old", **facts)
