"""What differs between chain versions, with separate processes: batches, warming keys, lost engines."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from devnet.vote_submission import delegate_and_cast_batch
from tests.support.devnet import BOTH_ERAS, DevChain
from tests.support.harness import cast_vote, run_helper


@pytest.mark.anyio
@pytest.mark.rule("N17")
@pytest.mark.parametrize("era", ["1.6"])
async def test_votes_of_a_batch_are_revealed_at_the_positions_of_its_event(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain) as helper, helper.create_wallet() as wallet:
        round_id = await chain.open_round()
        await chain.delegate(round_id, 5)
        ballots = [await wallet.seal_ballot(round_id, proposal, 1) for proposal in (1, 2, 3)]
        positions = await delegate_and_cast_batch(http, chain.url, ballots)
        assert positions == [6, 7, 8]
        for sealed, position in zip(ballots, positions, strict=True):
            await helper.wait_for_leaf(round_id, position)
            vote = await wallet.post_shares(sealed, position, times=ballot.immediate_times())
            assert vote.is_accepted
            await helper.wait_until_confirmed(vote)
        counted = {share.nullifier.hex(): 1 for sealed in ballots for share in sealed.shares}
        assert await chain.spent_nullifiers(round_id) == counted
        assert (await helper.service_counts()).get("failures", 0) == 0


@pytest.mark.anyio
@pytest.mark.rule("N14", "N16")
@BOTH_ERAS
async def test_warming_node_and_lost_engine_cost_no_attempt(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain, era: str
) -> None:
    async with run_helper(tmp_path, http, chain, nodes=2) as helper:
        round_id = await chain.open_round()
        healthy = await cast_vote(chain, helper, round_id)
        await helper.wait_until_confirmed(healthy)
        before = len(await chain.request_log())
        await chain.set_faults(node=0, keys="warming")
        await chain.set_faults(node=1, engine_failures=3, engine_seconds=0, engine_delivers=True)
        vote = await cast_vote(chain, helper, round_id, proposal=2)
        assert vote.is_accepted
        await helper.wait_until_confirmed(vote)
        entries = (await chain.request_log())[before:]
        assert {entry["status"] for entry in entries if entry["route"] == "reveal-share"} >= {503, 502}
        if era == "0.5":
            assert all(entry["route"] != "readiness" for entry in entries), "old nodes do not ask to wait"
        counted = {share.nullifier.hex(): 1 for share in (*healthy.shares, *vote.shares)}
        assert await chain.spent_nullifiers(round_id) == counted
        counts = await helper.service_counts()
        assert counts.get("failures", 0) == counts.get("failed", 0) == 0
