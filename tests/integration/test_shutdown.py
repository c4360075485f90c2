"""Shutdown of the service, clean or by SIGKILL, during work."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.harness import cast_vote, run_helper
from tests.support.process import wait_until_gone

SLOW_PROVER_ENV = {"STANDIN_SECONDS": "0.4"}


@pytest.mark.rule("R9", "R11")
async def test_sigterm_during_work_shuts_down_and_loses_no_share(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain, env=SLOW_PROVER_ENV) as helper:
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.immediate_times())
        await helper.wait_until("is processing", lambda facts: facts["in_hand"] and facts["counts"].get("broadcast"))
        workers = await helper.worker_pids()
        assert workers
        assert await helper.stop() == 0
        await wait_until_gone(workers, 1)
        alive = helper.query_rows("SELECT count(*), max(attempts), max(crashes) FROM shares")
        (tombstones,) = helper.query_rows("SELECT count(*) FROM tombstones")[0]
        assert alive[0][0] + tombstones == 16
        assert alive[0][0] > 0, "the service was stopped during its work"
        assert alive[0][1:] == (0, 0)
        await helper.start()
        await helper.wait_until_ready()
        await helper.wait_until_confirmed(vote)
        assert await chain.spent_nullifiers(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        assert (await helper.service_counts()).get("failures", 0) == 0


async def test_killed_service_leaves_no_worker(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> None:
    async with run_helper(tmp_path, http, chain, env={"STANDIN_SECONDS": "30"}) as helper:
        round_id = await chain.open_round()
        await cast_vote(chain, helper, round_id, times=ballot.immediate_times())
        await helper.wait_until("is processing", lambda facts: facts["in_hand"])
        workers = await helper.worker_pids()
    await wait_until_gone(workers)
