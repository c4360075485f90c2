"""The circuit is detected automatically; a wrong configured one pauses reveals without spending attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from devnet import ballot
from devnet.wallet import CastVote, Wallet
from tests.support.devnet import DevChain, era_flags
from tests.support.harness import WARM_UP_TIMEOUT_SECONDS, HelperProcess, run_chain_and_helper, run_helper


async def post_first_shares(chain: DevChain, helper: HelperProcess, round_id: bytes, count: int) -> CastVote:
    """Cast a vote and post its first shares."""
    async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
        sealed = await wallet.seal_ballot(round_id, 1, 1, weight=50)
        position = await wallet.cast_ballot(sealed)
        return await wallet.post_shares(sealed, position, times=ballot.immediate_times(), indices=range(count))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("era", "circuit", "version", "initial_circuit"), [("0.5", "k11", "", "k10"), ("1.6", "k10", "v1.2.0", "k11")]
)
async def test_circuit_auto_finds_generation_without_spending_attempts(
    tmp_path: Path, era: str, circuit: str, version: str, initial_circuit: str
) -> None:
    flags = ("--circuit", circuit, "--version", version, *era_flags(era))
    async with run_chain_and_helper(tmp_path, *flags, helper={"max_concurrent_proofs": 1}) as (chain, helper):
        assert (await helper.service_stats())["circuit"] == initial_circuit
        round_id = await chain.open_round()
        vote = await post_first_shares(chain, helper, round_id, 2)
        await helper.wait_until_confirmed(vote, WARM_UP_TIMEOUT_SECONDS)  # it creates the keys of the other circuit
        facts = await helper.service_stats()
        assert facts["circuit"] == circuit
        assert facts["counts"].get("failures", 0) == 0
        assert facts["counts"]["answer_bad_proof"] >= 1
        assert helper.query_rows("SELECT value FROM meta WHERE key LIKE 'circuit:%'") == [(circuit,)]
        await helper.stop()
        async with run_helper(tmp_path, chain.http, chain) as restarted:  # fake provers need no key generation
            assert (await restarted.service_stats())["circuit"] == circuit, "the generation is stored for this chain"


@pytest.mark.anyio
@pytest.mark.rule("R11", "N21")
async def test_circuit_wrong_setting_pauses_queue(tmp_path: Path, era: str) -> None:
    async with run_chain_and_helper(
        tmp_path, *era_flags(era), prover={"circuit": "k11"}, helper={"max_concurrent_proofs": 1}
    ) as (chain, helper):
        round_id = await chain.open_round()
        await post_first_shares(chain, helper, round_id, 2)
        await helper.wait_until("is paused", lambda facts: "k11" in str(facts["paused"]))
        shares = (await helper.operator_get("/queue"))["shares"]
        assert len(shares) == 2
        assert {share["attempts"] for share in shares} == {0}
        assert await chain.spent_nullifiers(round_id) == {}
