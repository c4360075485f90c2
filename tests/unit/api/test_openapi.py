"""The API's description: it is of all routes, it is valid, and payloads and answers are as it says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.api.app import wallet_app_routes
from helper.api.body import BodyReader
from helper.api.openapi import ApiRoute, Operation, document
from tests.unit.api.wallet_parts import SHARES, STATUS, Wallets
from tests.unit.intake_parts import NULLIFIER, PAYLOADS, ROUND_ID, body, payload

pytestmark = pytest.mark.anyio

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SHARE_STATUS = "/shielded-vote/v1/share-status/{round_id}/{nullifier}"


async def described(**settings: Any) -> dict[str, Any]:
    """The document that an application tells."""
    async with Wallets(**settings).client() as client:
        answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    told: dict[str, Any] = answer.json()
    return told


def responses(told: dict[str, Any], path: str, method: str = "get") -> dict[str, Any]:
    found: dict[str, Any] = told["paths"][path][method]["responses"]
    return found


def conforms(told: dict[str, Any], response: dict[str, Any], answer: Any) -> bool:
    """Whether an answer is as one of the document's responses says."""
    schema = response["content"]["application/json"]["schema"]
    return jsonschema_rs.is_valid({**schema, "components": told["components"]}, answer)


@pytest.mark.parametrize("expose", [False, True])
async def test_it_describes_every_route_and_no_other(expose: bool) -> None:
    async def page(_request: Request) -> Response:
        return Response()

    more = ApiRoute("/more/{name}", page, "GET", Operation("More.", dict[str, int]))
    wallets = Wallets()
    routes = wallet_app_routes(wallets.view, api_token="", expose_queue_status=expose, bodies=BodyReader(), more=[more])
    assert all(isinstance(route, Route) for route in routes)
    kinds = [route for route in routes if isinstance(route, Route)]
    served = {(route.path, method) for route in kinds for method in route.methods or () if method != "HEAD"}
    told = await described(expose_queue_status=expose, more=[more])
    assert {(path, method.upper()) for path, one in told["paths"].items() for method in one} == served
    assert (STATUS, "GET") in served


@pytest.mark.parametrize("token", ["", "of a closed set-up"])
async def test_it_is_valid(token: str) -> None:
    told = await described(api_token=token, expose_queue_status=True)
    assert told["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(told).validate()
    for schema in _schemas(told):
        jsonschema_rs.meta.validate({"$schema": DIALECT, **schema})


def _schemas(node: Any) -> list[Any]:
    if not isinstance(node, dict | list):
        return []
    inner = list(node.values()) if isinstance(node, dict) else node
    own = [node["schema"]] if isinstance(node, dict) and "schema" in node else []
    return own + [found for one in inner for found in _schemas(one)]


async def test_what_is_read_is_what_it_says() -> None:
    share = (await described())["paths"][SHARES]["post"]["requestBody"]["content"]["application/json"]["schema"]
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
        assert not jsonschema_rs.is_valid(share, payload(**{name: value}))
    assert set(share["required"]) == share["properties"].keys() - {"submit_at"}


async def test_answers_are_what_it_says() -> None:
    wallets = Wallets(expose_queue_status=True)
    path = SHARE_STATUS.format(round_id=ROUND_ID.hex(), nullifier=NULLIFIER.hex())
    async with wallets.client() as client:
        told = (await client.get("/openapi.json")).json()
        exchanges = {
            (SHARES, "post"): [await client.post(SHARES, content=content) for content in (body(), body(), b"{")],
            (SHARE_STATUS, "get"): [await client.get(path), await client.get(path.upper())],
            (STATUS, "get"): [await client.get(STATUS)],
            ("/shielded-vote/v1/queue-status", "get"): [await client.get("/shielded-vote/v1/queue-status")],
        }
    for (route, method), answers in exchanges.items():
        for answer in answers:
            assert conforms(told, responses(told, route, method)[str(answer.status_code)], answer.json())
    assert not conforms(told, responses(told, "/shielded-vote/v1/queue-status")["200"], {"ab": {"total": 1}})
    assert not conforms(told, responses(told, STATUS)["200"], {"status": "error", "error": "no"})


async def test_a_token_is_asked_for_where_one_is_set() -> None:
    guarded = await described(api_token="of a closed set-up")
    assert "401" in responses(guarded, SHARES, "post")
    assert "401" not in responses(guarded, STATUS)
    (scheme,) = guarded["components"]["securitySchemes"].values()
    assert (scheme["in"], scheme["name"]) == ("header", "X-Helper-Token")
    free = await described()
    assert "401" not in responses(free, SHARES, "post")
    assert "of a closed set-up" not in json.dumps(guarded)


def test_a_route_without_a_word_is_not_described() -> None:
    assert document([], token=False)["paths"] == {}
