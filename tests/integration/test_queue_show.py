"""`queue show` tells all that happened to a share that waits, and nothing of its witness."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from devnet.wallet import CastVote
from tests.support.devnet import Chain
from tests.support.harness import Helper, cast_vote, helping, soon
from tests.support.prover_worker import REFUSES
from tests.support.secrets import secrets_of, told_in


async def shown(helper: Helper, ref: str) -> tuple[dict[str, Any], str]:
    """The story as the command tells it to machines, and as it does to people."""
    printed = []
    for flags in (("--json",), ()):
        command = ("-m", "helper", "queue", "show", ref, "--config", str(helper.config), *flags)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, env={"COLUMNS": "300"}
        )
        text, _ = await process.communicate()
        assert process.returncode == 0
        printed.append(text.decode())
    return json.loads(printed[0]), printed[1]


async def the_only(helper: Helper) -> dict[str, Any]:
    """The one share in the queue."""
    (share,) = (await helper.operator("/queue"))["shares"]
    found: dict[str, Any] = share
    return found


def holds_no_witness(vote: CastVote, *texts: str) -> None:
    """None of them tells anything of it, nor a nullifier."""
    secrets = {**secrets_of(vote), **{f"nullifier {share.index}": share.nullifier for share in vote.ballot.shares}}
    for text in texts:
        assert told_in(text, secrets) == []


@pytest.mark.anyio
@pytest.mark.rule("R11")
async def test_a_failed_attempt_is_told_with_its_times_and_stage(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as helper:
        proposals = [{"id": REFUSES, "title": "One of many", "options": ["Yes", "No"]}]
        round_id = await chain.open_round(proposals=proposals)
        due = soon(1)
        async with helper.wallet() as wallet:
            sealed = await wallet.seal(round_id, REFUSES, 1, weight=7)
            position = await wallet.cast(sealed)
            vote = await wallet.post(sealed, position, times=ballot.same_second(due), indices=[0])
        await helper.until("has failed twice", lambda facts: facts["counts"].get("failures", 0) >= 2)
        share = await the_only(helper)
        story, text = await shown(helper, share["ref"])
        assert story["submit_at"] == due
        assert story["received"] <= due
        assert story["attempts"] == sum(story["attempts_by_stage"].values()) >= 2
        assert len(story["attempts_by_stage"]) == 1
        counted = [event for event in story["history"] if event["counted"]]
        assert len(counted) == story["attempts"]
        assert [event["at"] for event in counted] == sorted(event["at"] for event in counted)
        assert counted[0]["at"] >= due
        first, second = counted[:2]
        assert second["at"] - first["at"] >= 2, "2^1 s after the first failure"
        assert story["due"] >= second["at"] + 3.9, "2^2 s after the second"
        assert "told to" in first["note"]
        assert story["transaction"] is None
        assert story["state"] in {"received", "witnessed"}
        assert share["ref"] in text
        holds_no_witness(vote, json.dumps(story), text)


@pytest.mark.anyio
async def test_a_broadcast_share_is_told_with_its_transaction(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as helper:
        await chain.faults(routes=["reveal-share"], never_include=1)
        round_id = await chain.open_round()
        async with helper.wallet() as wallet:
            sealed = await wallet.seal(round_id, 1, 1, weight=7)
            position = await wallet.cast(sealed)
            vote = await wallet.post(sealed, position, times=ballot.immediate(), indices=[3])
        await helper.until("has sent it", lambda facts: facts["counts"].get("answer_accepted"))
        share = await the_only(helper)
        story, text = await shown(helper, share["ref"])
        ((message,),) = helper.rows("SELECT message FROM reveals")
        assert story["state"] == "broadcast"
        assert story["transaction"]["hash"].lower() == hashlib.sha256(message).hexdigest()
        assert story["transaction"]["hash"] in text
        told = json.dumps(story)
        holds_no_witness(vote, told, text)
        assert message.hex() not in told
        await chain.mend()
        await chain.delegate(round_id, 1)  # so that the next message differs: stand-in proofs are not random
        await helper.confirmed(vote)
        assert (await helper.operator("/queue"))["shares"] == []


@pytest.mark.anyio
async def test_the_story_of_a_waiting_share_and_the_log_hold_no_witness(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(600)))
        listed = (await helper.operator("/queue"))["shares"]
        assert len(listed) == 16
        stories = [await helper.operator(f"/queue/{share['ref']}") for share in listed]
        holds_no_witness(vote, json.dumps(listed), json.dumps(stories), helper.log.read_text())
