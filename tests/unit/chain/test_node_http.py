"""HTTP client of a node: limits of time and size, redirects, lost responses, dead connections, credentials."""

from __future__ import annotations

import asyncio
import base64
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import httpx
import pytest

from helper.chain import node_http
from helper.chain.broadcast_outcome import Verdict
from helper.chain.node_http import (
    CHUNKS_PER_CHECKPOINT,
    DEFAULT_LIMIT_BYTES,
    ERROR_LIMIT_BYTES,
    MAX_RESPONSES,
    MIN_RESPONSES,
    STREAM_LIMIT_BYTES,
    NodeHttp,
    NoResponse,
    RequestProgress,
    ResponseTimes,
    StreamRequest,
    request_kind,
)
from helper.chain.rest_client import ChainClient
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainResponseError, ChainUnavailable, ConfigError
from tests.support.servers import serve_connections
from tests.unit.chain.fakes import create_client, create_transport

MESSAGE = RevealMessage(b"\x01" * 32, b"\x02" * 64, 1, 0, b"\x03" * 4000, b"\x04" * 32, 84)


class Tarpit(httpx.AsyncBaseTransport):
    """Accepts every request and never responds."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (httpx.ConnectError("refused"), Verdict.UNAVAILABLE),
        (httpx.ConnectTimeout("slow"), Verdict.UNAVAILABLE),
        (httpx.PoolTimeout("busy"), Verdict.UNAVAILABLE),
        (httpx.ReadTimeout("slow"), Verdict.AMBIGUOUS),
        (httpx.WriteError("broken pipe"), Verdict.AMBIGUOUS),
        (httpx.ReadError("reset"), Verdict.AMBIGUOUS),
        (httpx.RemoteProtocolError("closed"), Verdict.AMBIGUOUS),
    ],
)
@pytest.mark.rule("R11")
async def test_broadcast_outcome_reports_whether_bytes_were_sent(error: Exception, verdict: Verdict) -> None:
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        raise error

    outcome = await create_client(handle).broadcast(MESSAGE)
    assert outcome.verdict is verdict
    assert outcome.may_be_sent is (verdict is Verdict.AMBIGUOUS)
    assert len(requests) == 1, "a broadcast is never repeated"


async def test_node_http_request_without_response_ends_at_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "SEND_TIMEOUT_SECONDS", 0.02)
    client = ChainClient("http://node", transport=Tarpit(), timeout=0.02)
    with anyio.fail_after(5):
        with pytest.raises(NoResponse, match=r"no response within 0.02 s") as caught:
            await client.rounds()
        assert caught.value.sent
        assert (await client.broadcast(MESSAGE)).verdict is Verdict.AMBIGUOUS


async def test_node_with_a_call_in_progress_is_slow_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ChainClient("http://node", transport=Tarpit(), timeout=60)
    call = asyncio.create_task(client.rounds())
    await asyncio.sleep(0)
    now = anyio.current_time()
    for seconds, is_slow in ((0.5, False), (2.0, True)):
        with monkeypatch.context() as patched:
            patched.setattr(anyio, "current_time", lambda later=now + seconds: later)
            assert client.is_slow is is_slow
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert not client.is_slow


class DelayedNode(httpx.AsyncBaseTransport):
    """Responds after `head_delay` seconds, with a pause of `body_delay` seconds in the middle of the body."""

    def __init__(self) -> None:
        self.head_delay = 0.0
        self.body_delay = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await anyio.sleep(self.head_delay)

        async def iter_body() -> AsyncIterator[bytes]:
            yield b'{"syncing":'
            await anyio.sleep(self.body_delay)
            yield b"false}"

        return httpx.Response(200, content=iter_body())


async def read_fast_responses(client: ChainClient, node: DelayedNode) -> None:
    """Read as many responses as the limit is derived from."""
    node.head_delay = node.body_delay = 0.0
    for _ in range(node_http.MIN_RESPONSES):
        await client.is_syncing()


@pytest.mark.parametrize("delayed", ["head_delay", "body_delay"])
async def test_adaptive_read_ends_early_once_then_waits(monkeypatch: pytest.MonkeyPatch, delayed: str) -> None:
    monkeypatch.setattr(node_http, "MIN_LIMIT_SECONDS", 0.03)
    node = DelayedNode()
    client = ChainClient("http://node", transport=node, is_adaptive=True)
    setattr(node, delayed, 0.1)
    assert await client.is_syncing() is False, "without recent times the timeout applies"
    client = ChainClient("http://node", transport=node, is_adaptive=True)
    await read_fast_responses(client, node)
    setattr(node, delayed, 4.0)
    with anyio.fail_after(3), pytest.raises(NoResponse, match=r"no response within 0\.\d+ s"):
        await client.is_syncing()
    setattr(node, delayed, 0.2)
    assert await client.is_syncing() is False, "a slow node is not given up"


async def test_read_without_other_nodes_waits_for_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "MIN_LIMIT_SECONDS", 0.03)
    node = DelayedNode()
    client = ChainClient("http://node", transport=node)
    await read_fast_responses(client, node)
    node.head_delay = 0.1
    assert await client.is_syncing() is False


async def test_recent_times_of_one_kind_do_not_limit_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "MIN_LIMIT_SECONDS", 0.03)
    node = DelayedNode()
    client = ChainClient("http://node", transport=node, is_adaptive=True)
    await read_fast_responses(client, node)
    node.head_delay = 0.1
    assert (await client.get("/cosmos/base/tendermint/v1beta1/blocks/7")).status == 200


async def test_wait_for_response_to_send_follows_recent_sends() -> None:
    client = create_client(httpx.Response(503))
    for _ in range(node_http.MIN_RESPONSES):
        assert client.response_wait == node_http.RESPONSE_WAIT_SECONDS == 3
        await client.broadcast(MESSAGE)
    assert client.response_wait == node_http.MIN_LIMIT_SECONDS == 1


async def test_send_is_not_limited_by_the_timeout_of_reads() -> None:
    node = DelayedNode()
    client = ChainClient("http://node", transport=node, timeout=0.02)
    node.head_delay = 0.06
    assert (await client.broadcast(MESSAGE)).log != "no response within 0.02 s"
    with pytest.raises(NoResponse):
        await client.is_syncing()


async def test_progress_reports_request_written_to_silent_node() -> None:
    """Contract test of the event names of httpcore's trace extension."""
    accepted = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()

    async with serve_connections(accept) as port:
        client = ChainClient(f"http://127.0.0.1:{port}")
        progress = RequestProgress(lambda: 7.0)
        assert (progress.has_started, progress.written_at) == (False, None)
        send = asyncio.create_task(client.broadcast(MESSAGE, progress))
        with anyio.fail_after(5):
            while progress.written_at is None:
                await asyncio.sleep(0.001)
            await accepted.wait()
        assert (progress.has_started, progress.written_at, send.done()) == (True, 7.0, False)
        send.cancel()
        await asyncio.gather(send, return_exceptions=True)
        await client.aclose()


