"""A wallet of library version 5.3.0: when it repeats a request, whom it asks next, and when it has confirmation."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import pytest

import proofs
from devnet.ballot import Ballot, seal_ballot
from devnet.clients.client_wallet import HelperState
from devnet.clients.responses import ChainOutcome
from devnet.clients.wallet_http import ATTEMPT_HEADER, normalize_base_url
from tests.simulation.virtual_loop import SimLoop
from tests.support.wallets.chain import MAX_CHAIN_BODY_BYTES, WalletError
from tests.support.wallets.library import LibraryShare, LibraryWallet, create_share

T = TypeVar("T")
CHAIN, FIRST, SECOND, THIRD = "http://chain", "http://first", "http://second", "http://third"
ACCEPTED = httpx.Response(200, json={"status": "queued"})
CHAIN_ACCEPTED = httpx.Response(200, json={"tx_hash": "AB" * 32, "code": 0})
Reply = httpx.Response | Exception | float | str
"""A response, an error after sending, "refused" (no connection), "receipt", or seconds without an answer."""


@dataclass
class SeenRequest:
    """A request: its virtual time, host, path, headers and body."""

    at: float
    host: str
    path: str
    headers: httpx.Headers
    body: bytes

    @property
    def token(self) -> str:
        return str(self.headers[ATTEMPT_HEADER])


class FakeServers(httpx.AsyncBaseTransport):
    """Servers with scripted replies by host; the last one is repeated."""

    def __init__(self, **replies: list[Reply]) -> None:
        self.replies = replies
        self.requests: list[SeenRequest] = []
        self.active = self.most_active = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host, now = request.url.host, asyncio.get_running_loop().time()
        body = await request.aread()
        self.requests.append(SeenRequest(now, host, request.url.path, request.headers, body))
        script = self.replies[host]
        reply = script.pop(0) if len(script) > 1 else script[0]
        if reply == "refused":
            raise httpx.ConnectError("refused", request=request)
        await request.extensions["trace"]("http11.send_request_headers.started", {})
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            if isinstance(reply, float):
                await asyncio.sleep(reply)
                reply = ACCEPTED
        finally:
            self.active -= 1
        if isinstance(reply, Exception):
            raise reply
        if reply == "receipt":
            fields = {"version": 1, "code": "request_body_timeout", "dispatch": "not_started"}
            return httpx.Response(408, json={"error": {**fields, "attempt": request.headers[ATTEMPT_HEADER]}})
        assert isinstance(reply, httpx.Response)
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    def hosts(self) -> list[str]:
        """The hosts of all requests, in order."""
        return [request.host for request in self.requests]


@pytest.fixture(scope="module")
def ballot() -> Ballot:
    _, public = proofs.elgamal_keygen(b"\7" * 32)
    round_id = proofs.random_field()
    return seal_ballot(
        round_id=round_id, ea_pk=public, proposal_id=1, vote_decision=0, weight=100, rng=random.Random(1)
    )


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run a test under virtual time."""
    result: T = SimLoop(random.Random("loop")).run_until_complete(test)
    return result


async def with_wallet(
    servers: FakeServers, act: Callable[[LibraryWallet], Awaitable[T]], *helpers: str, seed: int = 1
) -> T:
    """Run a wallet whose Unix time is that of the loop."""
    now = asyncio.get_running_loop().time
    async with LibraryWallet(CHAIN, helpers, rng=random.Random(seed), now=now, transport=servers) as wallet:
        return await act(wallet)


def share_of(ballot: Ballot, *helpers: str, index: int = 0, submit_at: int = 0) -> LibraryShare:
    return create_share(ballot, ballot.shares[index], 3, submit_at, helpers)


def deliver(ballot: Ballot, servers: FakeServers, *helpers: str) -> LibraryShare:
    """Deliver one share. The helpers are asked in the order in which they are given."""
    sent = share_of(ballot, *helpers)

    async def act(wallet: LibraryWallet) -> None:
        for rank, helper in enumerate(helpers):
            wallet.ranking.set_rank(helper, rank)
        await wallet.deliver([sent])

    run(with_wallet(servers, act, *helpers))
    return sent


def test_share_is_posted_as_the_library_does(ballot: Ballot) -> None:
    servers = FakeServers(first=[ACCEPTED])
    sent = deliver(ballot, servers, FIRST)
    (request,) = servers.requests
    assert request.path == "/shielded-vote/v1/shares"
    assert request.headers["content-type"] == "application/json"
    assert len(request.token) == 64
    assert request.token == request.token.lower()
    body = json.loads(request.body)
    assert set(body) == {
        "vote_round_id",
        "shares_hash",
        "proposal_id",
        "vote_decision",
        "enc_share",
        "share_index",
        "tree_position",
        "share_comms",
        "primary_blind",
        "submit_at",
    }
    assert (body["share_index"], body["submit_at"]) == (0, 0)
    assert sent.helpers == {FIRST: HelperState.ACCEPTED}


