"""Real votes, real proofs, real processes: from the POST to the counted reveal, and nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from devnet import ballot
from devnet.wallet import CastVote
from helper.share import ShareKey
from tests.support.harness import STAND_IN, Chain, Helper, cast_vote, running, soon

FAR = 70_000
"""Leaves before the vote, so that its position takes three bytes and can be looked for in a file."""


def names_of(vote: CastVote) -> dict[str, int]:
    """Every text that would name a share in a request, with the share's time."""
    return {share.nullifier.hex(): share.submit_at for share in vote.shares}


def named_early(requests: list[dict[str, Any]], due: dict[str, int]) -> list[str]:
    """Requests that name a share, by path or by body, before its time."""
    return [
        entry["path"]
        for entry in requests
        for name, at in due.items()
        if entry["time"] < at and (name in entry["path"].lower() or entry["nullifier"] == name)
    ]


@pytest.mark.anyio
@pytest.mark.rule("R1", "R2", "R4", "R6")
async def test_real_votes_are_revealed_at_their_times_and_tallied_right(tmp_path: Path) -> None:
    async with running(tmp_path) as (chain, helper):
        round_id = await chain.open_round(seconds=45)
        later = soon(4)
        timed = await cast_vote(chain, helper, round_id, decision=1, times=ballot.same_second(later))
        at_once = await cast_vote(chain, helper, round_id, proposal=2, decision=0)
        assert timed.accepted
        assert at_once.accepted
        for vote in (timed, at_once):
            await helper.confirmed(vote)
        due = names_of(timed) | names_of(at_once)
        requests = await chain.requests()
        assert named_early(requests, due) == []
        first = {name: min(e["time"] for e in requests if e["nullifier"] == name) for name in names_of(timed)}
        assert min(first.values()) >= later
        spent = await chain.spent(round_id)
        assert spent == dict.fromkeys(due, 1)
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


def secrets_of(vote: CastVote) -> dict[str, bytes]:
    """What must be in no file once the vote's shares are confirmed."""
    found = {"shares_hash": vote.ballot.shares_hash, "commitments": b"".join(vote.ballot.share_comms)}
    for share in vote.ballot.shares:
        found[f"blind {share.index}"] = share.blind
        found[f"c1 {share.index}"] = share.c1
        found[f"c2 {share.index}"] = share.c2
        key = ShareKey(vote.ballot.round_id, share.index, vote.ballot.proposal_id, vote.position)
        found[f"key {share.index}"] = key.encode()
    return found


@pytest.mark.anyio
@pytest.mark.rule("R14")
async def test_after_confirmation_the_files_hold_tombstones_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, "--stand-in-proofs", program=STAND_IN) as (chain, helper):
        round_id = await chain.open_round()
        await chain.post("/devnet/delegate", {"round_id": round_id.hex(), "count": FAR})
        await chain.mine()
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(6)))
        assert vote.position > FAR
        waiting = helper.bytes_on_disk()
        held = secrets_of(vote)
        assert all(held[f"blind {index}"] in waiting for index in range(16)), "the search finds what is there"
        await helper.confirmed(vote)
        await erased(helper, held)
        left = helper.bytes_on_disk()
        for share in vote.shares:
            assert left.count(share.nullifier) == 1, "once, among all spent ones"
        for entry in await chain.reveals():
            assert bytes.fromhex(entry["nullifier"]) in left
        position = vote.position.to_bytes(3, "big")
        (trees,) = helper.rows("SELECT group_concat(hex(leaves), '') FROM tree_leaves")
        (nodes,) = helper.rows("SELECT group_concat(hex(nodes), '') FROM tree_subtrees")
        public = bytes.fromhex(trees[0]) + bytes.fromhex(nodes[0]) + b"".join(s.nullifier for s in vote.shares)
        assert left.count(position) <= public.count(position)
        assert helper.rows("SELECT count(*) FROM shares") == [(0,)]
        assert helper.rows("SELECT count(*), min(state), max(state) FROM tombstones") == [(16, 2, 2)]
        assert [row[1] for row in helper.rows("PRAGMA table_info(tombstones)")] == ["round_no", "mac", "state"]


async def erased(helper: Helper, secrets: dict[str, bytes]) -> None:
    """Wait (a few seconds are promised) until none of these is in any of the database's files."""
    async with asyncio.timeout(5):
        while any(secret in helper.bytes_on_disk() for secret in secrets.values()):
            await asyncio.sleep(0.1)


@pytest.mark.anyio
@pytest.mark.rule("R10")
async def test_the_same_share_again_is_a_duplicate_before_and_after_confirmation(tmp_path: Path) -> None:
    async with running(tmp_path, "--stand-in-proofs", program=STAND_IN) as (chain, helper):
        round_id = await chain.open_round()
        due = soon(5)
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
        assert min(entry["time"] for entry in await chain.reveals()) >= due
        assert await chain.spent(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        assert (await helper.operator("/queue"))["shares"] == []


@pytest.mark.anyio
@pytest.mark.rule("R12")
async def test_a_share_that_another_helper_reveals_first_is_confirmed_all_the_same(tmp_path: Path) -> None:
    """Two helpers have the same shares; whoever is second sees them confirmed, and nothing counts twice."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    async with running(one, "--stand-in-proofs", program=STAND_IN) as (chain, first):
        second = Helper(two, chain._http, chain, program=STAND_IN)
        await second.start()
        try:
            await second.ready()
            round_id = await chain.open_round()
            vote = await cast_vote(chain, first, round_id, times=ballot.same_second(soon(4)))
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
        finally:
            await second.kill()


@pytest.mark.anyio
async def test_the_story_of_a_waiting_share_is_told_without_its_witness(tmp_path: Path) -> None:
    async with running(tmp_path, "--stand-in-proofs", program=STAND_IN) as (chain, helper):
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(600)))
        listed = (await helper.operator("/queue"))["shares"]
        assert len(listed) == 16
        story = await helper.operator(f"/queue/{listed[0]['ref']}")
        told = str(story) + str(listed)
        for secret in secrets_of(vote).values():
            assert secret.hex() not in told
        for share in vote.shares:
            assert share.nullifier.hex() not in told
        log = helper.log.read_text()
        for secret in (*secrets_of(vote).values(), *(share.nullifier for share in vote.shares)):
            assert secret.hex() not in log
