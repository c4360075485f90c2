"""Tarpit: one of three nodes accepts every request and does not respond in time.

Method. While shares come due continuously, one of the helper's three nodes becomes a tarpit: it sends a byte of its
responses every ten seconds, or its sockets are half open, so that connections are accepted, read, and never get a
response. This is repeated for each position in the operator's order. Then the first node stops as if by SIGSTOP, after
it was healthy: connections are accepted and stay open, nothing is read until it continues.

Requirements. A read ends within 10 s, a send within 75 s (and half a second that a busy machine may take to abort it),
measured at the tarpit. Only shares sent in the first seconds are sent to the tarpit first. For 99 % of all others the
first broadcast to a healthy node comes within 2 s of their time. While the first node is stopped, a node that responds
receives every share within 3 s of its time, and no share reaches nodes twice at one height. Nothing is lost, early or
counted twice, no attempt is spent, nothing fails.

Injected fault: no call makes a node slow (`helper.chain.node_http.SLOW_CALL_SECONDS = 1e9`), so that all shares due go
to the tarpit first until its probe has timed out. Reported: "shares sent to a tarpit first: 49 (≤ 18)".
With three real nodes and a wait of 10 s for every call, the shares due when the first node stopped were 7 to 11 s late.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import run_helper
from tests.support.tcp_gate import TcpGate, open_gates

NODE_COUNT = 3
TRICKLE, HALF_OPEN, STOPPED = "a byte every 10 s", "half open", "stopped"
SHARES_PER_SECOND = {TRICKLE: 4, HALF_OPEN: 4, STOPPED: 8}
MAX_LATENESS_SECONDS = 3.0
"""Goal for every share while one node of three is stopped."""
DETECTION_SECONDS = 1.5
"""Average over positions: a preferred tarpit receives the shares sent in the first seconds, others nearly none."""


@dataclass
class Observations:
    """Measurements of all scenarios, in seconds.

    Attributes:
        reads: durations of reads from a tarpit.
        sends: durations of sends to a tarpit.
        other_calls: lateness of the shares that were not sent to a tarpit first.
        detection_seconds: lateness of those that were.
        latencies_before: lateness before the fault.
        stopped: lateness of each share in the scenario of a stopped node.
        held_count: number of shares that were sent to a stopped node.
    """

    reads: list[float] = field(default_factory=list)
    sends: list[float] = field(default_factory=list)
    other_calls: list[float] = field(default_factory=list)
    detection_seconds: list[float] = field(default_factory=list)
    latencies_before: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)
    held_count: int = 0
    tarpits: int = 0


async def run(setting: CampaignRun) -> Findings:
    findings, observations = Findings(), Observations()
    kinds = [TRICKLE, HALF_OPEN]
    pairs = [(kind, position) for kind in kinds for position in range(NODE_COUNT)]
    turn = setting.seed % 2
    batches = setting.scale(
        [pairs[:3], pairs[3:]], [[(kinds[(position + turn) % 2], position) for position in range(NODE_COUNT)]]
    )
    batches.append([(STOPPED, 0)])
    async with httpx.AsyncClient(timeout=30) as http:
        for number, batch in enumerate(batches):
            async with asyncio.TaskGroup() as group:
                for kind, position in batch:
                    directory = setting.directory / f"{number}-{position}"
                    directory.mkdir()
                    group.create_task(_run_lane(setting, findings, observations, directory, http, kind, position))
    calls = len(observations.reads) + len(observations.sends)
    findings.require_at_least("calls to a tarpit", calls, observations.tarpits)
    findings.require_at_most("longest read from a tarpit, seconds", max(observations.reads, default=0.0), 10.5)
    findings.require_at_most("longest send to a tarpit, seconds", max(observations.sends, default=0.0), 75.5)
    findings.require_at_least("shares not sent to a tarpit first", len(observations.other_calls), 64)
    findings.require_at_most("their lateness, p99, seconds", percentile(observations.other_calls, 0.99) or 0.0, 2)
    findings.require_at_most(
        "shares sent to a tarpit first",
        len(observations.detection_seconds),
        SHARES_PER_SECOND[HALF_OPEN] * DETECTION_SECONDS * observations.tarpits,
    )
    findings.record_figure("their maximum lateness, seconds", max(observations.detection_seconds, default=0.0))
    findings.require_at_least("shares sent to a stopped node", observations.held_count, 1)
    findings.require_at_most(
        "maximum lateness with a stopped node, seconds", max(observations.stopped), MAX_LATENESS_SECONDS
    )
    findings.record_figure("lateness with a stopped node, p99, seconds", percentile(observations.stopped, 0.99) or 0.0)
    findings.record_figure(
        "lateness before the fault, p99, seconds", percentile(observations.latencies_before, 0.99) or 0.0
    )
    return findings


async def _run_lane(
    setting: CampaignRun,
    findings: Findings,
    observations: Observations,
    directory: Path,
    http: httpx.AsyncClient,
    kind: str,
    position: int,
) -> None:
    """Run a chain and a helper whose node in this position becomes a tarpit of this kind."""
    flags = ("--block-seconds", setting.scale("1", "0.5"), "--extra-nodes", str(NODE_COUNT), "--stand-in-proofs")
    full_chain = DevChain(directory, http, *flags)
    await full_chain.start()
    try:
        chain = full_chain.at_node(NODE_COUNT)  # the last node is used only by the checks
        listed = [(node["rest"], node["rpc"]) for node in chain.nodes[:NODE_COUNT]]
        async with open_gates(*listed[position]) as ports:
            listed[position] = (ports[0].url, ports[1].url)
            sections: dict[str, Any] = {
                "endpoints": [rest for rest, _ in listed],
                "rpc": [rpc for _, rpc in listed],
                "poll_seconds": 0.5,
            }
            async with run_helper(directory, http, chain, cluster=setting.cluster, chain=sections) as helper:
                wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random(f"{kind} {position}"))
                tarpit_since = await _run_tarpit(setting, chain, wallets, ports, kind, position)
                await promise_check.check_promises(findings, chain, wallets.ledger)
                await promise_check.check_no_share_charged(findings, helper)
            await asyncio.sleep(0.5)  # the helper has ended, and the chain logs the calls that were in progress
            requests = await chain.request_log()
            if kind == STOPPED:
                await promise_check.check_one_broadcast_per_height(findings, chain, wallets.ledger)
                _record_stopped(observations, wallets.ledger, requests, f"node{position}", tarpit_since)
            else:
                observations.tarpits += 1
                name = f"node{position}"
                _record_latencies(observations, wallets.ledger, requests, ports, kind, name, tarpit_since)
    finally:
        await full_chain.kill()


async def _run_tarpit(
    setting: CampaignRun,
    chain: DevChain,
    wallets: WalletGroup,
    ports: list[TcpGate],
    kind: str,
    position: int,
) -> float:
    """Post shares, and make the node a tarpit while they come due. Returns the Unix time of the fault."""
    rng, seconds = setting.seeded_random(f"times {kind} {position}"), setting.scale(60, 14)
    round_id = await chain.open_round()
    votes = await wallets.cast_votes(round_id, round(seconds * SHARES_PER_SECOND[kind] / 16))
    await asyncio.sleep(2)  # wait until the leaves are in the helper's tree
    start = time.time() + 4
    await wallets.post_shares(votes, lambda: int(start + rng.uniform(0, seconds)))
    await asyncio.sleep(start + 3 - time.time())
    tarpit_since = time.time()
    await _make_tarpit(chain, ports, kind, position)
    if kind == STOPPED:
        await asyncio.sleep(setting.scale(25, 7))
        for port in ports:
            port.resume_traffic()
    await asyncio.sleep(start + seconds - time.time())
    await promise_check.wait_until_drained(chain, wallets.ledger, 60)
    return tarpit_since


async def _make_tarpit(chain: DevChain, ports: list[TcpGate], kind: str, position: int) -> None:
    if kind == TRICKLE:
        await chain.set_faults(node=position, trickle=10)
        return
    for port in ports:
        if kind == STOPPED:
            port.stop_traffic()
            continue
        await port.close_port()
        port.is_silent = True
        await port.open_port()


def _record_latencies(
    observations: Observations,
    ledger: promise_check.ShareLedger,
    requests: list[dict[str, Any]],
    ports: list[TcpGate],
    kind: str,
    name: str,
    tarpit_since: float,
) -> None:
    """Record the duration of calls to the tarpit and each share's latency at a healthy node."""
    delayed: set[str] = set()
    first_sent_at: dict[str, float] = {}
    silent = [connection for port in ports for connection in port.silent_connections]
    received = b"".join(bytes(connection.received) for connection in silent)
    for entry in requests:
        slow = kind == TRICKLE and entry["node"] == name and entry["ms"] > 5000
        if slow:
            (observations.sends if entry["method"] == "POST" else observations.reads).append(entry["ms"] / 1000)
        nullifier = entry["nullifier"]
        if nullifier not in ledger.posted:
            continue
        if slow:
            delayed.add(nullifier)
        elif kind == HALF_OPEN or entry["node"] != name or entry["time"] < tarpit_since:
            first_sent_at.setdefault(nullifier, entry["time"])
    if kind == HALF_OPEN:
        for connection in silent:
            if connection.seconds is not None:
                is_send = connection.received.startswith(b"POST")
                (observations.sends if is_send else observations.reads).append(connection.seconds)
        delayed = {nullifier for nullifier in ledger.posted if base64.b64encode(bytes.fromhex(nullifier)) in received}
    for nullifier, posted in ledger.posted.items():
        if nullifier not in first_sent_at:
            continue  # a trickling tarpit may have received it in full, or it was sent while the node was healthy
        late = max(0.0, first_sent_at[nullifier] - posted.submit_at)
        if nullifier not in delayed and first_sent_at[nullifier] < tarpit_since:
            observations.latencies_before.append(late)
        else:
            (observations.detection_seconds if nullifier in delayed else observations.other_calls).append(late)


def _record_stopped(
    observations: Observations,
    ledger: promise_check.ShareLedger,
    requests: list[dict[str, Any]],
    name: str,
    stopped_since: float,
) -> None:
    """Record how late a node that responds received each share. A stopped node receives its requests afterwards."""
    arrivals: dict[str, float] = {}
    held: set[str] = set()
    for entry in sorted(requests, key=lambda entry: float(entry["time"])):
        nullifier = entry["nullifier"]
        if nullifier not in ledger.posted:
            continue
        if nullifier in arrivals and entry["node"] == name and entry["time"] >= stopped_since:
            held.add(nullifier)  # another node received it in the meantime
        arrivals.setdefault(nullifier, entry["time"])
    observations.held_count += len(held)
    observations.stopped += [
        max(0.0, arrivals.get(nullifier, math.inf) - posted.submit_at) for nullifier, posted in ledger.posted.items()
    ]


CAMPAIGN = Campaign("tarpit", run)
