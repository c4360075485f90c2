"""Outage: the chain is away for six hours, and comes back.

How it hurts. Time goes 120 times as fast (240 in the short form), for the chain and for the helper alike. While shares
come due one after another, the helper's only node is away for six hours (30 minutes in the short form): half of that
time its ports refuse every connection, the other half it answers 503 or 502 to everything, at its end only to reveals:
the helper then takes it for well, and proves and sends in vain. Wallets go on posting.

What must hold. Nothing is lost, early or counted twice. Not one attempt is spent, no share fails, no round is closed.
Wallets are told 503 while it lasts, and what they post again and again is taken in the end. Once the node is back, the
first reveal comes within ten minutes by the chain's clock (five or two and a half real seconds), and what fell due
meanwhile is drained as fast as the provers go: at half of their full speed at least.

Planted: a lost reply and a 503 to a reveal cost an attempt (two lines more in
`helper.chain.verdicts._VERDICT_COSTS`). Found: "attempts spent: 23 (= 0)".
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
from tests.campaign.wallet_clients import WalletCrowd
from tests.support.clock import ScaledClock
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_helper
from tests.support.tcp_gate import TcpGate, open_gates

BLOCK_SECONDS = 0.3
PROVERS = 2
PROOF_SECONDS = 0.1
LEASE_SECONDS = 600
"""Seconds of a lease in a shared database, so long by the server's clock, whose time is the real one."""
FULL_PROOFS_PER_SECOND = PROVERS / PROOF_SECONDS
"""Proofs a (real) second."""


@dataclass
class Environment:
    """What takes part. `chain` is seen through a node that stays; `ports` are the helper's ways to the other."""

    setting: CampaignRun
    clock: ScaledClock
    chain: DevChain
    helper: HelperProcess
    ports: list[TcpGate]
    crowd: WalletCrowd
    refusals: int = 0


async def run(setting: CampaignRun) -> Findings:
    """Hurt it, and judge."""
    findings = Findings()
    clock = ScaledClock(setting.scale(120.0, 240.0), float(int(time.time())))
    flags = ("--time-scale", str(clock.scale), "--time-origin", str(clock.origin))
    chain_flags = ("--block-seconds", str(BLOCK_SECONDS), "--extra-nodes", "1", "--stand-in-proofs")
    async with httpx.AsyncClient(timeout=30) as http:
        chain = DevChain(setting.folder, http, *chain_flags, *flags)
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
                place = setting.cluster
                if place is not None:
                    sections["store"] = {"lease_seconds": LEASE_SECONDS}
                async with run_helper(
                    setting.folder, http, chain, program=program, cluster=place, env=env, **sections
                ) as helper:
                    there = chain.at_node(1)
                    crowd = WalletCrowd(there, lambda: [helper.url], setting.seeded_random("votes"))
                    await _run_outage(findings, Environment(setting, clock, there, helper, ports, crowd))
        finally:
            await chain.kill()
    return findings


async def _run_outage(findings: Findings, scene: Environment) -> None:
    votes, hours = scene.setting.scale((60, 6.0), (4, 0.5))
    clock, chain, ledger, rng = scene.clock, scene.chain, scene.crowd.ledger, scene.setting.seeded_random("times")
    round_id = await chain.open_round(7 * 24 * 3600)
    cast = await scene.crowd.cast_votes(round_id, votes + 1)
    await scene.helper.wait_for_leaf(round_id, max(position for _, position in cast))
    begin, seconds = clock.now() + clock.scale, hours * 3600
    await scene.crowd.post_shares(cast[:votes], lambda: int(begin + rng.uniform(0, 1.1 * seconds)), posters=32)
    await clock.sleep(begin + 0.05 * seconds - clock.now())
    posting = await _take_offline(scene, seconds, cast[votes:])
    back = clock.now()
    await chain.clear_faults(node=0)
    drained = await promise_check.wait_until_drained(
        chain, ledger, 60 + 2 * len(ledger.posted) / FULL_PROOFS_PER_SECOND
    )
    await posting
    drained = drained and await promise_check.wait_until_drained(chain, ledger, 60)
    await promise_check.check_promises(findings, chain, ledger)
    await promise_check.check_no_share_charged(findings, scene.helper)
    findings.require_equal("drained", str(drained), "True")
    findings.require_at_least("times that wallets were told 503", scene.refusals, 1)
    findings.require_equal("posted and not acknowledged", len(ledger.posted.keys() - ledger.acknowledged_at.keys()), 0)
    findings.record_figure("hours away", hours)
    sent = await promise_check.find_broadcasts(chain, ledger)
    # While valid proofs are refused, one reveal is tried at each block.
    findings.require_at_least("reveals sent in vain", sum(bool(entry["faults"]) for entry in sent), 3)
    _check_recovery_speed(findings, [entry for entry in sent if entry["time"] >= back], scene, back)


async def _take_offline(scene: Environment, seconds: float, late_votes: list[tuple[Ballot, int]]) -> asyncio.Task[None]:
    """Be away for so long, while wallets post these votes: first the ports are shut, then the node is out of order, and
    at last only for reveals.
    """
    clock, broken = scene.clock, {"status_503": 0.5, "status_502": 1}
    middle, end = clock.now() + seconds / 2, clock.now() + seconds
    for port in scene.ports:
        await port.close_port()
    posting = asyncio.create_task(scene.crowd.post_shares(late_votes, lambda: 0, posters=4, timeout_seconds=600))
    while clock.now() < middle:
        await _poll_status(scene)
    await scene.chain.set_faults(node=0, **broken)
    for port in scene.ports:
        await port.open_port()
    while clock.now() < end - seconds / 5:
        await _poll_status(scene)
    await scene.chain.set_faults(node=0, reset=True)
    await scene.chain.set_faults(node=0, routes=[promise_check.BROADCAST_ROUTE], **broken)
    while clock.now() < end:
        await _poll_status(scene)
    return posting


async def _poll_status(scene: Environment) -> None:
    """Ask whether the helper takes shares, as wallets do."""
    answer = await scene.chain.http.get(f"{scene.helper.url}/shielded-vote/v1/status")
    scene.refusals += answer.status_code == 503
    await asyncio.sleep(0.2)


def _check_recovery_speed(
    findings: Findings, sent: list[dict[str, Any]], scene: Environment, recovered_at: float
) -> None:
    """From the first reveal after the outage to the last of what had fallen due in it."""
    posted = scene.crowd.ledger.posted
    firsts: dict[str, float] = {}
    for entry in sent:
        if posted[entry["nullifier"]].submit_at <= recovered_at:
            firsts.setdefault(entry["nullifier"], entry["time"])
    times = sorted(firsts.values())
    findings.require_at_least("shares that fell due meanwhile", len(times), 16)
    if not times:
        return
    findings.require_at_most("seconds of the chain to the first reveal", times[0] - recovered_at, 600)
    speed = (len(times) - 1) / max((times[-1] - times[0]) / scene.clock.scale, 0.001)
    findings.require_at_least("reveals a second", speed, FULL_PROOFS_PER_SECOND / 2)


CAMPAIGN = Campaign("outage", run)
