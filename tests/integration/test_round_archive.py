"""A finished round is archived, audited in the background and shown; the archive alone repeats the audit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from devnet import ballot
from helper.operations.archived_objects import PART_BLOCKS
from tests.integration.test_proof_bundle import ARCHIVE_CONFIG, run_command_line
from tests.support.harness import WARM_UP_TIMEOUT_SECONDS, cast_vote, run_chain_and_helper
from tests.support.s3 import ObjectStoreProcess


async def test_finished_round_is_archived_and_audited(tmp_path: Path, object_store: ObjectStoreProcess) -> None:
    async with (
        run_chain_and_helper(
            tmp_path,
            "--extra-nodes",
            "1",
            s3={"endpoint": object_store.url},
            archive=ARCHIVE_CONFIG,
            admin={"db_path": str(tmp_path / "admin.db")},
        ) as (chain, helper),
        httpx.AsyncClient(base_url=helper.url, timeout=30) as page,
    ):
        round_id = await chain.open_round(validators=3)
        await chain.delegate(round_id, 1)
        vote = await cast_vote(chain, helper, round_id, times=ballot.immediate_times())
        await helper.wait_until_confirmed(vote, WARM_UP_TIMEOUT_SECONDS)
        end = (await chain.get(f"/shielded-vote/v1/round/{round_id.hex()}"))["round"]["vote_end_time"]
        await chain.post("/devnet/faults", {"halt_chain": True})
        # Until the next blocks, the helper uses no node: its own clock seems slow.
        await chain.post("/devnet/mine", {"blocks": 8, "time": end + 1})
        await chain.post("/devnet/mine", {"blocks": 2 * PART_BLOCKS})
        await chain.post("/devnet/faults", {"halt_chain": False})

        # The audit has the lowest priority, and takes 40 s on an idle machine.
        async with helper.timeout("shows the audit of the round", seconds=240):
            while True:
                response = await page.get("/api/rounds")
                rounds = response.json()["rounds"] if response.status_code == 200 else []
                if rounds and rounds[0]["audit"] is not None:
                    break
                await asyncio.sleep(0.2)
        audit = rounds[0]["audit"]
        assert (audit["verdict"], audit["passed"]) == ("not_checked", 18), audit
        assert [other["id"] for other in audit["others"]] == ["E"], "the helper has one of the two nodes"

        await chain.kill()
        command = ("audit", round_id.hex()[:8], "--archive", "--config", str(helper.config), "--json")
        code, result, messages = await run_command_line(tmp_path, *command)
        assert code == 3, messages
        assert [check["id"] for check in result["checks"] if check["verdict"] != "passed"] == ["E"]
        assert next(check["count"] for check in result["checks"] if check["id"] == "A3") == ballot.SHARE_COUNT
