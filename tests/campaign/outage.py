"""Outage: the helper's only chain node is unreachable for six hours and then recovers.

Method. Time runs 120 times as fast (240 in the short form) for the chain and the helper. While shares come due one
after another, the helper's only node is down for six hours (30 minutes in the short form). During the first half its
ports refuse every connection. During the second half it responds to every request with 503 or 502, and near the end
only reveals: the helper then considers the node healthy and proves and sends without success. Wallets keep posting.

Requirements. Nothing is lost, early or counted twice. No attempt is spent, no share fails, no round is closed. Wallets
get 503 during the outage, and the shares that they post again are accepted in the end. After the recovery the first
reveal is sent within ten minutes by the chain's clock (five or two and a half real seconds), and shares that became
due during the outage are sent at no less than half of the provers' full rate.

Injected fault: a lost response and a 503 to a reveal spend an attempt (two more lines in
`helper.chain.broadcast_outcome._VERDICT_COSTS`). Reported: "attempts spent: 23 (= 0)".
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

from devnet.ballot import Ballot
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.wallet_clients import WalletGroup
from tests.support.clock import ScaledClock
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_helper
from tests.support.tcp_gate import TcpGate, open_gates

BLOCK_SECONDS = 0.3
PROVERS = 2
PROOF_SECONDS = 0.2
LEASE_SECONDS = 600
"""Lease in a shared database in seconds of the server's clock, which runs in real time."""
FULL_PROOFS_PER_SECOND = PROVERS / PROOF_SECONDS
"""Proofs per real second."""


@dataclass
class Environment:
    """The participants. `chain` uses a node without faults; `ports` are the helper's connections to the other node."""

    setting: CampaignRun
    clock: ScaledClock
    chain: DevChain
    helper: HelperProcess
    ports: list[TcpGate]
    wallets: WalletGroup
    refusals: int = 0


async def run(setting: CampaignRun) -> Findings:
    """Run the outage and check the promises."""
    findings = Findings()
    clock = ScaledClock(setting.scale(120.0, 240.0), float(int(time.time())))
    flags = ("--time-scale", str(clock.scale), "--time-origin", str(clock.origin))
    chain_flags = ("--block-seconds", str(BLOCK_SECONDS), "--extra-nodes", "1", "--stand-in-proofs")
    async with httpx.AsyncClient(timeout=30) as http:
        chain = DevChain(setting.directory, http, *chain_flags, *flags)
        await chain.start()
        try:
            node = chain.nodes[0]
            async with open_gates(node["rest"], node["rpc"]) as ports:
                sections: dict[str, Any] = {
                    "helper": {"max_concurrent_proofs": PROVERS},
                    "chain": {
                        "endpoints": [ports[0].url],
                        "rpc": [ports[1].url],
                        "poll_seconds": 0.1 * clock.scale,
                        "stale_seconds": 600,
                    },
                }
                program, env = (*STAND_IN_PROGRAM, *flags), {"STANDIN_SECONDS": str(PROOF_SECONDS)}
                cluster = setting.cluster
                if cluster is not None:
                    sections["store"] = {"lease_seconds": LEASE_SECONDS}
                async with run_helper(
                    setting.directory, http, chain, program=program, cluster=cluster, env=env, **sections
                ) as helper:
                    healthy_chain = chain.at_node(1)
                    wallets = WalletGroup(healthy_chain, lambda: [helper.url], setting.seeded_random("votes"))
                    await _run_outage(findings, Environment(setting, clock, healthy_chain, helper, ports, wallets))
        finally:
            await chain.kill()
    return findings


