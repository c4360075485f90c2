"""Requests of the kit against small servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

import pytest

from conformance.check_failures import CheckFailed
from conformance.http_requests import ConnectionEnded, HelperClient, Reply, encode_chunks, open_raw, parse_address
from conformance.refusals import Reason, refused
from conformance.runner import run_checks, select_checks
from conformance.session import Session
from helper.clock import SystemClock
from tests.support.servers import serve_connections

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

    async with serve_connections(handle) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def serve_client(respond: Respond) -> AsyncIterator[HelperClient]:
    """A client of such a server."""
    async with serve(respond) as url:
        client = HelperClient(parse_address(url), "", SystemClock())
        yield client
        await client.aclose()


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
    "url",
    [
        *("helper", "ftp://helper", "http://helper/?a=1", "http://a:b@helper", "http://helper/#a"),
        *("http://h\udcff", "http://a_\u2026b", "http://helper:x"),
    ],
)
def test_address_of_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not a base URL"):
        parse_address(url)


async def test_client_sends_token_and_reads_reply() -> None:
    heads: list[bytes] = []
    async with serve(lambda _: OK, heads=heads) as url:
        client = HelperClient(parse_address(f"{url}/mount"), "sécret", SystemClock())
        reply = await client.get("/shielded-vote/v1/status")
        await client.get("/shielded-vote/v1/status", token="")
        await client.aclose()
    assert (reply.status, reply.outcome, reply.media_type) == (200, "ok", "application/json")
    assert str(reply) == '200 Application/JSON; charset=utf-8 {"status":"ok"}'
    assert heads[0].startswith(b"GET /mount/shielded-vote/v1/status HTTP/1.1")
    assert "sécret".encode() in heads[0]
    assert "sécret".encode() not in heads[1]


@pytest.mark.parametrize(
    ("status", "text", "reasons", "is_fit"),
    [
        (400, b'{"error":"primary_blind: expected 32 bytes, got 31"}', [Reason.CONTENT], True),
        (400, b'{"error":"c1: not a point"}', [Reason.CONTENT], False),
        (400, b'{"error":"invalid JSON: submit_at: not a number"}', [Reason.CONTENT], False),
        (400, b'{"error":"the shares_hash does not match"}', [Reason.CONTENT], True),
        (400, b"<html>Bad Request</html>", [Reason.CONTENT], True),
        (400, b'{"error":"invalid submit_at: 9 > 5"}', [Reason.CONTENT], False),
        (400, b'{"error":"invalid submit_at: 9 > 5"}', [Reason.CONTENT, Reason.TIME], False),
        (409, b'{"error":"conflict"}', [Reason.CONTENT], False),
        (409, b'{"error":"conflict"}', [Reason.CONTENT, Reason.CONFLICT], True),
        (404, b"404 page not found", [Reason.CONTENT], False),
        (400, b'{"jsonrpc":"2.0","error":{"data":"read body: i/o timeout"}}', [Reason.CONTENT], False),
        (400, b'{"jsonrpc":"2.0","error":{"data":"read body: i/o timeout"}}', [Reason.TIMEOUT], True),
        (400, b'{"error":"invalid JSON"}', [Reason.SIZE], True),
        (400, b'{"error":"invalid JSON"}', [Reason.TIMEOUT], True),
        (429, b"", [Reason.LATER], True),
        (503, b'{"error":"paused"}', [Reason.LATER], True),
        (503, b'{"error":"paused"}', [Reason.CONTENT], False),
        (200, b'{"status":"queued"}', list(Reason), False),
    ],
)
def test_refusal_fits_only_its_reason(status: int, text: bytes, reasons: list[Reason], is_fit: bool) -> None:
    reply = Reply(status, [], text, 0.0)
    with nullcontext() if is_fit else pytest.raises(CheckFailed, match=f"^POST → {status}"):
        refused("POST", reply, *reasons, path=("primary_blind",))


@pytest.mark.parametrize(
    ("status", "word", "is_pending", "is_confirmed"),
    [(200, "pending", True, False), (202, "pending", True, False), (404, "pending", False, False),
     (200, "confirmed", False, True), (202, "confirmed", False, False)],
)  # fmt: skip
def test_status_of_a_share_is_read_with_its_http_status(
    status: int, word: str, is_pending: bool, is_confirmed: bool
) -> None:
    reply = Reply(status, [], b'{"status":"%s"}' % word.encode(), 0.0)
    assert (reply.is_pending, reply.is_confirmed) == (is_pending, is_confirmed)


@pytest.mark.parametrize("status", [429, 503])
async def test_client_repeats_a_request_if_the_helper_asks_for_it(status: int) -> None:
    pause = b"HTTP/1.1 %d Later\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n" % status
    async with serve_client(lambda number: pause if number < 2 else OK) as client:
        assert (await client.get("/")).status == 200
    async with serve_client(lambda _: pause) as client:
        assert (await client.send("GET", "/", is_patient=False)).status == status


async def test_client_does_not_repeat_503_without_retry_after() -> None:
    async with serve_client(lambda _: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n") as client:
        assert (await client.get("/")).status == 503


async def test_client_reports_missing_response_as_failure() -> None:
    async with serve_client(lambda _: b"") as client:
        with pytest.raises(CheckFailed, match="GET /x: RemoteProtocolError"):
            await client.get("/x")


async def test_client_reports_body_that_is_not_in_its_encoding_as_failure() -> None:
    async with serve_client(lambda _: OK.replace(b"\r\n", b"\r\nContent-Encoding: gzip\r\n", 1)) as client:
        with pytest.raises(CheckFailed, match="GET /x: DecodingError"):
            await client.get("/x")


def test_json_that_is_nested_too_deeply_is_none() -> None:
    assert Reply(200, [], b"[" * 200_000, 0.0).json() is None


async def test_client_does_not_read_a_response_without_end() -> None:
    long = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(17 << 20)
    async with serve_client(lambda _: long) as client:
        with pytest.raises(CheckFailed, match="longer than 16 MiB"):
            await client.get("/x")


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


async def test_raw_connection_that_fails_is_ended() -> None:
    async with serve(lambda _: OK) as url, open_raw(parse_address(url), "") as connection:
        connection._reader.set_exception(ssl.SSLError("bad record mac"))
        with pytest.raises(ConnectionEnded):
            await connection.response()


async def test_check_fails_if_the_helper_neither_responds_nor_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.connection_checks._QUIET_SECONDS", 0.05)
    async with serve_client(lambda _: b"HTTP/1.1 200 OK\r\n") as client:
        results = await run_checks(Session(client, SystemClock()), select_checks(["SMUGGLE-021"]))
    assert [result.verdict for result in results] == ["failed"]


async def test_raw_connection_to_nowhere_is_a_failure() -> None:
    with pytest.raises(CheckFailed, match="no connection: ConnectionRefusedError"):
        async with open_raw(parse_address("http://127.0.0.1:1"), ""):
            pass


async def test_raw_requests_have_host_length_and_token() -> None:
    async with serve(lambda _: OK) as url:
        address = parse_address(f"{url}/mount")
        async with open_raw(address, "sécret") as connection:
            request = connection.share_request(b"{}", [("X-Note", "1")], length=7)
    head = request.decode().split("\r\n")
    assert head[0] == "POST /mount/shielded-vote/v1/shares HTTP/1.1"
    assert f"Host: {address.authority}" in head
    assert {"Content-Length: 7", "X-Note: 1", "X-Helper-Token: sécret", "Content-Type: application/json"} <= set(head)
    assert request.endswith(b"\r\n\r\n{}")
