"""Operator actions over the control socket: the kernel identifies the user; refusals have distinct statuses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pwd
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from helper.chain.chain_data import RoundAuthentication
from helper.core.share import ShareState
from helper.errors import StoreFull
from helper.operations.export_format import ExportHeader, encode_header, encode_share_line
from helper.server import operator_routes
from helper.server.edge import Edge
from helper.server.listening import Server, bind_tcp, connection_limits, listen_unix
from helper.server.operator_json import KnownRound
from helper.server.operator_routes import (
    MARK_STRUCT,
    MAX_ACTION_BODY_BYTES,
    KnownRounds,
    create_operator_app,
    stored_rounds,
    user_name,
)
from helper.store import audit_log, blocks, shares
from helper.store.models import StoredRound
from helper.store.rounds import mark_alerted
from tests.support.service_state import partial_state
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import NOW, OperationsHarness
from tests.unit.operations.test_actions import enqueue_failed
from tests.unit.operations.test_import_queue import NOTHING_IMPORTED, waiting_share
from tests.unit.store.fixtures import make_posted_share

CURRENT_USER = {"uid": os.getuid(), "who": pwd.getpwuid(os.getuid()).pw_name, "way": "socket"}


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[OperationsHarness]:
    harness_ = OperationsHarness(tmp_path / "queue.db")
    await harness_.open()
    yield harness_
    await harness_.store.close()


@pytest.fixture
async def daemon(harness: OperationsHarness, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The operator application with a real store on a real socket."""

    async def read_rounds() -> KnownRounds:
        first = StoredRound(ROUND_ID, 1, END, 50, (), None, None)
        second = StoredRound(b"\x01" * 32, 9, END + 5, 51, (), None, None)
        return [
            KnownRound(first, 7, is_closed=False, authentication=RoundAuthentication.AUTHENTICATED),
            KnownRound(second, 0, is_closed=True, authentication=RoundAuthentication.NOT_LISTED),
        ], NOW + 0.5

    app = create_operator_app(harness.store, read_rounds, operations=harness.operations, service_status=partial_state)
    path = tmp_path / "helper.sock"
    with listen_unix(path) as listener:
        server = Server(Edge(app), connection_limits(evicts=False))
        task = asyncio.create_task(server.serve([listener]))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://daemon", timeout=30) as client:
            yield client
        server.stop()
        await task


def error_text(response: httpx.Response) -> str:
    """The text of a refusal; a refused action also has advice."""
    body = response.json()
    assert body.keys() - {"advice"} == {"status", "error"}
    assert bool(body.get("advice")) is (response.status_code in {404, 409, 422, 503})
    return str(body["error"])


async def audit(daemon: httpx.AsyncClient) -> list[dict[str, Any]]:
    response = (await daemon.get("/actions")).json()
    assert response["source"] == "daemon"
    return list(response["actions"])


async def test_actions_retry_is_executed_and_logged_with_user(
    harness: OperationsHarness, daemon: httpx.AsyncClient
) -> None:
    await enqueue_failed(harness, 1, 2)

    dry_result = await daemon.post("/queue/retry", json={"stage": "proof", "dry_run": True})
    assert (await audit(daemon), harness.wake_count) == ([], 0)
    executed = await daemon.post("/queue/retry", json={"stage": "proof"})

    expected = {"source": "daemon", "retried": 2, "closed": 0, "moved": 0, "not_failed": 0}
    assert dry_result.json() == {**expected, "dry_run": True}
    assert executed.json() == {**expected, "dry_run": False}
    assert (await harness.store.count_shares(), harness.wake_count) == ({ROUND_ID: {ShareState.WAITING: 2}}, 1)
    (action,) = await audit(daemon)
    at = {"at": NOW, "ended": NOW, "id": 1}
    assert action == {**CURRENT_USER, **at, "what": "retry", "wanted": {"stage": "proof"}, "outcome": {"retried": 2}}


