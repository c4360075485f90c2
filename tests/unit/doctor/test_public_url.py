"""The check of the public URL: what a wallet, a page and the operators' tools would meet there."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from helper.doctor import CheckResult, Level
from helper.doctor.publication import check_public_url
from tests.support.certificates import CertificateAuthority
from tests.unit.server.gateway_fixtures import running_gateway

pytestmark = pytest.mark.anyio

URL = "https://helper.example.org/base"
CORS = {"Access-Control-Allow-Origin": "*"}
API = "/base/shielded-vote/v1"
STATUS, SHARES, ROUNDS = f"{API}/status", f"{API}/shares", f"{API}/rounds"
SHARE_STATUS = f"{API}/share-status/{'00' * 32}/{'00' * 32}"
LATEST = "/base/cosmos/base/tendermint/v1beta1/blocks/latest"
HELPER_PATHS, CHAIN_PATHS = (STATUS, SHARES, SHARE_STATUS), (ROUNDS, LATEST)
BLOCK = {"block": {"header": {"height": "12", "chain_id": "zvote-1"}}}

Respond = Callable[[httpx.Request], httpx.Response]


def respond_well(request: httpx.Request) -> httpx.Response:
    status, content = {
        STATUS: (200, {"status": "ok"}),
        SHARES: (400, {"status": "error", "error": "shares_hash: missing"}),
        SHARE_STATUS: (202, {"status": "pending"}),
        ROUNDS: (200, {}),
        LATEST: (200, BLOCK),
    }[request.url.path]
    return httpx.Response(status, json=content, headers=CORS)


async def check(change: Respond = respond_well, *paths: str, has_gateway: bool = True) -> list[CheckResult]:
    """Check a URL of which some paths have the responses of `change`, or none if it raises."""
    requests: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        response = (change if request.url.path in (paths or (request.url.path,)) else respond_well)(request)
        # A transport must return a stream that was not read yet.
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(response.content))

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
        results = await check_public_url(client, URL, chain_id="zvote-1", has_gateway=has_gateway)
    assert {(request.method, request.url.path) for request in requests} == {
        *(("GET", path) for path in (STATUS, SHARE_STATUS, *CHAIN_PATHS)),
        ("POST", SHARES),
    }
    return results


async def test_url_of_a_helper_with_gateway_is_ok() -> None:
    assert [result.level for result in await check()] == [Level.OK]
    async with running_gateway() as harness:
        (result,) = await check_public_url(harness.client, "http://helper/", chain_id="", has_gateway=True)
        assert (result.level, result.message) == (Level.OK, "http://helper/ serves wallets, pages and the chain")


@pytest.mark.parametrize(
    ("path", "status", "content"),
    [
        (STATUS, 503, {"status": "error", "error": "shares cannot be accepted now: starting"}),
        (SHARES, 401, {"status": "error", "error": "X-Helper-Token is missing or invalid"}),
        (SHARES, 503, {"status": "error", "error": "starting"}),
        (SHARE_STATUS, 200, {"status": "pending"}),
        (SHARE_STATUS, 401, {"status": "error", "error": "X-Helper-Token is missing or invalid"}),
        (SHARE_STATUS, 503, {"status": "error", "error": "the queue cannot be read now"}),
    ],
)
async def test_pause_and_token_are_no_problem_of_the_url(path: str, status: int, content: dict[str, str]) -> None:
    results = await check(lambda _: httpx.Response(status, json=content, headers=CORS), path)
    assert [result.level for result in results] == [Level.OK]


def redirect(request: httpx.Request) -> httpx.Response:
    return httpx.Response(308, headers={"Location": f"https://www.example.org{request.url.path}"})


def respond_with_page(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, html="<!doctype html>", headers=CORS)


def respond_not_found(_: httpx.Request) -> httpx.Response:
    return httpx.Response(404, json={"error": "not found"}, headers=CORS)


def refuse_connection(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (redirect, "redirects (HTTP 308), which wallets do not follow"),
        (respond_with_page, "unexpected response (HTTP 200, text/html)"),
        (respond_not_found, "unexpected response (HTTP 404, application/json)"),
        (lambda _: httpx.Response(200, content=b"[" * 100_000), "unexpected response (HTTP 200, no type)"),
        (
            lambda _: httpx.Response(200, json=["status", "rounds", "block"]),
            "unexpected response (HTTP 200, application/json)",
        ),
        (refuse_connection, "no response (refused)"),
    ],
)
async def test_url_without_helper_is_one_failure(change: Respond, problem: str) -> None:
    (result,) = await check(change)
    assert (result.level, result.message) == (Level.FAIL, f"{URL}: {problem}")
    assert result.advice.startswith("Check name, certificate and proxy")


@pytest.mark.parametrize("path", HELPER_PATHS)
async def test_missing_route_of_the_helper_is_named(path: str) -> None:
    (result,) = await check(respond_not_found, path)
    shown = path.removeprefix("/base").replace("00" * 32, "…")
    assert result.level is Level.FAIL
    assert result.message == f"{URL}: {shown}: unexpected response (HTTP 404, application/json)"
    assert "proxy pass these paths to this helper" in result.advice


@pytest.mark.parametrize("has_gateway", [True, False])
async def test_missing_routes_of_the_chain_are_a_warning_that_says_who_can_serve_them(has_gateway: bool) -> None:
    (result,) = await check(respond_not_found, *CHAIN_PATHS, has_gateway=has_gateway)
    assert result.level is Level.WARN
    assert result.message.count("unexpected response (HTTP 404") == 2
    assert ("the helper" if has_gateway else "a node, or set [gateway] enable = true") in result.advice


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"height": 12, "chain_id": "zvote-1"}, "unexpected response (HTTP 200, application/json)"),
        ({"height": "0", "chain_id": "zvote-1"}, "unexpected response (HTTP 200, application/json)"),
        ({"height": "12"}, "unexpected response (HTTP 200, application/json)"),
        ("12", "unexpected response (HTTP 200, application/json)"),
        ({"height": "12", "chain_id": "svote-1"}, "block of another chain than zvote-1"),
    ],
)
async def test_block_is_read_as_operators_tools_do(header: object, problem: str) -> None:
    (result,) = await check(lambda _: httpx.Response(200, json={"block": {"header": header}}, headers=CORS), LATEST)
    assert (result.level, result.message.removeprefix(f"{URL}: {LATEST.removeprefix('/base')}: ")) == (
        Level.WARN,
        problem,
    )


@pytest.mark.parametrize("values", [[], ["*", "*"], ["https://other.example"]], ids=["none", "twice", "other origin"])
async def test_page_that_could_not_read_a_response_is_reported(values: list[str]) -> None:
    headers = [("Access-Control-Allow-Origin", value) for value in values]
    (result,) = await check(lambda _: httpx.Response(200, json={"rounds": []}, headers=headers), ROUNDS)
    assert result.level is Level.WARN
    assert "pages of other origins cannot read it" in result.message


@pytest.mark.parametrize(
    ("pause", "seconds", "problem"),
    [(3600, 0.5, "no response within 0.5 s"), (0, 60, "unexpected response (HTTP 200, no type)")],
    ids=["slow", "endless"],
)
async def test_body_without_end_is_reported(
    monkeypatch: pytest.MonkeyPatch, pause: float, seconds: float, problem: str
) -> None:
    monkeypatch.setattr("helper.doctor.publication._MAX_PUBLIC_BYTES", 1000)
    monkeypatch.setattr("helper.doctor.publication.PUBLIC_URL_SECONDS", seconds)

    async def generate() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(pause)

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=generate()))
    async with httpx.AsyncClient(transport=transport) as client:
        (result,) = await check_public_url(client, URL, chain_id="", has_gateway=True)
    assert result.message == f"{URL}: {problem}"


async def test_certificate_for_another_name_is_named(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "authority.pem")
    certificate, key = authority.issue("other.example.org")
    (tmp_path / "server.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    trusting = ssl.create_default_context(cafile=str(authority.file))
    port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient(verify=trusting, trust_env=False) as client:
        url = f"https://localhost:{port}"
        (result,) = await check_public_url(client, url, chain_id="", has_gateway=True)
    assert result.level is Level.FAIL
    assert "certificate verify failed: Hostname mismatch" in result.message
