"""Response times do not show whether a share was known before. `bench.known_shares` has exact figures."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx

from bench.known_shares import compare, time_responses
from devnet.ballot import SHARE_COUNT
from tests.campaign.wallet_clients import create_waiting_bodies
from tests.support.devnet import DevChain
from tests.support.harness import run_helper

VOTES = 24
MAX_RATIO = 1.5
"""Maximum ratio of the medians, in either direction."""


async def test_known_share_is_answered_as_fast_as_a_new_one(
    chain: DevChain, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        _, by_vote = await create_waiting_bodies(chain, helper, VOTES)
        bodies = [body.decode() for index in range(SHARE_COUNT) for body in by_vote[index::SHARE_COUNT]]
        figures = compare(await asyncio.to_thread(time_responses, helper.url, bodies, random.Random(7)))
    assert 1 / MAX_RATIO <= figures["ratio"] <= MAX_RATIO, figures
