"""Tokens are compared only by `hmac.compare_digest`, in constant time."""

from __future__ import annotations

import hmac
from collections import Counter

import httpx
import pytest
from starlette.requests import Request

from helper.observability.status_feed import StatusFeed
from helper.server.edge import Edge, json_application
from helper.server.page_routes import GUESS_BURST, GUESSES_PER_SECOND, PATH, bearer_matches, events_route
from tests.support.clock import FakeClock
from tests.support.edge_client import create_edge_client
from tests.unit.ingest.admission_fixtures import create_body
from tests.unit.server.test_events import fail_snapshot
from tests.unit.server.wallet_fixtures import WalletApp, error_text

TOKEN = "a tøken of some length"


class FakeComparison:
    """Replaces `hmac.compare_digest`: records its arguments and returns a fixed result."""

    def __init__(self, verdict: bool) -> None:
        self.verdict = verdict
        self.compared: list[tuple[bytes, bytes]] = []

    def __call__(self, first: bytes, other: bytes) -> bool:
        self.compared.append((first, other))
        return self.verdict


GIVEN = [None, "", "a", TOKEN[:-1], TOKEN + "x", TOKEN, "x" * 10_000, "ÿ"]


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("header_token", GIVEN)
async def test_tokens_guarded_routes_use_compare_digest(
    monkeypatch: pytest.MonkeyPatch, header_token: str | None, verdict: bool
) -> None:
    comparison = FakeComparison(verdict)
    monkeypatch.setattr(hmac, "compare_digest", comparison)
    wallets = WalletApp(api_token=TOKEN, expose_queue_status=True)
    headers = httpx.Headers({} if header_token is None else {b"X-Helper-Token": header_token.encode()})
    request_count = 0
    async with wallets.create_client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for path, operations in paths.items():
            for method, operation in operations.items():
                url = path.format(round_id="ab" * 32, nullifier="cd" * 32)
                body = create_body() if verdict else b"not read"
                response = await client.request(method, url, content=body, headers=headers)
                if "security" in operation:
                    request_count += 1
                    assert response.status_code in ((200, 202) if verdict else (401,))
                    assert verdict or error_text(response)
                else:
                    assert response.status_code == 200
    assert request_count == 3
    assert comparison.compared == [((header_token or "").encode(), TOKEN.encode())] * request_count


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("header_token", GIVEN)
def test_tokens_operator_token_uses_compare_digest(
    monkeypatch: pytest.MonkeyPatch, header_token: str | None, verdict: bool
) -> None:
    comparison = FakeComparison(verdict)
    monkeypatch.setattr(hmac, "compare_digest", comparison)
    headers = [] if header_token is None else [(b"authorization", b"Bearer " + header_token.encode())]
    is_accepted = bearer_matches(Request({"type": "http", "headers": headers}), TOKEN)
    assert is_accepted is (verdict and header_token is not None)
    assert comparison.compared == [((header_token or "").encode(), TOKEN.encode())]


async def test_guesses_of_the_operator_token_are_limited_and_not_compared_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparison = FakeComparison(False)
    monkeypatch.setattr(hmac, "compare_digest", comparison)
    clock = FakeClock()
    feed = StatusFeed(fail_snapshot, clock=clock)
    edge = Edge(json_application([events_route(feed, TOKEN, clock)]))

    async def guess(number: int) -> list[int]:
        async with create_edge_client(edge) as client:
            headers = {"Authorization": "Bearer guess"}
            return [(await client.get(PATH, headers=headers)).status_code for _ in range(number)]

    assert Counter(await guess(GUESS_BURST + 50)) == {401: GUESS_BURST, 429: 50}
    comparison.verdict = True
    assert await guess(1) == [429], "the right token must not be told from a wrong one"
    comparison.verdict = False
    clock.advance(1)
    assert Counter(await guess(50)) == {401: GUESSES_PER_SECOND, 429: 40}
    assert len(comparison.compared) == GUESS_BURST + GUESSES_PER_SECOND
