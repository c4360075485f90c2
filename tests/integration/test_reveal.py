"""Votes, over HTTP and processes of their own: from the POST to the counted reveal."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from devnet.leak_check import named_early
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, cast_vote, helping, running, soon
from tests.support.secrets import BEYOND_HEIGHTS, needles


@pytest.mark.anyio
@pytest.mark.rule("R1", "R2", "R4", "R6")
async def test_votes_are_revealed_at_their_times_and_tallied_right(tmp_path: Path) -> None:
    async with running(tmp_path, "--stand-in-proofs", program=STAND_IN) as (chain, helper):
        round_id = await chain.open_round(seconds=45)
        await chain.delegate(round_id, BEYOND_HEIGHTS)
        later = soon(2)
        timed = await cast_vote(chain, helper, round_id, decision=1, times=ballot.same_second(later))
        at_once = await cast_vote(chain, helper, round_id, proposal=2, decision=0)
        assert timed.accepted
        assert at_once.accepted
        for vote in (timed, at_once):
            await helper.confirmed(vote)
        requests = await chain.requests()
        assert named_early(requests, needles([timed, at_once], await chain.hashes(round_id))) == []
        first = {
            s.nullifier: min(e["time"] for e in requests if e["nullifier"] == s.nullifier.hex()) for s in timed.shares
        }
        assert min(first.values()) >= later
        assert await chain.spent(round_id) == {s.nullifier.hex(): 1 for s in (*timed.shares, *at_once.shares)}
        assert (await helper.counts()).get("failures", 0) == 0
        results = await tally(chain, round_id)
        assert results == {
            (timed.ballot.proposal_id, 1): timed.ballot.weight,
            (at_once.ballot.proposal_id, 0): at_once.ballot.weight,
        }


async def tally(chain: Chain, round_id: bytes) -> dict[tuple[int, int], int]:
    """The chain's results, once it has published them; moves the chain to the round's end."""
    await chain.post("/devnet/mine", {"blocks": 1, "advance_seconds": 60})
    await chain.mine(5)
    answer = await chain.get(f"/shielded-vote/v1/tally-results/{round_id.hex()}")
    return {(row["proposal_id"], row.get("vote_decision", 0)): row["total_value"] for row in answer["results"]}


@pytest.mark.anyio
@pytest.mark.rule("R10")
async def test_the_same_share_again_is_a_duplicate_before_and_after_confirmation(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        await chain.delegate(round_id, BEYOND_HEIGHTS)
        due = soon(2)
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second(due))
        bodies = [ballot.post_body(vote.ballot, share, vote.position, 0) for share in vote.ballot.shares]
        before = await helper.operator("/queue")
        for body in bodies:
            assert (await helper.post(body)).json() == {"status": "duplicate"}
        assert await helper.operator("/queue") == before
        assert {share["submit_at"] for share in before["shares"]} == {due}
        await helper.confirmed(vote)
        for body in bodies:
            answer = await helper.post(body)
            assert (answer.status_code, answer.json()) == (200, {"status": "duplicate"})
        assert named_early(await chain.requests(), needles([vote], await chain.hashes(round_id))) == []
        assert await chain.spent(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        assert (await helper.operator("/queue"))["shares"] == []


@pytest.mark.anyio
@pytest.mark.rule("R12")
async def test_a_share_that_another_helper_reveals_first_is_confirmed_all_the_same(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    """Two helpers have the same shares; whoever is second sees them confirmed, and nothing counts twice."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    async with helping(one, http, chain) as first, helping(two, http, chain) as second:
        round_id = await chain.open_round()
        vote = await cast_vote(chain, first, round_id, times=ballot.same_second(soon(2)))
        for share in vote.ballot.shares:
            body = ballot.post_body(vote.ballot, share, vote.position, vote.shares[share.index].submit_at)
            assert (await second.post(body)).json() == {"status": "queued"}
        await first.confirmed(vote)
        await second.confirmed(vote)
        assert await chain.spent(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        for helper in (first, second):
            counts = await helper.counts()
            assert counts["confirmed"] == 16
            assert counts.get("failures", 0) == 0