@pytest.mark.parametrize("reply", [httpx.Response(429, json={"error": "later"}), "receipt", "refused"])
def test_share_without_effect_goes_to_same_helper_after_200_and_600_ms(ballot: Ballot, reply: Reply) -> None:
    servers = FakeServers(first=[reply, reply, ACCEPTED], second=[ACCEPTED])
    sent = deliver(ballot, servers, FIRST, SECOND)
    assert [(request.host, round(request.at, 3)) for request in servers.requests] == [
        ("first", 0.0),
        ("first", 0.2),
        ("first", 0.8),
    ]
    assert len({request.token for request in servers.requests}) == 3
    assert sent.helpers == {FIRST: HelperState.ACCEPTED, SECOND: HelperState.UNTRIED}


def test_share_goes_to_next_helper_after_three_attempts_without_effect(ballot: Ballot) -> None:
    servers = FakeServers(first=[httpx.Response(429, json={})], second=[ACCEPTED])
    sent = deliver(ballot, servers, FIRST, SECOND)
    assert servers.hosts() == ["first"] * 3 + ["second"]
    assert sent.helpers == {FIRST: HelperState.INTERRUPTED, SECOND: HelperState.ACCEPTED}


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        (httpx.Response(503, json={"error": "starting"}), HelperState.UNKNOWN),
        (httpx.Response(200, html="<p>hello"), HelperState.UNKNOWN),
        (httpx.ReadError("reset"), HelperState.UNKNOWN),
        (31.0, HelperState.UNKNOWN),
        (httpx.Response(307, headers={"location": f"{THIRD}/"}), HelperState.REFUSED),
        (httpx.Response(400, json={"error": "no"}), HelperState.REFUSED),
        (httpx.Response(408, json={"error": "slow"}), HelperState.REFUSED),
    ],
)
def test_share_with_other_outcome_goes_to_next_helper_only(ballot: Ballot, reply: Reply, state: HelperState) -> None:
    servers = FakeServers(first=[reply], second=[ACCEPTED])
    sent = deliver(ballot, servers, FIRST, SECOND)
    assert servers.hosts() == ["first", "second"]
    assert servers.requests[1].at == (30.0 if isinstance(reply, float) else 0.0)
    assert sent.helpers == {FIRST: state, SECOND: HelperState.ACCEPTED}


def test_fan_out_of_a_share_ends_after_60_seconds(ballot: Ballot) -> None:
    servers = FakeServers(first=[31.0], second=[29.5], third=[ACCEPTED])
    sent = deliver(ballot, servers, FIRST, SECOND, THIRD)
    assert [request.at for request in servers.requests] == [0.0, 30.0]
    assert list(sent.helpers.values()) == [HelperState.UNKNOWN, HelperState.ACCEPTED, HelperState.UNTRIED]


def test_first_share_goes_first_and_at_most_32_shares_are_on_their_way(ballot: Ballot) -> None:
    servers = FakeServers(first=[1.0])
    shares = [share_of(ballot, FIRST, index=index % 16, submit_at=500) for index in range(48)]

    async def act(wallet: LibraryWallet) -> None:
        await wallet.deliver(shares)

    run(with_wallet(servers, act, FIRST))
    bodies = [json.loads(request.body) for request in servers.requests]
    assert (bodies[0]["share_index"], bodies[0]["submit_at"]) == (0, 0)
    assert servers.requests[1].at == 1.0
    assert servers.most_active == 32


def watch(
    ballot: Ballot, servers: FakeServers, states: dict[str, HelperState], *, end: float
) -> tuple[bool, LibraryShare]:
    """Watch a share that was due at second 100; the time starts at 100."""
    sent = share_of(ballot, *states, submit_at=100)
    sent.helpers.update(states)

    async def act(wallet: LibraryWallet) -> bool:
        await asyncio.sleep(100)
        return await wallet.watch(sent, end)

    return run(with_wallet(servers, act, *states)), sent


def status_of(word: str) -> httpx.Response:
    return httpx.Response(200, json={"status": word})


