"""Responses of the routes: JSON in Go's style, and the chain's error formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from devnet.eras import Era
from devnet.faults import KeyStatus
from devnet.gojson import dumps
from devnet.node_view import NodeView

ENGINE_LOST_TEXT: Final = 'broadcast failed: HTTP POST to CometBFT: Post "http://localhost:26657": EOF'
"""Error of a node whose consensus engine is lost."""


class ResponseError(Exception):
    """Ends a handler with a response: a status and a JSON body."""

    def __init__(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body, self.headers = status, body, headers


class QueryError(Exception):
    """A gRPC query failed. The era of the node decides the HTTP status.

    Args:
        code: gRPC code.
        text: description.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Create a JSON response."""
    return Response(dumps(body), status, headers, media_type="application/json")


def create_error(status: int, text: str) -> ResponseError:
    """Create an error in the vote module's format."""
    return ResponseError(status, {"error": text})


def create_field_error(text: str) -> ResponseError:
    """Create the error for a message with an invalid field."""
    return create_error(400, f"validation failed: invalid message field: {text}")


def create_warming_error(era: Era, keys: KeyStatus) -> ResponseError:
    """Create the error of a node whose verifying keys are not ready."""
    if not era.reports_warming:
        return create_error(503, "verifying keys are warming up")
    body = {"status": keys} | ({"error": "generating the verifying keys failed"} if keys == "failed" else {})
    return ResponseError(503, body, {"retry-after": "2"})


def get_view(request: Request) -> NodeView:
    """The chain as served by the node in this request."""
    view = request.state.view
    assert isinstance(view, NodeView)
    return view


async def handle_response_error(_: Request, raised: Exception) -> Response:
    """Starlette exception handler for `ResponseError`."""
    assert isinstance(raised, ResponseError)
    return json_response(raised.body, raised.status, raised.headers)


async def handle_query_error(request: Request, raised: Exception) -> Response:
    """Starlette exception handler for `QueryError`: the text contains the code twice."""
    assert isinstance(raised, QueryError)
    text = f"rpc error: code = {raised.code} desc = rpc error: code = {raised.code} desc = {raised.text}"
    return json_response({"error": text}, request.app.state.devnet.era.query_statuses.get(raised.code, 500))


async def handle_http_error(_: Request, raised: Exception) -> Response:
    """Starlette exception handler for a route or method that does not exist."""
    assert isinstance(raised, HTTPException)
    return json_response({"error": raised.detail.lower()}, raised.status_code)


async def handle_json_error(_: Request, raised: Exception) -> Response:
    """Starlette exception handler for `GoJsonError`: the body of the request is invalid."""
    return json_response({"error": f"invalid JSON: {raised}"}, 400)
