"""One connection's limits, which uvicorn does not have: how long and how large a request's head may be, how long
a body may be dragged on that nobody reads any more, how long an answer may lie there that the client does not read, and
how many connections there may be.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol, cast

import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from helper.api import peer
from helper.api.body import SMALL, WHOLE
from helper.api.deadline import Deadline
from helper.api.guard import RETRY_AFTER_SECONDS
from helper.api.limits import costs
from helper.api.ready_answer import CYCLE_OF
from helper.wire import error_answer

CUT: Final = "cut"
"""The name in a request's state of what ends its connection at once: only so can an answer be said not to be whole."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take.

    Attributes:
        head_seconds: from the connection, or a request's first byte, to the end of its headers.
        request_seconds: to the end of its body. Whoever is slow with both is cut off within 10 s all the same.
        stalled_seconds: in which nothing of an answer that waits was taken: whoever does not read is dropped.
        head_bytes: of a request line with its headers; also of what a body carries beside its content.
        connections: at once; for one more, whoever has most of them loses one that does nothing, or it is told to come
            again.
        connections_each: of one client, so that nobody can take them all.
    """

    head_seconds: float = 8.5
    request_seconds: float = 9.0
    stalled_seconds: float = 10.0
    head_bytes: int = 64 << 10
    connections: int = 4096
    connections_each: int = 1024


class Door(Protocol):
    """Who comes in, and what it costs to be thrown out."""

    def who(self, peer: str | None) -> bytes | None:
        """The client at the other end; None for one without limits: a trusted proxy, a unix socket (no address)."""
        ...

    def pay(self, client: bytes) -> None:
        """This client's connection was refused before there was a request."""
        ...

    def refused(self, status: int) -> None:
        """A connection was refused with this status, whoever's it was."""
        ...


class OpenDoor:
    """Nobody is known."""

    def who(self, peer: str | None) -> bytes | None:  # noqa: ARG002 (the protocol's)
        """Nobody."""
        return None

    def pay(self, client: bytes) -> None:
        """Nothing."""

    def refused(self, status: int) -> None:
        """Nothing."""


