"""Thousands of shares are due in one second, while other wallets go on posting.

All shares of the herd are posted well before their second, in random order. When it comes, the stand-in prover makes
proofs as quickly as it can, and other wallets post shares of a later time until the herd is through.

What must hold: the first proof begins within 100 ms of the second, wallets are answered as if nothing were going on,
and the order in which shares reach the chain says nothing of the order in which they arrived. The short form has too
few shares to tell a correlation of 0.05 from none: its bound is what independent orders of so many shares hardly ever
exceed.

The planted bug that it caught: `enqueue` in helper/store/operations/shares.py gave shares their place by arrival
(`rank=tx.next_id`). It printed "rank correlation of arrival and broadcast: 1.0 (≤ 0.142061)".
"""

from __future__ import annotations

import asyncio
import time

from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.promise_check import Ledger
from tests.campaign.rank_correlation import chance, first_seen, rank_correlation
from tests.campaign.wallet_clients import Crowd
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, running, soon

VOTE = 16
FAR_AHEAD = 1800
"""Seconds until the shares are due that are posted beside the herd: never in this run."""
ROUND_SECONDS = 3600


async def run(setting: Setting) -> Findings:
    """Post the herd, post others while it is worked, and ask the witness."""
    findings = Findings()
    place = setting.cluster
    async with running(setting.folder, "--stand-in-proofs", program=STAND_IN, cluster=place) as (chain, helper):
        round_id = await chain.open_round(seconds=ROUND_SECONDS)
        herd, others = (Crowd(chain, lambda: [helper.url], setting.dice(name)) for name in ("herd", "others"))
        votes = await herd.vote(round_id, setting.scale(313, 38))
        beside = await others.vote(round_id, setting.scale(80, 20))
        await helper.knows_leaf(round_id, max(position for _, position in votes + beside))
        far = soon(FAR_AHEAD)
        began = time.monotonic()
        await others.post(beside[:5], lambda: far)
        pace = 5 * VOTE / (time.monotonic() - began)
        due = soon(2 + 1.3 * len(votes) * VOTE / pace)
        await herd.post(votes, lambda: due)
        findings.at_least("seconds from the herd's last POST to its second", due - time.time(), 0)
        others.ledger.waits.clear()
        posting = asyncio.create_task(others.post(beside[5:], lambda: far, posters=4, pause=0.1))
        await _through(chain, helper, len(votes) * VOTE)
        findings.figure("shares revealed a second", len(votes) * VOTE / (time.time() - due))
        await posting
        await _judge(findings, chain, helper, herd.ledger, others.ledger, due)
        rho = rank_correlation(list(herd.ledger.acknowledged), await _order(chain, herd.ledger))
        findings.at_most(
            "rank correlation of arrival and broadcast", abs(rho), setting.scale(0.05, chance(len(votes) * VOTE))
        )
    return findings


async def _through(chain: Chain, helper: Helper, shares: int) -> None:
    """Wait until the chain has counted so many shares, by a question that costs it nothing."""
    async with helper.patience("has revealed the herd", seconds=600):
        while (await chain.get("/devnet/stats"))["reveals_counted"] < shares:
            await asyncio.sleep(0.1)


async def _judge(findings: Findings, chain: Chain, helper: Helper, herd: Ledger, others: Ledger, due: int) -> None:
    await promise_check.drained(chain, herd, 60)
    await promise_check.judge(findings, chain, herd)
    sent = await promise_check.broadcasts(chain, herd)
    start = (await helper.service())["lateness_start"]["min_ms"]
    findings.at_most("ms from the second to the first proof's start", start, 100)
    findings.figure("ms from the second to the first broadcast", 1000 * (min(one["time"] for one in sent) - due))
    findings.at_least("shares posted beside", len(others.waits), 100)
    findings.at_most("POST p99 beside the herd, ms", 1000 * (percentile(others.waits, 0.99) or 0), 250)
    findings.exactly("broadcasts of shares of a later time", len(await promise_check.broadcasts(chain, others)), 0)


async def _order(chain: Chain, ledger: Ledger) -> list[str]:
    """The shares in the order in which the node heard of them first."""
    heard = sorted(await chain.reveals(), key=lambda entry: float(entry["time"]))
    return first_seen((entry["nullifier"] for entry in heard), ledger.acknowledged)


CAMPAIGN = Campaign("herd", run)