async def test_get_on_dead_connection_is_retried_once() -> None:
    results: list[Exception | httpx.Response] = [
        httpx.RemoteProtocolError("server disconnected"),
        httpx.Response(200, content=b'{"syncing":false}'),
        *[httpx.ReadError("reset")] * 2,
    ]

    def handle(request: httpx.Request) -> httpx.Response:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    client = create_client(handle)
    assert await client.is_syncing() is False
    with pytest.raises(ChainUnavailable, match="connection failed"):
        await client.is_syncing()
    assert results == []


async def test_node_http_does_not_follow_redirects() -> None:
    hosts: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        return httpx.Response(307, headers={"location": "http://elsewhere/"})

    client = create_client(handle)
    with pytest.raises(ChainResponseError, match="HTTP 307"):
        await client.is_syncing()
    assert (await client.broadcast(MESSAGE)).verdict is Verdict.UNAVAILABLE
    assert hosts == ["node", "node"]


async def test_node_http_refuses_long_and_compressed_responses() -> None:
    long = httpx.MockTransport(lambda _: httpx.Response(200, content=b" " * (DEFAULT_LIMIT_BYTES + 1)))
    with pytest.raises(ChainResponseError, match="longer than"):
        await ChainClient("http://node", transport=long).is_syncing()
    assert (await ChainClient("http://node", transport=long).broadcast(MESSAGE)).verdict is Verdict.AMBIGUOUS
    error = b'{"message":"%b"}' % (b"a" * ERROR_LIMIT_BYTES)
    failing = httpx.MockTransport(lambda _: httpx.Response(500, content=error))
    with pytest.raises(ChainResponseError, match="longer than 65536"):
        await ChainClient("http://node", transport=failing).is_syncing()
    body = gzip.compress(b'{"syncing":false}')
    packed = httpx.MockTransport(lambda _: httpx.Response(200, content=body, headers={"content-encoding": "gzip"}))
    with pytest.raises(ChainResponseError, match="compressed"):
        await ChainClient("http://node", transport=packed).is_syncing()


