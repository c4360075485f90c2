"""What each node tells of itself, asked side by side, and what that means. Nothing that is asked is about a share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from helper.chain.node_http import SLOW
from helper.chain.rest_client import ChainClient
from helper.chain.rpc_client import RpcClient
from helper.clock import Clock
from helper.doctor.result import CheckResult, Level, fail, ok, warn
from helper.errors import ChainError, ConfigError

T = TypeVar("T")

PATIENCE: Final = 5.0
"""Seconds that a node has for each answer."""
LOOK_BACK: Final = 20
"""Blocks over which the time between two is measured."""
AHEAD: Final = 5.0
"""Seconds by which a block may lie in our future before somebody's clock wants a look."""


@dataclass(slots=True)
class NodeReport:
    """What one node told.

    Attributes:
        name: host and port.
        problem: why it could not be asked, None where it could.
        chain_id: the chain it serves.
        height: of its newest block.
        block_time: that block's time, unix seconds.
        syncing: whether it says that it catches up.
        version: its build's version, "" where it tells none.
        seconds: how long its newest block took to come.
        block_seconds: between two of its blocks, None where it was not told.
        rpc: what its consensus RPC told, None where none is set.
    """

    name: str
    problem: str | None = None
    chain_id: str = ""
    height: int = 0
    block_time: float = 0.0
    syncing: bool = False
    version: str = ""
    seconds: float = 0.0
    block_seconds: float | None = None
    rpc: NodeReport | None = None


async def query_nodes(nodes: Sequence[tuple[str, str]], clock: Clock) -> list[NodeReport]:
    """Ask every node (REST and RPC address, "" for none), all at the same time; never raises for what they do."""
    return list(await asyncio.gather(*(_look(rest, rpc, clock) for rest, rpc in nodes)))


async def _look(rest: str, rpc: str, clock: Clock) -> NodeReport:
    try:
        client = ChainClient(rest, timeout=PATIENCE)
    except ConfigError as error:
        return NodeReport(rest, problem=str(error))
    look = NodeReport(client.name)
    try:
        if rpc:
            look.rpc, _ = await asyncio.gather(_look_at_rpc(rpc, clock), _ask(look, client, clock))
        else:
            await _ask(look, client, clock)
    finally:
        await client.aclose()
    return look


async def _ask(look: NodeReport, client: ChainClient, clock: Clock) -> None:
    try:
        began = clock.monotonic()
        head = await client.latest_block()
        look.seconds = clock.monotonic() - began
        look.chain_id, look.height, look.block_time = head.chain_id, head.height, head.time
        look.syncing = await client.syncing()
    except ChainError as error:
        look.problem = str(error)
        return
    info, block = await asyncio.gather(
        _or_none(client.node_info()), _or_none(client.block(max(1, head.height - LOOK_BACK)))
    )
    look.version = info.version if info is not None else ""
    if block is not None and block.head.height < head.height:
        look.block_seconds = (head.time - block.head.time) / (head.height - block.head.height)


async def _or_none(question: Awaitable[T]) -> T | None:
    """The answer, or None where there is none."""
    try:
        return await question
    except ChainError:
        return None


async def _look_at_rpc(url: str, clock: Clock) -> NodeReport:
    try:
        client = RpcClient(url, timeout=PATIENCE)
    except ConfigError as error:
        return NodeReport(url, problem=str(error))
    look = NodeReport(client.name)
    try:
        began = clock.monotonic()
        head, look.syncing = await client.status()
        look.seconds = clock.monotonic() - began
        look.chain_id, look.height, look.block_time = head.chain_id, head.height, head.time
    except ChainError as error:
        look.problem = str(error)
    finally:
        await client.aclose()
    return look


# ---------------------------------------------------------------- what it means


@dataclass(frozen=True, slots=True)
class Expected:
    """What nodes are judged by.

    Attributes:
        chain_id: the chain's id; None where nobody has said, and the first node's word counts.
        now: our clock, unix seconds.
        stale_after: seconds after which a newest block is too old.
        clock_skew: seconds by which it may lie in our future.
    """

    chain_id: str | None
    now: float
    stale_after: float
    clock_skew: float


@dataclass(frozen=True, slots=True)
class Judged:
    """The findings, and what other checks go by.

    Attributes:
        findings: a line a node, and one for all of them.
        good: the nodes that are of use.
        same_chain: those that serve our chain, of use or not.
    """

    findings: list[CheckResult]
    good: list[NodeReport] = field(default_factory=list)
    same_chain: list[NodeReport] = field(default_factory=list)


