"""The chain changes a round's end, or gives it a status that this version does not know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from tests.support.devnet import Chain
from tests.support.harness import Helper, cast_vote, helping, soon

PATIENCE = 60.0


async def _post_until_accepted(helper: Helper, body: object) -> list[int]:
    """Post while the answer is 503; every status that came."""
    statuses: list[int] = []
    async with asyncio.timeout(PATIENCE):
        while True:
            statuses.append((await helper.post(body)).status_code)
            if statuses[-1] != 503:
                return statuses
            await asyncio.sleep(0.2)


@pytest.mark.anyio
@pytest.mark.parametrize("nodes", [1, 2])
async def test_extended_round_reveals_shares_due_after_its_first_end(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain, nodes: int
) -> None:
    async with helping(tmp_path, http, chain, nodes=nodes) as helper:
        first_end = soon(20)
        round_id = await chain.open_round(vote_end_time=first_end)
        other_round = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=[0, *[first_end - 4] * 15])
        assert vote.accepted
        late = first_end + 4
        async with helper.wallet(chain.url) as wallet:
            second = await wallet.seal(round_id, 1, 1)
            position = await wallet.cast(second)
        await helper.knows_leaf(round_id, position)
        await chain.post("/devnet/rounds/end-time", {"round_id": round_id.hex(), "vote_end_time": first_end + 3600})
        await chain.mine()
        if nodes == 1:
            await helper.until("reports the other end", _notes(str(first_end + 3600)))
        body = ballot.post_body(second, second.shares[0], position, late)
        async with asyncio.timeout(PATIENCE):
            while not await _knows_end(helper, round_id, first_end + 3600):
                await asyncio.sleep(0.1)
        assert (await _post_until_accepted(helper, body))[-1] == 200
        await helper.confirmed(vote)
        async with helper.patience("confirms the late share"):
            while await helper.share_status(round_id, second.shares[0].nullifier) != "confirmed":
                await asyncio.sleep(0.1)
        assert time.time() >= late
        rounds = {one["round"]: one for one in (await helper.operator("/rounds"))["rounds"]}
        assert rounds[round_id.hex()]["frozen"] is None
        assert rounds[other_round.hex()]["frozen"] is None
        checks = {one["name"]: one for one in (await helper.service())["checks"]}
        assert (checks["rounds"]["problem"], checks["rounds"]["note"]) == (None, None)


@pytest.mark.anyio
async def test_round_with_unknown_status_is_closed_and_purged(tmp_path: Path, http: httpx.AsyncClient) -> None:
    chain = Chain(tmp_path, http, "--block-seconds", "0.3", "--stand-in-proofs")
    await chain.start()
    try:
        async with helping(tmp_path, http, chain, helper={"purge_after_hours": 0}) as helper:
            end = soon(15)
            round_id = await chain.open_round(vote_end_time=end)
            vote = await cast_vote(chain, helper, round_id, times=[end - 1] * 16)
            assert vote.accepted
            await chain.faults(routes=["rounds", "round"], round_status=9)
            await helper.until("reports the status", _notes("status 9"))
            async with helper.patience("purges the round"):
                while helper.rows("SELECT count(*) FROM rounds") != [(0,)]:
                    await asyncio.sleep(0.2)
            assert helper.rows("SELECT count(*) FROM shares") == [(0,)]
            assert time.time() > end
    finally:
        await chain.kill()


def _notes(text: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a check of the daemon has this in its problem or note."""
    return lambda facts: any(text in f"{one['problem']} {one['note']}" for one in facts["checks"])


async def _knows_end(helper: Helper, round_id: bytes, end: int) -> bool:
    rounds = {one["round"]: one for one in (await helper.operator("/rounds"))["rounds"]}
    return bool(rounds[round_id.hex()]["ends"] == end)
