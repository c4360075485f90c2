"""A helper with a lagging node or a slow clock, and a wallet that reads a current node."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from devnet import ballot
from devnet.wallet import Wallet
from tests.support.devnet import DevChain, era_flags
from tests.support.harness import run_helper

BLOCKS_BEFORE_VOTE = 3
"""Blocks processed by the helper before the vote."""
MAX_WAIT_BLOCKS = 10


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("block", "lag", "clock_behind"),
    [(2.0, 1.2, 0.0), (1.5, 0.4, 30.0)],
)
async def test_lagging_node_costs_honest_wallet_no_share(
    tmp_path: Path, http: httpx.AsyncClient, era: str, block: float, lag: float, clock_behind: float
) -> None:
    flags = ("--stand-in-proofs", "--extra-nodes", "1", "--clock-offset", str(clock_behind), *era_flags(era))
    chain = DevChain(tmp_path, http, "--block-seconds", str(block), *flags)
    await chain.start()
    try:
        round_id = await chain.open_round()
        if lag:
            await chain.set_faults(stale=lag)  # fault of the helper's node only; the wallet reads the other one
        async with run_helper(tmp_path, http, chain, chain={"poll_seconds": 1.0}) as helper:
            current = chain.at_node(1)
            target_height = await current.newest_height() + BLOCKS_BEFORE_VOTE
            async with asyncio.timeout(10 * BLOCKS_BEFORE_VOTE * block):
                while await current.newest_height() < target_height:
                    await asyncio.sleep(0.1)
            async with Wallet(current.url, [], mode="parallel") as wallet:
                vote = await wallet.seal_ballot(round_id, 1, 1)
                position = await wallet.cast_ballot(vote)
            bodies = [ballot.post_body(vote, share, position, 0) for share in vote.shares[:8]]
            statuses = await asyncio.gather(
                *(_post_until_answered(http, helper.url, body, MAX_WAIT_BLOCKS * block) for body in bodies)
            )
            assert statuses == [200] * len(bodies)
    finally:
        await chain.kill()


async def _post_until_answered(http: httpx.AsyncClient, url: str, body: object, seconds: float) -> int:
    """Post again after each temporary refusal. Returns the last status."""
    end = time.monotonic() + seconds
    while True:
        response = await http.post(f"{url}/shielded-vote/v1/shares", json=body, timeout=30)
        if response.status_code != 503 or time.monotonic() > end:
            return response.status_code
        assert int(response.headers["retry-after"]) >= 1
        await asyncio.sleep(0.5)
