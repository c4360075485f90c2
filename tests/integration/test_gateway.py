"""The chain under the helper's address over real sockets: a wallet's whole vote, large answers, bad nodes, many at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from devnet.wallet import Wallet
from helper.chain.gateway_proxy import GatewayProxy
from helper.chain.models import BlockHead
from helper.chain.node_http import LARGE
from helper.chain.node_pool import NodePool, create_nodes
from helper.clock import SystemClock
from helper.server.application import wrapped
from helper.server.body_reader import BodyReader
from helper.server.http_server import bind_tcp, create_server
from helper.server.rate_limits import RefusalLimiter
from helper.server.routes.gateway import Gateway, GatewayLimits
from tests.support.devnet import Chain
from tests.support.harness import Helper, helping, soon
from tests.support.tcp_gate import doors

pytestmark = pytest.mark.anyio

API = "/shielded-vote/v1"
ON = {"enable": True}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PIECE = b'"' + b"A" * 65_534 + b'"'
PIECES = 800
"""Of an answer of 50 MB."""

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """A node that answers whatever it is asked in its own way.

    Attributes:
        requests: heads that came.
        open: connections that are open.
        answers: by path, for paths that are answered in another way.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.answers: dict[str, Answer] = {}
        self.requests: list[bytes] = []
        self.open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                    path = self.requests[-1].split()[1].decode()
                    await self.answers.get(path, self.answer)(writer)
                    await writer.drain()
        finally:
            self.open -= 1
            writer.transport.abort()


@contextlib.asynccontextmanager
async def upstream(answer: Answer) -> AsyncIterator[Upstream]:
    """Such a node, listening."""
    node = Upstream(answer)
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0)
    node.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield node
    finally:
        server.close()


