"""The proxy examples of deploy/: what reaches the helper, and what the proxy logs.

Each proxy runs with its names, ports and certificate replaced for this machine. Tests of a proxy that is not
installed are skipped; `make test` installs both if it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.core.refusals import ATTEMPT_HEADER
from helper.server.body_reader import BodyReader
from helper.server.connection_limits import IDLE_SECONDS, ConnectionLimits
from helper.server.edge import ingress_receipt
from helper.server.gateway_routes import BODY_SECONDS, GatewayLimits
from helper.server.listening import Server, bind_tcp
from tests.support.fakes import wait_until
from tests.support.process import TIMEOUT_SECONDS
from tests.support.proxies import DEPLOY, FORWARDING_CADDY, PROXIES, UNVERIFIED_SSL, run_proxy
from tests.support.servers import serve_connections
from tests.unit.ingest.admission_fixtures import COMMITMENT, ROUND_ID, create_body
from tests.unit.server.wallet_fixtures import SHARES_PATH, WalletApp

CLIENT_ADDRESS = "127.83.42.77"
EXAMPLES = {"example.conf", "Caddyfile"}
X25519_KEY_SHARE = bytes.fromhex("001d0020")
"""Group and length of an X25519 key in a ClientHello."""
FORGED_HEADERS = {
    "X-Forwarded-For": "203.0.113.9",
    "X-Real-IP": "203.0.113.9",
    "Forwarded": "for=203.0.113.9",
    "Cookie": "who=me",
    "Connection": "Upgrade",
    "Upgrade": "h2c",
    "Expect": "100-continue",
}


@dataclass
class RecordingUpstream:
    """Replaces the helper: records requests, and sends a response or closes the connection."""

    port: int = 0
    received_heads: list[str] = field(default_factory=list)
    closes_connection: bool = False
    body: bytes = b"{}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.received_heads.append(head)
                await read_body(head, reader)
                if self.closes_connection:
                    break
                length = f"Content-Length: {len(self.body)}\r\n\r\n".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + length + self.body)
                await writer.drain()
        writer.transport.abort()


def parse_headers(head: str) -> dict[str, str]:
    return dict(line.partition(": ")[::2] for line in head.split("\r\n")[1:] if line)


async def read_body(head: str, reader: asyncio.StreamReader) -> None:
    """Read the complete body of a request with this head (in lower case)."""
    headers = parse_headers(head)
    if headers.get("transfer-encoding") != "chunked":
        await reader.readexactly(int(headers.get("content-length", "0")))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


@contextlib.asynccontextmanager
async def run_upstream() -> AsyncIterator[RecordingUpstream]:
    upstream = RecordingUpstream()
    async with serve_connections(upstream.serve) as upstream.port:
        yield upstream


@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_neither_forwards_nor_logs_client_addresses(name: str, tmp_path: Path) -> None:
    async with run_upstream() as helper, run_proxy(name, tmp_path, helper.port) as other:
        transport = httpx.AsyncHTTPTransport(verify=UNVERIFIED_SSL, local_address=CLIENT_ADDRESS)
        async with httpx.AsyncClient(base_url=other.base_url, transport=transport, timeout=30) as client:
            helper.received_heads.clear()
            posted = await client.post("/shielded-vote/v1/shares", json={"some": "share"}, headers=FORGED_HEADERS)
            assert posted.status_code == 200
            (head,) = helper.received_heads
            assert head.startswith("post /shielded-vote/v1/shares http/1.1")
            headers = parse_headers(head)
            assert headers.keys().isdisjoint({"x-real-ip", "forwarded", "cookie", "upgrade", "expect"})
            assert not headers.get("x-forwarded-for"), "Caddy sends it empty"
            assert CLIENT_ADDRESS not in head
            assert "203.0.113.9" not in head

            await client.post("/api/register-validator", json={"some": "registration"}, headers=FORGED_HEADERS)
            registration = parse_headers(helper.received_heads[-1])
            assert registration["x-forwarded-for"] == CLIENT_ADDRESS, "registrations are limited by network"

            helper.closes_connection = True
            helper.received_heads.clear()
            lost = await client.post("/shielded-vote/v1/cast-vote", json={"some": "vote"})
            assert lost.status_code == 502
            assert len(helper.received_heads) == 1, "a vote was resent"
            helper.closes_connection = False

            if name == "nginx":  # Caddy leaves this to the helper
                large = await client.post("/shielded-vote/v1/shares", content=b"x" * (3 << 20))
                assert large.status_code == 413
        await send_invalid_handshake(str(other.base_url))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name not in EXAMPLES]
    assert not any(b"shielded-vote/v1" in data or CLIENT_ADDRESS.encode() in data for data in written)


async def send_invalid_handshake(url: str) -> None:
    """Send a ClientHello with an invalid public key, which nginx would log as critical. Waits for the refusal."""
    outgoing = ssl.MemoryBIO()
    tls = UNVERIFIED_SSL.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()
    at = hello.index(X25519_KEY_SHARE) + len(X25519_KEY_SHARE)
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, local_addr=(CLIENT_ADDRESS, 0))
    writer.write(hello[:at] + bytes(32) + hello[at + 32 :])
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_resumes_tls_sessions_with_either_protocol(
    name: str, version: ssl.TLSVersion, tmp_path: Path
) -> None:
    async with run_upstream() as helper, run_proxy(name, tmp_path, helper.port) as client:
        port = urlsplit(str(client.base_url)).port
        assert port is not None
        for protocol in ("http/1.1", "h2"):
            assert await asyncio.to_thread(reconnect_with_session, port, protocol, version) == (protocol, True)


def reconnect_with_session(port: int, protocol: str, version: ssl.TLSVersion) -> tuple[str | None, bool]:
    """Connect twice, the second time with the session of the first.

    Returns the protocol and whether the session was resumed.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols([protocol])
    session = None
    for _ in range(2):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname="localhost", session=session) as tls,
        ):
            if protocol == "http/1.1":
                tls.sendall(b"GET /shielded-vote/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            tls.recv(1)  # TLS 1.3 sends tickets before the first data
            session, outcome = tls.session, (tls.selected_alpn_protocol(), bool(tls.session_reused))
    return outcome


@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_request_for_other_host_gets_no_empty_success(name: str, tmp_path: Path) -> None:
    async with run_upstream() as helper, run_proxy(name, tmp_path, helper.port) as client:
        helper.received_heads.clear()
        response = await client.post("/shielded-vote/v1/shares", json={}, headers={"Host": "other.example.org"})
        assert bool(helper.received_heads) == response.is_success
        assert response.status_code in {200, 403, 421}


FILE_CALLS = "open,openat,openat2,creat,memfd_create,rename,renameat,renameat2"
OPENED_TO_WRITE = re.compile(r'"([^"]+)", [^)]*O_(?:WRONLY|RDWR|CREAT|TMPFILE)')


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_large_bodies_and_responses_open_no_file_for_writing(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    tracer = ["strace", "-D", "-f", "-q", "-e", f"trace={FILE_CALLS}", "-s", "256", "-o", str(trace), "--"]
    body = random.Random(7).randbytes(1 << 20)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    async with run_upstream() as helper, run_proxy(name, tmp_path, helper.port, tracer) as client:
        started = len(trace.read_text().splitlines())
        path = "/shielded-vote/v1/cast-vote"
        posted = [await client.post(path, content=content) for content in (body, chunks())]
        # Not as the response to a large body: Go can close the body of a request once the response starts, and if Caddy
        # is still reading it then, it truncates the response.
        helper.body = random.Random(8).randbytes(8 << 20)
        downloaded = await client.get("/shielded-vote/v1/status")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not trace.read_text().rstrip().endswith("+++"):  # strace writes the exit last
            await asyncio.sleep(0.05)
    lines = trace.read_text().splitlines()
    assert started, "strace recorded the start"
    assert [line for line in lines[started:] if OPENED_TO_WRITE.search(line)] == []
    assert [response.content for response in posted] == [b"{}", b"{}"]
    assert downloaded.content == helper.body


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("nginx/svote-helper.conf", r"upstream svote_helper \{[^}]*\bkeepalive_timeout (\d+)s;"),
        ("caddy/Caddyfile", r"transport http \{[^}]*\bkeepalive (\d+)s"),
    ],
)
def test_proxy_closes_idle_upstream_connections_before_the_helper(file: str, setting: str) -> None:
    match = re.search(setting, (DEPLOY / file).read_text())
    assert match is not None
    assert int(match[1]) <= ConnectionLimits().keep_alive_seconds - 5


