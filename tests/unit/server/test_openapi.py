"""OpenAPI document: complete, valid, and consistent with payloads and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jsonschema_rs
import pytest
import schemathesis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper import circuits
from helper.app.listeners import Listeners
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.config.sections import Config
from helper.observability.service_state import Check
from helper.observability.stats import Stats
from helper.operations.operator_actions import OperatorActions
from helper.server.openapi import ApiRoute, Operation, add_document_route, generate_document
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.support.edge_client import create_edge_client
from tests.support.service_state import partial_state
from tests.unit.ingest.admission_fixtures import NULLIFIER, PAYLOADS, ROUND_ID, create_body, create_payload
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SHARE_STATUS = "/shielded-vote/v1/share-status/{round_id}/{nullifier}"


async def read_document(**settings: Any) -> dict[str, Any]:
    async with WalletApp(**settings).create_client() as client:
        response = await client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    document: dict[str, Any] = response.json()
    return document


def responses(document: dict[str, Any], path: str, method: str = "get") -> dict[str, Any]:
    responses_by_status: dict[str, Any] = document["paths"][path][method]["responses"]
    return responses_by_status


def conforms(document: dict[str, Any], response: dict[str, Any], value: Any) -> bool:
    schema = response["content"]["application/json"]["schema"]
    return jsonschema_rs.is_valid({**schema, "components": document["components"]}, value)


@pytest.mark.parametrize("expose", [False, True])
async def test_openapi_describes_every_route_and_no_other(expose: bool) -> None:
    async def respond(_request: Request) -> Response:
        return Response()

    more = ApiRoute("/more/{name}", respond, "GET", Operation("More.", dict[str, int]))
    routes = add_document_route(WalletApp(expose_queue_status=expose).api.routes(), [more])
    assert all(isinstance(route, Route) for route in routes)
    kinds = [route for route in routes if isinstance(route, Route)]
    served = {(route.path, method) for route in kinds for method in route.methods or () if method != "HEAD"}
    document = await read_document(expose_queue_status=expose, more_routes=[more])
    assert {(path, method.upper()) for path, operations in document["paths"].items() for method in operations} == served
    assert (STATUS_PATH, "GET") in served


@pytest.mark.parametrize("token", ["", "of a closed set-up"])
async def test_openapi_document_is_valid(token: str) -> None:
    document = await read_document(api_token=token, expose_queue_status=True)
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document).validate()
    for schema in _schemas(document):
        jsonschema_rs.meta.validate({"$schema": DIALECT, **schema})


def _schemas(node: Any) -> list[Any]:
    if not isinstance(node, dict | list):
        return []
    inner = list(node.values()) if isinstance(node, dict) else node
    own = [node["schema"]] if isinstance(node, dict) and "schema" in node else []
    return own + [nested for schema in inner for nested in _schemas(schema)]


async def test_openapi_payload_schema_matches_parser() -> None:
    share = (await read_document())["paths"][SHARES_PATH]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    for recorded in PAYLOADS:
        assert jsonschema_rs.is_valid(share, recorded)
    breaks: dict[str, Any] = {
        "proposal_id": 51,
        "vote_decision": -1,
        "tree_position": 1 << 24,
        "submit_at": "0",
        "vote_round_id": "0" * 63,
        "share_comms": PAYLOADS[0]["share_comms"][:15],
        "shares_hash": "",
        "primary_blind": None,
        "enc_share": {"c1": PAYLOADS[0]["enc_share"]["c1"]},
    }
    assert breaks.keys() == share["properties"].keys()
    for name, value in breaks.items():
        assert not jsonschema_rs.is_valid(share, create_payload(**{name: value}))
    assert set(share["required"]) == share["properties"].keys() - {"submit_at"}


async def test_openapi_responses_match_document() -> None:
    wallets = WalletApp(expose_queue_status=True)
    path = SHARE_STATUS.format(round_id=ROUND_ID.hex(), nullifier=NULLIFIER.hex())
    async with wallets.create_client() as client:
        document = (await client.get("/openapi.json")).json()
        exchanges = {
            (SHARES_PATH, "post"): [
                await client.post(SHARES_PATH, content=content) for content in (create_body(), create_body(), b"{")
            ],
            (SHARE_STATUS, "get"): [await client.get(path), await client.get(path.upper())],
            (STATUS_PATH, "get"): [await client.get(STATUS_PATH)],
            ("/shielded-vote/v1/queue-status", "get"): [await client.get("/shielded-vote/v1/queue-status")],
        }
    for (route, method), received in exchanges.items():
        for response in received:
            assert conforms(document, responses(document, route, method)[str(response.status_code)], response.json())
    assert not conforms(document, responses(document, "/shielded-vote/v1/queue-status")["200"], {"ab": {"total": 1}})
    assert not conforms(document, responses(document, STATUS_PATH)["200"], {"status": "error", "error": "no"})


async def test_openapi_configured_tokens_are_described() -> None:
    protected = await read_document(api_token="of a closed set-up")
    assert "401" in responses(protected, SHARES_PATH, "post")
    assert "401" not in responses(protected, STATUS_PATH)
    (scheme,) = protected["components"]["securitySchemes"].values()
    assert (scheme["in"], scheme["name"]) == ("header", "X-Helper-Token")
    free = await read_document()
    assert "401" not in responses(free, SHARES_PATH, "post")
    assert "of a closed set-up" not in json.dumps(protected)


def test_openapi_route_without_operation_is_omitted() -> None:
    assert generate_document([])["paths"] == {}


# Everything on the wallet API port


def create_complete_routes(directory: Path, **changes: Any) -> Listeners:
    """All listeners of a helper with every feature enabled."""
    values = {
        "helper": {"db_path": str(directory / "q.db")},
        "operator": {"token": "of operators"},
        "ui": {"enable": True},
        "gateway": {"enable": True},
        **changes,
    }
    config = Config.model_validate(values)
    clock = FakeClock()
    listeners = Listeners(config, node_pool=NodePool([], clock=clock, chain_id="x-1"), clock=clock)
    store = SqliteStore(config.db_path)
    rounds = cast(RoundRegistry, SimpleNamespace(all_rounds=list))
    checks: list[Check] = [Check("store")]
    listeners.add_queue(
        WalletApp(api_token="of wallets", expose_queue_status=True).api,
        store,
        rounds,
        read_status=partial_state,
        run_checks=lambda: checks,
        stats=Stats(),
        operations=OperatorActions(store=store, rounds=None, share_checks=circuits),
        tree_size=lambda _: 0,
    )
    return listeners


async def read_document_of(listeners: Listeners, path: str = "/openapi.json") -> httpx.Response:
    async with create_edge_client(listeners._wallet_edge) as client:
        return await client.get(path)


async def test_openapi_every_wallet_path_is_described(tmp_path: Path) -> None:
    listeners = create_complete_routes(tmp_path)
    document = (await read_document_of(listeners)).json()
    schemathesis.openapi.from_dict(document).validate()
    for schema in _schemas(document):
        jsonschema_rs.meta.validate({"$schema": DIALECT, **schema})
    paths = set(document["paths"])
    assert {
        "/shielded-vote/v1/shares",
        "/shielded-vote/v1/events",
        "/shielded-vote/v1/rounds",
        "/shielded-vote/v1/cast-vote",
        "/api/register-validator",
        "/api/pending-validators",
        "/livez",
        "/readyz",
        "/openapi.json",
        "/{path}",
    } <= paths
    served = {("GET", "/{path}")}
    for route in list_routes(listeners):
        served |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    described_paths = {
        (method.upper(), path) for path, operations in document["paths"].items() for method in operations
    }
    assert described_paths == {(method, path.replace(":path", "")) for method, path in served}


def list_routes(listeners: Listeners) -> Iterator[Route]:
    """Every route of the wallet API port, described or not."""
    app = listeners._wallet_edge._app
    assert isinstance(app, Starlette)
    for route in app.routes:
        assert isinstance(route, Route)
        yield route


async def test_openapi_disabled_routes_are_omitted(tmp_path: Path) -> None:
    routes = create_complete_routes(tmp_path, operator={"token": ""}, gateway={"enable": False}, ui={})
    minimal = (await read_document_of(routes)).json()
    assert not {"/shielded-vote/v1/events", "/shielded-vote/v1/rounds", "/{path}"} & set(minimal["paths"])
    assert set(minimal["components"]["securitySchemes"]) == {"helperToken"}
    open_ = (await read_document_of(create_complete_routes(tmp_path))).json()
    assert open_["paths"]["/shielded-vote/v1/events"]["get"]["security"] == [{"operatorToken": []}]
    assert "401" in responses(open_, "/shielded-vote/v1/events")
    assert "of operators" not in json.dumps(open_)


async def test_openapi_without_queue_describes_other_routes(tmp_path: Path) -> None:
    clock = FakeClock()
    config = Config.model_validate({"helper": {"db_path": str(tmp_path / "q.db"), "disable": True}})
    listeners = Listeners(config, node_pool=NodePool([], clock=clock), clock=clock)
    document = (await read_document_of(listeners)).json()
    assert "/api/rounds" in document["paths"]
    assert "/shielded-vote/v1/shares" not in document["paths"]


async def test_openapi_health_responses_match_document(tmp_path: Path) -> None:
    listeners = create_complete_routes(tmp_path)
    document = (await read_document_of(listeners)).json()
    response = await read_document_of(listeners, "/readyz?verbose")
    assert response.text.startswith("[+]store ok")
    kinds = responses(document, "/readyz")
    assert set(kinds["200"]["content"]) == {"text/plain"}
    assert set(kinds["503"]["content"]) == {"text/plain", "application/json"}
