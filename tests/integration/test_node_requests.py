"""Promise 8: what the helper asks nodes follows the chain's pace only; no request is caused by an arrival."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from devnet import ballot
from devnet.leak_check import named_early
from devnet.wallet import CastVote
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, cast_vote, running, soon
from tests.support.secrets import BEYOND_HEIGHTS, needles

BLOCKS = 24
"""Blocks a span. A kind of request may come one time a block more or less often."""
FAR_AHEAD = 2000
"""Seconds until the shares are due."""


async def nothing() -> None:
    """Arrivals: none."""


async def arrivals(helper: Helper, votes: Sequence[CastVote], posts: Counter[str]) -> None:
    """More shares than a span has blocks: new ones, the same again, and ones to be held for the next sync."""
    due = soon(FAR_AHEAD)

    async def post(vote: CastVote, index: int, *, further: int = 0) -> None:
        body = ballot.post_body(vote.ballot, vote.ballot.shares[index], vote.position + further, due)
        answer = (await helper.post(body)).json()
        posts[answer["status"]] += 1

    for vote in votes:
        for index in range(0, ballot.SHARES, 8):
            batch = range(index, index + 8)
            await asyncio.gather(*(post(vote, one) for one in batch))
            await asyncio.gather(*(post(vote, one) for one in batch), *(post(vote, one, further=9) for one in batch))


async def heard(chain: Chain, happening: Awaitable[None]) -> list[dict[str, Any]]:
    """What the chain is asked in the time of so many blocks, while this happens."""
    before = (await chain.requests())[-1]["seq"]
    begin = await chain.newest()
    await happening
    assert await chain.newest() < begin + BLOCKS, "it took longer than the span"
    while await chain.newest() < begin + BLOCKS:
        await asyncio.sleep(0.02)
    return [entry for entry in await chain.requests() if entry["seq"] > before]


@pytest.mark.anyio
async def test_arrivals_cause_no_request_and_change_no_cadence(tmp_path: Path) -> None:
    async with running(tmp_path, "--stand-in-proofs", program=STAND_IN) as (chain, helper):
        round_id = await chain.open_round()
        await chain.delegate(round_id, BEYOND_HEIGHTS)
        votes = [await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(FAR_AHEAD)))]
        async with helper.wallet() as wallet:
            for _ in range(2):
                sealed = await wallet.seal(round_id, 1, 1, weight=5)
                votes.append(CastVote(sealed, await wallet.cast(sealed), ()))
        await helper.knows_leaf(round_id, max(vote.position for vote in votes))
        quiet = await heard(chain, nothing())
        posts: Counter[str] = Counter()
        busy = await heard(chain, arrivals(helper, votes[1:], posts))
        assert posts == {"queued": 32, "duplicate": 32, "error": 32}
        assert sum(posts.values()) >= 3 * BLOCKS, "one request an arrival would be seen"
        kinds = [Counter((entry["port"], entry["method"], entry["route"]) for entry in span) for span in (quiet, busy)]
        assert kinds[0].keys() == kinds[1].keys()
        assert {kind: kinds[1][kind] - kinds[0][kind] for kind in kinds[0] if off(kinds, kind) > BLOCKS} == {}
        assert {entry["body"] for entry in busy} == {""}
        late = soon(2 * FAR_AHEAD)
        assert named_early(busy, needles(votes, {}, until=late)) == []


def off(kinds: Sequence[Counter[tuple[str, str, str]]], kind: tuple[str, str, str]) -> int:
    """By how much a kind's count differs."""
    return abs(kinds[1][kind] - kinds[0][kind])
