"""Stale nodes: a node's data is old, of another chain, or impossible; one node, then all.

Method. One after another: a node serves blocks that are 91 s old and older; it is syncing; it was reset to height 1; it
does not find a live round; it reports the round as PENDING again; it reports another chain; its tree has other roots;
in the long form it also stops following the chain, for 90 s and more. Each time first the node that the operator
prefers is faulty, then all are, while shares come due, and then all recover. A round that all nodes report as PENDING
again stops nothing, so this fault is only that of one node.

Requirements. With one faulty node shares are accepted and sent through the other within 3 s. With all nodes faulty, a
POST of a new share gets 503 within 5 s (of a block being 90 s old), nothing is dispatched later than that, and nothing
that falls due after the 503 is dispatched. After the recovery the helper resumes automatically within 10 s. No attempt
is spent, nothing fails, is closed or purged, and nothing is lost, early or counted twice.

Injected fault: `CommitmentTreeSync.contradiction_reason` always returns None, so that a node with different roots is
used again after a second. Reported: "all faulty: seconds until a POST gets 503: 999.0 (≤ 5)", slowest "wrong root".
This was an original bug, found when the campaign was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from devnet import ballot
from devnet.ballot import Ballot
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_helper

FAULT_SWITCHES: dict[str, dict[str, Any]] = {
    "stale": {"stale": 91},
    "catching up": {"catching_up": True},
    "reset": {"reset_height": 1},
    "round not found": {"round_status": 0},
    "round pending": {"round_status": 4},
    "another chain": {"chain_id": "another-chain-1"},
    "wrong root": {"wrong_root": True},
    "frozen": {"freeze_blocks": True},
}
IGNORED_FAULTS = {"round pending"}
"""Faults that stop nothing, even if all nodes have them: an agreed status never goes back."""
STALE_SECONDS = 90
OLD_BLOCKS = 400
"""Age of the chain's first blocks in seconds."""
FIRST_BLOCKS = 250
"""Number of first blocks: more than a run adds, so that a reset node does not get in sync during the run."""
LANE_COUNT = 4
PAUSE_LIMIT_SECONDS = 5
"""Seconds within which a POST gets 503 after the last usable node became faulty."""
NEVER_SECONDS = 999.0
CONFIRMED_FIGURE = "one faulty node: seconds until shares are counted"
PAUSED_FIGURE = "all faulty: seconds until a POST gets 503"
DRAINED_FIGURE = "recovered: seconds until drained"
BOUNDS = {CONFIRMED_FIGURE: 3, PAUSED_FIGURE: PAUSE_LIMIT_SECONDS, DRAINED_FIGURE: 10}


@dataclass
class FailureScenario:
    """A chain, a helper, and wallets that post one share at a time; scenarios run concurrently."""

    setting: CampaignRun
    findings: Findings
    chain: DevChain
    helper: HelperProcess
    wallets: WalletGroup
    round_id: bytes
    shares: Iterator[tuple[Ballot, int, int]]
    slowest: dict[str, tuple[float, str]]
    due_in_pause: int = 0
    nodes: int = 2
    posted: list[bytes] = field(default_factory=list)

    async def post_share(self, due: int) -> int:
        """Post another share; return the status of the response."""
        vote, position, index = next(self.shares)
        share = vote.shares[index]
        self.wallets.ledger.record_post(share.nullifier, vote.round_id, due, position)
        started_at = time.monotonic()
        response = await self.helper.post_share(ballot.post_body(vote, share, position, due))
        if response.status_code == 200:
            self.wallets.ledger.record_acknowledgment(share.nullifier, time.time(), time.monotonic() - started_at)
            self.posted.append(share.nullifier)
        return response.status_code

    def record_slowest(self, figure: str, seconds: float, name: str) -> None:
        """Record the slowest time of a figure and the fault that caused it."""
        self.slowest[figure] = max(self.slowest.get(figure, (0.0, "")), (seconds, name))

    async def check_one_bad_node(self, name: str) -> None:
        """Make the node that the operator prefers faulty."""
        await self.chain.set_faults(node=0, **FAULT_SWITCHES[name])
        await asyncio.sleep(0.5)
        before = len(self.posted)
        responses = [await self.post_share(0) for _ in range(3)]
        self.findings.require_equal(
            "one faulty node: shares not accepted", sum(status != 200 for status in responses), 0
        )
        posted = {nullifier.hex() for nullifier in self.posted[before:]}
        started_at, seconds = time.time(), NEVER_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while posted - (await promise_check.count_confirmed(self.chain, [self.round_id])).keys():
                    await asyncio.sleep(0.1)
                seconds = time.time() - started_at
        self.record_slowest(CONFIRMED_FIGURE, seconds, name)

    async def check_all_nodes_bad(self, name: str) -> None:
        """Make all nodes faulty, then let them recover."""
        pause = self.setting.scale(8.0, 1.5)
        limit = PAUSE_LIMIT_SECONDS + (STALE_SECONDS if name == "frozen" else 0)
        for node in range(1, self.nodes):
            await self.chain.set_faults(node=node, **FAULT_SWITCHES[name])
        started_at = time.time()
        while (response := await self.post_share(0)) == 200 and time.time() - started_at < limit + 5:
            await asyncio.sleep(0.4)
        paused_since = time.time()
        seconds = paused_since - started_at if response == 503 else NEVER_SECONDS
        self.record_slowest(PAUSED_FIGURE, seconds - (limit - PAUSE_LIMIT_SECONDS), name)
        await asyncio.sleep(pause)
        recovered_at = time.time()
        for node in range(self.nodes):
            await self.chain.clear_faults(node=node)
        first_sent_at: dict[str, float] = {}  # messages sent before are public and may be sent again
        for entry in await promise_check.find_broadcasts(self.chain, self.wallets.ledger):
            first_sent_at.setdefault(entry["nullifier"], entry["time"])
        # Shares in progress when the nodes became faulty may be sent within those 5 s; shares due later may not.
        posted = self.wallets.ledger.posted
        late = sum(
            at < recovered_at
            and (at > started_at + limit or (at > paused_since and posted[nullifier].submit_at > paused_since))
            for nullifier, at in first_sent_at.items()
        )
        self.findings.require_equal(f"{name}: shares dispatched while paused", late, 0)
        due = [self.wallets.ledger.posted[nullifier.hex()].submit_at for nullifier in self.posted]
        self.due_in_pause += sum(paused_since < at < recovered_at for at in due)
        is_drained = await promise_check.wait_until_drained(self.chain, self.wallets.ledger, 30)
        self.record_slowest(DRAINED_FIGURE, time.time() - recovered_at if is_drained else NEVER_SECONDS, name)


