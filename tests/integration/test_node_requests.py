"""Promise 8: requests to nodes follow the chain's block times only; no arrival causes a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from devnet import ballot
from devnet.leak_check import find_leaks
from devnet.wallet import CastVote
from tests.support.devnet import DevChain, era_flags
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, run_chain_and_helper, unix_time_in
from tests.support.secrets import LEAVES_BEYOND_HEIGHTS, sensitive_values

BLOCKS_PER_SPAN = 24
"""Minimum number of blocks per span. The number of requests of a kind may differ by one per block."""
FAR_AHEAD_SECONDS = 2000
"""Seconds until the shares are due."""


async def post_arrivals(helper: HelperProcess, votes: Sequence[CastVote], posts: Counter[str]) -> None:
    """Post more shares than the span has blocks: new ones, duplicates, and shares that wait for the next sync."""
    due = unix_time_in(FAR_AHEAD_SECONDS)

    async def post_share(vote: CastVote, index: int, *, offset: int = 0) -> None:
        body = ballot.post_body(vote.ballot, vote.ballot.shares[index], vote.position + offset, due)
        response = (await helper.post_share(body)).json()
        posts[response["status"]] += 1

    for vote in votes:
        for index in range(0, ballot.SHARE_COUNT, 8):
            batch = range(index, index + 8)
            await asyncio.gather(*(post_share(vote, index) for index in batch))
            await asyncio.gather(
                *(post_share(vote, index) for index in batch), *(post_share(vote, index, offset=9) for index in batch)
            )


async def record_requests(
    chain: DevChain, blocks: int, activity: Awaitable[None] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Run the activity, then wait until at least this many blocks have passed since its start.

    Returns the requests to the chain during this span, and the span's number of blocks.
    """
    before = (await chain.request_log())[-1]["seq"]
    start = await chain.newest_height()
    if activity is not None:
        await activity
    end = max(start + blocks, await chain.newest_height() + 1)
    while await chain.newest_height() < end:
        await asyncio.sleep(0.02)
    return [entry for entry in await chain.request_log() if entry["seq"] > before], end - start


async def test_arrivals_cause_no_node_request(tmp_path: Path, era: str) -> None:
    flags = ("--stand-in-proofs", "--block-seconds", "0.6", *era_flags(era))
    async with run_chain_and_helper(tmp_path, *flags, program=STAND_IN_PROGRAM) as (chain, helper):
        round_id = await chain.open_round()
        await chain.delegate(round_id, LEAVES_BEYOND_HEIGHTS)
        votes = [
            await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(FAR_AHEAD_SECONDS)))
        ]
        async with helper.create_wallet() as wallet:
            for _ in range(2):
                sealed = await wallet.seal_ballot(round_id, 1, 1, weight=5)
                votes.append(CastVote(sealed, await wallet.cast_ballot(sealed), ()))
        await helper.wait_for_leaf(round_id, max(vote.position for vote in votes))
        posts: Counter[str] = Counter()
        busy_log, blocks = await record_requests(chain, BLOCKS_PER_SPAN, post_arrivals(helper, votes[1:], posts))
        idle_log, _ = await record_requests(chain, blocks)
        assert posts == {"queued": 32, "duplicate": 32, "error": 32}
        assert sum(posts.values()) >= 2 * blocks, "too few arrivals to detect one request per arrival"
        kinds = [
            Counter((entry["port"], entry["method"], entry["route"]) for entry in span) for span in (idle_log, busy_log)
        ]
        assert kinds[0].keys() == kinds[1].keys()
        assert {
            kind: kinds[1][kind] - kinds[0][kind] for kind in kinds[0] if count_difference(kinds, kind) > blocks
        } == {}
        assert {entry["body"] for entry in busy_log} == {""}
        late = unix_time_in(2 * FAR_AHEAD_SECONDS)
        assert find_leaks(busy_log, sensitive_values(votes, {}, not_before=late)) == []


def count_difference(kinds: Sequence[Counter[tuple[str, str, str]]], kind: tuple[str, str, str]) -> int:
    return abs(kinds[1][kind] - kinds[0][kind])