def test_two_different_helpers_confirm_a_share_whether_or_not_they_got_it(ballot: Ballot) -> None:
    pending, confirmed = status_of("pending"), status_of("confirmed")
    states = {FIRST: HelperState.ACCEPTED, SECOND: HelperState.UNTRIED, THIRD: HelperState.UNTRIED}
    servers = FakeServers(first=[confirmed], second=[pending, confirmed], third=[httpx.Response(200, html="<p>")])
    is_confirmed, sent = watch(ballot, servers, states, end=10_000)
    assert is_confirmed
    assert sent.confirmed_by == {FIRST, SECOND}
    assert sorted((request.host, request.at) for request in servers.requests) == [
        ("first", 110.0),
        ("second", 110.0),
        ("second", 125.0),
        ("third", 110.0),
        ("third", 125.0),
    ]
    path = f"/shielded-vote/v1/share-status/{ballot.round_id.hex()}/{sent.share.nullifier.hex()}"
    assert {request.path for request in servers.requests} == {path}


def test_one_confirmation_is_not_enough_and_recovery_stops_before_the_end(ballot: Ballot) -> None:
    servers = FakeServers(first=[status_of("confirmed")], second=[status_of("pending")])
    states = {FIRST: HelperState.ACCEPTED, SECOND: HelperState.REFUSED}
    is_confirmed, sent = watch(ballot, servers, states, end=150)
    assert not is_confirmed
    assert sent.confirmed_by == {FIRST}
    assert sent.recoveries == 0
    assert max(request.at for request in servers.requests) == 140.0


def test_overdue_share_is_posted_once_without_a_time_in_the_order_of_states(ballot: Ballot) -> None:
    states = {FIRST: HelperState.ACCEPTED, SECOND: HelperState.UNKNOWN, THIRD: HelperState.UNTRIED}
    servers = FakeServers(first=[status_of("pending")], second=[status_of("pending")], third=[status_of("pending")])
    is_confirmed, sent = watch(ballot, servers, states, end=230)
    assert not is_confirmed
    posts = [request for request in servers.requests if request.path.endswith("/shares")]
    # The end is 130 s after its time: it is overdue after 32.5 s, which the next question notices.
    assert [(post.host, post.at) for post in posts] == [("third", 140.0), ("second", 185.0)]
    assert {json.loads(post.body)["submit_at"] for post in posts} == {0}
    assert sent.recoveries == 2


def post_transaction(servers: FakeServers, route: str = "cast-vote", **body: str) -> ChainOutcome:
    async def act(wallet: LibraryWallet) -> ChainOutcome:
        return (await wallet.chain.post_transaction(route, body)).outcome

    return run(with_wallet(servers, act))


@pytest.mark.parametrize(
    ("replies", "outcome", "times"),
    [
        ([CHAIN_ACCEPTED], ChainOutcome.ACCEPTED, [0.0]),
        (["receipt", "refused", CHAIN_ACCEPTED], ChainOutcome.ACCEPTED, [0.0, 2.0, 6.0]),
        (["receipt"], ChainOutcome.NOT_STARTED, [0.0, 2.0, 6.0]),
        ([httpx.Response(502, json={"error": "lost"}), CHAIN_ACCEPTED], ChainOutcome.ACCEPTED, [0.0, 2.0]),
        ([151.0, "refused"], ChainOutcome.UNKNOWN, [0.0, 152.0, 156.0]),
        ([httpx.Response(422, json={"code": 1, "log": "spent"})], ChainOutcome.REFUSED, [0.0]),
        (
            [httpx.ReadError("reset"), httpx.Response(422, json={"code": 1, "log": "spent"})],
            ChainOutcome.UNKNOWN,
            [0.0, 2.0],
        ),
        ([httpx.Response(404, json={"error": "not found"})], ChainOutcome.NO_ROUTE, [0.0]),
    ],
)
def test_transaction_is_repeated_after_2_and_4_seconds_until_a_definite_response(
    replies: list[Reply], outcome: ChainOutcome, times: list[float]
) -> None:
    servers = FakeServers(chain=replies)
    assert post_transaction(servers) is outcome
    assert [request.at for request in servers.requests] == times
    assert len({request.body for request in servers.requests}) == 1
    assert len({request.token for request in servers.requests}) == len(times)


def test_transaction_above_1_mib_is_not_sent() -> None:
    servers = FakeServers(chain=[CHAIN_ACCEPTED])
    with pytest.raises(WalletError, match="too many"):
        post_transaction(servers, proof="A" * MAX_CHAIN_BODY_BYTES)
    assert servers.requests == []


def test_base_url_is_normalized_or_refused() -> None:
    assert normalize_base_url("https://vote.example/") == "https://vote.example"
    assert normalize_base_url("https://Vote.Example:443/mount/") == "https://vote.example/mount"
    for refused in (
        "ftp://v.example",
        "v.example",
        "https://me@v.example",
        "https://v.example?a",
        "https://v.example#a",
    ):
        with pytest.raises(ValueError, match="not a base URL"):
            normalize_base_url(refused)
