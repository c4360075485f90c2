"""Two endpoints, the first of which is bad in one way or another: the second serves, and no share pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.devnet import Chain
from tests.support.harness import cast_vote, helping

REVEALS = ["reveal-share"]
BAD: dict[str, dict[str, Any]] = {
    "refuses connections": {"refuse": 1},
    "answers HTML": {"html": 1},
    "answers half a JSON": {"half_json": 1},
    "has lost its consensus": {"status_502": 1},
    "warms up": {"status_503": 1},
    "has other roots": {"wrong_root": True},
    "is of another chain": {"chain_id": "another-chain"},
    "is stale": {"stale": 30},
    "answers HTML to reveals": {"routes": REVEALS, "html": 1},
    "has lost its consensus when a reveal comes": {"routes": REVEALS, "status_502": 1},
    "says 400 to reveals": {"routes": REVEALS, "status_400": 1},
    "refuses good proofs": {"routes": REVEALS, "bad_proof": 1},
}

MAY_TAKE = {"html", "half_json", "wrong_root"}
"""With these the first endpoint may have taken a reveal, and put it into a block."""


@pytest.mark.anyio
@pytest.mark.rule("R11")
@pytest.mark.parametrize("way", BAD)
async def test_one_bad_endpoint_costs_no_share_anything(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain, way: str
) -> None:
    await chain.faults(**BAD[way])
    sections: dict[str, Any] = {"helper": {"max_concurrent_proofs": 1}, "chain": {"stale_seconds": 3}}
    async with helping(tmp_path, http, chain, nodes=2, **sections) as helper:
        good = chain.by_node(1)
        round_id = await good.open_round()
        vote = await cast_vote(good, helper, round_id)
        assert vote.accepted
        await helper.confirmed(vote)
        assert await good.spent(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}
        counts = await helper.counts()
        assert counts.get("failures", 0) == counts.get("failed", 0) == 0
        assert helper.rows("SELECT count(*) FROM shares") == [(0,)]
        through = {
            one["nullifier"]
            for one in await good.reveals()
            if one["node"] == good.told["name"] and one["status"] == 200
        }
        if not BAD[way].keys() & MAY_TAKE:
            assert through >= {share.nullifier.hex() for share in vote.shares}
        log = helper.log.read_text()
        if "routes" not in BAD[way]:
            assert chain.nodes[0]["rest"].removeprefix("http://") in log, "the bad one is named"
