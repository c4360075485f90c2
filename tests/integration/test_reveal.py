"""Votes over HTTP with separate processes, from the POST to the confirmed reveal."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from devnet.leak_check import find_leaks
from tests.support.devnet import BOTH_ERAS, DevChain, era_flags
from tests.support.harness import STAND_IN_PROGRAM, cast_vote, run_chain_and_helper, run_helper, unix_time_in
from tests.support.secrets import LEAVES_BEYOND_HEIGHTS, sensitive_values


@pytest.mark.rule("R1", "R2", "R4", "R6")
@BOTH_ERAS
async def test_reveal_at_due_times_yields_correct_tally(tmp_path: Path, era: str) -> None:
    flags = ("--stand-in-proofs", *era_flags(era))
    async with run_chain_and_helper(tmp_path, *flags, program=STAND_IN_PROGRAM) as (chain, helper):
        round_id = await chain.open_round()
        await chain.delegate(round_id, LEAVES_BEYOND_HEIGHTS)
        later = unix_time_in(2)
        timed = await cast_vote(chain, helper, round_id, decision=1, times=ballot.same_second_times(later))
        immediate = await cast_vote(chain, helper, round_id, proposal=2, decision=0)
        assert timed.is_accepted
        assert immediate.is_accepted
        for vote in (timed, immediate):
            await helper.wait_until_confirmed(vote)
        requests = await chain.request_log()
        assert (
            find_leaks(requests, sensitive_values([timed, immediate], await chain.transaction_hashes(round_id))) == []
        )
        first = {
            s.nullifier: min(e["time"] for e in requests if e["nullifier"] == s.nullifier.hex()) for s in timed.shares
        }
        assert min(first.values()) >= later
        assert await chain.spent_nullifiers(round_id) == {
            s.nullifier.hex(): 1 for s in (*timed.shares, *immediate.shares)
        }
        assert (await helper.service_counts()).get("failures", 0) == 0
        results = await read_tally(chain, round_id)
        assert results == {
            (timed.ballot.proposal_id, 1): timed.ballot.weight,
            (immediate.ballot.proposal_id, 0): immediate.ballot.weight,
        }


async def read_tally(chain: DevChain, round_id: bytes) -> dict[tuple[int, int], int]:
    """End the round. Returns the published results."""
    await chain.post("/devnet/rounds/end", {"round_id": round_id.hex()})
    await chain.mine(6)
    response = await chain.get(f"/shielded-vote/v1/tally-results/{round_id.hex()}")
    return {(row["proposal_id"], row.get("vote_decision", 0)): row["total_value"] for row in response["results"]}


@pytest.mark.rule("R10", "W6")
async def test_repeated_share_is_duplicate_before_and_after_confirmation(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        await chain.delegate(round_id, LEAVES_BEYOND_HEIGHTS)
        due = unix_time_in(1800)
        waiting = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(due))
        before = await helper.operator_get("/queue")
        assert {share["submit_at"] for share in before["shares"]} == {due}
        revealed = await cast_vote(chain, helper, round_id, proposal=2)
        await helper.wait_until_confirmed(revealed)
        for vote in (waiting, revealed):
            for share in vote.ballot.shares:
                response = await helper.post_share(ballot.post_body(vote.ballot, share, vote.position, due + 60))
                assert (response.status_code, response.json()) == (200, {"status": "duplicate"})
        assert await helper.operator_get("/queue") == before
        secret = sensitive_values([waiting, revealed], await chain.transaction_hashes(round_id))
        assert find_leaks(await chain.request_log(), secret) == []
        assert await chain.spent_nullifiers(round_id) == {share.nullifier.hex(): 1 for share in revealed.shares}
