"""Two endpoints, the first of which is bad in one way or another: the second serves, and no share pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.harness import Chain, cast_vote, helping

REVEALS = ["reveal-share"]
BAD: dict[str, dict[str, Any]] = {
    "refuses connections": {"refuse": 1},
    "drops replies": {"drop_reply": 1},
    "answers HTML": {"html": 1},
    "answers half a JSON": {"half_json": 1},
    "has lost its consensus": {"status_502": 1},
    "warms up": {"status_503": 1},
    "has other roots": {"wrong_root": True},
    "is of another chain": {"chain_id": "another-chain"},
    "is stale": {"stale": 30},
    "is catching up": {"catching_up": True},
    "refuses connections of reveals": {"routes": REVEALS, "refuse": 1},
    "answers HTML to reveals": {"routes": REVEALS, "html": 1},
    "answers half a JSON to reveals": {"routes": REVEALS, "half_json": 1},
    "has lost its consensus when a reveal comes": {"routes": REVEALS, "status_502": 1},
    "warms up when a reveal comes": {"routes": REVEALS, "status_503": 1},
    "says 400 to reveals": {"routes": REVEALS, "status_400": 1},
    "refuses good proofs": {"routes": REVEALS, "bad_proof": 1},
}


@pytest.mark.anyio
@pytest.mark.rule("R11")
@pytest.mark.parametrize("way", BAD)
async def test_one_bad_endpoint_costs_no_share_anything(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain, way: str
) -> None:
    await chain.faults(**BAD[way])
    sections: dict[str, Any] = {"helper": {"max_concurrent_proofs": 1}, "chain": {"stale_seconds": 3}}
    async with helping(tmp_path, http, chain, nodes=2, **sections) as helper:
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id)
        assert vote.accepted
        await helper.confirmed(vote)
        assert await chain.spent(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        counts = await helper.counts()
        assert counts.get("failures", 0) == counts.get("failed", 0) == 0
        assert helper.rows("SELECT count(*) FROM shares") == [(0,)]
        good = chain.nodes[1]["name"]
        ours = {share.nullifier.hex() for share in vote.shares}
        counted = {one["nullifier"] for one in await chain.reveals() if one["node"] == good and one["status"] == 200}
        assert counted >= ours, "through the second"
        log = helper.log.read_text()
        if "routes" not in BAD[way]:
            assert chain.nodes[0]["rest"].removeprefix("http://") in log, "the bad one is named"
