"""If the node version is misleading, one reveal finds the chain's circuit and all others wait for its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from devnet import ballot
from tests.support.devnet import era_flags
from tests.support.harness import WARM_UP_TIMEOUT_SECONDS, run_chain_and_helper, run_helper

SHARES = 4


@pytest.mark.rule("N21")
async def test_circuit_trial_with_several_due_shares_sends_one_invalid_proof(tmp_path: Path, era: str) -> None:
    flags = (*era_flags(era), "--version", "v1.2.0")  # starts with k11, so the valid proofs are the fast ones
    async with run_chain_and_helper(tmp_path, *flags, helper={"max_concurrent_proofs": 2}) as (chain, helper):
        assert (await helper.service_stats())["circuit"] == "k11"
        round_id = await chain.open_round()
        async with helper.create_wallet() as wallet:
            sealed = await wallet.seal_ballot(round_id, 1, 1)
            position = await wallet.cast_ballot(sealed)
            vote = await wallet.post_shares(sealed, position, times=ballot.immediate_times(), indices=range(SHARES))
        await helper.wait_until_confirmed(vote, WARM_UP_TIMEOUT_SECONDS)
        refused = [entry for entry in await chain.broadcasts() if entry["status"] == 422]
        assert len(refused) == 1, "the others waited for the first response"
        facts = await helper.service_stats()
        assert facts["circuit"] == "k10"
        assert facts["counts"]["answer_bad_proof"] == 1
        assert facts["counts"].get("failures", 0) == 0
        assert facts["counts"]["confirmed"] == SHARES
        assert set((await chain.spent_nullifiers(round_id)).values()) == {1}
        assert await helper.stop() == 0
        async with run_helper(tmp_path, chain.http, chain) as restarted:  # fake provers need no key generation
            assert (await restarted.service_stats())["circuit"] == "k10", "the circuit is stored for this chain"
