"""Lost replies: a node takes a reveal and the answer never comes, or says that it lost its consensus; or it lies.

How it hurts. Two nodes. Of the broadcasts, 20 % are acted on and the connection then cut, 20 % are answered 502 (half
of them after they were acted on), 10 % are accepted and never get into a block, and 10 % are included and fail because
another helper's reveal of the same share went first. One of the nodes does not know the newest root that proofs are
made against. Meanwhile shares come due, votes are cast (so that roots change), and a wallet polls share-status.

What must hold. No share is lost, early or counted twice; a wallet is told "confirmed" only of nullifiers that are
counted on the chain at that moment, and in the end of all; no share is sent twice while the chain stands at one height;
none of it costs an attempt.

Planted: `Broadcaster._at_new_height` answers True always, so that the height that was last seen of a node is taken for
the height that it has. Found: "broadcasts of a share at one height: 2 (≤ 1)". It was no plant but the state of the
product when the campaign was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.wallet_clients import Crowd
from tests.support.devnet import Chain
from tests.support.harness import Helper, helping

REVEALS = ["reveal-share"]
# The dice are thrown one after another, in this order; what strikes first decides. So 10 % + 10 % are 502 and 20 % are
# dropped of all, and of what is acted on 10 % is never included and 10 % is beaten.
LOST = {
    "status_502": 0.1,
    "status_502_after": 1 / 9,
    "drop_reply": 1 / 4,
    "never_include": 0.1,
    "include_failed": 1 / 9,
}


@dataclass
class Told:
    """What share-status said: who was confirmed, and who without being counted."""

    confirmed: set[str] = field(default_factory=set)
    wrongly: set[str] = field(default_factory=set)


async def run(setting: Setting) -> Findings:
    """Hurt it, and judge."""
    findings, dice = Findings(), setting.dice("votes")
    votes, window = setting.scale((40, 120), (4, 5))
    async with httpx.AsyncClient(timeout=30) as http:
        block_seconds = setting.scale("1", "0.25")
        chain = Chain(setting.folder, http, "--block-seconds", block_seconds, "--extra-nodes", "1", "--stand-in-proofs")
        await chain.start()
        try:
            round_id = await chain.open_round()
            poll = {"poll_seconds": setting.scale(0.5, 0.1)}
            async with helping(setting.folder, http, chain, nodes=2, cluster=setting.cluster, chain=poll) as helper:
                crowd = Crowd(chain, lambda: [helper.url], dice)
                cast = await crowd.vote(round_id, votes)
                await helper.knows_leaf(round_id, max(position for _, position in cast))
                await _hurt(chain, setting)
                begin, told = time.time(), Told()
                beside = [
                    asyncio.create_task(_new_roots(chain, round_id, 4 * float(block_seconds))),
                    asyncio.create_task(_poll(helper, chain, crowd.ledger, told)),
                ]
                try:
                    await crowd.post(cast, lambda: int(begin + dice.uniform(0, window)))
                    await promise_check.drained(chain, crowd.ledger, window + setting.scale(240, 60))
                    await _all_told(crowd.ledger, told)
                finally:
                    for task in beside:
                        task.cancel()
                    await asyncio.gather(*beside, return_exceptions=True)
                await _judge(findings, chain, helper, crowd.ledger, told)
        finally:
            await chain.kill()
    return findings


async def _hurt(chain: Chain, setting: Setting) -> None:
    # The way over a server takes a proof longer than a block of the short form, before it is sent.
    blocks = 1 if setting.cluster is None else setting.scale(1, 3)
    for node in range(2):
        seed = setting.dice(f"node {node}").randrange(2**31)
        await chain.faults(node=node, routes=REVEALS, seed=seed, anchor_unknown=blocks * (1 - node), **LOST)


async def _new_roots(chain: Chain, round_id: bytes, seconds: float) -> None:
    """Votes of others: a proof that is made anew is made against another root, and is another transaction."""
    while True:
        with contextlib.suppress(httpx.HTTPError):  # without new roots the stand-in proofs would stay the same
            await chain.post("/devnet/delegate", {"round_id": round_id.hex(), "count": 2})
        await asyncio.sleep(seconds)


async def _poll(helper: Helper, chain: Chain, ledger: promise_check.Ledger, told: Told) -> None:
    """Ask for every share again and again, and hold each "confirmed" against the chain at once."""
    while True:
        news = set()
        for nullifier in ledger.acknowledged.keys() - told.confirmed:
            posted = ledger.posted[nullifier]
            with contextlib.suppress(httpx.HTTPError):
                if await helper.share_status(posted.round_id, bytes.fromhex(nullifier)) == "confirmed":
                    news.add(nullifier)
        if news:
            told.wrongly |= news - (await promise_check.counted(chain, ledger.rounds)).keys()
            told.confirmed |= news
        await asyncio.sleep(0.2)


async def _all_told(ledger: promise_check.Ledger, told: Told) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while ledger.acknowledged.keys() - told.confirmed:
                await asyncio.sleep(0.1)


async def _judge(findings: Findings, chain: Chain, helper: Helper, ledger: promise_check.Ledger, told: Told) -> None:
    await promise_check.judge(findings, chain, ledger)
    findings.exactly("confirmed to a wallet and not counted", len(told.wrongly), 0)
    findings.exactly("counted and never confirmed", len(ledger.acknowledged.keys() - told.confirmed), 0)
    await promise_check.once_a_height(findings, chain, ledger)
    await promise_check.unharmed(findings, helper)
    struck = Counter(fault for entry in await promise_check.broadcasts(chain, ledger) for fault in entry["faults"])
    for fault in LOST:
        findings.at_least(f"broadcasts struck by {fault}", struck[fault], 1)
    counts = await helper.counts()
    findings.at_least("answers of a node that lacks the anchor", counts.get("answer_behind", 0), 1)


CAMPAIGN = Campaign("replies", run)