class ChunkedStream(httpx.AsyncByteStream):
    """A body of equal chunks that are all in the receive buffer, so that reading never waits.

    Attributes:
        served: number of chunks read.
    """

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._piece = b" " * size
        self.served = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._count):
            self.served += 1
            yield self._piece


async def longest_run_without_yield(body: ChunkedStream, read: Callable[[NodeHttp], Awaitable[None]]) -> int:
    """Maximum number of chunks read between two steps of another task."""
    longest = previous = 0

    async def count_turns() -> None:
        nonlocal longest, previous
        while True:
            longest, previous = max(longest, body.served - previous), body.served
            await anyio.sleep(0)

    http = NodeHttp("http://node", transport=create_transport(httpx.Response(200, stream=body)))
    async with anyio.create_task_group() as group:
        group.start_soon(count_turns)
        await anyio.sleep(0)
        try:
            await read(http)
        finally:
            longest = max(longest, body.served - previous)
            group.cancel_scope.cancel()
    return longest


async def get_body(http: NodeHttp) -> None:
    await http.get("/rounds")


async def stream_body(http: NodeHttp) -> None:
    async with http.stream(StreamRequest("GET", "/rounds")) as response:
        async for _ in response.iter_chunks():
            pass


@pytest.mark.parametrize("read", [get_body, stream_body])
async def test_node_http_yields_to_other_tasks_while_pieces_are_buffered(
    read: Callable[[NodeHttp], Awaitable[None]],
) -> None:
    assert await longest_run_without_yield(ChunkedStream(2000, 1), read) <= 2 * CHUNKS_PER_CHECKPOINT


@pytest.mark.parametrize("read", [get_body, stream_body])
async def test_node_http_refuses_response_in_too_many_small_pieces(
    read: Callable[[NodeHttp], Awaitable[None]],
) -> None:
    body = ChunkedStream(500_000, 1)
    with pytest.raises(ChainResponseError, match="too many small chunks"):
        await read(NodeHttp("http://node", transport=create_transport(httpx.Response(200, stream=body))))
    assert body.served < 5000


async def test_node_http_accepts_many_pieces_of_ordinary_size() -> None:
    body = ChunkedStream(20_000, 400)
    http = NodeHttp("http://node", transport=create_transport(httpx.Response(200, stream=body)))
    assert len((await http.get("/rounds", limit=STREAM_LIMIT_BYTES)).body) == 8_000_000


def test_node_name_has_no_credentials() -> None:
    assert NodeHttp("https://user:secret@node.example/base").name == "node.example:443"
    assert NodeHttp("http://[::1]:1317").name == "[::1]:1317"


