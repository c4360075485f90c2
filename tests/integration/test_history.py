"""A new database joins an old round: due shares are revealed while 30,000 blocks are still being processed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.devnet import era_flags
from tests.support.harness import cast_vote, run_chain, run_helper

OLD_BLOCKS = 30_000
SECONDS_LEFT = 60.0
MAX_LATENESS_MS = 5000.0


@pytest.mark.rule("R2")
async def test_history_sync_does_not_delay_due_shares(tmp_path: Path, era: str) -> None:
    async with run_chain(tmp_path, "--block-seconds", "0.3", "--stand-in-proofs", *era_flags(era)) as chain:
        round_id = await chain.open_round(3600)
        for _ in range(OLD_BLOCKS // 2500):
            await chain.mine(2500)
        ending = await chain.open_round(SECONDS_LEFT)
        async with run_helper(tmp_path, chain.http, chain, chain={"rpc": []}) as helper:
            now = int(time.time())
            votes = [
                await cast_vote(chain, helper, round_id, times=[0] * 8 + [now + 6] * 8),
                await cast_vote(chain, helper, ending, proposal=2),
            ]
            for vote in votes:
                await helper.wait_until_confirmed(vote)
            facts = await helper.service_stats()
            assert facts["unread_blocks"] > 0, "the history must not have been read yet"
            assert facts["counts"]["confirmed"] == 32
            assert facts["lateness_broadcast"]["count"] == 32
            assert facts["lateness_broadcast"]["p99_ms"] <= MAX_LATENESS_MS
            assert (await chain.http.get(f"{helper.url}/readyz")).status_code == 200
            verbose = (await chain.http.get(f"{helper.url}/readyz", params={"verbose": ""})).text
            assert "older blocks have not been read yet" in verbose
            assert (await chain.http.get(f"{helper.url}/shielded-vote/v1/status")).json()["status"] == "ok"
