"""Serves the requests of a connection with an ASGI application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope

from helper.errors import ClientLeft
from helper.server.protocol import Request

Headers = Sequence[tuple[bytes, bytes]]
CompleteHead = Callable[[Request, int, Headers], Headers]
"""Returns the headers of a response with those that every response has."""

PEER_EXTENSION: Final = "peer"
"""Key of the peer's credentials (`Peer`, or None) among the extensions in a scope."""
ABORT_EXTENSION: Final = "abort"
"""Key of a function that aborts the connection, the only way to mark a response as incomplete."""


class AsgiAdapter:
    """A handler that calls an ASGI application.

    Args:
        app: the application.
        complete_head: called once for each response.
    """

    def __init__(self, app: ASGIApp, complete_head: CompleteHead) -> None:
        self._app = app
        self._complete_head = complete_head

    async def __call__(self, request: Request) -> None:
        """Serve a request. A response that the application leaves incomplete is aborted by the connection.

        Raises:
            Exception: what the application raises, or that it has not responded.
        """

        async def receive() -> Message:
            try:
                body, more = await request.receive()
            except ClientLeft:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": body, "more_body": more}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: Headers = [(name.lower(), value) for name, value in message.get("headers", [])]
                request.begin_response(message["status"], self._complete_head(request, message["status"], headers))
            else:
                await request.send(message.get("body", b""), more=message.get("more_body", False))

        await self._app(_create_scope(request), receive, send)
        if not request.has_response_begun and not request.is_over:
            raise RuntimeError("the application has not responded")


def _create_scope(request: Request) -> Scope:
    head = request.head
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.http_version,
        "method": head.method,
        "scheme": "http",
        "path": head.path,
        "raw_path": head.raw_path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.headers,
        "client": request.addresses.client,
        "server": request.addresses.server,
        "state": {"request_id": request.id},
        "extensions": {PEER_EXTENSION: request.addresses.peer, ABORT_EXTENSION: request.abort},
    }


class AsgiBody:
    """The body of a request to an ASGI application, for a `BodyReader`.

    Args:
        scope: of the request.
        receive: of the request; must not have been called.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.headers: Headers = scope["headers"]
        self._receive = receive

    def take_body(self, max_bytes: int) -> bytes | None:  # noqa: ARG002 (required by the protocol)
        """Return None: the body may still arrive."""
        return None

    async def receive(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether more follows.

        Raises:
            ClientLeft: the client disconnected.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client disconnected")
        return message.get("body", b""), message.get("more_body", False)