@pytest.mark.parametrize(
    ("file", "setting", "seconds"),
    [
        ("nginx/svote-helper.conf", r"client_body_timeout (\d+)s;", BODY_SECONDS),
        ("nginx/svote-helper.conf", r"proxy_read_timeout (\d+)s;", BODY_SECONDS + GatewayLimits().post_seconds),
        ("caddy/Caddyfile", r"read_body (\d+)s", BODY_SECONDS),
        ("caddy/Caddyfile", r"response_header_timeout (\d+)s", GatewayLimits().post_seconds),
    ],
)
def test_proxy_waits_longer_than_the_helper(file: str, setting: str, seconds: float) -> None:
    match = re.search(setting, (DEPLOY / file).read_text())
    assert match is not None
    assert int(match[1]) >= seconds + 5


@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_returns_the_receipt_of_a_slow_body(name: str, tmp_path: Path) -> None:
    refusals = Counter[int]()

    async def stall() -> AsyncIterator[bytes]:
        yield b"[" * 100
        await wait_until(lambda: refusals[408])  # the client reads the response after it has sent the body

    wallets = WalletApp(body_reader=BodyReader(timeout_seconds=0.2), refusals=refusals)
    headers = {ATTEMPT_HEADER: "0f" * 32}
    async with serve_on_socket(wallets) as port, run_proxy(name, tmp_path, port) as client:
        response = await client.post(SHARES_PATH, content=stall(), headers=headers)
    assert (response.status_code, response.json()) == (408, ingress_receipt("0f" * 32))
    assert response.headers.get_list("content-type") == ["application/json"]
    assert response.headers.get_list("cache-control") == ["no-store"]


