"""Checks all nodes and this machine's clock by the rules of the node pool. No request contains share data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from helper.chain.chain_data import NodeInfo, find_same_nodes
from helper.chain.node import Health, Node
from helper.chain.node_http import SLOW_CALL_SECONDS
from helper.chain.node_pool import CHAIN_ID_ADVICE, NodePool, create_node_pool, create_nodes
from helper.chain.rest_client import ChainClient
from helper.clock import Clock
from helper.config.sections import Config
from helper.doctor import CheckResult, Level, fail, ok, warn
from helper.errors import ChainError

T = TypeVar("T")

TIMEOUT_SECONDS: Final = 5.0
"""Request timeout in seconds."""
QUERY_SECONDS: Final = 8.0
"""Seconds after which the nodes are evaluated without the responses that are missing."""
INTERVAL_BLOCKS: Final = 20
"""Number of blocks over which the block interval is measured."""
AHEAD_WARNING_SECONDS: Final = 5.0
"""Seconds a block time may be ahead of our clock before the clock check warns."""
_UNKNOWN: Final = NodeInfo(chain_id="", version="")


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node reports about itself.

    Attributes:
        info: its version and id.
        seconds: time of its slowest response.
        block_seconds: interval between two blocks, None if unknown.
        unready_reason: why it accepts no reveals yet, None if it does or does not report it.
    """

    info: NodeInfo = _UNKNOWN
    seconds: float = 0.0
    block_seconds: float | None = None
    unready_reason: str | None = None


async def check_nodes(
    config: Config, clock: Clock, chain_id: str | None = None
) -> tuple[list[CheckResult], list[NodeReport]]:
    """Probe all configured nodes once, and evaluate them and this machine's clock. Returns the usable nodes too.

    If no chain id is configured, it must be `chain_id`, or if that is None, the one that the nodes report.
    """
    if not config.chain_nodes:
        advice = "Set [chain] endpoints to the REST URLs of at least two nodes of the vote chain."
        missing = fail("chain", "no node is configured: the helper does not start", advice, endpoints=0)
        return [missing, evaluate_clock(None)], []
    nodes = create_nodes(config.chain_nodes, timeout=TIMEOUT_SECONDS)
    pool = create_node_pool(config, clock, nodes)
    if pool.chain_id is None and chain_id:
        pool.chain_id = pool.reported_chain_id = chain_id
    deadline = clock.monotonic() + QUERY_SECONDS
    try:
        await pool.probe_all()
        queries = [_query(node, clock, deadline) for node in nodes]
        reports = dict(zip(nodes, await asyncio.gather(*queries), strict=True))
    finally:
        await pool.aclose()
    return evaluate_nodes(pool, reports)


async def query_authority_keys(endpoints: Sequence[str]) -> dict[bytes, bytes]:
    """Query the election authorities' keys by round id. If nodes differ, the first counts. Errors are ignored."""
    keys: dict[bytes, bytes] = {}
    for reported in await asyncio.gather(*map(_query_keys, endpoints)):
        keys = reported | keys
    return keys


async def _query_keys(rest: str) -> dict[bytes, bytes]:
    client = ChainClient(rest, timeout=TIMEOUT_SECONDS)
    try:
        listed = await client.rounds()
        return {known.round_id: known.authority_key for known in listed.rounds if known.authority_key}
    except ChainError:
        return {}
    finally:
        await client.aclose()


async def _query(node: Node, clock: Clock, deadline: float) -> NodeReport:
    head, client = node.health.head, node.client
    if head is None:
        return NodeReport()
    began = clock.monotonic()
    info, block, unready_reason = await asyncio.gather(
        _or_none(client.node_info(), deadline - began),
        _or_none(client.block(max(1, head.height - INTERVAL_BLOCKS)), deadline - began),
        _or_none(client.unready_reason(), deadline - began),
    )
    seconds, block_seconds = clock.monotonic() - began, None
    if block is not None and block.head.height < head.height:
        block_seconds = (head.time - block.head.time) / (head.height - block.head.height)
    return NodeReport(info or _UNKNOWN, seconds, block_seconds, unready_reason)


async def _or_none(request: Awaitable[T], seconds: float) -> T | None:
    try:
        async with asyncio.timeout(seconds):
            return await request
    except (ChainError, TimeoutError):
        return None


# ---------------------------------------------------------------- evaluation


def evaluate_nodes(pool: NodePool, reports: dict[Node, NodeReport]) -> tuple[list[CheckResult], list[NodeReport]]:
    """Evaluate each node of a pool after a probe. An unusable node is only a warning while another one is usable."""
    usable = pool.usable_nodes
    findings = [_evaluate_node(pool, node, report, is_only_warning=bool(usable)) for node, report in reports.items()]
    findings += [_evaluate_rpc(pool, node) for node in pool.nodes if node.rpc is not None]
    for name, other in find_same_nodes((node.name, report.info.node_id) for node, report in reports.items()):
        advice = "List two different nodes in [chain] endpoints: one node cannot confirm its own reports."
        findings.append(warn(f"node {name}", f"it reports the same node id as {other}", advice, endpoint=name))
    findings += [_evaluate_chain(pool), evaluate_clock(pool.clock_skew, pool.stale_after, pool.max_clock_skew)]
    return findings, [report for node, report in reports.items() if node in usable]


