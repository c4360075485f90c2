"""Gateway: forwarded requests and responses, selected nodes, and removed headers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import anyio
import httpx
import pytest

from helper.chain.node_http import SHORT_BODY_BYTES
from helper.core.refusals import ATTEMPT_HEADER
from helper.server.gateway_routes import GET_PATHS, POST_PATHS, GatewayLimits
from tests.support.fakes import wait_until
from tests.unit.chain.fakes import ROUND_ID, FakeNode, json_response, read_recorded
from tests.unit.server.gateway_fixtures import GatewayHarness, running_gateway
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, error_text, no_route_text

API = "/shielded-vote/v1"
ROUND = f"{API}/round/{ROUND_ID.hex()}"
LATEST = "/cosmos/base/tendermint/v1beta1/blocks/latest"
VOTE_BODY = {"vote_commitment": "AAAA"}
ACCEPTED_RESPONSE = {"tx_hash": "AB" * 32, "code": 0}


@pytest.fixture
async def harness() -> AsyncIterator[GatewayHarness]:
    async with running_gateway() as running:
        yield running


def accept_vote(_: httpx.Request) -> httpx.Response:
    return json_response(200, ACCEPTED_RESPONSE)


async def test_gateway_streams_responses_unchanged(harness: GatewayHarness) -> None:
    rounds = await harness.client.get(f"{API}/rounds")
    assert rounds.status_code == 200
    assert rounds.json()["rounds"][0]["status"] == 1
    assert rounds.headers["content-type"] == "application/json"
    assert rounds.headers["cache-control"] == "no-store"
    assert rounds.headers["access-control-allow-origin"] == "*"
    assert harness.requested_paths() == [[f"{API}/rounds"], []]

    unknown = json_response(500, read_recorded("unknown round")["response"])
    harness.set_response("/round/", lambda _: unknown)
    response = await harness.client.get(ROUND)
    assert (response.status_code, response.json()) == (500, read_recorded("unknown round")["response"])

    block = await harness.client.get(LATEST)
    assert block.json()["block"]["header"]["height"] == "463"
    assert block.headers["access-control-allow-origin"] == "*"


@pytest.mark.rule("N30")
@pytest.mark.parametrize("path", GET_PATHS)
async def test_gateway_forwards_every_listed_path(harness: GatewayHarness, path: str) -> None:
    path = path.format(name="ab" * 32, height="84", plan="v1.6.1-rc.5")
    harness.set_response(path, lambda _: json_response(200, {"this": "one"}))
    assert (await harness.client.get(path)).json() == {"this": "one"}
    assert harness.requested_paths() == [[path], []]


@pytest.mark.parametrize("path", POST_PATHS)
async def test_gateway_forwards_only_the_body_of_votes(harness: GatewayHarness, path: str) -> None:
    requests: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return json_response(200, ACCEPTED_RESPONSE)

    harness.set_response(path, take)
    headers = {
        "Cookie": "who=me",
        "X-Forwarded-For": "203.0.113.9",
        "X-Helper-Token": "hush",
        "Authorization": "Bearer hush",
        "User-Agent": "a wallet of 2026",
        "X-Request-Id": "17",
        "Referer": "https://wallet.example/",
        "Origin": "https://wallet.example",
    }
    sent = await harness.client.post(path, json=VOTE_BODY, headers=headers, params={"who": "me"})
    assert (sent.status_code, sent.json()) == (200, ACCEPTED_RESPONSE)
    (request,) = requests
    assert json.loads(request.content) == VOTE_BODY
    assert request.url.raw_path.decode() == path
    assert set(request.headers) == {
        "host",
        "accept",
        "accept-encoding",
        "connection",
        "user-agent",
        "content-type",
        "content-length",
    }
    assert "wallet" not in request.headers["user-agent"]
    assert not [value for value in request.headers.values() if "hush" in value or "203." in value]


async def test_gateway_forwards_only_listed_query_parameters(harness: GatewayHarness) -> None:
    leaves = f"{API}/commitment-tree/{ROUND_ID.hex()}/leaves"
    response = await harness.client.get(
        f"{leaves}?from_height=80&bust=17&to_height=90&to_height=x&who=me%26from_height=1&to_height=91"
    )
    assert response.status_code == 200
    assert response.json()["blocks"]
    assert harness.requested_paths() == [[f"{leaves}?from_height=80&to_height=90"], []]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", f"{API}/reveal-share", 404),
        ("GET", f"{API}/reveal-share", 404),
        ("GET", f"{API}/snapshot-data/1", 404),
        ("GET", "/cosmos/tx/v1beta1/txs", 404),
        ("POST", "/cosmos/tx/v1beta1/txs", 404),
        ("GET", "/cosmos/auth/v1beta1/accounts/sv1abc", 404),
        ("GET", "/devnet/faults", 404),
        ("GET", f"{API}/rounds/", 404),
        ("GET", f"/{API}/rounds", 404),
        ("GET", f"{API}//rounds", 404),
        ("GET", f"{API}/rounds%2Factive", 404),
        ("GET", f"{API}/%72ounds", 404),
        ("GET", f"{API}/round/%2e%2e", 404),
        ("GET", f"{API}/round/..%2frounds", 404),
        ("GET", f"{API}/round/a%00b", 404),
        ("GET", f"{API}/round/a b", 404),
        ("GET", f"{API}/round/a%0d%0aHost:%20b", 404),
        ("GET", f"{API}/round/{'a' * 129}", 404),
        ("GET", f"{API}/commitment-tree/ab/-1", 404),
        ("GET", "/cosmos/upgrade/v1beta1/applied_plan/%2e%2e", 404),
        ("GET", "/cosmos/upgrade/v1beta1/applied_plan/.v1", 404),
        ("GET", "/cosmos/upgrade/v1beta1/module_versions", 404),
        ("GET", f"{API}/tally/ab/1;x", 404),
        ("POST", f"{API}/rounds", 405),
        ("PUT", f"{API}/rounds", 405),
        ("DELETE", f"{API}/rounds", 405),
        ("TRACE", f"{API}/rounds", 405),
        ("HEAD", f"{API}/rounds", 405),
        ("GET", f"{API}/cast-vote", 405),
        ("PATCH", f"{API}/cast-vote", 405),
    ],
)
async def test_gateway_unlisted_request_is_refused_without_node_request(
    harness: GatewayHarness, method: str, path: str, status: int
) -> None:
    refused = await harness.client.request(method, path, content=b"{}" if method == "POST" else None)
    assert refused.status_code == status
    if method != "HEAD":
        (no_route_text if path.startswith("/shielded-vote/") else error_text)(refused)
    assert harness.requested_paths() == [[], []]


async def test_gateway_does_not_forward_helper_routes(harness: GatewayHarness) -> None:
    assert (await harness.client.get(STATUS_PATH)).json()["status"] == "ok"
    assert (await harness.client.post(SHARES_PATH, json={})).status_code == 400
    assert (await harness.client.get(f"{API}/share-status/{'00' * 32}/{'00' * 32}")).json() == {"status": "pending"}
    assert (await harness.client.get(f"{API}/queue-status")).status_code == 404
    assert (await harness.client.get("/openapi.json")).json()["openapi"] == "3.1.0"
    assert harness.requested_paths() == [[], []]


async def test_gateway_without_fresh_node_responds_503(harness: GatewayHarness) -> None:
    harness.first.syncing, harness.first.height = True, harness.first.height + 1
    await harness.endpoints.probe_all()
    harness.requested_paths()
    assert (await harness.client.get(f"{API}/rounds")).status_code == 200
    assert harness.requested_paths() == [[], [f"{API}/rounds"]]
    harness.second.chain_id = "another"
    await harness.endpoints.probe_all()
    harness.requested_paths()
    for refused in (
        await harness.client.get(f"{API}/rounds"),
        await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY),
    ):
        assert refused.status_code == 503
        assert "no chain node is reachable" in error_text(refused)
    assert harness.requested_paths() == [[], []]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_gateway_failed_read_is_retried_on_next_node(harness: GatewayHarness, status: int) -> None:
    harness.set_response("/rounds", lambda _: json_response(status, {"error": "not now"}))
    assert (await harness.client.get(f"{API}/rounds")).status_code == 200
    assert harness.requested_paths() == [[f"{API}/rounds"], [f"{API}/rounds"]]
    harness.set_response("/rounds", lambda _: json_response(status, {"error": "not now"}), harness.second)
    response = await harness.client.get(f"{API}/rounds")
    assert (response.status_code, response.json()) == (status, {"error": "not now"})


async def test_gateway_hanging_read_is_retried_on_next_node(harness: GatewayHarness) -> None:
    harness.first.hangs = True
    assert (await harness.client.get(f"{API}/rounds")).status_code == 200
    harness.second.hangs = True
    refused = await harness.client.get(f"{API}/rounds")
    assert refused.status_code == 503
    assert "first" not in error_text(refused)
    # The gateway does not change the health of the helper's nodes.
    assert harness.endpoints.unusable_reasons() == {"first:1317": None, "second:1317": None}


async def test_gateway_vote_is_retried_only_if_nothing_was_sent(harness: GatewayHarness) -> None:
    harness.set_response("/cast-vote", accept_vote, harness.second)
    del harness.network.nodes["first"]  # its host refuses connections
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).json() == ACCEPTED_RESPONSE
    assert harness.requested_paths() == [[], [f"{API}/cast-vote"]]
    del harness.network.nodes["second"]
    refused = await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)
    assert refused.status_code == 503
    assert "nothing was sent" in error_text(refused)


def break_connection(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("reset", request=request)


def fail_unsent(_: httpx.Request) -> httpx.Response:
    return httpx.Response(307, headers={"location": "http://second:1317/shielded-vote/v1/cast-vote"})


@pytest.mark.rule("N30")
@pytest.mark.parametrize("make", [break_connection, fail_unsent])
async def test_gateway_vote_with_lost_response_is_not_retried(make: Callable[[httpx.Request], httpx.Response]) -> None:
    async with running_gateway(post_seconds=0.3) as harness:
        harness.set_response("/cast-vote", make)
        lost = await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)
        assert lost.status_code == 502
        assert "check for the transaction" in error_text(lost)
        assert harness.requested_paths() == [[f"{API}/cast-vote"], []]
    async with running_gateway(post_seconds=0.3) as harness:
        harness.first.hangs = True
        assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).status_code == 502
        assert harness.requested_paths() == [[f"{API}/cast-vote"], []]


@pytest.mark.rule("W9", "W10")
@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("POST", "cast-vote", 200, b'{"tx_hash":"' + b"AB" * 32 + b'","code":0,"log":""}'),
        ("POST", "cast-vote", 422, b'{"tx_hash":"' + b"AB" * 32 + b'","code":7,"log":"refused"}'),
        ("POST", "cast-vote-batch", 200, b'{"tx_hash":"AB","code":0,"batch_digest":"' + b"cd" * 32 + b'"}'),
        ("GET", f"tx/{'AB' * 32}", 404, b'{"error":"tx not found"}'),
        ("GET", f"tx/{'AB' * 32}", 200, b'{"height":"7","code":0,"log":"","events":[{"type":"x","attributes":[]}]}'),
        ("GET", f"tx/{'AB' * 32}", 422, b'{"height":"7","code":3,"log":"failed","events":[]}'),
    ],
)
async def test_gateway_returns_every_byte_of_a_node_response(
    harness: GatewayHarness, method: str, path: str, status: int, body: bytes
) -> None:
    json_type = {"content-type": "application/json"}
    harness.set_response(
        f"/{path}", lambda _: httpx.Response(status, content=body, headers=json_type), harness.first, harness.second
    )
    response = await harness.client.request(method, f"{API}/{path}", content=b"{}" if method == "POST" else None)
    assert (response.status_code, response.content) == (status, body)
    assert response.headers["content-type"] == "application/json"


WARMING = {"status": "warming", "started_at": "2026-09-01T00:00:00Z"}


@pytest.mark.rule("N30")
@pytest.mark.parametrize(("asked", "forwarded"), [("2", "2"), ("86400", "60")])
async def test_gateway_forwards_nodes_that_are_starting_with_their_retry_after(
    harness: GatewayHarness, asked: str, forwarded: str
) -> None:
    harness.set_response(
        "/cast-vote",
        lambda _: httpx.Response(503, json=WARMING, headers={"Retry-After": asked}),
        harness.first,
        harness.second,
    )
    refused = await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)
    assert (refused.status_code, refused.json(), refused.headers["retry-after"]) == (503, WARMING, forwarded)
    assert harness.requested_paths() == [[f"{API}/cast-vote"]] * 2


@pytest.mark.rule("N30")
@pytest.mark.parametrize("body", [WARMING, {"error": "verifying keys are warming up"}])
async def test_gateway_vote_refused_by_starting_node_goes_to_next_node(
    harness: GatewayHarness, body: dict[str, str]
) -> None:
    harness.set_response("/cast-vote", lambda _: json_response(503, body))
    harness.set_response("/cast-vote", accept_vote, harness.second)
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).json() == ACCEPTED_RESPONSE
    assert harness.requested_paths() == [[f"{API}/cast-vote"]] * 2


@pytest.mark.rule("N30", "W9")
@pytest.mark.parametrize(
    "response",
    [
        *(json_response(status, {"code": 1, "log": "nullifier already spent"}) for status in (422, 429, 503)),
        httpx.Response(503, json={"status": "ready"}),
        httpx.Response(503, json={"status": "error", "error": "overloaded"}),
        httpx.Response(503, json=["warming"]),
        httpx.Response(503, json={**WARMING, "error": "x" * SHORT_BODY_BYTES}),
        httpx.Response(502, json=WARMING),
    ],
)
async def test_gateway_vote_that_a_node_refused_is_not_sent_to_the_next_one(
    harness: GatewayHarness, response: httpx.Response
) -> None:
    harness.set_response("/cast-vote", lambda _: response)
    failed = await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)
    assert (failed.status_code, failed.content) == (response.status_code, response.content)
    assert harness.requested_paths() == [[f"{API}/cast-vote"], []]


async def test_gateway_vote_repeated_after_failure_goes_to_other_node_first(harness: GatewayHarness) -> None:
    harness.set_response("/cast-vote", lambda _: json_response(502, {"error": "engine lost"}))
    harness.set_response("/cast-vote", accept_vote, harness.second)
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).status_code == 502
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).json() == ACCEPTED_RESPONSE
    assert (await harness.client.get(f"{API}/rounds")).status_code == 200
    assert harness.requested_paths() == [[f"{API}/cast-vote", f"{API}/rounds"], [f"{API}/cast-vote"]]
    harness.set_response("/cast-vote", break_connection, harness.second)
    harness.set_response("/cast-vote", accept_vote)
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).status_code == 502
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).json() == ACCEPTED_RESPONSE
    assert harness.requested_paths() == [[f"{API}/cast-vote"], [f"{API}/cast-vote"]]


@pytest.mark.rule("N30", "W9", "W11")
async def test_gateway_forwards_a_batch_of_785_kb(harness: GatewayHarness) -> None:
    bodies: list[bytes] = []

    def take(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return json_response(200, {**ACCEPTED_RESPONSE, "batch_digest": "ab" * 32})

    harness.set_response("/cast-vote-batch", take)
    batch = b'{"votes":"' + b"A" * 785_000 + b'"}'
    sent = await harness.client.post(f"{API}/cast-vote-batch", content=batch)
    assert sent.json() == {**ACCEPTED_RESPONSE, "batch_digest": "ab" * 32}
    assert bodies == [batch]


def delay_responses(node: FakeNode, seconds: float) -> None:
    handle = node.handle

    async def handle_late(request: httpx.Request) -> httpx.Response:
        response = await handle(request)
        await anyio.sleep(seconds)
        return response

    node.handle = handle_late  # type: ignore[method-assign]


@pytest.mark.rule("N30")
async def test_gateway_waits_longer_for_a_vote_and_for_leaves(harness: GatewayHarness) -> None:
    harness.set_response("/cast-vote", accept_vote)
    for node in (harness.first, harness.second):
        delay_responses(node, 0.4)  # the timeout of other requests is 0.3 s
    assert (await harness.client.get(f"{API}/rounds")).status_code == 503
    assert (await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY)).json() == ACCEPTED_RESPONSE
    harness.requested_paths()
    leaves = f"{API}/commitment-tree/{ROUND_ID.hex()}/leaves?from_height=80&to_height=90"
    assert (await harness.client.get(leaves)).json()["blocks"]
    assert harness.requested_paths() == [[leaves], [leaves]], "only the last node has more time"


@pytest.mark.rule("N30", "W11")
def test_gateway_limits_allow_what_wallets_wait_for() -> None:
    limits = GatewayLimits()
    assert (limits.post_seconds, limits.leaves_seconds) == (150, 60)
    assert limits.response_seconds >= limits.post_seconds


@pytest.mark.parametrize(
    "node_response",
    [
        httpx.Response(301, headers={"location": "http://127.0.0.1:1/"}),
        httpx.Response(200, content=b"{}", headers={"content-type": "application/json", "content-encoding": "br"}),
        httpx.Response(200, content=b"<script>", headers={"content-type": "text/html"}),
        httpx.Response(200, content=b"{}"),
    ],
    ids=["a redirect", "compressed", "a page", "no type"],
)
async def test_gateway_invalid_node_response_is_502(harness: GatewayHarness, node_response: httpx.Response) -> None:
    harness.set_response("/rounds", lambda _: node_response, harness.first, harness.second)
    refused = await harness.client.get(f"{API}/rounds")
    assert refused.status_code == 502
    error_text(refused)


@pytest.mark.rule("N5")
async def test_gateway_error_without_json_keeps_status() -> None:
    async with running_gateway() as harness:
        response = await harness.client.get(f"{API}/endorsed-rounds/zodl")
        assert response.status_code == 404
        assert no_route_text(response) == "the node responded with this status and no JSON"


async def test_gateway_does_not_forward_node_headers(harness: GatewayHarness) -> None:
    def make(_: httpx.Request) -> httpx.Response:
        headers = {
            "Content-Type": "application/json; charset=utf-8",
            "Set-Cookie": "who=me",
            "Server": "node",
            "Cache-Control": "public, max-age=600",
            "Access-Control-Allow-Origin": "https://other.example",
            "Connection": "keep-alive, x-secret",
            "Keep-Alive": "timeout=5",
            "Retry-After": "7",
            "Grpc-Metadata-X": "1",
        }
        return httpx.Response(503, content=b"{}", headers=headers)

    harness.set_response("/rounds", make, harness.first, harness.second)
    response = await harness.client.get(f"{API}/rounds")
    assert len(response.headers.pop("x-request-id")) == 16
    assert response.headers.pop("date").endswith(" GMT")
    assert dict(response.headers) == {
        "content-type": "application/json",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "content-length": "2",
        "retry-after": "7",
        "access-control-allow-origin": "*",
        "access-control-expose-headers": "Retry-After, X-Request-Id, Link, X-Total-Count",
    }


@pytest.mark.rule("W11")
async def test_gateway_too_large_vote_is_not_forwarded(harness: GatewayHarness) -> None:
    refused = await harness.client.post(f"{API}/cast-vote", content=b" " * ((1 << 20) + 1))
    assert refused.status_code == 413
    error_text(refused)
    assert harness.requested_paths() == [[], []]


async def test_gateway_response_with_large_content_length_is_refused(harness: GatewayHarness) -> None:
    long = json_response(200, {"leaves": "A" * (1 << 16)})
    harness.set_response("/rounds", lambda _: long, harness.first, harness.second)
    assert (await harness.client.get(f"{API}/rounds")).status_code == 502


@pytest.mark.rule("N8")
async def test_gateway_concurrency_is_limited() -> None:
    async with running_gateway(max_concurrent=2, response_seconds=0.5) as harness:
        harness.first.hangs = harness.second.hangs = True
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(harness.client.get, f"{API}/rounds")
            await wait_until(lambda: len(harness.gateway._active) == 2)
            refused = await harness.client.get(f"{API}/rounds")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            named = await harness.client.post(f"{API}/cast-vote", json=VOTE_BODY, headers={ATTEMPT_HEADER: "0f" * 32})
            assert (named.status_code, named.headers["retry-after"]) == (429, "2")
        assert len(harness.gateway._active) == 0
