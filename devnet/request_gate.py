"""ASGI middleware of a node's port: logs every request and applies the node's faults.

The routes read their `NodeView` from `scope["state"]["view"]`. To abort a connection, the middleware calls `abort` in
the same state, which the server's protocol sets; in-process clients get an httpx error instead.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from devnet.chain import Chain
from devnet.eras import RECORDED, Era
from devnet.faults import FAULTS_BEFORE_HANDLING, FaultDecision, FaultRules
from devnet.frauds import distort
from devnet.gojson import dumps
from devnet.lies import Liar
from devnet.node_view import NodeView
from devnet.request_log import RequestLog, readable_body
from devnet.responses import ENGINE_LOST_TEXT, ResponseError, create_warming_error

_JSON_HEADERS = [(b"content-type", b"application/json")]
_HTML_HEADERS = [(b"content-type", b"text/html; charset=utf-8")]
_BROADCAST_FAILED = {"error": ENGINE_LOST_TEXT}
_FAULT_RESPONSES = {
    "status_502": (502, _JSON_HEADERS, dumps(_BROADCAST_FAILED)),
    "status_502_after": (502, _JSON_HEADERS, dumps(_BROADCAST_FAILED)),
    "status_400": (400, _JSON_HEADERS, dumps({"error": "invalid request body: unexpected end of JSON input"})),
    "bad_proof": (
        422,
        _JSON_HEADERS,
        dumps({"code": 1, "log": "invalid zero-knowledge proof: constraint system is not satisfied"}),
    ),
    "html": (
        200,
        _HTML_HEADERS,
        b"<html><head><title>Welcome</title></head><body><h1>It works!</h1></body></html>",
    ),
}
"""Responses that replace that of the application: status, headers and body."""
_UNKNOWN_ERROR = (
    500,
    _JSON_HEADERS,
    dumps({"code": 13, "message": "disk is busy", "details": [], "error": {"code": -32603, "data": "disk is busy"}}),
)
"""An error that no client knows, in the formats of REST API and RPC."""


class BufferedResponse:
    """A buffered response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def collect(self, message: Message) -> None:
        """Collect what the application sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(k, v) for k, v in message.get("headers", []) if k.lower() != b"content-length"]
        else:
            self.body += message.get("body", b"")


class FaultMiddleware:
    """Middleware of one port of one node. `route_of(path)` returns the route's name in fault rules and log."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        chain: Chain,
        faults: FaultRules,
        liar: Liar,
        log: RequestLog,
        node: str,
        port: str,
        route_of: Callable[[str], str],
        height_before: Callable[[float], int],
        era: Era = RECORDED,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._app = app
        self._chain = chain
        self._faults = faults
        self._liar = liar
        self._log = log
        self._node = node
        self._port = port
        self._route_of = route_of
        self._height_before = height_before
        self._fault_responses = {**_FAULT_RESPONSES, "status_503": _encode_error(create_warming_error(era, "warming"))}
        self._now_ns = now_ns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"].startswith("/devnet/"):
            await self._app(scope, receive, send)
            return
        arrived, started = self._now_ns() / 1e9, time.perf_counter()
        route = self._route_of(scope["path"])
        decision = self._faults.decide(route, self._chain.height, self._height_before)
        height = min(decision.height, self._chain.height)
        body = await _read_body(receive)
        status: int | None = None
        try:
            status = await self._serve(scope, receive, send, body, decision)
        finally:
            self._log.add(
                {
                    "time": round(arrived, 6),
                    "node": self._node,
                    "port": self._port,
                    "height": height,
                    "route": route,
                    "method": scope["method"],
                    "path": _full_path(scope),
                    "body_sha256": hashlib.sha256(body).hexdigest() if body else None,
                    "body": readable_body(body),
                    "nullifier": _decode_nullifier(body) if route == "reveal-share" else None,
                    "client": "{}:{}".format(*scope["client"]) if scope.get("client") else None,
                    "status": status,
                    "faults": decision.fault_names,
                    "ms": round((time.perf_counter() - started) * 1000, 3),
                }
            )

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, decision: FaultDecision
    ) -> int | None:
        """Handle a request with its faults. Returns the status sent, None if the connection was aborted."""
        state = scope.setdefault("state", {})
        if decision.switches.latency_ms:
            await asyncio.sleep(decision.switches.latency_ms / 1000)
        if decision.response_fault == "refuse":
            await _abort_connection(state, httpx.ConnectError("the dev chain refused the connection"))
            return None
        response = BufferedResponse()
        if decision.response_fault not in FAULTS_BEFORE_HANDLING:
            state["view"] = NodeView(self._chain, decision, self._node, self._liar)
            await self._app(scope, _replay_body(body), response.collect)
        if decision.response_fault == "drop_reply":
            await _abort_connection(state, httpx.ReadError("the dev chain dropped the reply"))
            return None
        if decision.response_fault in self._fault_responses:
            response.status, response.headers, response.body = self._fault_responses[decision.response_fault]
        elif self._liar.tells("error_texts") and self._route_of(scope["path"]) in ("blocks", "block_results"):
            if not scope["path"].endswith("/latest"):
                response.status, response.headers, response.body = _UNKNOWN_ERROR
        elif decision.response_fault == "half_json":
            response.body = response.body[: len(response.body) // 2]
        if decision.switches.fraud is not None and response.status == 200:
            response.body = distort(decision.switches.fraud, self._route_of(scope["path"]), response.body)
        headers = [*response.headers, (b"content-length", str(len(response.body)).encode())]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        if decision.switches.trickle:
            await _send_slowly(response.body, receive, send, decision.switches.trickle)
        else:
            await send({"type": "http.response.body", "body": response.body})
        return response.status


def _encode_error(error: ResponseError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Encode an error as status, headers and body."""
    headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
    return error.status, [*_JSON_HEADERS, *headers], dumps(error.body)


async def _read_body(receive: Receive) -> bytes:
    """Read the request body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _replay_body(body: bytes) -> Receive:
    """A receive channel that returns the body again and never reports a disconnect."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _abort_connection(state: dict[str, Any], error: Exception) -> None:
    """Close the connection without a response."""
    abort = state.get("abort")
    if abort is None:
        raise error
    abort()
    # The server's protocol sees the closed connection in the next iterations of the event loop. If the application
    # returned earlier, the server would log a missing response.
    for _ in range(3):
        await asyncio.sleep(0)


async def _send_slowly(body: bytes, receive: Receive, send: Send, seconds: float) -> None:
    """Send one byte at a time until the client disconnects."""
    disconnected = asyncio.ensure_future(receive())
    try:
        for index in range(len(body)):
            await asyncio.wait([disconnected], timeout=seconds)
            if disconnected.done():
                return
            await send({"type": "http.response.body", "body": body[index : index + 1], "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        disconnected.cancel()


def _full_path(scope: Scope) -> str:
    """Path and query."""
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{scope['path']}?{query}" if query else str(scope["path"])


def _decode_nullifier(body: bytes) -> str | None:
    """The nullifier (hex) in the body of a reveal, None if it cannot be decoded."""
    try:
        return base64.b64decode(json.loads(body)["share_nullifier"]).hex()
    except (ValueError, TypeError, KeyError):
        return None
