"""Wallets really encrypt, and are exactly as patient as real ones."""

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
from devnet.ballot import SHARES, same_second, split, spread
from devnet.tx import Reveal
from devnet.wallet import Wallet, WalletError
from tests.unit.devnet.support import START, Net, running

pytestmark = pytest.mark.anyio


class Helper:
    """A helper that says what it is told to and keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.script: list[Response | Exception] = []
        self.app = Starlette(routes=[Route("/shielded-vote/v1/shares", self.take, methods=["POST"])])

    async def take(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.tokens.append(request.headers.get("x-helper-token"))
        answer = self.script.pop(0) if self.script else JSONResponse({"status": "queued"})
        if isinstance(answer, Exception):
            raise answer
        return answer


@asynccontextmanager
async def wallet_of(net: Net, *helpers: Helper, **options: Any) -> AsyncIterator[tuple[Wallet, list[float]]]:
    """A wallet that reaches the chain and the helpers without any socket; the second value is its pauses."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    mounts: dict[str, httpx.AsyncBaseTransport | None] = {"http://chain": httpx.ASGITransport(net.nodes[0].rest)}
    for number, helper in enumerate(helpers):
        mounts[f"http://helper{number}"] = httpx.ASGITransport(helper.app)
    async with httpx.AsyncClient(mounts=mounts) as http:
        urls = [f"http://helper{number}" for number in range(len(helpers))]
        dice = random.Random(7)
        yield Wallet("http://chain", urls, http=http, sleep=sleep, dice=dice, **options), pauses


async def mine_until(net: Net, task: asyncio.Task[Any]) -> Any:
    """Make a block whenever there is something to put into one, until the task is done."""
    while not task.done():
        if net.devnet.admission.has_others:
            await net.mine()
        await asyncio.sleep(0)
    return task.result()


async def test_a_vote_is_sixteen_shares_that_prove_themselves_and_sum_to_its_weight() -> None:
    async with running() as net:
        round_id = await net.new_round(vote_end_time=START + 100)
        helper = Helper()
        async with wallet_of(net, helper) as (wallet, _):
            voting = asyncio.create_task(wallet.cast_vote(round_id, 1, 1, weight=987))
            vote = await mine_until(net, voting)
        assert vote.accepted
        assert vote.position == 1
        assert net.devnet.chain.rounds[round_id].tree.leaf(1) == vote.ballot.commitment
        assert sum(share.value for share in vote.ballot.shares) == 987
        for body, share in zip(helper.bodies, vote.shares, strict=True):
            (checked,) = proofs.read_shares([json.dumps(body).encode()])
            assert isinstance(checked, proofs.ReadShare)
            assert checked.vote_commitment == vote.ballot.commitment
            assert checked.nullifier == share.nullifier
            assert body["tree_position"] == 1
            assert len(body["all_enc_shares"]) == SHARES
            assert "submit_at" not in body
        for share in vote.ballot.shares:
            reveal = net.stand_in(vote.ballot, share.index)
            assert isinstance(reveal, Reveal)
            await net.send(reveal)
        await net.mine()
        await net.mine(4, time=START + 100)
        assert net.devnet.chain.rounds[round_id].totals == {(1, 1): 987}


async def test_bodies_have_the_recorded_fields(recorded_shares: list[dict[str, Any]]) -> None:
    async with running() as net:
        round_id = await net.new_round()
        ballot, position = await net.vote(round_id)
        helper = Helper()
        async with wallet_of(net, helper, token="closed") as (wallet, _):
            await wallet.post(ballot, position, times=[0] * SHARES)
            vote = await wallet.post(ballot, position, times=same_second(1234), indices=[5])
        recorded = recorded_shares[0]
        assert set(helper.bodies[0]) == set(recorded)
        assert set(helper.bodies[0]["enc_share"]) == set(recorded["enc_share"])
        assert helper.bodies[-1]["submit_at"] == 1234
        assert helper.bodies[-1]["enc_share"]["share_index"] == 5
        assert [share.submit_at for share in vote.shares] == [1234]
        assert set(helper.tokens) == {"closed"}