async def test_actions_export_is_logged_and_moves_marked_shares(
    harness: OperationsHarness, daemon: httpx.AsyncClient
) -> None:
    await enqueue_failed(harness, 1, 2)
    rows = await harness.store._reader.run("SELECT id, row_check FROM shares ORDER BY id")
    marks = b"".join(MARK_STRUCT.pack(*row) for row in rows)

    copied = await daemon.post("/queue/export", json={"named": 2, "shares": 2})
    moved = await daemon.post("/queue/export", json={"shares": 2, "marks": base64.b64encode(marks).decode()})
    broken = await daemon.post("/queue/export", json={"shares": 2, "marks": base64.b64encode(marks[:-1]).decode()})
    of_no_row = await daemon.post("/queue/export", json={"shares": 1, "marks": base64.b64encode(b"\xff" * 16).decode()})

    assert copied.json() == {"source": "daemon", "dry_run": False, "copied": 2}
    assert moved.json() == {"source": "daemon", "dry_run": False, "moved": 2, "stayed": 0}
    assert (broken.status_code, error_text(broken)) == (400, "marks: must be a multiple of 16 bytes")
    assert of_no_row.json() == {"source": "daemon", "dry_run": False, "moved": 0, "stayed": 1}
    assert [(action["what"], action["wanted"]) for action in await audit(daemon)] == [
        ("move", {}),
        ("move", {}),
        ("export", {"named": 2}),
    ]


async def test_actions_import_reads_stream(harness: OperationsHarness, daemon: httpx.AsyncClient) -> None:
    exported = [waiting_share(index) for index in range(3)]
    body = [encode_header(ExportHeader(chain_id=None, made_at=5, shares=3)), *map(encode_share_line, exported)]

    async def stream() -> AsyncIterator[bytes]:
        for chunk in body:
            yield chunk

    dry_result = await daemon.post("/queue/import", params={"dry_run": "1"}, content=stream())
    assert await harness.store.count_shares() == {}
    executed = await daemon.post("/queue/import", content=stream())
    body.pop()
    cut_off = await daemon.post("/queue/import", content=stream())

    empty_report = {"source": "daemon", **NOTHING_IMPORTED, "left": []}
    assert dry_result.json() == {**empty_report, "taken": 3, "dry_run": True}
    assert executed.json() == {**empty_report, "taken": 3, "dry_run": False}
    assert await harness.store.count_shares() == {ROUND_ID: {ShareState.WAITING: 3}}
    assert (cut_off.status_code, error_text(cut_off)) == (422, "the export is truncated: received 2 of 3 shares")
    assert cut_off.json()["advice"]
    assert not any(exported[0].share.primary_blind.hex() in repr(action) for action in await audit(daemon))


async def test_actions_long_import_refused_early_gets_response(
    harness: OperationsHarness, daemon: httpx.AsyncClient
) -> None:
    await harness.store.run(blocks.set_meta, "chain_id", "chain-1")
    line = encode_share_line(waiting_share(0))

    async def stream() -> AsyncIterator[bytes]:
        yield encode_header(ExportHeader(chain_id="chain-2", made_at=5, shares=5000))
        for _ in range(5000):
            yield line

    response = await daemon.post("/queue/import", content=stream())
    assert response.status_code == 409
    assert "chain-2" in error_text(response)
    assert await harness.store.count_shares() == {}


async def test_actions_import_that_stops_is_refused_and_releases_the_lock(
    harness: OperationsHarness, daemon: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.store.run(blocks.set_meta, "chain_id", "chain-1")
    monkeypatch.setattr(operator_routes, "CHUNK_SECONDS", 0.05)

    async def stream() -> AsyncIterator[bytes]:
        yield encode_header(ExportHeader(chain_id="chain-1", made_at=5, shares=5000))
        await asyncio.Event().wait()

    stopped = asyncio.create_task(daemon.post("/queue/import", content=stream()))
    while not await audit(daemon):  # the import has the lock
        await asyncio.sleep(0.01)
    assert (await daemon.post("/queue/retry", json={"stage": "proof"})).status_code == 200
    assert "HTTPException" in repr(await audit(daemon))
    stopped.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await stopped


async def test_actions_refused_purge_returns_reason(harness: OperationsHarness, daemon: httpx.AsyncClient) -> None:
    await enqueue_failed(harness, 1)
    path = f"/rounds/{ROUND_ID.hex()}/purge"

    refused = await daemon.post(path, json={})
    assert refused.status_code == 409
    assert "chain has not closed" in error_text(refused)
    assert "block after its end" in refused.json()["advice"]
    assert (await daemon.post(f"/rounds/{'00' * 32}/purge", json={})).status_code == 404
    assert (await daemon.post("/rounds/zz/purge", json={})).status_code == 400

    harness.rounds.closed.add(ROUND_ID)
    await harness.store.run(mark_alerted, ROUND_ID, NOW)
    dry_result = await daemon.post(path, json={"dry_run": True})
    assert (dry_result.json()["failed"], dry_result.json()["dry_run"]) == (1, True)
    assert (await daemon.post(path, json={})).json()["failed"] == 1
    assert await harness.store.count_shares() == {}


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/queue/retry", {"round": "zz"}, 400, "round must be"),
        ("/queue/retry", {"state": "gone"}, 400, "state must be"),
        ("/queue/retry", {"state": "received"}, 409, "only failed"),
        ("/queue/retry", {"refs": ["ffffff"]}, 404, "ffffff"),
        ("/queue/retry", {"refs": "ffffff"}, 400, "refs"),
        ("/queue/retry", {"stage": "s" * 33}, 400, "stage"),
        ("/queue/retry", {"when": 5}, 400, "when"),
        ("/queue/retry", [], 400, "body"),
        ("/queue/export", {"shares": -1}, 400, "shares"),
        ("/queue/export", {"shares": 10**25}, 400, "shares"),
        ("/queue/export", {}, 400, "shares"),
        ("/queue/import", {}, 422, "truncated"),
    ],
)
async def test_actions_invalid_request_is_refused_and_not_logged(
    daemon: httpx.AsyncClient, path: str, body: Any, status: int, named: str
) -> None:
    response = await daemon.post(path, json=body)
    assert response.status_code == status
    assert named in error_text(response)
    if path != "/queue/import":  # an import starts an audited action before it fails
        assert await audit(daemon) == []


