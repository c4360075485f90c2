"""Operator queries: lists, details and counts, never a witness."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from helper.cli.queue import print_share
from helper.core.json_records import to_json
from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.server import operator_parameters
from helper.server.operator_json import describe_share
from helper.server.operator_routes import create_operator_app, stored_rounds
from helper.store.models import (
    DamagedShare,
    FailedShares,
    HistoryEntry,
    PurgedShares,
    QueueEntry,
    QueueFilter,
    ShareDetails,
    TransactionRow,
)
from helper.store.queue_reader import QueueReader
from tests.support.clock import FakeClock
from tests.support.service_state import partial_state
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.server.wallet_fixtures import error_text

ENTRY: dict[str, Any] = {
    "ref": "0123456789ab",
    "round": ROUND_ID.hex(),
    "state": "broadcast",
    "submit_at": END - 60,
    "due": END - 59.5,
    "attempts": 1,
    "crashes": 0,
    "stage": "broadcast",
    "note": "no answer",
    "damaged": False,
}
"""A share of a list, as JSON and as the fields of `QueueEntry`."""


def make_entry(**changes: Any) -> QueueEntry:
    return QueueEntry(**{**ENTRY, **changes})


STORY = ShareDetails(
    entry=make_entry(),
    received_ms=(END - 600) * 1000,
    vote_end_time=END,
    history=(
        HistoryEntry((END - 600) * 1000, "accepted", "on disk", spent_attempt=False),
        HistoryEntry((END - 50) * 1000 + 250, "proof", "timed out", spent_attempt=True),
    ),
    attempts_by_stage={"proof": 1},
    transaction=TransactionRow("AB" * 32, 84, "k11", 2, 90, 93, "http://node", "ambiguous"),
)


class FakeQueue(QueueReader):
    def __init__(self) -> None:
        self.query: tuple[QueueFilter, int] | None = None

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        return {ROUND_ID: {ShareState.SENT: 1, ShareState.CONFIRMED: 15}, b"\x01" * 32: {ShareState.FAILED: 2}}

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        self.query = (query, limit)
        return [make_entry()]

    async def get_share_details(self, share_ref: str) -> ShareDetails | None:
        return STORY if STORY.entry.ref.startswith(share_ref) else None

    async def list_damaged(self) -> list[DamagedShare]:
        return [DamagedShare("fedcba987654", ROUND_ID, 9)]

    async def list_matching_failures(self, query: QueueFilter, *, limit: int) -> list[FailedShares]:
        return [FailedShares("proof", "timed out", 2, END - 50)]

    async def list_purged_failures(self) -> list[PurgedShares]:
        return [PurgedShares(20_000 * 86_400, "closed", "the round closed before the share was confirmed", 3)]

    async def find_rounds_of_nullifier(self, nullifier: bytes) -> list[bytes]:
        return [ROUND_ID] if nullifier == SPENT else []


SPENT = b"\x07" * 32


class OperatorClient:
    def __init__(self) -> None:
        self.queue = FakeQueue()
        self.app = create_operator_app(
            self.queue,
            partial(stored_rounds, self.queue, FakeClock()),
            service_status=lambda: partial_state(height=7),
        )

    async def get(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://daemon") as client:
            return await client.get(path)


@pytest.fixture
def operator_client() -> OperatorClient:
    return OperatorClient()


async def test_queue_list_shows_waiting_shares(operator_client: OperatorClient) -> None:
    response = await operator_client.get("/queue")
    assert response.json() == {
        "source": "daemon",
        "shares": [ENTRY],
    }
    assert operator_client.queue.query == (QueueFilter(), operator_parameters.DEFAULT_LIST_LIMIT)


async def test_queue_list_applies_filter(operator_client: OperatorClient) -> None:
    await operator_client.get(f"/queue?round={ROUND_ID.hex()}&state=failed&due_before=1795268000&stage=proof&limit=5")
    query_filter = QueueFilter(ROUND_ID, ShareState.FAILED, 1_795_268_000_000, "proof")
    assert operator_client.queue.query == (query_filter, 5)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("round=ab", "round"),
        ("round=" + "zz" * 32, "round"),
        ("state=gone", "state"),
        ("due_before=tomorrow", "due_before"),
        ("due_before=1.5", "due_before"),
        ("due_before=" + "9" * 40, "due_before"),
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=1000000000000", "limit"),
        ("limit=-1", "limit"),
    ],
)
async def test_operator_invalid_parameter_is_400(operator_client: OperatorClient, query: str, named: str) -> None:
    response = await operator_client.get(f"/queue?{query}")
    assert response.status_code == 400
    assert error_text(response).startswith(named)
    assert operator_client.queue.query is None


async def test_queue_show_has_times_attempts_and_transaction(operator_client: OperatorClient) -> None:
    details = (await operator_client.get("/queue/012345")).json()
    assert details["received"] == END - 600
    assert details["attempts_by_stage"] == {"proof": 1}
    assert details["history"][1] == {"at": END - 50 + 0.25, "stage": "proof", "note": "timed out", "counted": True}
    assert details["transaction"] == {
        "hash": "AB" * 32,
        "anchor_height": 84,
        "circuit": "k11",
        "sends": 2,
        "first_sent_height": 90,
        "last_sent_height": 93,
        "last_endpoint": "http://node",
        "last_outcome": "ambiguous",
    }
    assert details["cannot_count"] is False


@pytest.mark.rule("R3")
async def test_queue_show_reports_share_that_cannot_count() -> None:
    at_the_end = ShareDetails(make_entry(submit_at=END), 0, END, (), {})
    shown = describe_share(at_the_end, source="file")
    assert (shown.cannot_count, shown.transaction) == (True, None)


@pytest.mark.rule("R11")
@pytest.mark.parametrize(
    ("state", "due", "vote_end_time", "next_attempt", "text"),
    [
        ("received", END - 60.5, END, END - 60.5, "2026-11-"),
        ("received", END, END, None, "none before the round ends"),
        ("received", END, None, float(END), "2026-11-"),
        ("witnessed", END - 60, END, None, None),
        ("failed", END - 60, END, None, None),
    ],
)
def test_queue_show_has_time_of_next_attempt(
    state: str,
    due: float,
    vote_end_time: int | None,
    next_attempt: float | None,
    text: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    details = ShareDetails(make_entry(state=state, due=due), 0, vote_end_time, (), {})
    response = to_json(describe_share(details, source="daemon"))
    assert response["next_attempt"] == next_attempt
    print_share(response)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next attempt")]
    assert len(lines) == (text is not None)
    assert text is None or text in lines[0]


async def test_operator_responses_contain_no_witness(operator_client: OperatorClient) -> None:
    texts = "".join([(await operator_client.get(path)).text for path in ("/queue", "/queue/012345", "/stats")])
    for secret in ("shares_hash", "share_comms", "primary_blind", "c1", "c2", "nullifier", "message", "position"):
        assert f'"{secret}"' not in texts


async def test_queue_show_unknown_share_is_404(operator_client: OperatorClient) -> None:
    response = await operator_client.get("/queue/ffffff")
    assert response.status_code == 404
    assert error_text(response).startswith("no share, or more than one, matches this reference")
    assert error_text(await operator_client.get("/nothing")) == "not found"


async def test_stats_count_by_round_and_total(operator_client: OperatorClient) -> None:
    stats = (await operator_client.get("/stats")).json()
    states = {"received": 0, "witnessed": 0}
    assert stats["total"] == {"total": 18, **states, "broadcast": 1, "submitted": 15, "failed": 2}
    assert stats["rounds"]["01" * 32] == {"total": 2, **states, "broadcast": 0, "submitted": 0, "failed": 2}
    assert stats["damaged"] == [{"ref": "fedcba987654", "round": ROUND_ID.hex(), "state": "9"}]
    assert (stats["service"]["height"], stats["service"]["paused"]) == (7, None)
    assert not stats["service"].keys() & {"role", "sends", "sender", "database_skew", "archive"}
    assert stats["failed"] == [{"stage": "proof", "note": "timed out", "count": 2, "latest": END - 50}]
    assert stats["failed_before"] == [
        {
            "day": 20_000 * 86_400,
            "stage": "closed",
            "reason": "the round closed before the share was confirmed",
            "count": 3,
        }
    ]


async def test_queue_list_of_failed_shares_has_failure_groups(operator_client: OperatorClient) -> None:
    failed = (await operator_client.get("/queue?state=failed")).json()
    assert failed["failed"] == [{"stage": "proof", "note": "timed out", "count": 2, "latest": END - 50}]
    assert "failed" not in (await operator_client.get("/queue?state=received")).json()


async def test_spent_returns_round_of_nullifier(operator_client: OperatorClient) -> None:
    assert (await operator_client.get(f"/spent/{SPENT.hex()}")).json() == {
        "source": "daemon",
        "rounds": [ROUND_ID.hex()],
    }
    assert (await operator_client.get(f"/spent/{'00' * 32}")).json()["rounds"] == []
    assert error_text(await operator_client.get("/spent/xyz")) == "nullifier must be 64 hex characters"


async def test_operator_query_of_damaged_store_is_503_with_advice(
    operator_client: OperatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged(_queue: FakeQueue) -> list[DamagedShare]:
        raise StoreCorrupt("the database is damaged: page 7")

    monkeypatch.setattr(FakeQueue, "list_damaged", damaged)
    response = await operator_client.get("/stats")
    assert response.status_code == 503
    assert response.json() == {
        "status": "error",
        "error": "the database is damaged: page 7",
        "advice": StoreCorrupt.advice,
    }


async def test_operator_app_does_not_serve_wallet_routes(operator_client: OperatorClient) -> None:
    assert (await operator_client.get("/shielded-vote/v1/status")).status_code == 404
