"""Response times do not show whether a share was known before. `bench.known_shares` has exact figures."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx

from bench.known_shares import compare, time_responses
from devnet import ballot
from devnet.wallet import Wallet
from tests.support.devnet import DevChain
from tests.support.harness import run_helper, unix_time_in

VOTES = 24
MAX_RATIO = 1.5
"""Maximum ratio of the medians, in either direction."""


async def test_known_share_is_answered_as_fast_as_a_new_one(
    chain: DevChain, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        async with Wallet(chain.url, [], rng=random.Random(7)) as wallet:
            votes = [await wallet.seal_ballot(round_id, 1 + number % 3, 1, weight=100) for number in range(VOTES)]
            positions = await asyncio.gather(*map(wallet.cast_ballot, votes))
        await helper.wait_for_leaf(round_id, max(positions))
        due = unix_time_in(1800)
        bodies = [
            json.dumps(ballot.post_body(vote, vote.shares[index], position, due))
            for index in range(ballot.SHARE_COUNT)
            for vote, position in zip(votes, positions, strict=True)
        ]
        figures = compare(await asyncio.to_thread(time_responses, helper.url, bodies, random.Random(7)))
    assert 1 / MAX_RATIO <= figures["ratio"] <= MAX_RATIO, figures
