"""A name for each request: in its answer as X-Request-Id, and in the log line of what went wrong with it.

What such a name can join decides where it may stand. A share that is due at once is revealed seconds after it came, so
"this client came at that second" is nearly "this client's share is that public reveal". A proxy's log knows the client
by the name that the proxy gave; a line here with the same name and a time would complete the pair. Therefore:

- On the wallets' paths a name that was given is not taken: one is made here, that nobody else's log has. The wallet
  finds it in its answer and can tell an operator about it; that joins nothing which the wallet does not know itself.
- Elsewhere (registrations, health, the page) a well-formed name is taken, so that an operator can follow a request
  through a proxy.
- It is logged only with what is over: an error of ours (500), or a refusal that the same share does not come back from
  (400, 401, 404 and their like, at debug). Never with a good answer, and never with "come again" (429, 503, 408): that
  share is on its way, and the line would tell when it came.
- It is a parameter of those few lines and nothing that lines take up by themselves. Bound to the task, as request ids
  usually are, it would be inherited by whatever work the request sets off, and could end up beside a reveal.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "X-Request-Id"
WALLETS: Final = "/shielded-vote/"
"""Below it shares arrive, and votes on their way to the chain."""
LATER: Final = frozenset({408, 429, 503})
"""Statuses after which the same share comes again."""

NAME: Final = HEADER.lower().encode()
"""The header as it is sent."""
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}")
_IN_SCOPE: Final = "helper.request_id"
_BYTES: Final = 8
_AT_ONCE: Final = 256
"""Names that are drawn at once: the system is asked as seldom."""


class RequestIds:
    """The outermost layer: names each request, and its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._names = new_names()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        name = None if scope["path"].startswith(WALLETS) else _given(scope["headers"])
        scope[_IN_SCOPE] = name or next(self._names)
        header = (NAME, scope[_IN_SCOPE].encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, named)


def new_names() -> Iterator[str]:
    """Names that nobody can guess, without end."""
    digits = 2 * _BYTES
    while True:
        drawn = secrets.token_hex(_BYTES * _AT_ONCE)
        yield from (drawn[at : at + digits] for at in range(0, len(drawn), digits))


def request_id(scope: Scope) -> str:
    """The name of a request, "" for one that has none."""
    return str(scope.get(_IN_SCOPE, ""))


def _given(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The name that came with a request, None where there is none, more than one, or not one."""
    given = [value for name, value in headers if name == NAME]
    if len(given) != 1 or _WELL_FORMED.fullmatch(given[0]) is None:
        return None
    return given[0].decode("ascii")
