"""How the service ends: asked or killed, with work under way; and that two never share a file."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from devnet import ballot
from tests.support.devnet import Chain
from tests.support.harness import REAL, STAND_IN, Helper, cast_vote, helping
from tests.support.process import gone

SLOW = {"STANDIN_SECONDS": "0.4"}


@pytest.mark.anyio
@pytest.mark.rule("R9", "R11")
async def test_sigterm_in_the_middle_of_work_ends_in_order_and_loses_nothing(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    helper = Helper(tmp_path, http, chain, program=STAND_IN)
    await helper.start(**SLOW)
    try:
        await helper.ready()
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.immediate())
        await helper.until("is at work", lambda facts: facts["in_hand"] and facts["counts"].get("broadcast"))
        workers = await helper.workers()
        assert workers
        began = time.monotonic()
        assert await helper.stop() == 0
        assert time.monotonic() - began <= 10
        await gone(workers, 1)
        alive = helper.rows("SELECT count(*), max(attempts), max(crashes) FROM shares")
        (tombstones,) = helper.rows("SELECT count(*) FROM tombstones")[0]
        assert alive[0][0] + tombstones == 16
        assert alive[0][0] > 0, "it was stopped in the middle"
        assert alive[0][1:] == (0, 0)
        await helper.start()
        await helper.ready()
        await helper.confirmed(vote)
        assert await chain.spent(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        assert (await helper.counts()).get("failures", 0) == 0
    finally:
        await helper.kill()


@pytest.mark.anyio
async def test_no_worker_outlives_a_killed_service(tmp_path: Path, http: httpx.AsyncClient, chain: Chain) -> None:
    helper = Helper(tmp_path, http, chain, program=STAND_IN)
    await helper.start(STANDIN_SECONDS="30")
    try:
        await helper.ready()
        round_id = await chain.open_round()
        await cast_vote(chain, helper, round_id, times=ballot.immediate())
        await helper.until("is at work", lambda facts: facts["in_hand"])
        workers = await helper.workers()
    finally:
        await helper.kill()
    await gone(workers)


@pytest.mark.anyio
async def test_a_second_daemon_on_the_same_file_is_refused(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as first:
        other = tmp_path / "other"
        other.mkdir()
        second = Helper(other, http, chain, program=REAL)
        second.config.write_text(first.config.read_text() + f'[operator]\nsocket = "{other}/helper.sock"\n')
        began = time.monotonic()
        second.launch()
        assert await second.ended() == 1
        assert time.monotonic() - began <= 10, "most of it is Python starting"
        assert "another daemon has this database open" in second.tail()
        assert "Traceback" not in second.tail()
        round_id = await chain.open_round()
        await first.confirmed(await cast_vote(chain, first, round_id))
