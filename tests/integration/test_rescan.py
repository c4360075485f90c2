"""`chain rescan` after the only node served blocks without their reveals; with two, such blocks are not agreed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.support.command import run_in_process
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, run_helper


async def rescan(helper: HelperProcess, first: int) -> Any:
    command = ("chain", "rescan", "--from", str(first), "--config", str(helper.config), "--json")
    return (await run_in_process(helper.config.parent, *command)).json()


@pytest.mark.rule("R12")
async def test_rescan_confirms_and_erases_shares_whose_blocks_were_served_empty(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    first = await chain.newest_height()
    await chain.set_faults(empty_blocks=True)
    async with run_helper(tmp_path, http, chain, program=STAND_IN_PROGRAM) as helper:
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id)
        nullifiers = {share.nullifier.hex(): 1 for share in vote.shares}
        with anyio.fail_after(60):
            while await chain.spent_nullifiers(round_id) != nullifiers:
                await anyio.sleep(0.1)
        spent_at = await chain.newest_height()
        await helper.wait_until("reads past the reveals", lambda facts: facts["height"] > spent_at)
        # Ten blocks after a send, a share that the node reports as spent is confirmed without a block. On a busy
        # machine this happens to some of them before the rescan.
        witnesses = [share.blind for share in vote.ballot.shares]
        [(waiting,)] = helper.query_rows("SELECT count(*) FROM shares")

        await chain.clear_faults()
        result = await rescan(helper, first)

        assert (result["source"], result["left"], result["pruned"]) == ("daemon", 0, 0)
        assert result["confirmed"] == result["added"] <= waiting
        assert helper.query_rows("SELECT count(*) FROM shares") == [(0,)]
        with anyio.fail_after(30):
            while any(secret in helper.bytes_on_disk() for secret in witnesses):
                await anyio.sleep(0.05)
        for share in vote.shares:
            assert await helper.share_status(round_id, share.nullifier) == "confirmed"
        before = helper.query_rows("SELECT * FROM tombstones"), helper.query_rows("SELECT * FROM spent")

        again = await rescan(helper, first)
        assert (again["confirmed"], again["added"], again["left"]) == (0, 0, 0)
        assert again["read"] == again["blocks"] >= result["blocks"]
        assert (helper.query_rows("SELECT * FROM tombstones"), helper.query_rows("SELECT * FROM spent")) == before
        assert await chain.spent_nullifiers(round_id) == nullifiers
        actions = (await helper.operator_get("/actions"))["actions"]
        assert [action["what"] for action in actions] == ["rescan", "rescan"]