async def test_actions_store_error_is_reported(
    harness: OperationsHarness, daemon: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise StoreFull("nothing was written: database or disk is full")

    monkeypatch.setattr(audit_log, "begin_action", full)
    await enqueue_failed(harness, 1)
    response = await daemon.post("/queue/retry", json={})
    assert (response.status_code, error_text(response)) == (503, "nothing was written: database or disk is full")
    assert "Free space" in response.json()["advice"]
    assert await harness.store.count_shares() == {ROUND_ID: {ShareState.FAILED: 1}}, (
        "no action is performed without an audit entry"
    )


async def test_actions_too_large_request_is_refused(daemon: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_ACTION_BODY_BYTES // (1 << 20) + 2):
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.WriteError):  # the server may close the connection before it sends the response
        response = await daemon.post("/queue/retry", content=endless())
        assert response.status_code == 413


async def test_rounds_list_has_counts(harness: OperationsHarness, daemon: httpx.AsyncClient) -> None:
    posted = make_posted_share(1, round_id=ROUND_ID)
    await harness.store.run(shares.EnqueueOperation(posted.share, posted.nullifier, now=NOW))

    body = (await daemon.get("/rounds")).json()

    assert (body["source"], body["now"]) == ("daemon", NOW + 0.5)
    later, recorded = body["rounds"]
    assert (later["status"], later["closed"], later["shares"]["total"]) == ("9", True, 0)
    assert later["authentication"] == "not_listed"
    assert recorded == {
        "round": ROUND_ID.hex(),
        "status": "active",
        "ends": END,
        "left": END - NOW - 0.5,
        "created_at_height": 50,
        "tree_size": 7,
        "closed": False,
        "frozen": None,
        "authentication": "authenticated",
        "shares": {"total": 1, "received": 1, "witnessed": 0, "submitted": 0, "failed": 0, "broadcast": 0},
    }


@pytest.mark.parametrize("limit", ["0", "x", "10001"])
async def test_actions_audit_log_respects_limit(
    harness: OperationsHarness, daemon: httpx.AsyncClient, limit: str
) -> None:
    for _ in range(3):
        await daemon.post("/queue/export", json={"shares": 1})
    assert len((await daemon.get("/actions?limit=2")).json()["actions"]) == 2
    assert (await daemon.get(f"/actions?limit={limit}")).status_code == 400


async def test_actions_are_not_available_over_tcp(harness: OperationsHarness) -> None:
    """The routes exist only on the control socket, and a TCP peer has no user."""
    read_rounds = partial(stored_rounds, harness.store, harness.clock)
    app = create_operator_app(harness.store, read_rounds, operations=harness.operations)
    listener = bind_tcp("127.0.0.1", 0)
    server = Server(Edge(app))
    task = asyncio.create_task(server.serve([listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        response = await client.post("/queue/retry", json={})
    server.stop()
    await task
    assert (response.status_code, error_text(response)) == (
        403,
        "unknown user: operator actions require the control socket",
    )


def test_user_name_of_unknown_uid_is_number() -> None:
    assert user_name(os.getuid()) == CURRENT_USER["who"]
    assert user_name(3_999_999_999) == "3999999999"
