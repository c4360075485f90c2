"""A lying node: one of two or three nodes tells lies that are consistent with each other, on all of its routes.

Method. For each kind of lie a new round begins, with votes and shares due within seconds, while one node lies: before
the round is listed, or once the votes are cast. The liar is the node that the operator prefers, and most of the lies
also swallow the reveals that are sent to it. It tells the truth again once the round's shares are counted.

Requirements. Every share is accepted, sent, and counted before the end of its round, 99 % of them within 10 s, while
the node lies. A wallet gets "confirmed" only for nullifiers that the chain has counted at that moment, and for all of
them within a minute after the lie. No honest node goes into backoff, no attempt is spent, nothing fails, is refused for
good, early, or counted twice.

Injected fault: one node's word is enough (`[chain] agree = 1`). Reported: "confirmed to a wallet and not counted: 8
(= 0)", "shares refused for good: 8 (= 0)", "times that an honest node was unusable: 8 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from devnet.lies import Lie
from tests.campaign import promise_check
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.promise_check import StatusObservations
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_chain, run_helper
from tests.support.tasks import is_met_within, running

SCENARIOS: tuple[tuple[Lie, ...], ...] = (
    ("ahead", "swallow"),
    ("invented_block",),
    ("false_tree", "swallow"),
    ("dispute", "extra_round", "swallow"),
    ("false_end", "false_proposals", "swallow"),
    ("false_created", "swallow"),
    ("future_blocks", "empty_blocks"),
    ("forged_time", "swallow"),
    ("ahead_briefly", "false_status", "swallow"),
    ("error_texts", "false_spent"),
    ("index_gaps", "swallow"),
    ("twin",),
    ("one_height", "swallow"),
    ("extended_tree", "swallow"),
)
QUICK_SCENARIOS = SCENARIOS[:8]
LANE_COUNT = 4
MAX_LATENESS_SECONDS, MAX_LATENESS_SECONDS_BUSY = 10.0, 25.0
"""Goal of the full form, and of the short form on a machine with other work."""
CONFIRMATION_SECONDS = 60.0
"""Seconds within which all shares are confirmed after a lie."""


@dataclass
class Lane:
    """A chain, one liar and a helper. Its scenarios run one after another."""

    setting: CampaignRun
    findings: Findings
    lateness: list[float]
    chain: DevChain
    helper: HelperProcess
    wallets: WalletGroup
    observations: StatusObservations = field(default_factory=StatusObservations)

    @property
    def round_seconds(self) -> int:
        return self.setting.scale(120, 30)

    async def run_scenario(self, lies: tuple[Lie, ...], *, from_first_listing: bool) -> None:
        """Open a round and vote in it while the first node lies, until all shares are counted or the round ends."""
        name, rng = " ".join(lies), self.setting.seeded_random(" ".join(lies))
        seconds, (votes, window, shares) = self.round_seconds, self.setting.scale((2, 20, 16), (1, 2, 8))
        seed = rng.randrange(2**31)
        ledger = self.wallets.ledger
        if from_first_listing:
            await self.chain.set_faults(lies=lies, seed=seed)
        round_id = await self.chain.open_round(seconds)
        start = time.time()
        cast = await self.wallets.cast_votes(round_id, votes)
        if not from_first_listing:
            await self.helper.wait_for_leaf(round_id, max(position for _, position in cast))
            await self.chain.set_faults(lies=lies, seed=seed)
        posted = time.time()
        await self.wallets.post_shares(
            cast,
            lambda: int(posted + rng.uniform(0, window)),
            timeout_seconds=seconds / 2,
            indices=range(shares),
        )
        nullifiers = {nullifier for nullifier, share in ledger.posted.items() if share.round_id == round_id}
        remaining = max(1.0, start + seconds - time.time())
        await is_met_within(remaining, lambda: nullifiers <= self.observations.counted_at.keys())
        counted_at = {n: at for n, at in self.observations.counted_at.items() if n in nullifiers}
        self.findings.require_equal(f"{name}: not counted before the end", len(nullifiers - counted_at.keys()), 0)
        due_at = {n: max(ledger.posted[n].submit_at, ledger.acknowledged_at[n]) for n in counted_at}
        lateness = [at - due_at[n] for n, at in counted_at.items()]
        self.findings.record_figure(f"{name}: slowest s", max(lateness, default=seconds))
        self.lateness += lateness
        sent = await promise_check.find_broadcasts(self.chain, ledger)
        to_liar = {entry["nullifier"] for entry in sent if entry["node"] == self.chain.nodes[0]["name"]}
        self.findings.record_figure(f"{name}: sent to the liar", len(to_liar & nullifiers))
        await self.chain.clear_faults()
        await is_met_within(CONFIRMATION_SECONDS, lambda: counted_at.keys() <= self.observations.confirmed)
        left = len(counted_at.keys() - self.observations.confirmed)
        self.findings.require_equal(f"{name}: not confirmed a minute after the lie", left, 0)

    async def wait_until_rounds_close(self) -> None:
        closed = "SELECT count(*) FROM rounds WHERE alerted_ms IS NOT NULL"
        count = len(self.wallets.ledger.round_ids)
        seconds = CONFIRMATION_SECONDS + self.round_seconds
        await is_met_within(seconds, lambda: self.helper.query_rows(closed)[0][0] >= count)


async def run(setting: CampaignRun) -> Findings:
    findings, lateness = Findings(), list[float]()
    scenarios = [*product(SCENARIOS, (2, 3), (True, False))]
    if setting.is_quick:  # each once, from the first listing, with two and three nodes in turn
        scenarios = [(lies, 2 + number % 2, True) for number, lies in enumerate(QUICK_SCENARIOS)]
    async with asyncio.TaskGroup() as group:
        for nodes, half in product((2, 3), range(LANE_COUNT // 2)):
            selected = [(lies, early) for lies, count, early in scenarios if count == nodes][half :: LANE_COUNT // 2]
            directory = setting.directory / f"nodes{nodes}-{half}"
            group.create_task(_run_lane(setting, findings, lateness, directory, nodes, selected))
    bound = setting.scale(MAX_LATENESS_SECONDS, MAX_LATENESS_SECONDS_BUSY)
    findings.require_percentile("lateness while a node lies", lateness, 0.99, bound)
    return findings


async def _run_lane(
    setting: CampaignRun,
    findings: Findings,
    lateness: list[float],
    directory: Path,
    nodes: int,
    scenarios: list[tuple[tuple[Lie, ...], bool]],
) -> None:
    flags = ("--block-seconds", setting.scale("1", "0.5"), "--stand-in-proofs", "--extra-nodes", str(nodes))
    async with run_chain(directory, *flags) as full_chain:
        chain = full_chain.at_node(nodes)  # the last node is used only by the checks
        sections: dict[str, Any] = {"chain": {"poll_seconds": setting.scale(0.5, 0.2)}}
        async with run_helper(directory, chain.http, chain, nodes=nodes, cluster=setting.cluster, **sections) as helper:
            wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random(f"votes {directory.name}"))
            lane = Lane(setting, findings, lateness, chain, helper, wallets)
            async with running(lane.observations.poll(helper, chain, wallets.ledger)):
                for lies, from_first_listing in scenarios:
                    await lane.run_scenario(lies, from_first_listing=from_first_listing)
                await lane.wait_until_rounds_close()
            ledger = wallets.ledger
            await promise_check.check_promises(findings, chain, ledger)
            await promise_check.check_no_share_charged(findings, helper, closed=len(ledger.round_ids))
            unacknowledged = ledger.posted.keys() - ledger.acknowledged_at.keys()
            findings.require_equal("posted and not acknowledged", len(unacknowledged), 0)
            findings.require_equal("shares refused for good", len(wallets.refused), 0)
            wrong = len(lane.observations.wrongly_confirmed)
            findings.require_equal("confirmed to a wallet and not counted", wrong, 0)
            honest = {node[port] for node in chain.nodes[1:nodes] for port in ("rest", "rpc")}
            findings.require_equal("times that an honest node was unusable", _count_unusable(helper.log, honest), 0)


def _count_unusable(log: Path, nodes: set[str]) -> int:
    """Count how often the helper stopped using one of these nodes, according to its log."""
    count = 0
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            is_unusable = entry["event"] in {"node_not_fresh", "rpc_not_fresh"}
            count += is_unusable and any(str(entry["endpoint"]) in url for url in nodes)
    return count
