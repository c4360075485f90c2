"""Two nodes, of which the first sends truncated JSON: no share spends an attempt, and confirmations wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.devnet import DevChain
from tests.support.harness import cast_vote, run_helper


@pytest.mark.rule("R11")
async def test_one_faulty_node_costs_no_attempt(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> None:
    await chain.set_faults(half_json=1)
    sections: dict[str, Any] = {"helper": {"max_concurrent_proofs": 1}, "chain": {"stale_seconds": 3}}
    async with run_helper(tmp_path, http, chain, nodes=2, **sections) as helper:
        healthy_node = chain.at_node(1)
        round_id = await healthy_node.open_round()
        vote = await cast_vote(healthy_node, helper, round_id)
        assert vote.is_accepted
        counted = {share.nullifier.hex(): 1 for share in vote.shares}
        async with helper.timeout("has revealed a vote"):
            while await healthy_node.spent_nullifiers(round_id) != counted:
                await asyncio.sleep(0.05)
        await chain.clear_faults()
        await helper.wait_until_confirmed(vote)
        counts = await helper.service_counts()
        assert counts.get("failures", 0) == counts.get("failed", 0) == 0
        assert helper.query_rows("SELECT count(*) FROM shares") == [(0,)]
        faulty = chain.nodes[0]["rest"].removeprefix("http://")
        assert faulty in helper.log.read_text(), "the report contains the faulty node"
