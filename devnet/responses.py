"""Answers of the routes: Go's JSON, and the error texts that the chain is known for."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from devnet.gojson import dumps
from devnet.node_view import View


class AnsweredError(Exception):
    """An answer given from deep inside a handler: a status and a JSON body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


def answer(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(dumps(body), status, media_type="application/json")


def error(status: int, text: str) -> AnsweredError:
    """The vote module's error shape."""
    return AnsweredError(status, {"error": text})


def grpc_error(code: str, text: str) -> AnsweredError:
    """An error of a query that went through gRPC: always HTTP 500, and the code is said twice."""
    return error(500, f"rpc error: code = {code} desc = rpc error: code = {code} desc = {text}")


def view_of(request: Request) -> View:
    """The chain as the node shows it in this request."""
    view = request.state.view
    assert isinstance(view, View)
    return view


async def on_answered(_: Request, raised: Exception) -> Response:
    """Starlette's handler for `AnsweredError`."""
    assert isinstance(raised, AnsweredError)
    return answer(raised.body, raised.status)