def _evaluate_node(pool: NodePool, node: Node, report: NodeReport, *, is_only_warning: bool) -> CheckResult:
    subject, head, version = f"node {node.name}", node.health.head, report.info.version
    age = None if head is None else pool.clock.now() - head.time
    facts: dict[str, Any] = {
        "endpoint": node.name,
        "chain_id": head.chain_id if head else None,
        "height": head.height if head else None,
        "block_age": None if age is None else round(age, 1),
        "syncing": node.health.is_syncing,
        "version": version or None,
        "latency_ms": round(report.seconds * 1000, 1) if head else None,
    }
    reason = pool.unusable_reason(node.health)
    if head is None or age is None or reason is not None:
        level = Level.WARN if is_only_warning else Level.FAIL
        return CheckResult(subject, level, str(reason), _advise(node.health, pool), facts)
    if report.unready_reason is not None:
        return warn(
            subject,
            f"the node accepts no reveals yet: {report.unready_reason}",
            "Wait until its keys are ready, or restart it if that failed. Reveals go to the other nodes meanwhile.",
            **facts,
        )
    text = f"chain {head.chain_id}, height {head.height}, block {max(0.0, age):.0f} s old, "
    text += f"response in {report.seconds * 1000:.0f} ms, "
    text += f"version {version}" if version else "no version reported"
    if report.seconds > SLOW_CALL_SECONDS:
        return warn(subject, text, "The node is slow: put a faster node before it in [chain] endpoints.", **facts)
    return ok(subject, text, **facts)


def _advise(health: Health, pool: NodePool) -> str:
    """Return what to do about a service that the pool does not use."""
    if health.error is not None or health.head is None:
        return "Check that the node is running and that its URL in [chain] is correct."
    if pool.chain_id not in {None, health.head.chain_id}:
        return "Replace it in [chain] endpoints, or set [chain] chain_id to the right chain."
    if health.is_syncing:
        return "Wait until it has caught up; the helper does not use it until then."
    if pool.usable_nodes:
        return "This machine's clock agrees with other responses: restart the node, or replace it in [chain]."
    if health.head.time > pool.clock.now():
        return "Correct this machine's clock: run an NTP service."
    return "Check whether only the node or the entire chain has stopped, or this machine's clock is ahead."


def _evaluate_rpc(pool: NodePool, node: Node) -> CheckResult:
    assert node.rpc is not None
    subject, head = f"rpc {node.rpc.name}", node.rpc_health.head
    facts = {"endpoint": node.rpc.name, "height": head.height if head else None}
    reason = pool.unusable_reason(node.rpc_health)
    if reason is not None:
        advice = f"{_advise(node.rpc_health, pool)} Without RPC, blocks are read over REST, which needs more requests."
        return warn(subject, reason, advice, **facts)
    return ok(subject, f"height {facts['height']}", **facts)


def _evaluate_chain(pool: NodePool) -> CheckResult:
    number, usable = len(pool.nodes), len(pool.usable_nodes)
    facts = {"chain_id": pool.reported_chain_id, "endpoints": number, "of_use": usable}
    if not usable:
        return fail(
            "chain",
            f"none of {number} nodes is usable: shares are neither accepted nor revealed; no attempts are spent",
            "Fix one of the nodes listed above, or add another to [chain] endpoints.",
            **facts,
        )
    if pool.chain_id_dispute is not None:
        return fail("chain", pool.chain_id_dispute, CHAIN_ID_ADVICE, **facts)
    text = f"{pool.reported_chain_id}, {usable} of {number} nodes usable"
    if number == 1:
        text += "; add a second one for failover and for detecting false responses"
    return ok("chain", text, **facts)


def evaluate_clock(skew: float | None, max_ahead: float = 0.0, max_behind: float = 0.0) -> CheckResult:
    """Compare this machine's clock with the nodes' newest block times.

    `skew` is the clock minus the nearest of them, in seconds. Above the limits, dispatch pauses.
    """
    if skew is None:
        return warn("clock", "no block time to compare with", "Fix a node first.")
    facts = {"block_age": round(skew, 1)}
    if skew > max_ahead:
        advice = "Compare it with `date -u` on another machine and run an NTP service; if the chain has halted, wait."
        text = f"{skew:.0f} s ahead of the newest block: it is wrong, or the chain has halted"
        return fail("clock", text, advice, **facts)
    if skew < -AHEAD_WARNING_SECONDS:
        level = Level.FAIL if skew < -max_behind else Level.WARN
        advice = "Correct it, and run an NTP service."
        return CheckResult("clock", level, f"{-skew:.0f} s behind the chain", advice, facts)
    return ok("clock", f"newest block is {max(0.0, skew):.0f} s old", **facts)
