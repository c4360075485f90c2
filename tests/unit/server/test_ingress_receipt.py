"""Receipts of bodies that time out: exact, for a valid token only, and only while nothing was stored or sent."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from structlog.testing import capture_logs

from helper.server.body_reader import BodyReader
from helper.server.edge import Edge
from helper.server.gateway_routes import POST_PATHS
from helper.server.listening import Server
from tests.support.edge_client import request_and_wait
from tests.unit.chain.fakes import json_response
from tests.unit.ingest.admission_fixtures import create_body
from tests.unit.server.gateway_fixtures import running_gateway
from tests.unit.server.server_fixtures import RawClient
from tests.unit.server.share_scenarios import build_head, build_post, count_served
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp, error_text

HEADER = "X-Vote-Ingress-Attempt-V1"
TOKEN = "0123456789abcdef" * 4
RECEIPT = (
    b'{"error":{"version":1,"code":"request_body_timeout","dispatch":"not_started",'
    b'"attempt":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}}'
)
CAST_VOTE = "/shielded-vote/v1/cast-vote"
INVALID_TOKENS = {
    "none": [],
    "empty": [""],
    "upper case": [TOKEN.upper()],
    "one upper case digit": [TOKEN[:-1] + "F"],
    "63 digits": [TOKEN[:-1]],
    "65 digits": [TOKEN + "0"],
    "not hex": [TOKEN[:-1] + "g"],
    "prefix": ["0x" + TOKEN[2:]],
    "twice": [TOKEN, TOKEN],
    "two": [TOKEN, TOKEN[::-1]],
    "valid and invalid": [TOKEN, ""],
    "list": [f"{TOKEN}, {TOKEN}"],
}


async def post_stalled_body(edge: Edge, path: str, *tokens: str) -> httpx.Response:
    """Post the begin of a body that is never completed."""
    lines = [f"POST {path} HTTP/1.1", "Host: helper", "Content-Length: 1000", *(f"{HEADER}: {each}" for each in tokens)]
    return await request_and_wait(edge, "\r\n".join([*lines, "", ""]).encode(), create_body()[:100])


def impatient_reader() -> BodyReader:
    return BodyReader(timeout_seconds=0.05)


@pytest.mark.rule("N3", "N4", "W8")
@pytest.mark.parametrize("path", [SHARES_PATH, *POST_PATHS])
async def test_slow_body_of_attempt_gets_its_receipt(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.server.protocol.DRAIN_SECONDS", 0.01)
    async with running_gateway(body_reader=impatient_reader()) as harness:
        with capture_logs() as logs:
            response = await post_stalled_body(harness.wallets.edge, path, TOKEN)
        assert (response.status_code, response.content) == (408, RECEIPT)
        assert response.headers.get_list("content-type") == ["application/json"]
        assert response.headers.get_list("cache-control") == ["no-store"]
        assert response.headers["connection"] == "close"
        assert TOKEN not in str(response.headers)
        assert harness.requested_paths() == [[], []]
        assert harness.wallets.store.calls == []
        assert harness.refusals == {408: 1}, "no label contains the token"
    assert logs == []


@pytest.mark.rule("N3")
@pytest.mark.parametrize("path", [SHARES_PATH, CAST_VOTE])
@pytest.mark.parametrize("values", INVALID_TOKENS.values(), ids=INVALID_TOKENS)
async def test_slow_body_without_valid_token_is_503(
    path: str, values: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helper.server.protocol.DRAIN_SECONDS", 0.01)
    async with running_gateway(body_reader=impatient_reader()) as harness:
        with capture_logs() as logs:
            response = await post_stalled_body(harness.wallets.edge, path, *values)
        assert (response.status_code, error_text(response)) == (503, "body: was not received in time")
        assert (response.headers["retry-after"], response.headers["connection"]) == ("2", "close")
        assert harness.requested_paths() == [[], []]
    assert logs == []


@pytest.mark.rule("N3", "N30")
async def test_token_is_forwarded_and_receipt_of_the_node_is_returned_unchanged() -> None:
    requests: list[httpx.Request] = []

    def time_out(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(408, content=RECEIPT, headers={"Content-Type": "application/json"})

    async with running_gateway() as harness:
        harness.set_response("/cast-vote", time_out)
        response = await harness.client.post(CAST_VOTE, json={}, headers={HEADER: TOKEN})
        assert (response.status_code, response.content) == (408, RECEIPT)
        assert response.headers["cache-control"] == "no-store"
        assert harness.requested_paths() == [[CAST_VOTE], []]
    (request,) = requests
    assert request.headers.get_list(HEADER) == [TOKEN]


@pytest.mark.parametrize("values", INVALID_TOKENS.values(), ids=INVALID_TOKENS)
async def test_invalid_token_is_not_forwarded(values: list[str]) -> None:
    requests: list[httpx.Request] = []

    def accept(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return json_response(200, {"tx_hash": "AB" * 32, "code": 0})

    async with running_gateway() as harness:
        harness.set_response("/cast-vote", accept)
        headers = [(HEADER, value) for value in values]
        assert (await harness.client.post(CAST_VOTE, json={}, headers=headers)).status_code == 200
    assert [HEADER in request.headers for request in requests] == [False]


@pytest.mark.rule("N3", "N30")
async def test_vote_that_was_sent_gets_no_receipt() -> None:
    async with running_gateway(post_seconds=0.05) as harness:
        harness.first.hangs = True
        response = await harness.client.post(CAST_VOTE, json={}, headers={HEADER: TOKEN})
        assert response.status_code == 502
        assert "check for the transaction" in error_text(response)
        assert harness.requested_paths() == [[CAST_VOTE], []]


@pytest.mark.rule("N3", "W8")
async def test_receipt_is_read_by_a_client_that_is_still_sending() -> None:
    server = Server(WalletApp(body_reader=BodyReader(timeout_seconds=0.2)).edge)
    async with count_served(server) as port:
        client = await RawClient.connect(port, build_head(f"{HEADER}: {TOKEN}", "Content-Length: 60000"))
        assert await client.request(b"[" * 20_000) == RECEIPT
        with pytest.raises(TimeoutError):  # closing now would reset the connection when the rest arrives
            await asyncio.wait_for(client.reader.read(), 0.1)
        client.writer.write(b"[" * 40_000)
        assert await client.reader.read() == b""
        client.writer.close()


async def test_connection_after_a_receipt_is_closed_if_the_body_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.server.protocol.DRAIN_SECONDS", 0.1)
    server = Server(WalletApp(body_reader=BodyReader(timeout_seconds=0.1)).edge)
    async with count_served(server) as port:
        client = await RawClient.connect(port, build_head(f"{HEADER}: {TOKEN}", "Content-Length: 60000"))
        assert (await client.read_rest()).endswith(RECEIPT)


@pytest.mark.rule("N6", "N9", "W1")
async def test_status_is_fast_while_a_wallet_posts_128_shares_slowly() -> None:
    wallets = WalletApp()
    share = build_post(create_body(), f"{HEADER}: {TOKEN}")
    async with count_served(Server(wallets.edge)) as port:
        clients = [await RawClient.connect(port, share[:-1000]) for _ in range(128)]
        other = await RawClient.connect(port)
        # The response comes while all bodies are incomplete, so it waits for none of them.
        assert b'"status":"ok"' in await other.request(build_head(line=f"GET {STATUS_PATH} HTTP/1.1"))
        other.writer.close()
        responses = await asyncio.gather(*(client.request(share[-1000:]) for client in clients))
        for client in clients:
            client.writer.close()
    assert sorted(set(responses)) == [b'{"status":"duplicate"}', b'{"status":"queued"}']