@contextlib.asynccontextmanager
async def gateway(
    *nodes: str, timeout: float = 5.0, limit: int = LARGE, bodies: BodyReader | None = None, **limits: Any
) -> AsyncIterator[tuple[str, Gateway]]:
    """A gateway alone, listening, in front of nodes that count as fresh; its address."""
    clock = SystemClock()
    endpoints = NodePool(create_nodes(nodes), clock=clock, chain_id="test")
    for endpoint in endpoints.all:
        endpoint.health.saw(BlockHead("test", 7, clock.now()), syncing=False, now=clock.now(), began=clock.monotonic())
    refusals = RefusalLimiter(clock)
    made = Gateway(
        GatewayProxy(endpoints, timeout=timeout, limit=limit),
        client=refusals.client,
        bodies=bodies,
        limits=GatewayLimits(**limits),
    )
    server = create_server(wrapped(made.routes(), refusals))
    listener = bind_tcp("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", made
    finally:
        server.should_exit = True
        await task
        await made.aclose()
        await endpoints.aclose()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_wallet_votes_through_one_address(tmp_path: Path, http: httpx.AsyncClient, chain: Chain) -> None:
    round_id = await chain.open_round()
    async with helping(tmp_path, http, chain, nodes=2, gateway=ON) as helper:
        async with Wallet(helper.url, [helper.url], own_routes=False, dice=random.Random(7)) as wallet:
            vote = await wallet.cast_vote(round_id, 1, 1, times=ballot.same_second(soon(1)))
            assert vote.accepted
        await helper.confirmed(vote)
        assert sum((await chain.spent(round_id)).values()) == 16
        active = await http.get(f"{helper.url}{API}/rounds/active")
        assert active.json()["round"]["vote_round_id"]
        # a reveal is the helper's own business
        assert (await http.post(f"{helper.url}{API}/reveal-share", json={})).status_code == 404
        told = helper.log.read_text()
        assert "cast-vote" not in told
        assert vote.ballot.commitment.hex() not in told


async def test_the_gateway_alone_needs_no_queue(tmp_path: Path, http: httpx.AsyncClient, chain: Chain) -> None:
    alone = {"disable": True}
    helper = Helper(tmp_path, http, chain, helper=alone, admin=alone, gateway=ON)
    await helper.start()
    try:
        async with helper.patience("passes on"):
            while (found := await http.get(f"{helper.url}{API}/rounds")).status_code == 503:
                await asyncio.sleep(0.05)
        assert found.status_code == 200
        assert (await http.post(f"{helper.url}{API}/shares", json={})).status_code == 404
    finally:
        await helper.kill()


async def test_one_node_away_or_slow_is_not_felt_and_all_away_is_503(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with doors(chain.nodes[0]["rest"], chain.nodes[1]["rest"]) as (first, second):
        settings = {"endpoints": [first.url, second.url], "rpc": ["", ""], "timeout_seconds": 1}
        async with helping(tmp_path, http, chain, gateway=ON, chain=settings) as helper:
            first.silent = True
            assert (await http.get(f"{helper.url}{API}/rounds", timeout=10)).status_code == 200
            await first.shut()
            assert (await http.get(f"{helper.url}{API}/rounds", timeout=10)).status_code == 200
            await second.shut()
            gone = await http.get(f"{helper.url}{API}/rounds", timeout=10)
            assert gone.status_code == 503
            assert gone.json()["status"] == "error"


async def large(writer: asyncio.StreamWriter) -> None:
    """A list of pieces, 50 MB of JSON."""
    length = PIECES * (len(PIECE) + 1) + 1
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n[" % length)
    for number in range(PIECES):
        writer.write(PIECE + (b"]" if number == PIECES - 1 else b","))
        await writer.drain()


async def endless(writer: asyncio.StreamWriter) -> None:
    """Chunks for ever."""
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
        await writer.drain()


async def test_fifty_megabytes_come_through_without_being_held(http: httpx.AsyncClient) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with upstream(large) as node, gateway(node.url) as (base, _):
        size, ends = 0, b""
        async with http.stream("GET", f"{base}{API}/rounds") as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_bytes():
                size += len(piece)
                ends = piece[-1:]
    assert size == PIECES * (len(PIECE) + 1) + 1
    assert ends == b"]"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40_000, f"{grown} kB"  # 50,000 and more if it were held


async def test_a_client_that_goes_away_ends_the_nodes_work(http: httpx.AsyncClient) -> None:
    async with upstream(endless) as node, gateway(node.url) as (base, made):
        async with http.stream("GET", f"{base}{API}/rounds") as answer:
            async for _ in answer.aiter_bytes():
                break
            assert (made.under_way, node.open) == (1, 1)
        await until(lambda: made.under_way == 0 and node.open == 0)


async def never(_: asyncio.StreamWriter) -> None:
    """No answer."""
    await asyncio.Event().wait()


async def test_a_client_that_goes_away_before_the_answer_ends_it_too() -> None:
    async with upstream(never) as node, gateway(node.url, timeout=60) as (base, made):
        port = int(base.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {API}/rounds HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await until(lambda: len(node.requests) == 1)
        writer.transport.abort()
        await until(lambda: made.under_way == 0)


async def test_a_client_that_does_not_read_is_cut_off_and_nothing_is_read_for_it() -> None:
    sent = 0

    async def counted(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
            await writer.drain()
            sent += len(PIECE)

    async with upstream(counted) as node, gateway(node.url, piece_seconds=0.3) as (base, made):
        port = int(base.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(f"GET {API}/rounds HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await until(lambda: len(node.requests) == 1)
        await until(lambda: made.under_way == 0 and node.open == 0)
        assert sent < 24 << 20  # what the sockets' buffers on the way take
        writer.transport.abort()


async def test_an_endless_answer_is_cut_off_and_is_seen_to_be(http: httpx.AsyncClient) -> None:
    async with upstream(endless) as node, gateway(node.url, limit=1 << 20) as (base, made):
        with pytest.raises(httpx.HTTPError):
            await http.get(f"{base}{API}/rounds")
        await until(lambda: made.under_way == 0 and node.open == 0)


async def test_an_answer_that_stands_still_is_cut_off_and_is_seen_to_be(http: httpx.AsyncClient) -> None:
    async def stands(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 100\r\n\r\n[")
        await writer.drain()
        await asyncio.Event().wait()

    async with upstream(stands) as node, gateway(node.url, timeout=0.3) as (base, made):
        with pytest.raises(httpx.HTTPError):
            await http.get(f"{base}{API}/rounds")
        await until(lambda: made.under_way == 0)


async def test_an_answer_that_takes_too_long_ends(http: httpx.AsyncClient) -> None:
    async def drips(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with upstream(drips) as node, gateway(node.url, whole_seconds=0.5) as (base, made):
        with pytest.raises(httpx.HTTPError):
            await http.get(f"{base}{API}/rounds")
        await until(lambda: made.under_way == 0)


async def test_sixty_four_at_once(http: httpx.AsyncClient, chain: Chain) -> None:
    await chain.open_round()
    async with gateway(chain.nodes[0]["rest"], chain.nodes[1]["rest"]) as (base, made):
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(limits=limits, timeout=30) as many:
            answers = await asyncio.gather(*(many.get(f"{base}{API}/rounds") for _ in range(64)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({json.dumps(answer.json()) for answer in answers}) == 1
        assert made.under_way == 0


@pytest.mark.parametrize(
    "line",
    [
        "GET /shielded-vote/v1/round/../rounds HTTP/1.1",
        "GET /shielded-vote/v1/./rounds HTTP/1.1",
        "GET /shielded-vote/v1/%2e%2e/v1/rounds HTTP/1.1",
        "GET /shielded-vote/v1/rounds%2factive HTTP/1.1",
        "GET /shielded-vote/v1\\rounds HTTP/1.1",
        "GET //shielded-vote/v1/rounds HTTP/1.1",
        "GET /shielded-vote/v1/rounds;x HTTP/1.1",
        "BREW /shielded-vote/v1/rounds HTTP/1.1",
        "OPTIONS /shielded-vote/v1/rounds HTTP/1.1",
        "GET http://127.0.0.1:1/shielded-vote/v1/round/../rounds HTTP/1.1",
    ],
)
async def test_odd_paths_and_methods_reach_no_node(line: str) -> None:
    async with upstream(large) as node, gateway(node.url) as (base, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
        writer.write(f"{line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        assert int(answer.split()[1]) in ({204} if line.startswith("OPTIONS") else {400, 404, 405})
        writer.transport.abort()
        assert node.requests == []


async def small(writer: asyncio.StreamWriter) -> None:
    """Two bytes of JSON."""
    writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")


class EndlessAnswer:
    """Chunks until nobody reads them.

    Attributes:
        stalled: answers of which nothing could be sent for a while.
    """

    def __init__(self) -> None:
        self.stalled = 0

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:
                break
        self.stalled += 1
        try:
            await writer.drain()
        finally:
            self.stalled -= 1


@contextlib.asynccontextmanager
async def unfinished(base: str, request: bytes, *sources: str) -> AsyncIterator[None]:
    """Connections from these addresses of this machine: each sends this much, and reads nothing."""
    writers = []
    try:
        for source in sources:
            port = int(base.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), limit=1 << 10)
            writers.append(writer)
            writer.write(request)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


SLOW_BODY = f"POST {API}/cast-vote HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n[".encode()
UNREAD = f"{API}/commitment-tree/{'ab' * 32}/leaves"
UNREAD_REQUEST = f"GET {UNREAD} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


TWO_CLIENTS = ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3")


async def test_gateway_slow_bodies_from_two_clients_leave_slots_for_others(http: httpx.AsyncClient) -> None:
    async with (
        upstream(small) as node,
        gateway(node.url, at_once=4, at_once_each=2) as (base, made),
        unfinished(base, SLOW_BODY, *TWO_CLIENTS),
    ):
        # The server reads its connections in order: when this one is answered, it has read the others, too.
        assert (await http.get(f"{base}{API}/nothing")).status_code == 404
        assert (await http.get(f"{base}{API}/rounds")).status_code == 200
        assert (await http.post(f"{base}{API}/cast-vote", json={"some": "vote"})).status_code == 200
        await until(lambda: made.under_way == 0)
        assert len(node.requests) == 2


async def test_gateway_large_slow_bodies_of_one_client_leave_memory_for_others(http: httpx.AsyncClient) -> None:
    begun = f"POST {API}/cast-vote HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n".encode() + b"[" * 50_000
    bodies = BodyReader(budget=100_000, budget_each=40_000, small=16_000)
    async with (
        upstream(small) as node,
        gateway(node.url, bodies=bodies) as (base, _),
        unfinished(base, begun, *["127.0.0.2"] * 4),
    ):
        assert (await http.get(f"{base}{API}/nothing")).status_code == 404
        assert (await http.post(f"{base}{API}/cast-vote", content=b"[" * 50_000)).status_code == 200


async def test_gateway_body_counts_until_its_request_has_ended(http: httpx.AsyncClient) -> None:
    bodies = BodyReader(budget=100_000, budget_each=40_000, small=16_000)
    vote = b"[" * 50_000
    sent = f"POST {API}/cast-vote HTTP/1.1\r\nHost: x\r\nContent-Length: {len(vote)}\r\n\r\n".encode() + vote
    async with upstream(never) as node, gateway(node.url, timeout=60, bodies=bodies) as (base, made):
        async with unfinished(base, sent, "127.0.0.1"):
            await until(lambda: len(node.requests) == 1)
            node.answer = small
            assert (await http.post(f"{base}{API}/cast-vote", content=vote)).status_code == 429
        await until(lambda: made.under_way == 0)
        assert (await http.post(f"{base}{API}/cast-vote", content=vote)).status_code == 200


def saying(head: bytes, rest: bytes) -> Answer:
    """Answers with this status and these headers, then sends the rest."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + head + b"\r\nContent-Type: application/json\r\n" + rest)

    return answer


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("status", [b"304 Not Modified", b"600 Odd", b"777 Odd", b"999 Odd"])
async def test_gateway_invalid_status_of_a_node_is_502(http: httpx.AsyncClient, status: bytes, method: str) -> None:
    path = "rounds" if method == "GET" else "cast-vote"
    async with upstream(saying(status, b"Content-Length: 2\r\n\r\n{}")) as node, gateway(node.url) as (base, _):
        refused = await http.request(method, f"{base}{API}/{path}", content=None if method == "GET" else b"{}")
    assert (refused.status_code, refused.json()["status"]) == (502, "error")


@pytest.mark.parametrize("rest", [b"\r\n", b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_gateway_204_of_a_node_has_no_body(http: httpx.AsyncClient, rest: bytes) -> None:
    async with upstream(saying(b"204 No Content", rest)) as node, gateway(node.url) as (base, made):
        answer = await http.get(f"{base}{API}/rounds")
        assert (answer.status_code, answer.content) == (204, b"")
        assert not {"content-length", "content-type", "transfer-encoding"} & set(answer.headers)
        assert (await http.get(f"{base}{API}/rounds")).status_code == 204
        await until(lambda: made.under_way == 0)


async def test_gateway_length_beside_chunks_is_ignored(http: httpx.AsyncClient) -> None:
    chunked = b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with upstream(saying(b"200 OK", chunked)) as node, gateway(node.url) as (base, _):
        answer = await http.get(f"{base}{API}/rounds")
    assert (answer.status_code, answer.content) == (200, b"{}")


async def test_gateway_full_of_slow_readers_frees_a_slot_for_another_client(http: httpx.AsyncClient) -> None:
    limits: dict[str, Any] = {"at_once": 4, "at_once_each": 2, "piece_seconds": 60}
    async with upstream(small) as node, gateway(node.url, **limits) as (base, made):
        node.answers[UNREAD] = endless = EndlessAnswer()
        async with unfinished(base, UNREAD_REQUEST, *TWO_CLIENTS):
            await until(lambda: endless.stalled == 4)
            assert made.under_way == 4
            assert (await http.get(f"{base}{API}/rounds")).status_code == 200
            await until(lambda: endless.stalled == made.under_way == 3)
            assert (await http.post(f"{base}{API}/cast-vote", json={"some": "vote"})).status_code == 200
        await until(lambda: made.under_way == 0)


async def test_gateway_full_with_one_slot_each_refuses_another_client(http: httpx.AsyncClient) -> None:
    async with upstream(small) as node, gateway(node.url, at_once=2, piece_seconds=60) as (base, made):
        node.answers[UNREAD] = endless = EndlessAnswer()
        async with unfinished(base, UNREAD_REQUEST, "127.0.0.2", "127.0.0.3"):
            await until(lambda: endless.stalled == 2)
            refused = await http.get(f"{base}{API}/rounds")
            assert refused.status_code == 503
            assert endless.stalled == made.under_way == 2
        await until(lambda: made.under_way == 0)


async def test_gateway_full_of_pending_reads_frees_the_oldest_for_another_client(http: httpx.AsyncClient) -> None:
    async with upstream(small) as node, gateway(node.url, timeout=60, at_once=4, at_once_each=2) as (base, made):
        node.answers[UNREAD] = never
        async with unfinished(base, UNREAD_REQUEST, *TWO_CLIENTS):
            await until(lambda: len(node.requests) == 4)
            assert (await http.get(f"{base}{API}/rounds")).status_code == 200
            await until(lambda: made.under_way == 3)
        await until(lambda: made.under_way == 0)


async def test_gateway_full_of_pending_posts_refuses_another_client_and_cuts_none(http: httpx.AsyncClient) -> None:
    post = f"POST {API}/cast-vote HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with upstream(small) as node, gateway(node.url, timeout=60, at_once=4, at_once_each=2) as (base, made):
        node.answers[f"{API}/cast-vote"] = never
        async with unfinished(base, post, *TWO_CLIENTS):
            await until(lambda: len(node.requests) == 4)
            assert (await http.get(f"{base}{API}/rounds")).status_code == 503
            assert made.under_way == 4
        await until(lambda: made.under_way == 0)
