"""Lost replies, gateway errors and false acceptance: nodes that misreport reveals.

Method. There are two nodes. Of the broadcasts, 20 % are processed and the connection is then closed, 20 % get a
502 (half of them after being processed), 10 % are accepted and never included in a block, and 10 % are included and
fail because another helper's reveal of the same share came first. One of the nodes does not have the newest root
that proofs are made against. At the same time shares become due, votes are cast (so that roots change), and a wallet
polls share-status.

Requirements. No share is lost, early or counted twice. A wallet gets "confirmed" only for nullifiers that are counted
on the chain at that moment, and in the end for all shares. No share is sent twice at one height of the chain. No
attempt is spent.

Injected fault: `NodeFacts.has_new_block` is always true, so that the last known height of a node is used as its
current height. Reported: "broadcasts of a share at one height: 2 (≤ 1)". This was an original bug, found when the
campaign was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

import httpx

from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_helper

REVEAL_ROUTES = ["reveal-share"]
# The faults are drawn one after another in this order; the first that applies is used. So 10 % + 10 % are 502 and 20 %
# are dropped of all, and of the processed ones 10 % are never included and 10 % fail.
LOST_REPLY_FAULTS = {
    "status_502": 0.1,
    "status_502_after": 1 / 9,
    "drop_reply": 1 / 4,
    "never_include": 0.1,
    "include_failed": 1 / 9,
}


async def run(setting: CampaignRun) -> Findings:
    """Run the faults and check the promises."""
    findings, rng = Findings(), setting.seeded_random("votes")
    votes, window = setting.scale((40, 120), (4, 5))
    async with httpx.AsyncClient(timeout=30) as http:
        block_seconds = setting.scale("1", "0.25")
        chain = DevChain(
            setting.directory, http, "--block-seconds", block_seconds, "--extra-nodes", "1", "--stand-in-proofs"
        )
        await chain.start()
        try:
            round_id = await chain.open_round()
            poll = {"poll_seconds": setting.scale(0.5, 0.1)}
            async with run_helper(
                setting.directory, http, chain, nodes=2, cluster=setting.cluster, chain=poll
            ) as helper:
                wallets = WalletGroup(chain, lambda: [helper.url], rng)
                cast = await wallets.cast_votes(round_id, votes)
                await helper.wait_for_leaf(round_id, max(position for _, position in cast))
                await _vary_faults(chain, setting)
                start, observations = time.time(), promise_check.StatusObservations()
                background = [
                    asyncio.create_task(_add_roots(chain, round_id, 4 * float(block_seconds))),
                    asyncio.create_task(observations.poll(helper, chain, wallets.ledger)),
                ]
                try:
                    await wallets.post_shares(cast, lambda: int(start + rng.uniform(0, window)))
                    await promise_check.wait_until_drained(chain, wallets.ledger, window + setting.scale(240, 60))
                    await _wait_until_all_confirmed(wallets.ledger, observations)
                finally:
                    for task in background:
                        task.cancel()
                    await asyncio.gather(*background, return_exceptions=True)
                await _check_promises(findings, chain, helper, wallets.ledger, observations)
        finally:
            await chain.kill()
    return findings


async def _vary_faults(chain: DevChain, setting: CampaignRun) -> None:
    # With a database server a proof takes longer than a block of the short form before it is sent.
    blocks = 1 if setting.cluster is None else setting.scale(1, 3)
    for node in range(2):
        seed = setting.seeded_random(f"node {node}").randrange(2**31)
        await chain.set_faults(
            node=node, routes=REVEAL_ROUTES, seed=seed, anchor_unknown=blocks * (1 - node), **LOST_REPLY_FAULTS
        )


async def _add_roots(chain: DevChain, round_id: bytes, seconds: float) -> None:
    """Cast other votes, so that a new proof uses another root and is another transaction."""
    while True:
        with contextlib.suppress(httpx.HTTPError):  # without new roots the fake proofs would be identical
            await chain.post("/devnet/delegate", {"round_id": round_id.hex(), "count": 2})
        await asyncio.sleep(seconds)


async def _wait_until_all_confirmed(
    ledger: promise_check.ShareLedger, observations: promise_check.StatusObservations
) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while ledger.acknowledged_at.keys() - observations.confirmed:
                await asyncio.sleep(0.1)


async def _check_promises(
    findings: Findings,
    chain: DevChain,
    helper: HelperProcess,
    ledger: promise_check.ShareLedger,
    observations: promise_check.StatusObservations,
) -> None:
    await promise_check.check_promises(findings, chain, ledger)
    findings.require_equal("confirmed to a wallet and not counted", len(observations.wrongly_confirmed), 0)
    findings.require_equal(
        "counted and never confirmed", len(ledger.acknowledged_at.keys() - observations.confirmed), 0
    )
    await promise_check.check_one_broadcast_per_height(findings, chain, ledger)
    await promise_check.check_no_share_charged(findings, helper)
    fault_counts = Counter(
        fault for entry in await promise_check.find_broadcasts(chain, ledger) for fault in entry["faults"]
    )
    for fault in LOST_REPLY_FAULTS:
        findings.require_at_least(f"broadcasts with fault {fault}", fault_counts[fault], 1)
    counts = await helper.service_counts()
    findings.require_at_least("responses of a node that lacks the anchor", counts.get("answer_behind", 0), 1)


CAMPAIGN = Campaign("replies", run)
