"""Requests of the kit against small servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from helper.clock import SystemClock
from helper.conformance.http_client import HelperClient, Reply, parse_address
from helper.conformance.raw_http import ConnectionEnded, encode_chunks, open_raw
from helper.conformance.verdicts import CheckFailed

pytestmark = pytest.mark.anyio

Respond = Callable[[int], bytes]
OK = b'HTTP/1.1 200 OK\r\nContent-Type: Application/JSON; charset=utf-8\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'


@asynccontextmanager
async def serve(respond: Respond, *, heads: list[bytes] | None = None) -> AsyncIterator[str]:
    """Respond to the n-th request head with `respond(n)`; close the connection after an empty response."""
    count = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if heads is not None:
                    heads.append(head)
                response = respond(count)
                count += 1
                writer.write(response)
                await writer.drain()
                if not response or b"close" in response:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://helper.example/", ("https://helper.example", "helper.example", 443, "", "helper.example")),
        ("http://[::1]:8090/vote/", ("http://[::1]:8090/vote", "::1", 8090, "/vote", "[::1]:8090")),
    ],
)
def test_address_of_base_url_is_parsed(url: str, expected: tuple[object, ...]) -> None:
    address = parse_address(url)
    assert (address.url, address.host, address.port, address.path, address.authority) == expected


@pytest.mark.parametrize(
    "url", ["helper", "ftp://helper", "http://helper/?a=1", "http://a:b@helper", "http://helper/#a"]
)
def test_address_of_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not a base URL"):
        parse_address(url)


async def test_client_sends_token_and_reads_reply() -> None:
    heads: list[bytes] = []
    async with serve(lambda _: OK, heads=heads) as url:
        client = HelperClient(parse_address(f"{url}/mount"), "secret", SystemClock())
        reply = await client.get("/shielded-vote/v1/status")
        await client.get("/shielded-vote/v1/status", token="")
        await client.aclose()
    assert (reply.status, reply.outcome, reply.media_type) == (200, "ok", "application/json")
    assert str(reply) == '200 Application/JSON; charset=utf-8 {"status":"ok"}'
    assert heads[0].startswith(b"GET /mount/shielded-vote/v1/status HTTP/1.1")
    assert b"secret" in heads[0]
    assert b"secret" not in heads[1]


@pytest.mark.parametrize(
    ("status", "expected"),
    [(200, False), (302, False), (400, True), (401, False), (408, False), (422, True), (429, False), (500, False)],
)
def test_reply_is_refusal_only_if_wallets_give_up(status: int, expected: bool) -> None:
    assert Reply(status, [], b"", 0.0).is_refusal is expected


@pytest.mark.parametrize(("method", "status"), [("GET", 429), ("POST", 429), ("POST", 503)])
async def test_client_repeats_a_request_that_was_refused_temporarily(method: str, status: int) -> None:
    limited = b"HTTP/1.1 %d Later\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n" % status
    async with serve(lambda number: limited if number < 2 else OK) as url:
        client = HelperClient(parse_address(url), "", SystemClock())
        assert (await client.send(method, "/")).status == 200
        await client.aclose()
    async with serve(lambda _: limited) as url:
        client = HelperClient(parse_address(url), "", SystemClock())
        assert (await client.send(method, "/", is_patient=False)).status == status
        await client.aclose()


async def test_client_reports_missing_response_as_failure() -> None:
    async with serve(lambda _: b"") as url:
        client = HelperClient(parse_address(url), "", SystemClock())
        with pytest.raises(CheckFailed, match="GET /x: RemoteProtocolError"):
            await client.get("/x")
        await client.aclose()


async def test_raw_connection_reads_every_form_of_a_response() -> None:
    responses = [
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + encode_chunks(b"abcdefg", 3),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end",
    ]
    async with serve(lambda number: responses[number]) as url, open_raw(parse_address(url), "") as connection:
        bodies = []
        for _ in responses:
            await connection.send(connection.head(method="GET", path="/"))
            bodies.append((await connection.response()).body)
        assert bodies == [b'{"status":"ok"}', b"abcdefg", b"", b"to the end"]
        assert await connection.is_closed()


async def test_raw_connection_that_ends_or_waits_is_reported() -> None:
    async with serve(lambda _: b"") as url, open_raw(parse_address(url), "") as connection:
        await connection.send(connection.head())
        with pytest.raises(ConnectionEnded):
            await connection.response()
    async with serve(lambda _: b"HTTP/1.1 200 OK\r\n") as url, open_raw(parse_address(url), "") as connection:
        await connection.send(connection.head())
        with pytest.raises(CheckFailed, match="no response within 0 s"):
            await connection.response(0.05)
        assert not await connection.is_closed(0.05)
    async with serve(lambda _: b"hello\r\n\r\n") as url, open_raw(parse_address(url), "") as connection:
        await connection.send(connection.head())
        with pytest.raises(CheckFailed, match="not an HTTP response: 'hello'"):
            await connection.response()


async def test_raw_connection_to_nowhere_is_a_failure() -> None:
    with pytest.raises(CheckFailed, match="no connection: ConnectionRefusedError"):
        async with open_raw(parse_address("http://127.0.0.1:1"), ""):
            pass


async def test_raw_requests_have_host_length_and_token() -> None:
    async with serve(lambda _: OK) as url:
        address = parse_address(f"{url}/mount")
        async with open_raw(address, "secret") as connection:
            request = connection.share_request(b"{}", [("X-Note", "1")], length=7)
    head = request.decode().split("\r\n")
    assert head[0] == "POST /mount/shielded-vote/v1/shares HTTP/1.1"
    assert f"Host: {address.authority}" in head
    assert {"Content-Length: 7", "X-Note: 1", "X-Helper-Token: secret", "Content-Type: application/json"} <= set(head)
    assert request.endswith(b"\r\n\r\n{}")