@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_ends_the_request_of_a_client_that_has_left(name: str, tmp_path: Path) -> None:
    received, has_ended = asyncio.Event(), asyncio.Event()

    async def answer_start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get /started "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        else:
            await read_body(head, reader)
            received.set()
            await reader.read()
            has_ended.set()
        writer.close()

    async with serve_connections(answer_start) as port, run_proxy(name, tmp_path, port) as client:
        post = asyncio.create_task(client.post("/shielded-vote/v1/cast-vote", json={"some": "vote"}))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await received.wait()
            post.cancel()
            await has_ended.wait()


# Clients that read nothing

STALLED_STREAMS = 64
SETTINGS, HEADERS = 4, 1


async def request_without_reading(url: str, path: str) -> asyncio.StreamWriter:
    """Request a path in many streams of one HTTP/2 connection, none of which may get a byte of its response's body."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, ssl=context, server_hostname="localhost")
    head = b"\x82\x87\x04%c%b\x01\x09localhost" % (len(path), path.encode())  # GET, https, path, authority
    no_window = b"\0\x04\0\0\0\0"
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(SETTINGS, 0, 0, no_window))
    for stream in range(1, 2 * STALLED_STREAMS, 2):
        writer.write(http2_frame(HEADERS, 5, stream, head))  # the whole request
    return writer


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


@pytest.mark.parametrize("name", PROXIES)
async def test_clients_that_read_nothing_keep_no_other_out(name: str, tmp_path: Path) -> None:
    refusals, answered = Counter[int](), 0

    async def script(_request: Request) -> Response:
        nonlocal answered
        answered += 1
        return Response(bytes(1 << 16))

    wallets = WalletApp(more_routes=[Route("/script", script)], refusals=refusals)
    limits = ConnectionLimits(max_connections=STALLED_STREAMS // 2)
    async with serve_on_socket(wallets, limits) as port, run_proxy(name, tmp_path, port) as client:
        stalled = await request_without_reading(str(client.base_url), "/script")
        await wait_until(lambda: answered + refusals[503] == STALLED_STREAMS)
        evictable_at = asyncio.get_running_loop().time() + IDLE_SECONDS
        await wait_until(lambda: asyncio.get_running_loop().time() > evictable_at)
        responses = await asyncio.gather(*(client.post(SHARES_PATH, content=create_body()) for _ in range(2)))
        stalled.transport.abort()
    assert [response.status_code for response in responses] == [200, 200]


# Attacks on connections that clients share

ATTEMPT_COUNT = 1000
SENDER_COUNT = 4
ROUTES = ["direct", *PROXIES, *([FORWARDING_CADDY] if "caddy" in PROXIES else [])]
EXPECT_VALUES = ("100-continue", "other, 100-Continue")
SMUGGLED_REQUESTS = (
    # Consumes the next request of the connection as its body.
    f"POST {SHARES_PATH} HTTP/1.1\r\nHost: helper\r\nContent-Length: 2000\r\n\r\n".encode(),
    # Gets its own response, which the next request of the connection would receive.
    b"GET /smuggled HTTP/1.1\r\nHost: helper\r\n\r\n",
)


@contextlib.asynccontextmanager
async def serve_on_socket(wallets: WalletApp, limits: ConnectionLimits | None = None) -> AsyncIterator[int]:
    server = Server(wallets.edge, limits, trusted_networks=[ip_network("127.0.0.1/32")])
    listener = bind_tcp("127.0.0.1", 0)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await task


async def send_in_segments(url: str, *segments: bytes) -> bytes:
    """Send segments over a new connection. Returns everything received."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(
        address.hostname, address.port, ssl=UNVERIFIED_SSL if address.scheme == "https" else None
    )
    response = b""
    with contextlib.suppress(OSError, TimeoutError):
        for segment in segments:
            writer.write(segment)
            await writer.drain()
            await asyncio.sleep(0.01)  # send the next one separately
        async with asyncio.timeout(0.05):  # a second response arrives immediately or never
            while chunk := await reader.read(1 << 16):
                response += chunk
    writer.transport.abort()
    return response


