"""The demo's known clients post to a helper."""

from __future__ import annotations

import random
from pathlib import Path

from devnet.clients.known_clients import DIRECT_CLIENTS
from devnet.demo.plan import PlannedVote, Timing
from devnet.demo.votes import cast_all_votes
from tests.support.harness import STAND_IN_PROGRAM, run_chain_and_helper


async def test_every_client_of_the_demo_gets_its_shares_accepted(tmp_path: Path) -> None:
    planned = [PlannedVote(voter, 1, 0, 10, Timing.IMMEDIATE) for voter in range(len(DIRECT_CLIENTS))]
    acceptances: list[int] = []
    flags = ("--block-seconds", "0.3", "--stand-in-proofs")
    async with run_chain_and_helper(tmp_path, *flags, program=STAND_IN_PROGRAM) as (chain, helper):
        results = await cast_all_votes(
            chain.url,
            [helper.url],
            await chain.open_round(),
            planned,
            helpers_per_share=1,
            plays_clients=True,
            spread=0,
            rng=random.Random(1),
            on_accepted=acceptances.append,
        )
        assert (await helper.service_counts())["post_queued"] == 16 * len(DIRECT_CLIENTS)
    assert [result.client for result in results] == [client.name for client in DIRECT_CLIENTS]
    assert acceptances == [16] * len(DIRECT_CLIENTS)
