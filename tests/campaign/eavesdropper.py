"""Checks what a malicious node learns from its request log and the order of its chain.

Method. The request log is recorded first while the helper is idle, then while wallets post at random moments: new
shares, known shares, and shares whose leaf is not in the synced tree yet. Then votes are cast whose shares are
due within a few seconds, many of them in the same second, while other voters' leaves give the tree a new root every two
seconds.

Requirements. No request contains data of a share before its time. Neither the requests nor their order or timing reveal
that a share arrived. Each reveal is made against the newest root known to the helper, so that no anchor reveals an
arrival (`GRACE_SECONDS` seconds are allowed for the proof, queueing and the disk, in which newer roots may arrive). The
order in which shares of one second reach the chain, or are confirmed, is independent of the order in which wallets
posted them. Public summaries of the queues recover the choices of simulated votes no better than chance
(`summary_attack`).

Injected faults that it caught. `CommitmentTreeSync.wait_for_news`, which holds shares that are not in the
synced tree yet, began with its own sync (`await self.sync(self.synced_height)`): "difference in requests per block with
and without POSTs, any kind: 0.9375 (≤ 0.5)". `RoundTree.set_anchor` used the root before the newest as the anchor:
"seconds from knowing a newer root to sending a reveal: 1.9823 (≤ 1)". The summary had exact counts by due time
(`ExactSummaries`): "choices recovered from summaries: 0.94 (≤ 0.58)".
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import Any

from devnet import ballot
from devnet.ballot import Ballot, BallotShare
from devnet.leak_check import find_leaks
from devnet.tx import Reveal, decode
from devnet.wallet import CastShare, CastVote
from tests.campaign import promise_check
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.node_observer import anchor_staleness, count_request_groups, count_request_kinds, post_correlation
from tests.campaign.promise_check import ShareLedger
from tests.campaign.rank_correlation import chance_bound, first_occurrences, rank_correlation
from tests.campaign.summary_attack import Summaries, recovered_fraction
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, unix_time_in
from tests.support.secrets import LEAVES_BEYOND_HEIGHTS, sensitive_values
from tests.support.tasks import running

Votes = Sequence[tuple[Ballot, int]]

FAR_AHEAD_SECONDS = 2000
"""Seconds until the shares are due that are only posted."""
WINDOW_SECONDS = 0.1
"""Seconds after a POST in which a request is attributed to it."""
GRACE_SECONDS = 1.0
ROOT_INTERVAL_SECONDS = 2.0
"""Seconds between two roots: more than `GRACE_SECONDS`, so that most reveals have no newer root in that time."""
USUAL_REQUEST_GROUPS = {
    ("rest", "blocks"),
    ("rest", "blocks", "rounds", "tree-latest"),
    ("rest", "blocks", "syncing"),
    ("rest", "blocks", "syncing", "rounds", "tree-latest"),
    ("rpc", "status"),
    ("rpc", "status", "block_results"),
}
"""Request groups of one health check of a node. The syncing state is queried only with a new block or when the last
response is old. On a busy machine two health checks may overlap.
"""
BLOCK_SECONDS = 0.3
PAGE_SIZE = 1000
"""Maximum heights per request for leaves."""


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    async with setting.run_helper() as (chain, helper):
        round_id = await chain.open_round()
        await chain.delegate(round_id, LEAVES_BEYOND_HEIGHTS)
        posters, voters = (
            WalletGroup(chain, lambda: [helper.url], setting.seeded_random(name)) for name in ("posters", "voters")
        )
        posted = await posters.cast_votes(round_id, setting.scale(24, 4))
        await helper.wait_for_leaf(round_id, max(position for _, position in posted))
        await _compare_traffic(findings, setting, chain, helper, posted)
        revealed = await _run_reveals(setting, chain, helper, voters, round_id)
        log = await chain.request_log()
        await promise_check.check_promises(findings, chain, voters.ledger)
        await _check_anchors(findings, chain, round_id, log)
        await _check_orders(findings, setting, chain, voters.ledger, log)
        votes = [*_to_cast_votes(posted, None), *_to_cast_votes(revealed, voters.ledger)]
        named = find_leaks(log, sensitive_values(votes, await chain.transaction_hashes(round_id)))
        findings.require_equal("requests that contain data of a share before its time", len(named), 0)
    await asyncio.to_thread(_attack_summaries, findings, setting)
    return findings


def _attack_summaries(findings: Findings, setting: CampaignRun) -> None:
    """Recover choices from the public summaries. Votes of one round are not independent, hence the margins."""
    rounds, margin = setting.scale((63, 0.02), (6, 0.08))
    fraction = recovered_fraction(Summaries, setting.seeded_random("summaries"), rounds=rounds, voters=160, helpers=3)
    findings.record_figure("votes attacked through summaries", 160 * rounds)
    findings.require_at_most("choices recovered from summaries", fraction, 0.5 + margin)


# -------------------------------------------------------------------- arrivals


async def _compare_traffic(
    findings: Findings, setting: CampaignRun, chain: DevChain, helper: HelperProcess, posted: Votes
) -> None:
    """Compare an idle span with an equally long one in which wallets post."""
    blocks = setting.scale(120, 16)
    idle_log, _ = await _record_span(chain, blocks, asyncio.sleep(0, list[float]()))
    arrivals = _post_arrivals(helper, posted, setting.seeded_random("moments"), blocks * BLOCK_SECONDS)
    busy_log, posts = await _record_span(chain, blocks, arrivals)
    spans = [count_request_kinds(span) for span in (idle_log, busy_log)]
    # The span with posts is longer if the last of them waits for its leaf.
    idle_blocks, busy_blocks = ((log[-1]["time"] - log[0]["time"]) / BLOCK_SECONDS for log in (idle_log, busy_log))
    more = {kind: abs(spans[1][kind] / busy_blocks - spans[0][kind] / idle_blocks) for kind in spans[0] | spans[1]}
    groups = [count_request_groups(span) for span in (idle_log, busy_log)]
    deviations = post_correlation(
        [entry["time"] for entry in busy_log], posts, busy_log[0]["time"], busy_log[-1]["time"], WINDOW_SECONDS
    )
    findings.record_figure("POSTs while recording", len(posts))
    findings.record_figure("requests in an idle span and in one with POSTs", f"{len(idle_log)} and {len(busy_log)}")
    findings.require_at_most(
        "difference in requests per block with and without POSTs, any kind", max(more.values()), 0.5
    )
    for what, group_counts in zip(("idle", "with POSTs"), groups, strict=True):
        unusual = sum(number for group, number in group_counts.items() if group not in USUAL_REQUEST_GROUPS)
        findings.require_at_most(f"fraction of unusual request groups, {what}", unusual / group_counts.total(), 0.05)
    findings.require_at_most("requests shortly after a POST, in deviations from chance", deviations, 4)
    findings.require_equal("requests with a body", sum(bool(entry["body"]) for entry in busy_log), 0)


async def _record_span(
    chain: DevChain, blocks: int, activity: Awaitable[list[float]]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Record the requests to the node over some blocks while an activity runs."""
    before = (await chain.request_log())[-1]["seq"]
    end = await chain.newest_height() + blocks
    result = await activity
    while await chain.newest_height() < end:
        await asyncio.sleep(0.02)
    return [entry for entry in await chain.request_log() if entry["seq"] > before], result


