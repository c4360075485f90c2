"""Request ids: in every response, and in the log only if they link no share to a client."""

from __future__ import annotations

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from structlog.testing import capture_logs

from helper.core.refusals import RETRYABLE_STATUSES
from helper.errors import ShareRefused
from helper.server.edge import Edge, json_application
from tests.support.edge_client import create_edge_client
from tests.unit.ingest.admission_fixtures import create_body
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp

INCOMING_ID = "proxy-0123.4567:89_a"


async def respond_ok(_request: Request) -> Response:
    return Response(b"fine")


async def respond_error(_request: Request) -> Response:
    raise ZeroDivisionError


async def respond_refused(request: Request) -> Response:
    raise HTTPException(int(request.path_params["status"]), "no")


async def share(request: Request) -> Response:
    raise ShareRefused(int(request.path_params["status"]), "no", field="submit_at")


ROUTES = [
    Route("/fine", respond_ok),
    Route("/broken", respond_error),
    Route("/refused/{status}", respond_refused),
    Route("/shielded-vote/v1/share/{status}", share),
    Route("/shielded-vote/v1/broken", respond_error),
]


async def request_path(path: str, *names: str) -> tuple[httpx.Response, list[dict[str, object]]]:
    with capture_logs() as logs:
        async with create_edge_client(Edge(json_application(ROUTES))) as client:
            response = await client.get(path, headers=[("X-Request-Id", name) for name in names])
    return response, [dict(entry) for entry in logs]


async def test_request_ids_are_unique() -> None:
    names = {(await request_path("/fine"))[0].headers["x-request-id"] for _ in range(5)}
    assert len(names) == 5
    for path in ("/nowhere", "/broken", "/refused/400", "/shielded-vote/v1/broken"):
        response, _ = await request_path(path)
        assert len(response.headers.get_list("x-request-id")) == 1
        assert len(response.headers["x-request-id"]) == 16


async def test_request_ids_incoming_id_is_used_outside_wallet_paths() -> None:
    response, _ = await request_path("/fine", INCOMING_ID)
    assert response.headers["x-request-id"] == INCOMING_ID
    response, logs = await request_path("/broken", INCOMING_ID)
    assert (response.headers["x-request-id"], logs[0]["request_id"]) == (INCOMING_ID, INCOMING_ID)
    for path in ("/shielded-vote/v1/broken", "/shielded-vote/v1/share/400"):
        response, logs = await request_path(path, INCOMING_ID)
        assert response.headers["x-request-id"] != INCOMING_ID
        assert INCOMING_ID not in repr(logs), "a proxy's log contains it next to the client's address"
        assert logs[0]["request_id"] == response.headers["x-request-id"], "the wallet can report it"


@pytest.mark.parametrize(
    "names", [["short"], ["a" * 65], ["with space 123"], ["-begins-badly"], [""], [INCOMING_ID] * 2]
)
async def test_request_ids_malformed_id_is_replaced(names: list[str]) -> None:
    response, _ = await request_path("/fine", *names)
    assert response.headers["x-request-id"] not in names
    assert len(response.headers["x-request-id"]) == 16


@pytest.mark.parametrize("status", [400, 401, 404, 405, 409, 413])
async def test_request_ids_final_refusal_is_logged_at_debug(status: int) -> None:
    response, (line,) = await request_path(f"/refused/{status}")
    assert (line["log_level"], line["event"], line["status"]) == ("debug", "request_refused", status)
    assert line["request_id"] == response.headers["x-request-id"]
    response, (line,) = await request_path(f"/shielded-vote/v1/share/{status}")
    assert line["reason"] == "submit_at: no"


@pytest.mark.parametrize("status", sorted(RETRYABLE_STATUSES))
async def test_request_ids_retried_refusal_is_not_logged(status: int) -> None:
    for path in (f"/refused/{status}", f"/shielded-vote/v1/share/{status}"):
        response, logs = await request_path(path)
        assert response.status_code == status
        assert logs == []


async def test_request_ids_accepted_share_is_not_logged() -> None:
    wallets = WalletApp()
    with capture_logs() as logs:
        async with wallets.create_client() as client:
            assert (await client.post(SHARES_PATH, content=create_body())).json()["status"] == "queued"
            assert (await client.post(SHARES_PATH, content=create_body())).json()["status"] == "duplicate"
            assert (await client.get(STATUS_PATH)).status_code == 200
    assert [entry for entry in logs if "request_id" in entry] == []


async def test_request_ids_header_is_exposed_to_pages() -> None:
    response, _ = await request_path("/shielded-vote/v1/share/400")
    assert response.headers["access-control-expose-headers"] == "Retry-After, X-Request-Id, Link, X-Total-Count"
