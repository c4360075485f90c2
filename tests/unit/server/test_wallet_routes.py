"""Wallet routes: responses, tokens, CORS and JSON errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.chain_data import RoundStatus
from helper.core.refusals import PauseReason, Situation, TemporaryRefusal
from helper.core.share import ShareState
from helper.errors import StoreFull
from helper.observability.queue_summary import QueueSummaries
from helper.server.wallet_routes import create_wallet_edge
from helper.store.models import DueBucket
from tests.unit.ingest.admission_fixtures import (
    END,
    NULLIFIER,
    POSITION,
    ROUND_ID,
    FakeStore,
    create_body,
    make_round,
)
from tests.unit.server.wallet_fixtures import (
    QUEUE_STATUS_PATH,
    SHARES_PATH,
    STATUS_PATH,
    WalletApp,
    error_text,
    no_route_text,
)

SHARE_STATUS = f"/shielded-vote/v1/share-status/{ROUND_ID.hex()}/{NULLIFIER.hex()}"
TOKEN = "tøken of a closed set-up"


@pytest.fixture
def wallets() -> WalletApp:
    return WalletApp()


@pytest.fixture
async def client(wallets: WalletApp) -> AsyncIterator[httpx.AsyncClient]:
    async with wallets.create_client() as opened:
        yield opened


async def test_shares_full_disk_is_503(client: httpx.AsyncClient, wallets: WalletApp) -> None:
    wallets.store.error = StoreFull("no space")
    response = await client.post(SHARES_PATH, content=create_body())
    assert response.status_code == 503
    assert (response.headers["retry-after"], error_text(response)) == (
        "2",
        "the queue cannot be written now; retry later",
    )


@pytest.mark.parametrize(
    ("round_id", "nullifier", "named"),
    [
        ("ab", NULLIFIER.hex(), "round_id"),
        (ROUND_ID.hex(), "ab", "nullifier"),
        (ROUND_ID.hex(), "%FF" * 20, "nullifier"),
    ],
)
async def test_share_status_malformed_path_is_400(
    client: httpx.AsyncClient, round_id: str, nullifier: str, named: str
) -> None:
    response = await client.get(f"/shielded-vote/v1/share-status/{round_id}/{nullifier}")
    assert response.status_code == 400
    assert error_text(response).startswith(f"{named}: ")


@pytest.mark.rule("W1")
async def test_status_shows_tree_of_newest_active_round(client: httpx.AsyncClient, wallets: WalletApp) -> None:
    older, newest_closed = b"\x01" * 32, b"\x02" * 32
    wallets.chain.rounds[older] = make_round(height=10, round_id=older)
    wallets.chain.rounds[newest_closed] = make_round(RoundStatus.FINALIZED, height=90, round_id=newest_closed)
    response = await client.get(STATUS_PATH)
    wallets.chain.rounds.clear()
    empty = await client.get(STATUS_PATH)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"status": "ok", "tree": {"leaf_count": POSITION + 1, "anchor_height": 84}}
    assert empty.json() == {"status": "ok", "tree": {"leaf_count": 0, "anchor_height": 0}}


async def test_status_before_ready_is_503(client: httpx.AsyncClient, wallets: WalletApp) -> None:
    wallets.is_ready = False
    response = await client.get(STATUS_PATH)
    assert (response.status_code, error_text(response)) == (503, "starting")


@pytest.mark.rule("N8", "W1")
async def test_status_while_paused_is_503(client: httpx.AsyncClient, wallets: WalletApp) -> None:
    wallets.pause_reason = PauseReason.NO_NODE_IN_SYNC
    response = await client.get(STATUS_PATH)
    assert response.status_code == 503
    assert "no chain node is in sync" in error_text(response)


@pytest.mark.rule("N13")
async def test_queue_status_is_served_only_if_enabled(client: httpx.AsyncClient) -> None:
    hidden = await client.get(QUEUE_STATUS_PATH)
    exposed = WalletApp(expose_queue_status=True)
    async with exposed.create_client() as exposed_client:
        await exposed_client.post(SHARES_PATH, content=create_body())
        shown = await exposed_client.get(QUEUE_STATUS_PATH)
    assert (hidden.status_code, no_route_text(hidden)) == (404, "not found")
    assert shown.json() == {
        ROUND_ID.hex(): {
            "total": 1,
            "pending": 1,
            "ready": 1,
            "not_yet_due": 0,
            "processing": 0,
            "submitted": 0,
            "failed": 0,
        }
    }


SUMMARY_PATH = "/shielded-vote/v1/queue-summary"


class SummaryStore(FakeStore):
    reads = 0

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        if self.error is not None:
            raise self.error
        self.reads += 1
        return {ROUND_ID: {ShareState.CONFIRMED: 1200}}

    async def count_by_due_bucket(self, round_id: bytes, *, start: int, width: int, now: float) -> list[DueBucket]:
        return [DueBucket(ShareState.WAITING, is_due=False, index=1, count=3000)] if round_id == ROUND_ID else []

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        return None


class SummaryApp(WalletApp):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.summary_store = SummaryStore()
        self.block_time: float | None = END - 1000
        self.asked_heights: list[int] = []

        async def read_block_time(height: int) -> float | None:
            self.asked_heights.append(height)
            return self.block_time

        self.summaries = QueueSummaries(self.summary_store, self.chain.registry, read_block_time, clock=self.clock)
        self.edge = create_wallet_edge(replace(self.api, queue_summaries=self.summaries))

    async def count_at_next_hour(self) -> None:
        """Let the summaries read the queue, as their background task does at each full hour."""
        await self.summaries.refresh()
        self.clock.time += 3600 - self.clock.time % 3600
        await self.summaries.refresh()


@pytest.mark.rule("N12", "Q2")
async def test_queue_summary_needs_no_token_and_has_cors() -> None:
    wallets = SummaryApp(api_token=TOKEN)
    wallets.clock.time = END - 3601.0
    wallets.block_time = END - 4000
    await wallets.count_at_next_hour()
    async with wallets.create_client() as client:
        response = await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")
        upper = await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex().upper()}")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["content-type"] == "application/json"
    summary = response.json()
    created, hour = END - 4000, int(wallets.clock.time)
    assert (summary["round_id"], summary["created_at_time"], summary["counted_at"]) == (ROUND_ID.hex(), created, hour)
    submitted, waiting = summary["buckets"][0]["submitted"], summary["buckets"][-1]["pending_future"]
    assert {1200 - submitted, 3000 - waiting} <= {0, 100}, "less a secret offset"
    totals = summary["not_yet_due"], sum(bucket["total"] for bucket in summary["buckets"])
    assert totals == (waiting, submitted + waiting)
    assert upper.json() == summary


@pytest.mark.rule("N12", "Q3")
async def test_queue_summary_request_reads_neither_queue_nor_chain() -> None:
    wallets = SummaryApp()
    await wallets.count_at_next_hour()
    reads, asked = wallets.summary_store.reads, list(wallets.asked_heights)
    assert (reads, len(asked)) == (1, 1), "the time of the round's creation does not change"
    async with wallets.create_client() as client:
        for seconds in (0, 59, 59, 1, 300, 3600):
            wallets.clock.time += seconds
            summary = (await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")).json()
            assert 0 <= wallets.clock.time - summary["generated_at"] <= 60, "the monitor calls 300 s stale"
    assert (wallets.summary_store.reads, wallets.asked_heights) == (reads, asked)


@pytest.mark.rule("Q5")
async def test_queue_summary_is_served_during_a_pause() -> None:
    wallets = SummaryApp()
    wallets.pause_reason = PauseReason.NO_NODE_IN_SYNC
    async with wallets.create_client() as client:
        assert (await client.get(STATUS_PATH)).status_code == 503
        assert (await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")).status_code == 200


async def test_queue_summary_of_a_round_that_one_node_may_have_invented_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wallets = SummaryApp()
    monkeypatch.setattr(wallets.chain, "is_agreed", lambda round_id: round_id == ROUND_ID)
    for number in range(3):
        invented = number.to_bytes(32)
        wallets.chain.rounds[invented] = make_round(round_id=invented)
    async with wallets.create_client() as client:
        statuses = [(await client.get(f"{SUMMARY_PATH}/{each.hex()}")).status_code for each in wallets.chain.rounds]
    assert statuses == [200, 404, 404, 404]


async def test_queue_summary_without_creation_block_begins_now() -> None:
    wallets = SummaryApp()
    wallets.block_time = None
    wallets.clock.time = END - 500.0
    async with wallets.create_client() as client:
        summary = (await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")).json()
    assert summary["created_at_time"] == END - 500


@pytest.mark.rule("N12")
@pytest.mark.parametrize(
    ("path", "status"),
    [("ab", 400), ("zz" * 32, 400), (ROUND_ID.hex() + "00", 400), ("77" * 32, 404), ("", 404)],
)
async def test_queue_summary_of_bad_or_unknown_round_is_refused(path: str, status: int) -> None:
    wallets = SummaryApp()
    async with wallets.create_client() as client:
        response = await client.get(f"{SUMMARY_PATH}/{path}")
    assert response.status_code == status
    if path == "":
        assert no_route_text(response) == "not found"
    else:
        assert "round" in error_text(response)


async def test_queue_summary_unreadable_queue_shows_the_counts_before_and_invalid_round_is_400() -> None:
    wallets = SummaryApp()
    await wallets.count_at_next_hour()
    wallets.summary_store.error = StoreFull("no space")
    await wallets.count_at_next_hour()
    async with wallets.create_client() as client:
        summary = (await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")).json()
        assert summary["counted_at"] == wallets.clock.time - 3600
        wallets.summary_store.error = None
        wallets.clock.time += 60
        await wallets.summaries.refresh()
        summary = (await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")).json()
        assert summary["counted_at"] == wallets.clock.time, "read again after a minute"
    wallets = SummaryApp()
    wallets.block_time = END
    await wallets.count_at_next_hour()
    async with wallets.create_client() as client:
        assert (await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")).status_code == 400


@pytest.mark.rule("N12")
async def test_queue_summary_disabled_is_404(client: httpx.AsyncClient) -> None:
    response = await client.get(f"{SUMMARY_PATH}/{ROUND_ID.hex()}")
    assert (response.status_code, no_route_text(response)) == (404, "not found")


@pytest.mark.parametrize("path", [SHARES_PATH, STATUS_PATH, SHARE_STATUS, QUEUE_STATUS_PATH, "/api/register-validator"])
async def test_preflight_needs_no_token(path: str) -> None:
    wallets = WalletApp(api_token=TOKEN)
    preflight = {"Origin": "https://wallet.example", "Access-Control-Request-Method": "POST"}
    async with wallets.create_client() as client:
        response = await client.options(path, headers=preflight)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] == "*"
    assert {"GET", "POST"} <= set(response.headers["access-control-allow-methods"].split(", "))
    assert {"content-type", "x-helper-token"} <= set(
        response.headers["access-control-allow-headers"].lower().split(", ")
    )
    assert "access-control-allow-credentials" not in response.headers


async def test_responses_allow_all_origins(client: httpx.AsyncClient) -> None:
    responses = [
        await client.post(SHARES_PATH, content=create_body()),
        await client.post(SHARES_PATH, content=b"{"),
        await client.get(SHARES_PATH),
        await client.get("/shielded-vote/v1/nothing"),
        await client.get(STATUS_PATH),
        await client.get("/api/rounds"),
    ]
    elsewhere = await client.get("/")
    for response in responses:
        assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in elsewhere.headers


@pytest.mark.parametrize("path", ["/", "/queue", "/%2e%2e/stats"])
async def test_unknown_path_is_404_in_json(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    error_text(response)


@pytest.mark.rule("N5")
@pytest.mark.parametrize(
    "path",
    ["/shielded-vote/", "/shielded-vote/v1", "/shielded-vote/v1/share", "/shielded-vote/v9/x", f"{SHARES_PATH}/"],
)
async def test_unknown_path_of_wallet_api_is_404_with_only_an_error(client: httpx.AsyncClient, path: str) -> None:
    for response in (await client.get(path), await client.post(path, json={})):
        assert (response.status_code, response.content) == (404, b'{"error":"not found"}')
        assert response.headers["content-type"] == "application/json"


@pytest.mark.rule("N5")
@pytest.mark.parametrize(
    ("method", "path"), [("GET", SHARES_PATH), ("DELETE", STATUS_PATH), ("PUT", SHARES_PATH), ("POST", STATUS_PATH)]
)
async def test_wrong_method_is_405_in_json(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, path)
    assert (response.status_code, no_route_text(response)) == (405, "method not allowed")


async def test_unexpected_error_is_500_without_details(
    client: httpx.AsyncClient, wallets: WalletApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> bool:
        raise RuntimeError("a secret")

    monkeypatch.setattr(wallets.store, "is_spent", broken)
    with capture_logs() as logs:
        response = await client.get(SHARE_STATUS)
    assert response.status_code == 500
    assert error_text(response) == "internal error"
    assert response.headers["access-control-allow-origin"] == "*"
    assert [entry["event"] for entry in logs] == ["request_failed"]


async def test_shares_refusal_without_field_is_plain_text(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_share: object) -> None:
        raise TemporaryRefusal(Situation.PAUSED, "no fresh node")

    monkeypatch.setattr("helper.ingest.admission.AdmissionController.admit", lambda _self, body, **_: refuse(body))
    response = await client.post(SHARES_PATH, content=create_body())
    assert response.status_code == 503
    assert error_text(response) == "shares cannot be accepted now: no fresh node"
