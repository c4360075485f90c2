"""Posted shares: the response to every kind of request, on the wire."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException

from helper.chain.chain_data import RoundStatus
from helper.core.refusals import PauseReason
from helper.errors import ClientLeft, ShareRefused, StoreError, StoreFull
from helper.server.edge import Edge
from helper.server.listening import Server
from helper.server.protocol import Request
from helper.server.wallet_routes import create_wallet_edge
from proofs import InvalidShare
from tests.unit.ingest.admission_fixtures import END, POSITION, ROUND_ID, create_body, make_round
from tests.unit.server.share_scenarios import (
    MAX_BODY_BYTES,
    PATIENCE_SECONDS,
    Scenario,
    build_head,
    build_post,
    count_served,
    encode_chunked,
    run_scenario,
)
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp

VALID_POST, INVALID_POST = build_post(create_body()), build_post(b"{")
OTHER = build_post(create_body(submit_at=END - 5))
TOKEN = "tøken of a closed set-up"
PADDED_BODY = create_body()[:-1] + b" " * (20 << 10) + b"}"
"""A valid body that is processed as a large one."""
CHUNKED = "Transfer-Encoding: chunked"
EXPECT = "Expect: 100-continue"
ATTEMPT = f"X-Vote-Ingress-Attempt-V1: {'0f' * 32}"


def fail_check(error: Exception) -> Callable[[WalletApp], None]:
    def change(wallets: WalletApp) -> None:
        wallets.checks.error = error

    return change


def check_returns(invalid: InvalidShare) -> Callable[[WalletApp], None]:
    def change(wallets: WalletApp) -> None:
        wallets.checks.invalid = invalid

    return change


def fail_store(error: Exception) -> Callable[[WalletApp], None]:
    def change(wallets: WalletApp) -> None:
        wallets.store.error = error

    return change


def pause_intake(wallets: WalletApp) -> None:
    wallets.pause_reason = PauseReason.NO_NODE_IN_SYNC


def set_starting(wallets: WalletApp) -> None:
    wallets.is_ready = False


def set_lagging(wallets: WalletApp) -> None:
    wallets.chain.leaves.clear()


def set_other_leaf(wallets: WalletApp) -> None:
    wallets.chain.leaves[(ROUND_ID, POSITION)] = bytes(32)


def end_round(wallets: WalletApp) -> None:
    wallets.chain.rounds[ROUND_ID] = make_round(RoundStatus.TALLYING)


def close_on_other_host(wallets: WalletApp) -> None:
    wallets.store.is_round_closed = True


def request_line(text: str, *headers: str) -> bytes:
    return build_post(create_body(), *headers, line=text)


REFUSALS = [
    Scenario(
        f"refused with {status}", [VALID_POST], [status], fail_check(ShareRefused(status, "no", field="submit_at"))
    )
    for status in (400, 401, 404, 408, 409, 413, 422, 429, 500, 503)
]
ERRORS = [
    Scenario("a server error", [VALID_POST], [503], fail_store(StoreError("no"))),
    Scenario("a full disk", [VALID_POST], [503], fail_store(StoreFull("no"))),
    Scenario("an internal error", [VALID_POST], [500], fail_store(ZeroDivisionError())),
    Scenario(
        "an internal error, then other requests",
        [VALID_POST, INVALID_POST, VALID_POST],
        [500, 400, 500],
        fail_store(ZeroDivisionError()),
    ),
    Scenario("an unexpected exception", [VALID_POST], [409], fail_check(HTTPException(409, "no", {"X-Odd": "one"}))),
    Scenario("an exception with the status text", [VALID_POST], [405], fail_check(HTTPException(405))),
    Scenario(
        "an invalid field, detected late", [VALID_POST], [400], fail_check(ShareRefused(400, "no", field="index"))
    ),
    Scenario("a client reported as disconnected", [VALID_POST], [400], fail_check(ClientLeft("gone"))),
    Scenario("an invalid point", [VALID_POST], [400], check_returns(InvalidShare("enc_share.c2", "identity"))),
    Scenario("paused", [VALID_POST], [503], pause_intake),
    Scenario("paused, with an invalid body", [INVALID_POST, VALID_POST], [400, 503], pause_intake),
    Scenario("starting", [build_head(line=f"GET {STATUS_PATH} HTTP/1.1"), VALID_POST], [503, 200], set_starting),
    Scenario("a lagging node", [VALID_POST], [503], set_lagging),
    Scenario("a lagging node, with an attempt", [build_post(create_body(), ATTEMPT)], [429], set_lagging),
    Scenario("another leaf", [VALID_POST], [400], set_other_leaf),
    Scenario("an ended round", [VALID_POST], [400], end_round),
    Scenario("a round closed by another host", [VALID_POST], [400], close_on_other_host),
]
BODIES = [
    Scenario("queued", [VALID_POST], [200]),
    Scenario("queued, then two duplicates", [VALID_POST, VALID_POST, OTHER], [200, 200, 200]),
    Scenario("not JSON", [INVALID_POST], [400]),
    Scenario("an invalid field", [build_post(create_body(proposal_id="1"))], [400]),
    Scenario("after the round's end", [build_post(create_body(submit_at=END + 1))], [400]),
    Scenario("an empty body", [build_post()], [400]),
    Scenario("no body", [build_head()], [400]),
    Scenario("a body in segments", [VALID_POST[:-900], VALID_POST[-900:-1], VALID_POST[-1:]], [200]),
    Scenario("a head in segments", [VALID_POST[:9], VALID_POST[9:60], VALID_POST[60:]], [200]),
    Scenario("a large body", [build_post(PADDED_BODY)], [200]),
    Scenario("a large body, then a small one", [build_post(PADDED_BODY), VALID_POST], [200, 200]),
    Scenario("a refused large body", [build_post(PADDED_BODY[:-1])], [400]),
    Scenario("large bodies beyond the budget", [build_post(PADDED_BODY)], [503], settings={"budget": 1000}),
    Scenario("a chunked body", [build_head(CHUNKED) + encode_chunked(create_body())], [200]),
    Scenario(
        "a chunked body with late chunks",
        [build_head(CHUNKED), encode_chunked(create_body()[:90], create_body()[90:])],
        [200],
    ),
    Scenario("invalid chunks", [build_head(CHUNKED), b"no number\r\n"], []),
    Scenario("too large", [build_post(b" " * (MAX_BODY_BYTES + 1))], [413]),
    Scenario(
        "a chunked body that is too large", [build_head(CHUNKED) + encode_chunked(*[b" " * MAX_BODY_BYTES] * 2)], [413]
    ),
    Scenario("Expect: 100-continue", [build_post(b"", EXPECT, size=len(create_body())), create_body()], [100, 200]),
    Scenario("Expect, body sent immediately", [build_post(create_body(), EXPECT)], [100, 200]),
    Scenario("Expect, body too large", [build_post(b"", EXPECT, size=MAX_BODY_BYTES + 1)], [413]),
    Scenario("Expect, without the token", [build_post(b"", EXPECT, size=100)], [401], settings={"token": TOKEN}),
    Scenario("a slow body", [VALID_POST[:-9]], [503], settings={"body_seconds": 0.3}),
    Scenario(
        "a slow body of an attempt",
        [build_post(create_body(), ATTEMPT)[:-9]],
        [408],
        settings={"body_seconds": 0.3},
    ),
    Scenario("a complete body of an attempt", [build_post(create_body(), ATTEMPT)], [200]),
    Scenario("disconnected during the body", [VALID_POST[:-9]], [], disconnects=True),
    Scenario("disconnected before the response", [VALID_POST], [], disconnects=True),
    Scenario("disconnected before the refusal", [INVALID_POST], [], disconnects=True),
]
REQUESTS = [
    Scenario("GET", [build_head(line=f"GET {SHARES_PATH} HTTP/1.1")], [405]),
    Scenario("GET of an attempt", [build_head(ATTEMPT, line=f"GET {SHARES_PATH} HTTP/1.1")], [405]),
    Scenario("status of an attempt", [build_head(ATTEMPT, line=f"GET {STATUS_PATH} HTTP/1.1")], [503], set_starting),
    Scenario("HEAD", [build_head(line=f"HEAD {SHARES_PATH} HTTP/1.1")], [405]),
    Scenario("a preflight request", [build_head("Origin: null", line=f"OPTIONS {SHARES_PATH} HTTP/1.1")], [204]),
    Scenario("PUT", [request_line(f"PUT {SHARES_PATH} HTTP/1.1")], [405]),
    Scenario("a trailing slash", [request_line(f"POST {SHARES_PATH}/ HTTP/1.1")], [404]),
    Scenario("two slashes", [request_line(f"POST /{SHARES_PATH} HTTP/1.1")], [404]),
    Scenario("a query", [request_line(f"POST {SHARES_PATH}?wallet=1&x HTTP/1.1")], [200]),
    Scenario("a path with escapes", [request_line(f"POST {SHARES_PATH[:-1]}%73 HTTP/1.1")], [200]),
    Scenario("a path with a line break", [request_line(f"POST {SHARES_PATH}%0A HTTP/1.1")], [404]),
    Scenario("a path in upper case", [request_line(f"POST {SHARES_PATH.upper()} HTTP/1.1")], [404]),
    Scenario("an absolute URL", [request_line(f"POST http://helper{SHARES_PATH} HTTP/1.1")], [200]),
    Scenario("HTTP/1.0", [request_line(f"POST {SHARES_PATH} HTTP/1.0")], [200]),
    Scenario("the last request of its connection", [build_post(create_body(), "Connection: close")], [200]),
    Scenario("a refusal of the last request", [build_post(b"{", "Connection: close")], [400]),
    Scenario("an Upgrade request", [build_post(create_body(), "Connection: Upgrade", "Upgrade: websocket")], [200]),
    Scenario("two pipelined requests", [VALID_POST + OTHER], [200, 200]),
    Scenario(
        "five pipelined requests",
        [VALID_POST + INVALID_POST + OTHER + build_head(line=f"GET {STATUS_PATH} HTTP/1.1") + VALID_POST],
        [200, 400, 200, 200, 200],
    ),
    Scenario("a given request id", [build_post(create_body(), "X-Request-Id: proxy-0123.4567:89_a")], [200]),
    Scenario("a given request id with a refusal", [build_post(b"{", "X-Request-Id: proxy-0123.4567:89_a")], [400]),
    Scenario(
        "odd headers", [build_post(create_body(), "Content-Type: text/ÿ", "X-Odd:", "x-odd: 2", "Origin: null")], [200]
    ),
    Scenario("contradicting lengths", [build_post(create_body(), "Content-Length: 7")], [400]),
    Scenario("not HTTP", [b"\x16\x03\x01 hello\r\n\r\n"], [400]),
]
TOKENS = [
    Scenario(name, [build_post(create_body(), *headers)], [status], settings={"token": TOKEN})
    for name, headers, status in (
        ("no token", (), 401),
        ("a wrong token", ("X-Helper-Token: wrong",), 401),
        ("the token", (f"X-Helper-Token: {TOKEN.encode().decode('latin-1')}",), 200),
        ("the token in small letters", (f"x-helper-token: {TOKEN.encode().decode('latin-1')}",), 200),
        ("the token, first", (f"X-Helper-Token: {TOKEN.encode().decode('latin-1')}", "X-Helper-Token: wrong"), 200),
        ("the token, second", ("X-Helper-Token: wrong", f"X-Helper-Token: {TOKEN.encode().decode('latin-1')}"), 401),
    )
]
SCENARIOS = [*BODIES, *REFUSALS, *ERRORS, *REQUESTS, *TOKENS]


@pytest.mark.rule("W2")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_posted_share_gets_its_response(scenario: Scenario) -> None:
    result = await run_scenario(scenario)
    assert result.statuses == list(scenario.statuses)
    assert result.refusals >= Counter(status for status in scenario.statuses if status >= 400), "and the probe's"
    assert 500 in result.statuses or "request_failed" not in {line["event"] for line in result.logs}
    for response in result.responses:
        if not response.startswith((b"HTTP/1.1 100 ", b"HTTP/1.1 404 ")):
            assert b"\r\naccess-control-allow-origin: *\r\n" in response
        if response.startswith((b"HTTP/1.1 429 ", b"HTTP/1.1 503 ")):
            assert re.search(rb"\r\nretry-after: [12]\r\n", response), "zkool waits that long for the next server"


async def test_each_outcome_is_counted_once() -> None:
    scenario = Scenario(
        "one of each kind",
        [VALID_POST, VALID_POST, INVALID_POST, build_head(line=f"GET {SHARES_PATH} HTTP/1.1")],
        [200, 200, 400, 405],
    )
    outcome = await run_scenario(scenario)
    assert outcome.statuses == scenario.statuses
    assert outcome.counts == {"post_queued": 1, "post_duplicate": 1, "post_refused": 1}
    assert outcome.stored_count == 1


async def test_body_of_a_client_that_left_is_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    wallets, counts, left = WalletApp(), Counter[str](), asyncio.Event()
    wallets.checks.error = AssertionError("validated")
    edge = create_wallet_edge(replace(wallets.api, count_outcome=lambda outcome: counts.update([outcome])))
    serve = edge.__call__

    async def start_late(request: Request) -> None:
        while not request.has_left:
            await asyncio.sleep(0.002)
        await serve(request)
        left.set()

    server = Server(edge)
    monkeypatch.setattr(Edge, "__call__", lambda _, request: start_late(request))
    async with asyncio.timeout(PATIENCE_SECONDS), count_served(server) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        linger = struct.pack("ii", 1, 0)  # close with a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.write(VALID_POST)
        await writer.drain()
        writer.transport.abort()
        await left.wait()
    assert (counts, wallets.store.calls) == ({"post_broken_off": 1}, [])
