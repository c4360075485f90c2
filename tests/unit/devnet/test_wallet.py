"""Wallets encrypt, and have the same timeouts and retries as real wallets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import proofs
from devnet.ballot import SHARE_COUNT, same_second_times, split_weight, spread_times
from devnet.tx import Reveal
from devnet.wallet import Wallet, WalletError
from tests.unit.devnet.support import START_TIME, ChainFixture


class FakeHelper:
    """A helper that sends configured responses and stores what it receives."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.responses: list[Response | Exception] = []
        self.app = Starlette(routes=[Route("/shielded-vote/v1/shares", self.accept_share, methods=["POST"])])

    async def accept_share(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.tokens.append(request.headers.get("x-helper-token"))
        response = self.responses.pop(0) if self.responses else JSONResponse({"status": "queued"})
        if isinstance(response, Exception):
            raise response
        return response


@asynccontextmanager
async def create_wallet(
    chain: ChainFixture, *helpers: FakeHelper, **options: Any
) -> AsyncIterator[tuple[Wallet, list[float]]]:
    """A wallet that reaches the chain and the helpers without sockets; the second value is its pauses."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    mounts: dict[str, httpx.AsyncBaseTransport | None] = {"http://chain": httpx.ASGITransport(chain.nodes[0].rest)}
    for number, helper in enumerate(helpers):
        mounts[f"http://helper{number}"] = httpx.ASGITransport(helper.app)
    async with httpx.AsyncClient(mounts=mounts) as http:
        urls = [f"http://helper{number}" for number in range(len(helpers))]
        rng = random.Random(7)
        yield Wallet("http://chain", urls, http=http, sleep=sleep, rng=rng, **options), pauses


async def mine_until_done(chain: ChainFixture, task: asyncio.Task[Any]) -> Any:
    """Produce a block whenever a transaction is pending, until the task is done."""
    while not task.done():
        if chain.devnet.admission.has_other_messages:
            await chain.mine()
        await asyncio.sleep(0)
    return task.result()


async def test_vote_has_sixteen_provable_shares_summing_to_weight(chain: ChainFixture) -> None:
    round_id = await chain.create_round(vote_end_time=START_TIME + 100)
    helper = FakeHelper()
    async with create_wallet(chain, helper) as (wallet, _):
        voting = asyncio.create_task(wallet.cast_vote(round_id, 1, 1, weight=987))
        vote = await mine_until_done(chain, voting)
    assert vote.is_accepted
    assert vote.position == 1
    assert chain.devnet.chain.rounds[round_id].tree.leaf(1) == vote.ballot.commitment
    assert sum(share.value for share in vote.ballot.shares) == 987
    for body, share in zip(helper.bodies, vote.shares, strict=True):
        (checked,) = proofs.read_shares([json.dumps(body).encode()])
        assert isinstance(checked, proofs.ReadShare)
        assert checked.vote_commitment == vote.ballot.commitment
        assert checked.nullifier == share.nullifier
        assert body["tree_position"] == 1
        assert len(body["all_enc_shares"]) == SHARE_COUNT
        assert "submit_at" not in body
    for share in vote.ballot.shares:
        reveal = chain.create_stand_in_reveal(vote.ballot, share.index)
        assert isinstance(reveal, Reveal)
        await chain.send_reveal(reveal)
    await chain.mine()
    await chain.mine(4, time=START_TIME + 100)
    assert chain.devnet.chain.rounds[round_id].totals == {(1, 1): 987}


async def test_share_bodies_have_recorded_fields(chain: ChainFixture, recorded_shares: list[dict[str, Any]]) -> None:
    round_id = await chain.create_round()
    ballot, position = await chain.cast_vote(round_id)
    helper = FakeHelper()
    async with create_wallet(chain, helper, token="closed") as (wallet, _):
        await wallet.post_shares(ballot, position, times=[0] * SHARE_COUNT)
        vote = await wallet.post_shares(ballot, position, times=same_second_times(1234), indices=[5])
    recorded = recorded_shares[0]
    assert set(helper.bodies[0]) == set(recorded)
    assert set(helper.bodies[0]["enc_share"]) == set(recorded["enc_share"])
    assert helper.bodies[-1]["submit_at"] == 1234
    assert helper.bodies[-1]["enc_share"]["share_index"] == 5
    assert [share.submit_at for share in vote.shares] == [1234]
    assert set(helper.tokens) == {"closed"}


async def test_wallet_retries_shares_after_retryable_responses(chain: ChainFixture) -> None:
    ballot, position = await chain.cast_vote(await chain.create_round())
    helper = FakeHelper()
    helper.responses = [
        JSONResponse({"error": "busy"}, 429),
        JSONResponse({"error": "paused"}, 503),
        JSONResponse({"status": "queued"}),
        JSONResponse({"status": "error", "error": "no such round"}, 400),
    ]
    async with create_wallet(chain, helper) as (wallet, pauses):
        vote = await wallet.post_shares(ballot, position, times=[0] * SHARE_COUNT, indices=[0, 1])
    first, second = (share.posts[0] for share in vote.shares)
    assert (first.is_accepted, first.attempts, pauses) == (True, 3, [0.2, 0.6])
    assert (second.status, second.outcome, second.attempts) == (400, "no such round", 1)
    assert not vote.is_accepted


async def test_wallet_retries_and_reports_lost_responses(chain: ChainFixture) -> None:
    ballot, position = await chain.cast_vote(await chain.create_round())
    helper = FakeHelper()
    helper.responses = [httpx.ReadTimeout("slow"), httpx.ReadError("lost"), PlainTextResponse("?", 502)]
    async with create_wallet(chain, helper) as (wallet, _):
        vote = await wallet.post_shares(ballot, position, times=[0] * SHARE_COUNT, indices=[0])
    (post,) = vote.shares[0].posts
    assert (post.status, post.outcome, post.attempts, post.is_accepted) == (502, "?", 3, False)


async def test_wallet_tries_failing_helper_last(chain: ChainFixture) -> None:
    ballot, position = await chain.cast_vote(await chain.create_round())
    bad, good = FakeHelper(), FakeHelper()
    bad.responses = [JSONResponse({"error": "down"}, 500) for _ in range(100)]
    async with create_wallet(chain, bad, good) as (wallet, _):
        vote = await wallet.post_shares(ballot, position, times=[0] * SHARE_COUNT)
    assert vote.is_accepted
    assert len(good.bodies) == SHARE_COUNT
    # Three shares (the even ones) tried it three times each; then the wallet stopped using it.
    assert len(bad.bodies) == 9


async def test_wallet_sends_shares_to_several_helpers_concurrently(chain: ChainFixture) -> None:
    ballot, position = await chain.cast_vote(await chain.create_round())
    helpers = [FakeHelper(), FakeHelper(), FakeHelper()]
    async with create_wallet(chain, *helpers, mode="parallel", copies=2) as (wallet, _):
        vote = await wallet.post_shares(ballot, position, times=[0] * SHARE_COUNT)
    assert vote.is_accepted
    assert sum(len(helper.bodies) for helper in helpers) == 2 * SHARE_COUNT
    assert all(len({post.helper for post in share.posts}) == 2 for share in vote.shares)


async def test_wallet_failed_vote_states_reason(chain: ChainFixture) -> None:
    async with create_wallet(chain, FakeHelper()) as (wallet, _):
        with pytest.raises(WalletError, match="does not accept votes"):
            await wallet.cast_vote(bytes(32), 1, 1)
    round_id = await chain.create_round(vote_end_time=START_TIME + 10)
    async with create_wallet(chain, FakeHelper()) as (wallet, _):
        ballot = await wallet.seal_ballot(round_id, 1, 1)
        casting = asyncio.create_task(wallet.cast_ballot(ballot))
        while not chain.devnet.admission.has_other_messages:
            await asyncio.sleep(0)
        await chain.mine(time=START_TIME + 10)
        with pytest.raises(WalletError, match="vote_end_time"):
            await casting


def test_split_weight_has_sixteen_parts_with_same_sum() -> None:
    for seed in range(50):
        parts = split_weight(seed, random.Random(seed))
        assert len(parts) == SHARE_COUNT
        assert sum(parts) == seed
        assert min(parts) >= 0


def test_spread_submit_times_stay_in_window() -> None:
    times = spread_times(1000, 60, random.Random(1))
    assert len(times) == SHARE_COUNT
    assert all(1000 <= time <= 1060 for time in times)
    assert len(set(times)) > 1