async def _post_arrivals(helper: HelperProcess, votes: Votes, rng: random.Random, seconds: float) -> list[float]:
    """Post new, known and held shares; return the time of each POST."""
    due, started_at = unix_time_in(FAR_AHEAD_SECONDS), time.monotonic()
    times: list[float] = []

    async def post_arrival(number: int, at: float) -> None:
        await asyncio.sleep(started_at + at - time.monotonic())
        vote, position = votes[number // 2 % len(votes)]
        share = vote.shares[number // 2 // len(votes) % len(vote.shares)]
        offset = 1000 if rng.random() < 0.3 else 0
        times.append(time.time())
        await helper.post_share(ballot.post_body(vote, share, position + offset, due))

    number = min(int(seconds * 8), 2 * len(votes) * ballot.SHARE_COUNT)
    moments = sorted(rng.uniform(0, max(1.0, seconds - 2.5)) for _ in range(number))
    await asyncio.gather(*(post_arrival(index, at) for index, at in enumerate(moments)))
    return sorted(times)


# -------------------------------------------------------------------- reveals


async def _run_reveals(
    setting: CampaignRun, chain: DevChain, helper: HelperProcess, voters: WalletGroup, round_id: bytes
) -> Votes:
    """Cast votes with shares due in different seconds and in one second, while the tree grows."""
    spread, same_second = setting.scale((30, 60), (3, 12))
    votes = await voters.cast_votes(round_id, spread + same_second)
    await helper.wait_for_leaf(round_id, max(position for _, position in votes))
    seconds = setting.scale(40, 8)
    start, rng = unix_time_in(setting.scale(30, 4)), setting.seeded_random("times")
    common_due = start + seconds // 2
    async with running(_grow_tree(chain, round_id)):
        await asyncio.gather(
            voters.post_shares(votes[:spread], lambda: start + rng.randrange(seconds)),
            voters.post_shares(votes[spread:], lambda: common_due),
        )
        await promise_check.wait_until_drained(chain, voters.ledger, 120)
    return votes


async def _grow_tree(chain: DevChain, round_id: bytes) -> None:
    """Append leaves of other voters at intervals."""
    while True:
        await chain.post("/devnet/delegate", {"round_id": round_id.hex(), "count": 1})
        await asyncio.sleep(ROOT_INTERVAL_SECONDS)


async def _check_anchors(findings: Findings, chain: DevChain, round_id: bytes, log: Sequence[dict[str, Any]]) -> None:
    """Compare each reveal's anchor with the roots known to the helper."""
    anchors = {}
    for transaction in await chain.find_transactions(round_id):
        message = decode(base64.b64decode(transaction["tx"]))
        assert isinstance(message, Reveal)
        anchors[message.nullifier.hex()] = message.anchor_height
    roots = await _root_times(chain, round_id)
    queried_at = sorted(entry["time"] for entry in log if entry["route"] == "tree-latest")
    sent: dict[str, float] = {}
    for entry in _broadcast_entries(log):
        sent.setdefault(entry["nullifier"], entry["time"])  # a resent message keeps its anchor
    stale = [anchor_staleness(anchors[name], at, roots, queried_at) for name, at in sent.items()]
    findings.record_figure("different anchors", len(set(anchors.values())))
    findings.require_equal("anchors at heights without a root", len(set(anchors.values()) - roots.keys()), 0)
    findings.require_at_most("seconds from knowing a newer root to sending a reveal", max(stale), GRACE_SECONDS)


async def _root_times(chain: DevChain, round_id: bytes) -> dict[int, float]:
    """Return the block time of every height at which the round got a root."""
    newest, heights = await chain.newest_height(), list[int]()
    for start in range(1, newest + 1, PAGE_SIZE):
        span = {"from_height": start, "to_height": min(newest, start + PAGE_SIZE - 1)}
        response = await chain.get(f"/shielded-vote/v1/commitment-tree/{round_id.hex()}/leaves", **span)
        heights += [int(block["height"]) for block in response.get("blocks", [])]
    return {height: await _block_time(chain, height) for height in heights}


async def _block_time(chain: DevChain, height: int) -> float:
    response = await chain.get(f"/cosmos/base/tendermint/v1beta1/blocks/{height}")
    return datetime.fromisoformat(response["block"]["header"]["time"]).timestamp()


async def _check_orders(
    findings: Findings, setting: CampaignRun, chain: DevChain, ledger: ShareLedger, log: Sequence[dict[str, Any]]
) -> None:
    """Compare the orders of posting, sending and confirmation for shares of one second."""
    (round_id,) = ledger.round_ids
    second, _ = Counter(share.submit_at for share in ledger.posted.values()).most_common(1)[0]
    # Shares that arrived after their second were sent immediately, in order of arrival, as intended.
    in_time = [name for name, at in ledger.acknowledged_at.items() if at < second == ledger.posted[name].submit_at]
    entries = _broadcast_entries(log)
    counted = (await chain.spent_nullifiers(round_id)).keys()
    bound = chance_bound(len(in_time))
    findings.require_at_least("shares due in one second, posted before it", len(in_time), setting.scale(500, 64))
    for what, order in {"broadcast": [entry["nullifier"] for entry in entries], "counting": list(counted)}.items():
        rho = rank_correlation(in_time, first_occurrences(order, in_time))
        findings.require_at_most(f"rank correlation of arrival and {what} in a second", abs(rho), bound)


def _broadcast_entries(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the broadcasts of a log in order of arrival at the node."""
    return sorted((entry for entry in log if entry["route"] == "reveal-share"), key=lambda entry: float(entry["time"]))


def _to_cast_votes(votes: Votes, ledger: ShareLedger | None) -> list[CastVote]:
    """Convert votes to cast votes; those without a ledger are due far ahead."""
    far_ahead = unix_time_in(FAR_AHEAD_SECONDS)
    times = {} if ledger is None else {name: share.submit_at for name, share in ledger.posted.items()}

    def to_cast_vote(share: BallotShare) -> CastShare:
        return CastShare(share.index, share.nullifier, times.get(share.nullifier.hex(), far_ahead), ())

    return [CastVote(vote, position, tuple(map(to_cast_vote, vote.shares))) for vote, position in votes]
