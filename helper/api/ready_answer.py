"""An answer that is made once and sent many times, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

CYCLE_OF: Final = "cycle of"
"""The name in a request's state of a function: from its scope to that by which uvicorn sends its answer, None where
another request has come over its connection meanwhile."""

Header = tuple[bytes, bytes]


class ReadyAnswer:
    """What the answers to many requests have in common.

    Args:
        response: what is answered; not to HEAD.
        headers: beside its own.
    """

    def __init__(self, response: Response, headers: Iterable[Header]) -> None:
        self._status = response.status_code
        self._headers = [*response.raw_headers, *headers]
        self._lines = b"".join(map(_line, self._headers))
        self._body = bytes(response.body)

    async def send(self, scope: Scope, send: Send, name: Header) -> None:
        """Answer one request, with one more header.

        uvicorn looks through each header of an answer, and writes its head and its body one after the other: a sixth of
        what a request costs that comes by the lane. Where nothing is in the way the connection is handed all of it.
        """
        cycle_of: Callable[[Scope], RequestResponseCycle | None] | None = scope.get("state", {}).get(CYCLE_OF)
        cycle = cycle_of(scope) if cycle_of is not None else None
        if cycle is None or cycle.disconnected or cycle.flow.write_paused or cycle.access_log:
            start: Message = {"type": "http.response.start", "status": self._status, "headers": [*self._headers, name]}
            await send(start)
            await send({"type": "http.response.body", "body": self._body})
        else:
            self._write(cycle, name)

    def _write(self, cycle: RequestResponseCycle, name: Header) -> None:
        """What `RequestResponseCycle.send` does with the two messages."""
        begin = b"".join(map(_line, cycle.default_headers))
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"".join((STATUS_LINE[self._status], begin, self._lines, _line(name), end, self._body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _line(header: Header) -> bytes:
    return b"%b: %b\r\n" % header
