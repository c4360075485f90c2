"""With a node version that misleads, one reveal finds out the chain's circuit and the others wait for its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_circuit_selection import some_shares
from tests.support.harness import running

SHARES = 16


@pytest.mark.anyio
async def test_sixteen_due_shares_send_one_bad_proof_in_the_wrong_circuit(tmp_path: Path) -> None:
    flags = ("--circuit", "k10", "--version", "v1.2.0")  # begins with k11; the right proofs are the quick ones
    async with running(tmp_path, *flags, helper={"max_concurrent_proofs": 2}) as (chain, helper):
        assert (await helper.service())["circuit"] == "k11"
        round_id = await chain.open_round()
        vote = await some_shares(chain, helper, round_id, SHARES)
        await helper.confirmed(vote)
        refused = [entry for entry in await chain.reveals() if entry["status"] == 422]
        assert len(refused) == 1, "the others waited for the first answer"
        facts = await helper.service()
        assert facts["circuit"] == "k10"
        assert facts["counts"]["answer_bad_proof"] == 1
        assert facts["counts"].get("failures", 0) == 0
        assert facts["counts"]["confirmed"] == SHARES
        assert set((await chain.spent(round_id)).values()) == {1}
