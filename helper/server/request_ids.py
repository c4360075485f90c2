"""Request ids: sent as X-Request-Id, and logged with failed and refused requests.

A share without a delay is revealed seconds after its arrival, so the arrival time of a client's request nearly
identifies the client's public reveal. A proxy logs clients with its own request ids; a log line here with the same id
and a time would link the two. Therefore:

- On the paths of the wallet API, an incoming id is ignored and a new one is generated, which appears in no other log.
  The wallet gets it in the response and can report it to an operator, which reveals nothing new about the wallet's
  requests.
- On other paths (registrations, health, the page) a well-formed incoming id is accepted, so that an operator can trace
  a request through a proxy.
- The id is logged only with an internal error (500), or at debug level with a final refusal (400, 401, 404 and
  others). It is never logged with a success, nor with a status that wallets retry (429, 503, 408): the same share
  arrives again, and the log line would reveal the time of the first attempt.
- The id is passed to these log calls explicitly. In a context variable it would be inherited by all tasks that the
  request starts, and could be logged together with a reveal.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER: Final = "X-Request-Id"
WALLET_PREFIX: Final = "/shielded-vote/"
"""Prefix of the paths of shares, and of votes that are forwarded to the chain."""

REQUEST_ID_HEADER_BYTES: Final = REQUEST_ID_HEADER.lower().encode()
"""The header's name as it is sent."""
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}")
_SCOPE_KEY: Final = "helper.request_id"
_ID_BYTES: Final = 8
_BATCH_SIZE: Final = 256
"""Ids generated from one read of the system's random source."""


class RequestIdMiddleware:
    """Outermost middleware: assigns an id to each request and adds it to the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._request_ids = generate_request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        incoming = None if scope["path"].startswith(WALLET_PREFIX) else _incoming_id(scope["headers"])
        scope[_SCOPE_KEY] = incoming or next(self._request_ids)
        header = (REQUEST_ID_HEADER_BYTES, scope[_SCOPE_KEY].encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, send_with_id)


def generate_request_ids() -> Iterator[str]:
    """Generate random ids endlessly."""
    digits = 2 * _ID_BYTES
    while True:
        batch = secrets.token_hex(_ID_BYTES * _BATCH_SIZE)
        yield from (batch[at : at + digits] for at in range(0, len(batch), digits))


def get_request_id(scope: Scope) -> str:
    """The id of a request, "" if it has none."""
    return str(scope.get(_SCOPE_KEY, ""))


def _incoming_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id in a request's headers; None unless there is exactly one, and well-formed."""
    values = [value for name, value in headers if name == REQUEST_ID_HEADER_BYTES]
    if len(values) != 1 or _WELL_FORMED.fullmatch(values[0]) is None:
        return None
    return values[0].decode("ascii")
