"""`queue show` prints the complete event log of a waiting share without its witness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from devnet.wallet import CastVote
from tests.support.command import run_in_process
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_helper, unix_time_in
from tests.support.prover_worker import PROPOSAL_REFUSED
from tests.support.secrets import collect_secrets, secrets_in_text


async def show_share(helper: HelperProcess, ref: str) -> tuple[dict[str, Any], str]:
    """Return the JSON and the text output of the command."""
    command = ("queue", "show", ref, "--config", str(helper.config))
    result, text = [await run_in_process(helper.config.parent, *command, *flags) for flags in (("--json",), ())]
    assert text.exit_code == 0, text.stderr
    return result.json(), text.stdout


async def find_only_share(helper: HelperProcess) -> dict[str, Any]:
    (share,) = (await helper.operator_get("/queue"))["shares"]
    only_share: dict[str, Any] = share
    return only_share


def assert_no_witness(vote: CastVote, *texts: str) -> None:
    """Assert that no output contains the witness or a nullifier."""
    secrets = {**collect_secrets(vote), **{f"nullifier {share.index}": share.nullifier for share in vote.ballot.shares}}
    for text in texts:
        assert secrets_in_text(text, secrets) == []


@pytest.mark.anyio
@pytest.mark.rule("R11")
async def test_queue_show_failed_attempt_has_times_and_stage(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        proposals = [{"id": PROPOSAL_REFUSED, "title": "One of many", "options": ["Yes", "No"]}]
        round_id = await chain.open_round(proposals=proposals)
        async with helper.create_wallet() as wallet:
            sealed = await wallet.seal_ballot(round_id, PROPOSAL_REFUSED, 1, weight=7)
            position = await wallet.cast_ballot(sealed)
            due = unix_time_in(2)
            vote = await wallet.post_shares(sealed, position, times=ballot.same_second_times(due), indices=[0])
        await helper.wait_until("has failed twice", lambda facts: facts["counts"].get("failures", 0) >= 2)
        share = await find_only_share(helper)
        details, text = await show_share(helper, share["ref"])
        assert details["submit_at"] == due
        assert details["received"] <= due
        assert details["attempts"] == sum(details["attempts_by_stage"].values()) >= 2
        assert len(details["attempts_by_stage"]) == 1
        counted = [event for event in details["history"] if event["counted"]]
        assert len(counted) == details["attempts"]
        assert [event["at"] for event in counted] == sorted(event["at"] for event in counted)
        assert counted[0]["at"] >= due
        first, second = counted[:2]
        assert second["at"] - first["at"] >= 2, "2^1 s after the first failure"
        assert details["due"] >= second["at"] + 3.9, "2^2 s after the second"
        assert "failure requested" in first["note"]
        assert details["transaction"] is None
        assert details["state"] in {"received", "witnessed"}
        assert share["ref"] in text
        assert_no_witness(vote, json.dumps(details), text)
