"""Requests of every known client, byte for byte, on one connection.

The bytes are not recordings. They are written from the documented behavior and the sources of the clients' HTTP
libraries: order and case of the headers, and how a request is divided into segments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tests.unit.ingest.admission_fixtures import ROUND_ID, create_body
from tests.unit.server.share_scenarios import Scenario, ScenarioResult, encode_chunked, run_scenario
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp

HOST = "helper.example.org"
SHARE_STATUS_PATH = f"/shielded-vote/v1/share-status/{ROUND_ID.hex()}/{'0f' * 32}"
ATTEMPT = f"X-Vote-Ingress-Attempt-V1: {'0f' * 32}"
EXTENSION, PAGE = "chrome-extension://fihbfgjopbkgnadajhdmdpcbdmkoknif", "https://vote.example.org"
SHARE = create_body()
NEW_SHARE = json.dumps({name: value for name, value in json.loads(SHARE).items() if name != "all_enc_shares"}).encode()
"""As the library writes it since version 5."""
ESCAPED = SHARE.replace(b"/", b"\\/")
"""As JSONObject (Android) and JSONSerialization (iOS) write it."""


def encode(line: str, *headers: str) -> bytes:
    return "\r\n".join((f"{line} HTTP/1.1", *headers, "", "")).encode()


def okhttp(line: str, *headers: str, body: bytes | None = None) -> list[bytes]:
    """OkHttp with ktor: headers of the caller, then those of OkHttp's bridge; one flush for head and body."""
    length = [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    own = [*headers, "Accept-Charset: UTF-8", "Accept: */*", "User-Agent: ktor-client", *length]
    return [encode(line, *own, f"Host: {HOST}", "Connection: Keep-Alive", "Accept-Encoding: gzip") + (body or b"")]


def urlsession(line: str, *headers: str, body: bytes | None = None) -> list[bytes]:
    """CFNetwork: the body in a segment of its own."""
    typed = [] if body is None else ["Content-Type: application/json"]
    length = [] if body is None else [f"Content-Length: {len(body)}"]
    agent = ["User-Agent: secant/1 CFNetwork/1568.300.101 Darwin/24.2.0", *length]
    last = ["Accept-Language: en-GB,en;q=0.9", "Accept-Encoding: gzip, deflate, br"]
    head = encode(
        line, f"Host: {HOST}", *typed, "Connection: keep-alive", "Accept: application/json", *headers, *agent, *last
    )
    return [head, body] if body else [head]


def hyper(line: str, *headers: str, agent: str = "", body: bytes | None = None) -> list[bytes]:
    """hyper, also of reqwest and of a client over Tor: names in lower case; one write for head and body."""
    typed = [] if body is None else ["content-type: application/json"]
    length = [] if body is None else [f"content-length: {len(body)}"]
    named = [f"user-agent: {agent}"] if agent else []
    lower = [f"{name.lower()}: {value}" for name, value in (header.split(": ", 1) for header in headers)]
    return [encode(line, *typed, *lower, *named, "accept: */*", f"host: {HOST}", *length) + (body or b"")]


def dart(line: str, *headers: str, body: bytes | None = None, is_chunked: bool = False) -> list[bytes]:
    """dart:io: names in lower case; the body is chunked unless the caller sets its length."""
    framing = [] if body is None else ["transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"]
    typed = [] if body is None else ["content-type: application/json"]
    agent = "user-agent: Dart/3.5 (dart:io)"
    head = encode(line, agent, *typed, *headers, "accept-encoding: gzip", *framing, f"host: {HOST}")
    if body is None:
        return [head]
    return [head, encode_chunked(body) if is_chunked else body]


def chromium(line: str, *headers: str, origin: str, body: bytes | None = None) -> list[bytes]:
    """fetch() of Chromium over HTTP/1.1: head and body in one segment, preflight requests without a body."""
    length = [] if body is None else [f"Content-Length: {len(body)}"]
    typed = [] if body is None else ["Content-Type: application/json"]
    first = [
        f"Host: {HOST}",
        "Connection: keep-alive",
        *length,
        *headers,
        "User-Agent: Mozilla/5.0 (X11; Linux x86_64)",
    ]
    last = [f"Origin: {origin}", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: empty"]
    accepted = ["Accept: */*", "Accept-Encoding: gzip, deflate, br, zstd", "Accept-Language: en-US,en;q=0.9"]
    return [encode(line, *first, *typed, *accepted[:1], *last, *accepted[1:]) + (body or b"")]


def curl(line: str, *headers: str, body: bytes | None = None, expects: bool = False) -> list[bytes]:
    """curl: `Expect` before a large body, with which curl waits for the 100 response."""
    typed = [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    expect = ["Expect: 100-continue"] if expects else []
    head = encode(line, f"Host: {HOST}", "User-Agent: curl/8.5.0", "Accept: */*", *headers, *typed, *expect)
    return [head, body or b""] if expects else [head + (body or b"")]


def go(line: str) -> list[bytes]:
    """net/http, of the operators' monitors."""
    return [encode(line, f"Host: {HOST}", "User-Agent: Go-http-client/1.1", "Accept-Encoding: gzip")]


PREFLIGHT = ("Accept: */*", "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: content-type")
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
POST, STATUS, SHARE_STATUS = f"POST {SHARES_PATH}", f"GET {STATUS_PATH}", f"GET {SHARE_STATUS_PATH}"


@dataclass(frozen=True)
class Client:
    """What a client sends on one connection.

    Attributes:
        segments: sent one after the other.
        statuses: of the responses.
        is_open: whether the connection stays open for the next request.
        refusal: status of a share whose vote is in no known block; None if the client posts none.
    """

    name: str
    segments: Sequence[bytes]
    statuses: Sequence[int] = field(default=(200,))
    is_open: bool = True
    refusal: int | None = None


CLIENTS = [
    # old generation: 503 makes it take another helper
    Client("Android", okhttp(POST, body=ESCAPED), refusal=503),
    Client("Android, over Tor", hyper(POST, body=ESCAPED), refusal=503),
    Client("Android, share status", okhttp(SHARE_STATUS, "X-Helper-Token: voting-helper"), [202]),
    Client("iOS, status and share", urlsession(STATUS) + urlsession(POST, body=ESCAPED), [200, 200], refusal=503),
    Client("iOS, share status", urlsession(SHARE_STATUS, "X-Helper-Token: voting-helper"), [202]),
    Client("zkool", hyper(POST, agent="zkool/1.0", body=SHARE), refusal=503),
    Client("zkool, share status", hyper(SHARE_STATUS, agent="zkool/1.0"), [202]),
    Client("Vizor", dart(POST, body=SHARE), refusal=503),
    Client("Vizor, without a length", dart(POST, body=SHARE, is_chunked=True), refusal=503),
    Client("Vizor, share status", dart(SHARE_STATUS), [202]),
    Client("custody-voter", hyper(POST, agent="valar-custody-voter/1.0.1", body=SHARE) * 2, [200, 200], refusal=503),
    Client("zafu", chromium(POST, origin=EXTENSION, body=SHARE), refusal=503),
    # new generation: names its attempt, and repeats it at the same helper after 429
    Client("Android 5.x", okhttp(POST, ATTEMPT, body=NEW_SHARE), refusal=429),
    Client("iOS 5.x", urlsession(POST, ATTEMPT, body=NEW_SHARE), refusal=429),
    Client("5.x over Tor", hyper(POST, ATTEMPT, "Connection: close", body=NEW_SHARE), is_open=False, refusal=429),
    Client("Vizor 5.x", dart(POST, ATTEMPT.lower(), body=NEW_SHARE), refusal=429),
    Client("custody-voter 5.x", hyper(POST, ATTEMPT, agent="zcash_voting/5.1.1", body=NEW_SHARE), refusal=429),
    # pages, tools and operators' monitors
    Client(
        "a page, with its preflight request",
        chromium(f"OPTIONS {SHARES_PATH}", *PREFLIGHT, origin=PAGE) + chromium(POST, origin=PAGE, body=SHARE),
        [204, 200],
        refusal=503,
    ),
    Client("curl", curl(POST, body=SHARE), refusal=503),
    Client("curl, with Expect", curl(POST, body=SHARE, expects=True), [100, 200], is_open=False, refusal=503),
    Client("curl --http2, without TLS", curl(POST, *H2C, body=SHARE), is_open=False, refusal=503),
    Client("the fleet's watchdog", go(STATUS) * 3, [200] * 3),
]


async def exchange(client: Client, prepare: Callable[[WalletApp], None] = lambda _: None) -> ScenarioResult:
    statuses = client.statuses
    result = await run_scenario(Scenario(client.name, client.segments, statuses, prepare))
    assert result.is_open is client.is_open
    assert [b"\r\nconnection: close\r\n" in each for each in result.responses][-1] is not client.is_open
    for response in result.responses:
        assert response.startswith(b"HTTP/1.1 100 ") or b"\r\naccess-control-allow-origin: *\r\n" in response
    return result


@pytest.mark.rule("W2")
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_request_of_each_client_is_answered_as_it_expects(client: Client) -> None:
    result = await exchange(client)
    assert result.statuses == list(client.statuses)
    posts = client.refusal is not None
    assert result.stored_count == posts
    body = json.loads(result.responses[-1].partition(b"\r\n\r\n")[2])
    assert body["status"] in ("queued", "duplicate") if posts else body["status"] in ("ok", "pending")


@pytest.mark.rule("W4")
@pytest.mark.parametrize("client", [each for each in CLIENTS if each.refusal], ids=lambda client: client.name)
async def test_share_that_comes_too_early_gets_the_refusal_of_its_clients_generation(client: Client) -> None:
    result = await exchange(client, lambda wallets: wallets.chain.leaves.clear())
    *earlier, last = result.statuses
    assert last == client.refusal
    assert set(earlier) <= {*client.statuses, client.refusal}
    assert b"\r\nretry-after: 2\r\n" in result.responses[-1]