async def test_shares_are_tried_again_where_the_answer_may_change() -> None:
    async with running() as net:
        ballot, position = await net.vote(await net.new_round())
        helper = Helper()
        helper.script = [
            JSONResponse({"error": "busy"}, 429),
            JSONResponse({"error": "paused"}, 503),
            JSONResponse({"status": "queued"}),
            JSONResponse({"status": "error", "error": "no such round"}, 400),
        ]
        async with wallet_of(net, helper) as (wallet, pauses):
            vote = await wallet.post(ballot, position, times=[0] * SHARES, indices=[0, 1])
        first, second = (share.posts[0] for share in vote.shares)
        assert (first.accepted, first.attempts, pauses) == (True, 3, [0.2, 0.6])
        assert (second.status, second.answer, second.attempts) == (400, "no such round", 1)
        assert not vote.accepted


async def test_lost_answers_are_tried_again_and_reported() -> None:
    async with running() as net:
        ballot, position = await net.vote(await net.new_round())
        helper = Helper()
        helper.script = [httpx.ReadTimeout("slow"), httpx.ReadError("lost"), PlainTextResponse("?", 502)]
        async with wallet_of(net, helper) as (wallet, _):
            vote = await wallet.post(ballot, position, times=[0] * SHARES, indices=[0])
        (post,) = vote.shares[0].posts
        assert (post.status, post.answer, post.attempts, post.accepted) == (502, "?", 3, False)


async def test_a_helper_that_fails_three_times_comes_last() -> None:
    async with running() as net:
        ballot, position = await net.vote(await net.new_round())
        bad, good = Helper(), Helper()
        bad.script = [JSONResponse({"error": "down"}, 500) for _ in range(100)]
        async with wallet_of(net, bad, good) as (wallet, _):
            vote = await wallet.post(ballot, position, times=[0] * SHARES)
        assert vote.accepted
        assert len(good.bodies) == SHARES
        # Three shares (the even ones) met it with three attempts each; then it rested.
        assert len(bad.bodies) == 9


async def test_shares_can_go_to_several_helpers_all_at_once() -> None:
    async with running() as net:
        ballot, position = await net.vote(await net.new_round())
        helpers = [Helper(), Helper(), Helper()]
        async with wallet_of(net, *helpers, mode="parallel", copies=2) as (wallet, _):
            vote = await wallet.post(ballot, position, times=[0] * SHARES)
        assert vote.accepted
        assert sum(len(helper.bodies) for helper in helpers) == 2 * SHARES
        assert all(len({post.helper for post in share.posts}) == 2 for share in vote.shares)


async def test_votes_that_cannot_be_cast_say_why() -> None:
    async with running() as net:
        async with wallet_of(net, Helper()) as (wallet, _):
            with pytest.raises(WalletError, match="does not accept votes"):
                await wallet.cast_vote(bytes(32), 1, 1)
        round_id = await net.new_round(vote_end_time=START + 10)
        async with wallet_of(net, Helper()) as (wallet, _):
            ballot = await wallet.seal(round_id, 1, 1)
            casting = asyncio.create_task(wallet.cast(ballot))
            while not net.devnet.admission.has_others:
                await asyncio.sleep(0)
            await net.mine(time=START + 10)
            with pytest.raises(WalletError, match="vote_end_time"):
                await casting


def test_splits_are_sixteen_parts_of_the_whole() -> None:
    for seed in range(50):
        parts = split(seed, random.Random(seed))
        assert len(parts) == SHARES
        assert sum(parts) == seed
        assert min(parts) >= 0


def test_spread_times_stay_in_their_window() -> None:
    times = spread(1000, 60, random.Random(1))
    assert len(times) == SHARES
    assert all(1000 <= time <= 1060 for time in times)
    assert len(set(times)) > 1
