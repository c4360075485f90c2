"""The chain changes a round's end, or reports a status that is unknown to this version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from devnet import ballot
from tests.support.devnet import DevChain, era_flags
from tests.support.harness import HelperProcess, cast_vote, run_chain, run_helper, unix_time_in


async def test_extended_round_reveals_shares_due_after_its_first_end(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain, nodes=2) as helper:
        round_id, other_round = await chain.open_round(), await chain.open_round()
        due = unix_time_in(8)
        vote = await cast_vote(chain, helper, round_id, times=[0, *[due] * 15])
        assert vote.is_accepted
        async with helper.create_wallet(chain.url) as wallet:
            second = await wallet.seal_ballot(round_id, 1, 1)
            position = await wallet.cast_ballot(second)
        await helper.wait_for_leaf(round_id, position)
        await chain.set_faults(halt_chain=True)  # no block ends the round before its end is extended
        first_end = max(due, unix_time_in(0)) + 2
        for end in (first_end, first_end + 3600):
            await _change_end(chain, helper, round_id, end, block_time=first_end - 1)
        await chain.set_faults(halt_chain=False)
        late = first_end + 2
        body = ballot.post_body(second, second.shares[0], position, late)
        assert (await helper.post_share(body)).status_code == 200
        await helper.wait_until_confirmed(vote)
        async with helper.timeout("confirms the late share"):
            while await helper.share_status(round_id, second.shares[0].nullifier) != "confirmed":
                await asyncio.sleep(0.1)
        assert time.time() >= late
        rounds = {entry["round"]: entry for entry in (await helper.operator_get("/rounds"))["rounds"]}
        assert rounds[round_id.hex()]["frozen"] is None
        assert rounds[other_round.hex()]["frozen"] is None
        checks = {check["name"]: check for check in (await helper.service_stats())["checks"]}
        assert (checks["rounds"]["problem"], checks["rounds"]["note"]) == (None, None)


async def test_round_with_unknown_status_is_closed_and_purged(
    tmp_path: Path, http: httpx.AsyncClient, era: str
) -> None:
    flags = ("--block-seconds", "0.3", "--stand-in-proofs", *era_flags(era))
    async with (
        run_chain(tmp_path, *flags) as chain,
        run_helper(tmp_path, http, chain, helper={"purge_after_hours": 0}) as helper,
    ):
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(1800)))
        assert vote.is_accepted
        await chain.set_faults(halt_chain=True)  # no block ends the round before its status is unknown
        end = unix_time_in(2)
        await _change_end(chain, helper, round_id, end, block_time=end - 1)
        await chain.set_faults(routes=["rounds", "round"], round_status=9)
        await chain.post("/devnet/mine", {"time": end - 1})
        await helper.wait_until("reports the status", _has_note("status 9"))
        await chain.set_faults(halt_chain=False)
        await helper.wait_for("purges the round", lambda: helper.query_rows("SELECT count(*) FROM rounds") == [(0,)])
        assert helper.query_rows("SELECT count(*) FROM shares") == [(0,)]
        assert time.time() > end


def _has_note(text: str) -> Callable[[dict[str, Any]], bool]:
    """Return whether a check of the helper has this text in its problem or note."""
    return lambda facts: any(text in f"{check['problem']} {check['note']}" for check in facts["checks"])


async def _change_end(chain: DevChain, helper: HelperProcess, round_id: bytes, end: int, *, block_time: int) -> None:
    """Change the end of a round in a block of this time, and wait until the helper knows it."""
    await chain.post("/devnet/rounds/end-time", {"round_id": round_id.hex(), "vote_end_time": end})
    await chain.post("/devnet/mine", {"time": block_time})

    async def knows_end() -> bool:
        rounds = {entry["round"]: entry for entry in (await helper.operator_get("/rounds"))["rounds"]}
        return bool(rounds[round_id.hex()]["ends"] == end)

    await helper.wait_for("knows the new end", knows_end)