async def run(setting: CampaignRun) -> Findings:
    """Run all faults and check the promises."""
    findings = Findings()
    names = list(FAULT_SWITCHES)[: setting.scale(8, 7)]
    lanes = [names[number::LANE_COUNT] for number in range(LANE_COUNT)]
    worst: dict[str, tuple[float, str]] = {}
    async with httpx.AsyncClient(timeout=30) as http, asyncio.TaskGroup() as group:
        for number, lane_names in enumerate(lanes):
            directory = setting.directory / f"run{number}"
            directory.mkdir()
            group.create_task(_run_lane(setting, findings, worst, directory, http, lane_names))
    for what, (seconds, name) in worst.items():
        findings.require_at_most(what, seconds, BOUNDS[what])
        findings.record_figure(f"{what}, slowest", name)
    return findings


async def _run_lane(
    setting: CampaignRun,
    findings: Findings,
    slowest: dict[str, tuple[float, str]],
    directory: Path,
    http: httpx.AsyncClient,
    names: list[str],
) -> None:
    nodes = setting.scale(3, 2)
    flags = ("--block-seconds", "0.25", "--stand-in-proofs", "--extra-nodes", str(nodes))
    full_chain = DevChain(directory, http, *flags, "--clock-offset", str(-OLD_BLOCKS))
    await full_chain.start()
    try:
        chain = full_chain.at_node(nodes)  # the last node is used only by the checks and is never faulty
        await chain.mine(FIRST_BLOCKS)
        await chain.set_faults(clock_offset_seconds=0)
        round_id = await chain.open_round()
        sections: dict[str, Any] = {"chain": {"poll_seconds": 0.1}, "helper": {"max_concurrent_proofs": 1}}
        async with run_helper(directory, http, chain, nodes=nodes, cluster=setting.cluster, **sections) as helper:
            wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random(f"votes {directory.name}"))
            votes = await wallets.cast_votes(round_id, len(names) * setting.scale(12, 3))
            await helper.wait_for_leaf(round_id, max(position for _, position in votes))
            shares = ((vote, position, index) for vote, position in votes for index in range(16))
            scenario = FailureScenario(
                setting, findings, chain, helper, wallets, round_id, shares, slowest, nodes=nodes
            )
            pauses = len([name for name in names if name not in IGNORED_FAULTS])
            for name in names:
                await scenario.check_one_bad_node(name)
                earliest = int(time.time()) + (STALE_SECONDS if name == "frozen" else 0)
                # Covers every second until one after the last moment at which the 503 may come: at least one share
                # falls due in the pause, which is longer than a second.
                for second in range(setting.scale(13, PAUSE_LIMIT_SECONDS + 1)):
                    await scenario.post_share(earliest + 1 + second)
                if name in IGNORED_FAULTS:
                    await chain.clear_faults(node=0)
                    await promise_check.wait_until_drained(chain, wallets.ledger, 30)
                else:
                    await scenario.check_all_nodes_bad(name)
            await promise_check.check_promises(findings, chain, wallets.ledger)
            await promise_check.check_no_share_charged(findings, helper)
            findings.require_at_least("shares due while paused, per scenario", scenario.due_in_pause, pauses)
    finally:
        await full_chain.kill()


CAMPAIGN = Campaign("stale", run)