class _RefusedError(Exception):
    """Stops the parser; what to answer is noted."""


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits. `bounded` makes the class for other limits than the usual."""

    limits = ConnectionLimits()
    door: Door = OpenDoor()
    held: ClassVar[defaultdict[bytes, set[BoundedProtocol]]] = defaultdict(set)  # connections by client

    def __init__(self, *arguments: Any, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        self._who: bytes | None = None
        self._cut = Deadline(self.loop, self._too_slow)  # of the request under way, or of the wait for it
        self._idle = Deadline(self.loop, self.timeout_keep_alive_handler)
        self._stalled: asyncio.TimerHandle | None = None
        self.since = 0.0  # when the request under way, or the wait for it, began
        self._in_head = True  # or between two requests
        self._unread = 0  # bytes that came since the parser last gave a part of a body or the end of a head
        self._head_size = 0
        self._refusal = (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(cast("asyncio.Transport", transport))
        own = {peer.KEY: peer.peer_of(transport), CUT: self.transport.abort, CYCLE_OF: self._cycle_of}
        self.app_state = {**self.app_state, **own}  # of which each request's state is a copy
        self._who = self.door.who(self.client[0] if self.client else None)
        mine = 0
        if self._who is not None:
            self.held[self._who].add(self)
            mine = len(self.held[self._who])
        if mine > self.limits.connections_each:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too many connections at once, come again")
        elif len(self.connections) > self.limits.connections and not self._make_room(mine):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections, come again")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._cut.close()
        self._idle.close()
        # and be gone, without the help of the cyclic collector
        self.app_state = {}
        if self.scope is not None:
            self.scope["state"].pop(CYCLE_OF, None)
        self._read_on()
        if self._who is not None:
            self.held[self._who].discard(self)
            if not self.held[self._who]:
                del self.held[self._who]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse on, unless too much has come of what must be short."""
        if self._in_head and not self._cut:
            self._arm()
        self._unread += len(data)
        super().data_received(data)
        if self._unread > self.limits.head_bytes:
            self._refuse(*self._too_large())

    def pause_writing(self) -> None:
        """More waits to be taken by the client than is kept for it."""
        super().pause_writing()
        self._watch_reading(None)

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        self._read_on()

    # What the parser finds

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head, self._head_size = True, 0
        if not self._cut:
            self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a body."""
        self._measure(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head, self._unread = False, 0
        self._idle.clear()
        self._cut.set(self.since + self.limits.request_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body; whoever reads it has limits of his own."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._in_head, self._unread = True, 0
        self._cut.clear()
        super().on_message_complete()
        if self.cycle.response_complete:
            # It was answered before its end, and its end has stopped the clock that watches idle connections.
            self._idle.set(self.loop.time() + self.timeout_keep_alive)
        elif not self.expect_100_continue and len(self.cycle.body) <= SMALL:
            # not where it was asked whether to send it: that is answered where the body is received
            self.scope["state"][WHOLE] = self.cycle.body

    def on_response_complete(self) -> None:
        """An answer is out; what is left of its request's body must not take for ever.

        The first half is uvicorn's own, but for the timer that it makes for each answer.
        """
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._idle.clear()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._idle.set(self.loop.time() + self.timeout_keep_alive)
        if self._in_head or not self.cycle.response_complete:
            return
        if self.expect_100_continue:
            # Whoever asked whether to send a body and was answered need not send it: what comes next may be anything.
            self.transport.close()
        elif not self._cut:
            self._arm()

    # What is done about it

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's text)
        """Answer a request that could not be parsed, in the shape of all errors."""
        self._refuse(*self._refusal)

    def _measure(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self.limits.head_bytes:
            self._refusal = self._too_large()
            raise _RefusedError

    def _too_large(self) -> tuple[HTTPStatus, str]:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: are larger than {self.limits.head_bytes} bytes"

    def _make_room(self, mine: int) -> bool:
        """Close that connection of whoever has most of them which has waited for its client longest; not for one with
        as many. A few clients who hold all that they may would keep everybody else out.
        """
        theirs: set[BoundedProtocol] = max(self.held.values(), key=len, default=set())
        waiting = [one for one in theirs if one.waits_for_client()]
        if len(theirs) <= mine or not waiting:
            return False
        min(waiting, key=lambda one: one.since).transport.abort()  # at once: its place is taken
        return True

    def _arm(self) -> None:
        if not self.transport.is_closing():
            self.since = self.loop.time()
            self._cut.set(self.since + self.limits.head_seconds)

    def _unset_keepalive_if_required(self) -> None:
        self._idle.clear()  # where uvicorn cancels its timer

    def _too_slow(self) -> None:
        if self._in_head and self._answering():
            self._arm()  # the answer to the request before this one is still being made
        elif self._unread and self._in_head:
            seconds = f"{self.limits.head_seconds:g}"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not come within {seconds} s")
        else:
            self.transport.close()

    def _watch_reading(self, before: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            # Not closed: that would wait until the rest is taken.
            self.transport.abort()
            return
        self._stalled = self.loop.call_later(self.limits.stalled_seconds, self._watch_reading, left)

    def _read_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def waits_for_client(self) -> bool:
        """Whether it is between two requests, or one has not come whole; not while one is being answered."""
        if self.transport.is_closing():
            return False
        return bool(self._cut) or (self._in_head and not self._answering())

    def _cycle_of(self, scope: Scope) -> RequestResponseCycle | None:
        return self.cycle if self.cycle.scope is scope else None

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer, unless that would end up in the midst of another answer, and close."""
        self._cut.clear()
        if self.transport.is_closing():
            return
        self.door.refused(status.value)
        if self._who is not None and costs(status):
            self.door.pay(self._who)
        if not self._answering():
            body = orjson.dumps(error_answer(message))
            later = f"retry-after: {RETRY_AFTER_SECONDS}\r\n" if status == HTTPStatus.TOO_MANY_REQUESTS else ""
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{later}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def bounded(limits: ConnectionLimits, door: Door | None = None) -> type[BoundedProtocol]:
    """The protocol with these limits, as uvicorn takes it: a class."""
    return type("Bounded", (BoundedProtocol,), {"limits": limits, "door": door or OpenDoor(), "held": defaultdict(set)})
