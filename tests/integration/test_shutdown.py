"""Shutdown of the service, clean or by SIGKILL, during work."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
import pytest

from devnet import ballot
from tests.integration.test_export_import import suspend_processes
from tests.support.devnet import DevChain
from tests.support.harness import cast_vote, run_helper
from tests.support.process import is_running, wait_until_gone


@pytest.mark.rule("R9", "R11")
async def test_sigterm_during_work_shuts_down_and_loses_no_share(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        async with helper.create_wallet() as wallet:
            sealed = await wallet.seal_ballot(round_id, 1, 1)
            position = await wallet.cast_ballot(sealed)
            await helper.wait_for_leaf(round_id, position)
            await chain.set_faults(halt_chain=True)
            post = partial(wallet.post_shares, sealed, position, times=ballot.immediate_times())
            sent = await post(indices=range(8))
            await helper.wait_until("has sent them", lambda facts: facts["counts"].get("broadcast", 0) >= 8)
            workers = await helper.worker_pids()
            assert workers
            with suspend_processes(workers):
                unproven = await post(indices=range(8, 16))
                await helper.wait_until("is processing", lambda facts: facts["in_hand"])
                assert await helper.stop() == 0
                assert not any(map(is_running, workers))
        alive = helper.query_rows("SELECT count(*), max(attempts), max(crashes) FROM shares")
        assert alive == [(16, 0, 0)], "the service was stopped during its work"
        await chain.set_faults(halt_chain=False)
        await helper.start()
        await helper.wait_until_ready()
        for vote in (sent, unproven):
            await helper.wait_until_confirmed(vote)
        assert await chain.spent_nullifiers(round_id) == {share.nullifier.hex(): 1 for share in sealed.shares}
        assert (await helper.service_counts()).get("failures", 0) == 0


async def test_killed_service_leaves_no_worker(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> None:
    async with run_helper(tmp_path, http, chain, env={"STANDIN_SECONDS": "3600"}) as helper:
        round_id = await chain.open_round()
        await cast_vote(chain, helper, round_id, times=ballot.immediate_times())
        await helper.wait_until("is processing", lambda facts: facts["in_hand"])
        workers = await helper.worker_pids()
    await wait_until_gone(workers)
