"""Votes through the routes of real chains: accepted shape, error texts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import proofs
from devnet import vote_submission
from devnet.ballot import seal_ballot
from devnet.gojson import b64
from devnet.wallet import WalletError
from tests.unit.devnet.support import API_PREFIX, ChainFixture, run_chain
from tests.unit.devnet.test_wallet import FakeHelper, create_wallet


async def mine_continuously(chain: ChainFixture) -> None:
    """Produce blocks until cancelled."""
    while True:
        await chain.mine()
        await asyncio.sleep(0.02)


async def test_vote_by_production_routes_is_added_to_tree() -> None:
    async with run_chain() as chain, create_wallet(chain, FakeHelper(), uses_control_routes=False) as (wallet, _):
        round_id = await chain.create_round()
        miner = asyncio.create_task(mine_continuously(chain))
        try:
            vote = await wallet.cast_vote(round_id, 1, 1, weight=9)
        finally:
            miner.cancel()
        assert vote.is_accepted
        assert vote.position == 2  # after the VAN of the delegation and that of the vote itself
        assert chain.devnet.chain.rounds[round_id].tree.leaf(2) == vote.ballot.commitment


async def test_vote_for_inactive_round_is_refused() -> None:
    async with run_chain() as chain, create_wallet(chain, uses_control_routes=False) as (wallet, _):
        round_id = await chain.create_round(status=4)
        ballot = seal_ballot(
            round_id=round_id,
            ea_pk=chain.devnet.chain.rounds[round_id].ea_pk,
            proposal_id=1,
            vote_decision=1,
            weight=1,
            rng=wallet._rng,
        )
        with pytest.raises(WalletError, match=r"delegate-vote: HTTP 422 .*not active"):
            await wallet.cast_ballot(ballot)


@pytest.mark.parametrize(
    ("route", "field", "value", "message"),
    [
        ("cast-vote", "vote_commitment", b64(b"short"), "vote_commitment must be 32 bytes, got 5"),
        ("cast-vote", "vote_commitment", 7, "cannot unmarshal number"),
        ("cast-vote", "proof", "", "proof must be 1..8192 bytes, got 0"),
        ("cast-vote", "vote_comm_tree_anchor_height", 0, "cannot be zero"),
        ("cast-vote", "proposal_id", "1", "cannot unmarshal string"),
        ("delegate-vote", "van_cmx", None, "van_cmx must be 32 bytes, got 0"),
        ("delegate-vote", "spend_auth_sig", b64(bytes(63)), "spend_auth_sig must be 64 bytes, got 63"),
    ],
)
async def test_malformed_vote_message_is_bad_request(
    chain: ChainFixture, route: str, field: str, value: object, message: str
) -> None:
    round_id = await chain.create_round()
    body: dict[str, Any] = vote_submission.delegation_body(round_id)
    if route == "cast-vote":
        body = vote_submission.cast_vote_body(round_id, proofs.random_field(), proposal_id=1, anchor_height=5)
    response = await chain.rest.post(f"{API_PREFIX}/{route}", json=body | {field: value})
    assert response.status_code == 400
    assert message in response.json()["error"]
    assert (await chain.rest.post(f"{API_PREFIX}/{route}", json=body)).json()["code"] == 0