async def test_node_http_sends_credentials_and_no_cookies() -> None:
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, content=b"{}", headers={"set-cookie": "route=7"})

    http = NodeHttp("http://us%40er:pass@node/base/", transport=httpx.MockTransport(handle))
    for _ in range(2):
        await http.get("/status")
    await http.get("/status", {"height": "7"})
    await http.post("/reveal", {"a": 1})
    async with http.stream(StreamRequest("GET", "/rounds?x=%2F")) as response:
        assert response.status == 200
    requests_sent = [(request.method, str(request.url.copy_with(userinfo=b""))) for request in requests]
    assert requests_sent == [
        ("GET", "http://node/base/status"),
        ("GET", "http://node/base/status"),
        ("GET", "http://node/base/status?height=7"),
        ("POST", "http://node/base/reveal"),
        ("GET", "http://node/base/rounds?x=%2F"),
    ]
    expected = "Basic " + base64.b64encode(b"us@er:pass").decode()
    assert [request.headers.get("authorization") for request in requests] == [expected] * len(requests)
    assert [request.headers["host"] for request in requests] == ["node"] * len(requests)
    assert not any("cookie" in request.headers for request in requests)


async def test_node_http_without_credentials_sends_none() -> None:
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(302, headers={"location": "http://elsewhere/"})

    response = await NodeHttp("http://node", transport=httpx.MockTransport(handle)).get("/status")
    assert (response.status, len(requests)) == (302, 1)
    assert "authorization" not in requests[0].headers


@pytest.mark.parametrize("url", ["node:1317", "ftp://node", "http://", "http://[::1", "unix:///run/node"])
def test_node_url_invalid_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        NodeHttp(url)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_node_http_gateway_error_is_unavailable(status: int) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=b"<html>"))
    with pytest.raises(ChainUnavailable, match=f"HTTP {status}"):
        await ChainClient("http://node", transport=transport).rounds()


def create_times(*seconds: float) -> ResponseTimes:
    times = ResponseTimes(10.0)
    for value in seconds:
        times.add(value)
    return times


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ([], 10.0),
        ([0.01] * (MIN_RESPONSES - 1), 10.0),
        ([0.01] * MIN_RESPONSES, 1.0),
        ([0.5, *[0.01] * MIN_RESPONSES], 2.0),
        ([0.5, *[0.01] * (MAX_RESPONSES - 1)], 2.0),
        ([0.5, *[0.01] * MAX_RESPONSES], 1.0),
        ([4.0] * MIN_RESPONSES, 10.0),
    ],
)
def test_limit_is_four_times_the_longest_recent_time(seconds: list[float], limit: float) -> None:
    assert create_times(*seconds).limit == limit


def test_limit_is_the_maximum_again_after_forget() -> None:
    times = create_times(*[0.01] * MIN_RESPONSES)
    times.forget()
    assert times.limit == 10.0


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/shielded-vote/v1/rounds", "/shielded-vote/v1/rounds"),
        (f"/shielded-vote/v1/round/{'7a' * 32}", "/shielded-vote/v1/round"),
        (f"/shielded-vote/v1/commitment-tree/{'7a' * 32}/464", "/shielded-vote/v1/commitment-tree"),
        (f"/shielded-vote/v1/commitment-tree/{'7a' * 32}/leaves", "/shielded-vote/v1/commitment-tree/leaves"),
        (f"/shielded-vote/v1/tx/{'7A' * 32}", "/shielded-vote/v1/tx"),
        ("/cosmos/base/tendermint/v1beta1/blocks/464", "/cosmos/base/tendermint/v1beta1/blocks"),
        ("/cosmos/base/tendermint/v1beta1/blocks/latest", "/cosmos/base/tendermint/v1beta1/blocks/latest"),
    ],
)
def test_kind_of_request_has_no_identifiers(path: str, kind: str) -> None:
    assert request_kind(path) == kind
