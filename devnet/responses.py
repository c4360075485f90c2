"""Responses of the routes: JSON in Go's style, and the chain's error formats."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from devnet.gojson import dumps
from devnet.node_view import View


class AnsweredError(Exception):
    """Ends a handler with a response: a status and a JSON body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


def answer(body: Any, status: int = 200) -> Response:
    """Create a JSON response."""
    return Response(dumps(body), status, media_type="application/json")


def error(status: int, text: str) -> AnsweredError:
    """Create an error in the vote module's format."""
    return AnsweredError(status, {"error": text})


def grpc_error(code: str, text: str) -> AnsweredError:
    """Create an error of a gRPC query: always HTTP 500, with the code twice in the text."""
    return error(500, f"rpc error: code = {code} desc = rpc error: code = {code} desc = {text}")


def view_of(request: Request) -> View:
    """The chain as served by the node in this request."""
    view = request.state.view
    assert isinstance(view, View)
    return view


async def on_answered(_: Request, raised: Exception) -> Response:
    """Starlette exception handler for `AnsweredError`."""
    assert isinstance(raised, AnsweredError)
    return answer(raised.body, raised.status)
