"""Votes by the routes of real chains: taken in their shape, refused in its words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import proofs
from devnet import vote_submission
from devnet.ballot import seal
from devnet.gojson import b64
from devnet.wallet import WalletError
from tests.unit.devnet.support import API, Net, running
from tests.unit.devnet.test_wallet import Helper, wallet_of

pytestmark = pytest.mark.anyio


async def mining(net: Net) -> None:
    """Blocks, for ever."""
    while True:
        await net.mine()
        await asyncio.sleep(0.02)


async def test_a_vote_by_the_routes_of_real_chains_is_in_the_tree() -> None:
    async with running() as net, wallet_of(net, Helper(), own_routes=False) as (wallet, _):
        round_id = await net.new_round()
        miner = asyncio.create_task(mining(net))
        try:
            vote = await wallet.cast_vote(round_id, 1, 1, weight=9)
        finally:
            miner.cancel()
        assert vote.accepted
        assert vote.position == 2  # behind the authority of the delegation, and that of the vote itself
        assert net.devnet.chain.rounds[round_id].tree.leaf(2) == vote.ballot.commitment


async def test_a_round_that_takes_no_votes_refuses_them() -> None:
    async with running() as net, wallet_of(net, own_routes=False) as (wallet, _):
        round_id = await net.new_round(status=4)
        ballot = seal(
            round_id=round_id,
            ea_pk=net.devnet.chain.rounds[round_id].ea_pk,
            proposal_id=1,
            vote_decision=1,
            weight=1,
            dice=wallet._dice,
        )
        with pytest.raises(WalletError, match=r"delegate-vote: HTTP 422 .*not active"):
            await wallet.cast(ballot)


@pytest.mark.parametrize(
    ("route", "field", "value", "told"),
    [
        ("cast-vote", "vote_commitment", b64(b"short"), "vote_commitment must be 32 bytes, got 5"),
        ("cast-vote", "vote_commitment", 7, "cannot unmarshal number"),
        ("cast-vote", "proof", "", "proof must be 1..8192 bytes, got 0"),
        ("cast-vote", "vote_comm_tree_anchor_height", 0, "cannot be zero"),
        ("delegate-vote", "van_cmx", None, "van_cmx must be 32 bytes, got 0"),
        ("delegate-vote", "spend_auth_sig", b64(bytes(63)), "spend_auth_sig must be 64 bytes, got 63"),
    ],
)
async def test_a_message_of_another_shape_is_400(route: str, field: str, value: object, told: str) -> None:
    async with running() as net:
        round_id = await net.new_round()
        body: dict[str, Any] = vote_submission.delegation(round_id)
        if route == "cast-vote":
            body = vote_submission.vote_message(round_id, proofs.random_field(), proposal_id=1, anchor_height=5)
        answer = await net.rest.post(f"{API}/{route}", json=body | {field: value})
        assert answer.status_code == 400
        assert told in answer.json()["error"]
        assert (await net.rest.post(f"{API}/{route}", json=body)).json()["code"] == 0