def judge_nodes(looks: Sequence[NodeReport], expected: Expected) -> Judged:
    """A line for each node; one that is of no use is a warning only, as long as another is."""
    chain_id = expected.chain_id or next((look.chain_id for look in looks if look.chain_id), None)
    problems = [_problem(look, chain_id, expected) for look in looks]
    good = [look for look, problem in zip(looks, problems, strict=True) if problem is None]
    findings = [_node(look, problem, bool(good), expected) for look, problem in zip(looks, problems, strict=True)]
    for look in looks:
        if look.rpc is not None:
            findings.append(_rpc(look.rpc, _problem(look.rpc, chain_id, expected)))
    same = [look for look in looks if look.problem is None and look.chain_id == chain_id]
    return Judged([*findings, _together(looks, good, chain_id)], good, same)


def _problem(look: NodeReport, chain_id: str | None, expected: Expected) -> tuple[str, str] | None:
    """What is wrong with a node, and what to do about it."""
    if look.problem is not None:
        return look.problem, "See whether the node runs, and whether its address in [chain] is right."
    if look.chain_id != chain_id:
        return (
            f"it serves chain {look.chain_id}, not {chain_id}",
            "Take it out of [chain] endpoints, or set [chain] chain_id to the chain that you mean.",
        )
    if look.syncing:
        return "it is catching up with its chain", "Wait until it has caught up; shares are not taken by its word."
    age = expected.now - look.block_time
    if age > expected.stale_after:
        return (
            f"its newest block is {age:.0f} s old",
            "See why the node has stopped; or whether the whole chain has, or this machine's clock is ahead.",
        )
    if age < -expected.clock_skew:
        return f"its newest block is {-age:.0f} s ahead of our clock", "Set this machine's clock: run an NTP service."
    return None


def _node(look: NodeReport, problem: tuple[str, str] | None, others: bool, expected: Expected) -> CheckResult:
    subject = f"node {look.name}"
    facts: dict[str, Any] = {
        "endpoint": look.name,
        "chain_id": look.chain_id or None,
        "height": look.height or None,
        "block_age": round(expected.now - look.block_time, 1) if look.block_time else None,
        "syncing": look.syncing,
        "version": look.version or None,
        "latency_ms": round(look.seconds * 1000, 1) if look.chain_id else None,
    }
    if problem is not None:
        level = Level.WARN if others else Level.FAIL
        return CheckResult(subject, level, problem[0], problem[1], facts)
    age = max(0.0, expected.now - look.block_time)
    text = (
        f"chain {look.chain_id}, height {look.height}, block {age:.0f} s old, answers in {look.seconds * 1000:.0f} ms"
    )
    text += f", version {look.version}" if look.version else ", tells no version"
    if look.seconds > SLOW:
        return warn(subject, text, "It is slow: put a quicker node before it in [chain] endpoints.", **facts)
    return ok(subject, text, **facts)


def _rpc(look: NodeReport, problem: tuple[str, str] | None) -> CheckResult:
    subject = f"rpc {look.name}"
    facts = {"endpoint": look.name, "height": look.height or None, "latency_ms": round(look.seconds * 1000, 1)}
    if problem is not None:
        advice = f"{problem[1]} Without it blocks are read over REST, which asks more."
        return warn(subject, problem[0], advice, **facts)
    return ok(subject, f"height {look.height}, answers in {look.seconds * 1000:.0f} ms", **facts)


def _together(looks: Sequence[NodeReport], good: Sequence[NodeReport], chain_id: str | None) -> CheckResult:
    facts = {"chain_id": chain_id, "endpoints": len(looks), "of_use": len(good)}
    if not good:
        return fail(
            "chain",
            f"none of {len(looks)} nodes is of use: no share is taken or revealed, and none loses an attempt by it",
            "Mend one of the nodes above, or name another in [chain] endpoints.",
            **facts,
        )
    text = f"{chain_id}, {len(good)} of {len(looks)} nodes of use"
    if len(looks) == 1:
        text += "; name a second one: it could take over, and speak up when the first lies"
    return ok("chain", text, **facts)


def judge_clock(looks: Sequence[NodeReport], now: float, *, limit: float) -> CheckResult:
    """This machine's clock against the newest block's time, by the node that is nearest to our clock.

    Args:
        looks: of the right chain, caught up, and answering.
        now: our clock when they were asked.
        limit: seconds from which on dispatch pauses.
    """
    ages = [now - look.block_time for look in looks if look.problem is None and look.block_time and not look.syncing]
    if not ages:
        return warn("clock", "there is no block to compare it with", "Mend a node first.")
    age = min(ages, key=abs)
    facts = {"block_age": round(age, 1)}
    if age > limit:
        advice = "Compare it with `date -u` elsewhere and run an NTP service; if the chain stands still, wait for it."
        return fail(
            "clock",
            f"it is {age:.0f} s ahead of the newest block: it is wrong, or the chain stands still",
            advice,
            **facts,
        )
    if age < -limit:
        return fail("clock", f"it is {-age:.0f} s behind the chain's", "Set it, and run an NTP service.", **facts)
    if age < -AHEAD:
        return warn("clock", f"it is {-age:.0f} s behind the chain's", "Set it, and run an NTP service.", **facts)
    return ok("clock", f"the newest block is {max(0.0, age):.0f} s old by it", **facts)