async def _run_outage(findings: Findings, env: Environment) -> None:
    votes, hours = env.setting.scale((60, 6.0), (4, 0.5))
    clock, chain, ledger, rng = env.clock, env.chain, env.wallets.ledger, env.setting.seeded_random("times")
    round_id = await chain.open_round(7 * 24 * 3600)
    cast = await env.wallets.cast_votes(round_id, votes + 1)
    await env.helper.wait_for_leaf(round_id, max(position for _, position in cast))
    start, seconds = clock.now() + clock.scale, hours * 3600
    await env.wallets.post_shares(cast[:votes], lambda: int(start + rng.uniform(0, 1.1 * seconds)), posters=32)
    await clock.sleep(start + 0.05 * seconds - clock.now())
    posting = await _take_offline(env, seconds, cast[votes:])
    recovered_at = clock.now()
    await chain.clear_faults(node=0)
    drained = await promise_check.wait_until_drained(
        chain, ledger, 60 + 2 * len(ledger.posted) / FULL_PROOFS_PER_SECOND
    )
    await posting
    drained = drained and await promise_check.wait_until_drained(chain, ledger, 60)
    await promise_check.check_promises(findings, chain, ledger)
    await promise_check.check_no_share_charged(findings, env.helper)
    findings.require_equal("drained", str(drained), "True")
    findings.require_at_least("responses 503 to wallets", env.refusals, 1)
    findings.require_equal("posted and not acknowledged", len(ledger.posted.keys() - ledger.acknowledged_at.keys()), 0)
    findings.record_figure("hours of outage", hours)
    sent = await promise_check.find_broadcasts(chain, ledger)
    # While valid proofs are refused, one reveal is attempted per block.
    findings.require_at_least("reveals sent during the outage", sum(bool(entry["faults"]) for entry in sent), 3)
    _check_recovery_speed(findings, [entry for entry in sent if entry["time"] >= recovered_at], env, recovered_at)


async def _take_offline(env: Environment, seconds: float, late_votes: list[tuple[Ballot, int]]) -> asyncio.Task[None]:
    """Take the node offline while wallets post: closed ports, then errors, then errors for reveals only."""
    clock, errors = env.clock, {"status_503": 0.5, "status_502": 1}
    middle, end = clock.now() + seconds / 2, clock.now() + seconds
    for port in env.ports:
        await port.close_port()
    posting = asyncio.create_task(env.wallets.post_shares(late_votes, lambda: 0, posters=4, timeout_seconds=600))
    while clock.now() < middle:
        await _poll_status(env)
    await env.chain.set_faults(node=0, **errors)
    for port in env.ports:
        await port.open_port()
    while clock.now() < end - seconds / 5:
        await _poll_status(env)
    await env.chain.set_faults(node=0, reset=True)
    await env.chain.set_faults(node=0, routes=[promise_check.BROADCAST_ROUTE], **errors)
    while clock.now() < end:
        await _poll_status(env)
    return posting


async def _poll_status(env: Environment) -> None:
    """Poll whether the helper accepts shares, as wallets do."""
    response = await env.chain.http.get(f"{env.helper.url}/shielded-vote/v1/status")
    env.refusals += response.status_code == 503
    await asyncio.sleep(0.2)


def _check_recovery_speed(
    findings: Findings, sent: list[dict[str, Any]], env: Environment, recovered_at: float
) -> None:
    """Check the rate from the first reveal after the outage to the last overdue share."""
    posted = env.wallets.ledger.posted
    first_sent_at: dict[str, float] = {}
    for entry in sent:
        if posted[entry["nullifier"]].submit_at <= recovered_at:
            first_sent_at.setdefault(entry["nullifier"], entry["time"])
    times = sorted(first_sent_at.values())
    findings.require_at_least("shares due during the outage", len(times), 16)
    if not times:
        return
    findings.require_at_most("seconds of chain time to the first reveal", times[0] - recovered_at, 600)
    rate = (len(times) - 1) / max((times[-1] - times[0]) / env.clock.scale, 0.001)
    findings.require_at_least("reveals per second", rate, FULL_PROOFS_PER_SECOND / 2)


CAMPAIGN = Campaign("outage", run)