def smuggled_request(number: int) -> list[bytes]:
    """A request with `Upgrade` whose body is another request."""
    smuggled = SMUGGLED_REQUESTS[number % len(SMUGGLED_REQUESTS)]
    head = f"POST {SHARES_PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n"
    return [f"{head}Content-Length: {len(smuggled)}\r\n\r\n".encode(), smuggled]


def expecting_request(number: int) -> list[bytes]:
    """A request with `Expect` that is refused before its body is read; the body follows, or does not."""
    expect, has_body = EXPECT_VALUES[number % 2], number % 4 < 2
    head = f"POST /livez HTTP/1.1\r\nHost: localhost\r\nExpect: {expect}\r\nContent-Length: 2\r\n\r\n"
    return [head.encode(), *([b"{}"] if has_body else [])]


@pytest.mark.parametrize("attack", [smuggled_request, expecting_request])
@pytest.mark.parametrize("route", ROUTES)
async def test_attacks_on_connections_never_reach_other_clients(
    route: str, attack: Callable[[int], list[bytes]], tmp_path: Path
) -> None:
    wallets = WalletApp()
    attempts = ATTEMPT_COUNT // len(ROUTES) // 2 + 1
    positions = iter(range(1, attempts + 1))
    wallets.chain.leaves.update({(ROUND_ID, position): COMMITMENT for position in range(1, attempts + 1)})
    posted, wrong = 0, []

    async def post_between_attacks(client: httpx.AsyncClient, url: str) -> None:
        nonlocal posted
        for position in positions:
            attacked = await send_in_segments(url, *attack(position))
            response = await client.post(SHARES_PATH, content=create_body(tree_position=position))
            posted += 1
            if (
                response.status_code != 200
                or response.json() != {"status": "queued"}
                or len(re.findall(rb"HTTP/1.1 [2-5]", attacked)) > 1
            ):
                wrong.append((position, response.status_code, response.text, attacked))

    async with contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serve_on_socket(wallets))
        if route == "direct":
            url = f"http://127.0.0.1:{behind}"
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        else:
            client = await stack.enter_async_context(run_proxy(route, tmp_path, behind))
            url = str(client.base_url)
        await asyncio.gather(*(post_between_attacks(client, url) for _ in range(SENDER_COUNT)))
    assert (posted, wrong) == (attempts, [])
    assert {share.tree_position for share in wallets.store.shares} == set(range(1, attempts + 1))
