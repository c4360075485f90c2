"""Thousands of shares due in one second, while other wallets keep posting.

Method. All shares of the herd are posted well before their due time, in random order. From then on the fake prover
creates proofs as fast as it can, and other wallets post shares with later due times until all shares of the herd are
sent.

Requirements. The first proof begins within 100 ms of the due time, wallets get responses as fast as usual, and the
order in which shares reach the chain is independent of the order in which they arrived. The short form has too few
shares to distinguish a correlation of 0.05 from none: its bound is one that independent orders of that length rarely
exceed.

Injected fault that it caught: `enqueue` in helper/store/shares.py ranked shares by arrival
(`rank=tx.next_id`). It printed "rank correlation of arrival and broadcast: 1.0 (≤ 0.142061)".
"""

from __future__ import annotations

import asyncio
import time

from devnet.ballot import SHARE_COUNT
from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.promise_check import ShareLedger
from tests.campaign.rank_correlation import chance_bound, first_occurrences, rank_correlation
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, unix_time_in

FAR_AHEAD_SECONDS = 1800
"""Seconds until the shares posted during the herd are due: never in this run."""
ROUND_SECONDS = 3600


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    async with setting.run_helper() as (chain, helper):
        round_id = await chain.open_round(seconds=ROUND_SECONDS)
        herd, others = (
            WalletGroup(chain, lambda: [helper.url], setting.seeded_random(name)) for name in ("herd", "others")
        )
        votes = await herd.cast_votes(round_id, setting.scale(313, 38))
        other_votes = await others.cast_votes(round_id, setting.scale(80, 20))
        await helper.wait_for_leaf(round_id, max(position for _, position in votes + other_votes))
        far_due = unix_time_in(FAR_AHEAD_SECONDS)
        started_at = time.monotonic()
        await others.post_shares(other_votes[:5], lambda: far_due)
        post_rate = 5 * SHARE_COUNT / (time.monotonic() - started_at)
        due = unix_time_in(2 + 2 * len(votes) * SHARE_COUNT / post_rate)
        await herd.post_shares(votes, lambda: due)
        findings.require_at_least("seconds from the herd's last POST to its due time", due - time.time(), 0)
        others.ledger.response_seconds.clear()
        posting = asyncio.create_task(
            others.post_shares(other_votes[5:], lambda: far_due, posters=4, pause_seconds=0.1)
        )
        await _wait_until_confirmed(chain, helper, len(votes) * SHARE_COUNT)
        findings.record_figure("shares revealed per second", len(votes) * SHARE_COUNT / (time.time() - due))
        await posting
        await _check_herd(findings, chain, helper, herd.ledger, others.ledger, due)
        rho = rank_correlation(list(herd.ledger.acknowledged_at), await _broadcast_order(chain, herd.ledger))
        findings.require_at_most(
            "rank correlation of arrival and broadcast",
            abs(rho),
            setting.scale(0.05, chance_bound(len(votes) * SHARE_COUNT)),
        )
    return findings


async def _wait_until_confirmed(chain: DevChain, helper: HelperProcess, shares: int) -> None:
    """Wait until all shares are confirmed, with a query that is cheap for the chain."""
    async with helper.timeout("has revealed the herd", seconds=600):
        while (await chain.get("/devnet/stats"))["reveals_counted"] < shares:
            await asyncio.sleep(0.1)


async def _check_herd(
    findings: Findings, chain: DevChain, helper: HelperProcess, herd: ShareLedger, others: ShareLedger, due: int
) -> None:
    await promise_check.wait_until_drained(chain, herd, 60)
    await promise_check.check_promises(findings, chain, herd)
    await promise_check.check_one_broadcast_per_height(findings, chain, herd)
    sent = await promise_check.find_broadcasts(chain, herd)
    start = (await helper.service_stats())["lateness_start"]["min_ms"]
    findings.require_at_most("ms from the due time to the first proof's start", start, 100)
    findings.record_figure(
        "ms from the due time to the first broadcast", 1000 * (min(entry["time"] for entry in sent) - due)
    )
    findings.require_at_least("other shares posted at the same time", len(others.response_seconds), 100)
    findings.require_at_most(
        "POST p99 during the herd, ms", 1000 * (percentile(others.response_seconds, 0.99) or 0), 250
    )
    findings.require_equal("broadcasts of shares due later", len(await promise_check.find_broadcasts(chain, others)), 0)


async def _broadcast_order(chain: DevChain, ledger: ShareLedger) -> list[str]:
    """Return the shares in the order in which the node first received them."""
    entries = sorted(await chain.broadcasts(), key=lambda entry: float(entry["time"]))
    return first_occurrences((entry["nullifier"] for entry in entries), ledger.acknowledged_at)
