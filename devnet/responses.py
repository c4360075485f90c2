"""Responses of the routes: JSON in Go's style, and the chain's error formats."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from devnet.gojson import dumps
from devnet.node_view import NodeView


class ResponseError(Exception):
    """Ends a handler with a response: a status and a JSON body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


def json_response(body: Any, status: int = 200) -> Response:
    """Create a JSON response."""
    return Response(dumps(body), status, media_type="application/json")


def create_error(status: int, text: str) -> ResponseError:
    """Create an error in the vote module's format."""
    return ResponseError(status, {"error": text})


def create_field_error(text: str) -> ResponseError:
    """Create the error for a message with an invalid field."""
    return create_error(400, f"validation failed: invalid message field: {text}")


def create_grpc_error(code: str, text: str) -> ResponseError:
    """Create an error of a gRPC query: always HTTP 500, with the code twice in the text."""
    return create_error(500, f"rpc error: code = {code} desc = rpc error: code = {code} desc = {text}")


def get_view(request: Request) -> NodeView:
    """The chain as served by the node in this request."""
    view = request.state.view
    assert isinstance(view, NodeView)
    return view


async def handle_response_error(_: Request, raised: Exception) -> Response:
    """Starlette exception handler for `ResponseError`."""
    assert isinstance(raised, ResponseError)
    return json_response(raised.body, raised.status)


async def handle_json_error(_: Request, raised: Exception) -> Response:
    """Starlette exception handler for `GoJsonError`: the body of the request is invalid."""
    return json_response({"error": f"invalid JSON: {raised}"}, 400)
