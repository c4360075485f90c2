"""Gateway to the chain's REST API, for wallets with one base URL (`[gateway] enable`, on by default).

Only the listed paths are forwarded. The helper's own paths are matched first, and `reveal-share` is not listed. A
forwarded request consists of the method, the path, the listed parameters and the body of a POST. It has no headers,
except a wallet's token for this attempt, and no data that identifies the client. The gateway stores and logs nothing,
and sends no requests of its own.

The number of concurrent requests to nodes is limited. Slow clients cannot use up the slots: the body of a POST is read
completely, within the limits of `BodyReader`, before its request takes a slot, and counts towards these limits until
the request has ended. Responses are streamed. A GET whose response has begun holds no slot. The number of these is
limited too: the response that has waited longest for its client is aborted. A GET that its node has not answered for a
while is aborted for a new request.

Pages of leaves, which nodes answer slowly, have a small number of slots of their own. Further requests for them wait
for their turn (`_PageReads`). None is aborted for a new one before it had time for its response: otherwise a few
clients that repeat their requests would end those of all others, and none would get a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import anyio
import structlog
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from helper.chain.gateway_proxy import GatewayProxy, PossiblySent
from helper.chain.node_http import StreamedResponse, StreamRequest
from helper.core.refusals import ATTEMPT_HEADER, Situation, TemporaryRefusal, attempt_token
from helper.errors import ChainError, ChainUnavailable
from helper.server.body_reader import BodyReader
from helper.server.edge import PREFIX, error_response, refusal_response, request_of
from helper.server.openapi import ApiRoute, Operation

log = structlog.get_logger("helper.server")

_TENDERMINT: Final = "/cosmos/base/tendermint/v1beta1"
_STAKING: Final = "/cosmos/staking/v1beta1"
_UPGRADE: Final = "/cosmos/upgrade/v1beta1"

GET_PATHS: Final = (
    f"{PREFIX}/rounds",
    f"{PREFIX}/rounds/active",
    f"{PREFIX}/rounds/overview",
    f"{PREFIX}/round/{{name}}",
    f"{PREFIX}/commitment-tree/{{name}}/latest",
    f"{PREFIX}/commitment-tree/{{name}}/leaves",
    f"{PREFIX}/commitment-tree/{{name}}/{{height}}",
    f"{PREFIX}/vote-summary/{{name}}",
    f"{PREFIX}/tally/{{name}}/{{height}}",
    f"{PREFIX}/tally-results/{{name}}",
    f"{PREFIX}/partial-decryptions/{{name}}",
    f"{PREFIX}/ceremony",
    f"{PREFIX}/pallas-keys",
    f"{PREFIX}/vote-managers",
    f"{PREFIX}/coordinator-actions",
    f"{PREFIX}/coordinator-actions/{{name}}",
    f"{PREFIX}/endorsers",
    f"{PREFIX}/endorsed-rounds/{{name}}",
    f"{PREFIX}/protocol-capabilities",
    f"{PREFIX}/readiness",
    f"{PREFIX}/tx/{{name}}",
    f"{_TENDERMINT}/node_info",
    f"{_TENDERMINT}/syncing",
    f"{_TENDERMINT}/blocks/latest",
    f"{_TENDERMINT}/blocks/{{height}}",
    f"{_STAKING}/validators",
    f"{_STAKING}/validators/{{name}}",
    f"{_UPGRADE}/current_plan",
    f"{_UPGRADE}/applied_plan/{{plan}}",
)
"""Paths that are read with GET. A name is a round id, a hash or an address; a height is any number; a plan is a tag."""
POST_PATHS: Final = (
    f"{PREFIX}/delegate-vote",
    f"{PREFIX}/cast-vote",
    f"{PREFIX}/cast-vote-batch",
    f"{PREFIX}/delegate-and-cast-vote-batch",
)
"""Paths of transactions. Only newer chains support the batches; others respond 404."""

BODY_SECONDS: Final = 60.0
"""Maximum seconds to receive the body of a POST: 1 MiB at 20 kB/s takes 53 s. Wallets wait 150 s for the response."""

_PLACEHOLDERS: Final = {
    "{name}": r"[A-Za-z0-9_-]{1,128}",
    "{height}": r"[0-9]{1,19}",
    "{plan}": r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
}
_HEIGHT_SCHEMA: Final = {"type": "string", "pattern": "^[0-9]{1,19}$"}
_HEIGHT_PARAMETER: Final = re.compile(rb"(?:^|&)(from_height|to_height)=([0-9]{1,19})(?=&|$)")


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of the gateway.

    Attributes:
        max_concurrent: maximum concurrent requests to nodes.
        max_reads: maximum number of GETs among them. The other slots are left to transactions.
        post_seconds: until a node responds to a POST. It may check a proof for 120 s, and wallets wait 150 s.
        leaves_seconds: until a node responds with a page of leaves, as long as wallets wait.
        response_seconds: until the last byte of a response is sent. Allows a large page over a slow connection.
        max_streams: maximum responses to GETs that are being streamed. They hold no slot.
        slow_seconds: a GET without a response for this long may be aborted for another request.
        max_leaves: maximum concurrent requests to nodes for pages of leaves, in addition to `max_concurrent`.
        max_waiting_leaves: maximum requests for pages of leaves that wait for one of these to get its response. For
            another one, one of them is refused.
        slow_leaves_seconds: a request for a page of leaves without a response for this long may be aborted for another.
        max_shared_bytes: maximum bytes of pages of leaves that several requests share, which are in memory until these
            requests have ended.
    """

    max_concurrent: int = 128
    max_reads: int = 96
    post_seconds: float = 150.0
    leaves_seconds: float = 60.0
    response_seconds: float = 300.0
    max_streams: int = 128
    slow_seconds: float = 2.0
    max_leaves: int = 16
    max_waiting_leaves: int = 128
    slow_leaves_seconds: float = 10.0
    max_shared_bytes: int = 16 << 20

    @property
    def max_connections(self) -> int:
        """Maximum number of connections to each node."""
        return self.max_concurrent + self.max_leaves + self.max_streams


class Gateway:
    """Forwards listed requests to chain nodes."""

    def __init__(
        self,
        proxy: GatewayProxy,
        *,
        body_reader: BodyReader | None = None,
        limits: GatewayLimits | None = None,
    ) -> None:
        self._proxy = proxy
        self._body_reader = body_reader or BodyReader(timeout_seconds=BODY_SECONDS)
        self._limits = limits or GatewayLimits()
        self._active: set[_ForwardedRequest] = set()
        self._page_reads = _PageReads(self._limits)

    def routes(self) -> Sequence[Route]:
        """The forwarded paths, to be matched after the helper's own routes."""
        return [_GatewayRoute(path, "GET", self) for path in GET_PATHS] + [
            _GatewayRoute(path, "POST", self) for path in POST_PATHS
        ]

    async def aclose(self) -> None:
        """Close the connections to the nodes."""
        await self._proxy.aclose()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request to a listed path."""
        method, target, is_leaves = scope["method"], _target(scope), scope["raw_path"].endswith(b"/leaves")
        async with contextlib.AsyncExitStack() as stack:
            if method == "POST":
                body = await stack.enter_async_context(self._body_reader.buffer_body(request_of(scope)))
                token = attempt_token(scope["headers"])
                headers = {} if token is None else {ATTEMPT_HEADER: token}
                forwarded = StreamRequest(method, target, body, headers, self._limits.post_seconds)
            else:
                forwarded = StreamRequest(method, target, timeout=self._limits.leaves_seconds if is_leaves else None)
            page_reads = self._page_reads if is_leaves else None
            forwarding = _ForwardedRequest(scope, receive, send, self._limits, page_reads)
            self._abort_slowest_stream()
            if forwarding.holds_slot:
                self._require_slot(method)
            self._active.add(forwarding)
            stack.callback(self._active.discard, forwarding)
            await forwarding.run(self._proxy, forwarded)

    def _require_slot(self, method: str) -> None:
        """Raise TemporaryRefusal if no slot is free and none can be freed."""
        busy = [each.method for each in self._active if each.holds_slot]  # without a response yet, or POSTs
        is_full = len(busy) >= self._limits.max_concurrent
        is_full |= method == "GET" and busy.count(method) >= self._limits.max_reads
        if is_full and not self._abort_slow_read():
            raise TemporaryRefusal(Situation.TOO_MANY_CHAIN_REQUESTS)

    def _abort(self, forwarding: _ForwardedRequest) -> None:
        """Abort a request, and release its slot immediately: its task ends only after the connection."""
        forwarding.abort()
        self._active.discard(forwarding)

    def _abort_slowest_stream(self) -> None:
        """If too many responses are streamed, abort the one that has waited longest for its client, or the oldest."""
        streams = [each for each in self._active if each.is_streamed]
        if len(streams) >= self._limits.max_streams:
            self._abort(
                min(streams, key=lambda each: (each.stalled_since is None, each.stalled_since or each.started_at))
            )

    def _abort_slow_read(self) -> bool:
        """Abort the oldest GET whose node has not responded for `slow_seconds`; return whether there was one.

        A POST is never aborted, because its sender could not tell whether the transaction was sent.
        """
        started_until = anyio.current_time() - self._limits.slow_seconds
        slow = [
            each
            for each in self._active
            if each.holds_slot and each.method == "GET" and each.started_at <= started_until
        ]
        if slow:
            self._abort(min(slow, key=lambda each: each.started_at))
        return bool(slow)


class _GatewayRoute(ApiRoute):
    """Matches a listed path exactly as it was sent, without percent-decoding."""

    def __init__(self, path: str, method: str, gateway: Gateway) -> None:
        super().__init__(path, gateway.serve, method, _describe_operation(path, method))
        pattern = "".join(_PLACEHOLDERS.get(part) or re.escape(part) for part in re.split(r"(\{[a-z]+\})", path))
        self._raw_pattern = re.compile(pattern.encode())
        self._gateway = gateway

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != self.method:
            raise HTTPException(405, headers={"Allow": self.method})
        if self._raw_pattern.fullmatch(scope.get("raw_path", b"")) is None:
            raise HTTPException(404)
        await self._gateway.serve(scope, receive, send)


@dataclass(eq=False, repr=False)
class _ForwardedRequest:
    """One request that is being forwarded.

    Attributes:
        started_at: when it took its slot, or began to wait for its turn, in event loop time.
        stalled_since: when it began to wait for the client to read; None while it does not.
    """

    scope: Scope
    receive: Receive
    send: Send
    limits: GatewayLimits
    page_reads: _PageReads | None  # if it requests a page of leaves
    stalled_since: float | None = None

    def __post_init__(self) -> None:
        self._request = request_of(self.scope)
        self.abort = self._request.abort  # `_cancel_on_disconnect` then ends the request to the node
        self.method: str = self.scope["method"]
        self.started_at = anyio.current_time()

    @property
    def is_streamed(self) -> bool:
        """Whether the response to a GET has begun."""
        return self.method == "GET" and self._request.has_response_begun

    @property
    def holds_slot(self) -> bool:
        """Whether it counts towards `max_concurrent`."""
        return not self.is_streamed and self.page_reads is None

    async def run(self, proxy: GatewayProxy, request: StreamRequest) -> None:
        """Forward until the response is complete, the client disconnects, or a time limit is reached."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_on_disconnect, group.cancel_scope)
            try:
                with anyio.fail_after(self.limits.response_seconds):
                    await self._forward(proxy, request)
            except TemporaryRefusal as refusal:
                await self._fail(self._refusal(refusal))
            except PossiblySent:
                text = "the node's response was lost; check for the transaction before sending it again"
                await self._fail(self._error(502, text))
            except ChainUnavailable as error:
                # The error's text contains names of nodes, which only operators may see.
                situation = Situation.NOTHING_SENT if request.method == "POST" else Situation.NO_CHAIN_NODE
                await self._fail(self._refusal(TemporaryRefusal(situation)), error)
            except ChainError as error:
                await self._fail(self._error(502, "invalid response from node"), error)
            except TimeoutError:
                # Not logged: a client that does not read can cause any number of timeouts.
                await self._fail(self._error(504, "request to the chain timed out"))
            group.cancel_scope.cancel()

    async def _forward(self, proxy: GatewayProxy, request: StreamRequest) -> None:
        """Send the request, that for a page of leaves in its turn, and stream the response."""
        forward = proxy.forward(request)
        if self.page_reads is not None:
            forward = self.page_reads.read(request.target, forward, self.abort)
        async with forward as response:
            await self._stream(response)

    async def _cancel_on_disconnect(self, scope: anyio.CancelScope) -> None:
        """Cancel when the client disconnects. This also closes the connection to the node."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _stream(self, response: StreamedResponse) -> None:
        if response.status == HTTPStatus.NO_CONTENT:
            await self._send_head(response.status, [])  # ignore the node's length and type: there is no body
            await self._send_chunk(b"", more=False)
            return
        if not response.is_json:
            # An HTML page would be served in this origin.
            invalid = 502, "invalid response from node"
            failed = response.status, "the node responded with this status and no JSON"
            await self._fail(self._error(*(invalid if response.status < 400 else failed)))
            return
        headers = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
        if response.length is not None:
            headers.append((b"content-length", str(response.length).encode()))
        if response.retry_after is not None:
            headers.append((b"retry-after", str(response.retry_after).encode()))
        await self._send_head(response.status, headers)
        async for chunk in response.iter_chunks():
            await self._send_chunk(chunk, more=True)
        await self._send_chunk(b"", more=False)

    async def _send_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"cache-control", b"no-store")]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_chunk(self, chunk: bytes, *, more: bool) -> None:
        self.stalled_since = anyio.current_time()  # the connection ends if the client reads nothing for some time
        await self.send({"type": "http.response.body", "body": chunk, "more_body": more})
        self.stalled_since = None

    async def _fail(self, response: Response, error: ChainError | None = None) -> None:
        """Respond with an error. Once the head of a response was sent, abort the connection instead."""
        if not self._request.has_response_begun:
            await response(self.scope, self.receive, self.send)
            return
        if error is not None:
            log.warning("gateway_response_aborted", status=response.status_code, reason=str(error))
        self.abort()

    def _error(self, status: int, text: str) -> Response:
        return error_response(status, text, path=self.scope["path"])

    def _refusal(self, error: TemporaryRefusal) -> Response:
        return refusal_response(self.scope["path"], self.scope["headers"], error)


class _PageReads:
    """Reads of pages of leaves, of which a limited number is in progress.

    Requests for a page that is not being read yet share its read: their response is as new as that of a read of their
    own. While too much is shared, each of them reads the page itself, one after the other.
    Above the maximum number of requests that wait for a read to begin, another one takes the place of the one that has
    waited longest, but not of requests that share a read while there is one that does not.
    """

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._shared_bytes = 0
        self._waiting: dict[str, _Read] = {}  # by target, in order
        self._running: dict[_Read, float] = {}  # the time of their start, or of the start of their response, in order

    @contextlib.asynccontextmanager
    async def read(
        self, target: str, forward: contextlib.AbstractAsyncContextManager[StreamedResponse], abort: Callable[[], None]
    ) -> AsyncIterator[StreamedResponse]:
        """Read a page.

        Args:
            target: path and query; the same for the same page.
            forward: sends the request, unless the response to another one is shared.

        Raises:
            TemporaryRefusal: another request has taken the place.
            ChainError: as `forward`.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        read = self._join(target, turn, abort)
        try:
            async with contextlib.AsyncExitStack() as stack:
                await turn
                # A client that leaves does not end a read that others wait for: each would begin it anew.
                async with read.lock:
                    with anyio.CancelScope(shield=len(read.turns) > 1) as read.scope:
                        response = await self._get_response(read, forward, stack)
                self._end_turn(read, turn)
                yield response
        finally:
            self._end_turn(read, turn)
            read.users -= 1
            if not read.users:
                self._shared_bytes -= read.shared_bytes

    def _join(self, target: str, turn: asyncio.Future[None], abort: Callable[[], None]) -> _Read:
        self._abort_slow()
        if sum(len(read.turns) for read in self._waiting.values()) >= self._limits.max_waiting_leaves:
            displaced = min(self._waiting.values(), key=lambda each: len(each.turns))
            longest = next(iter(displaced.turns))
            if not longest.done():  # it is cancelled if the client has left
                longest.set_exception(TemporaryRefusal(Situation.TOO_MANY_CHAIN_REQUESTS))
            self._end_turn(displaced, longest)
        read = self._waiting.setdefault(target, _Read(target))
        read.turns[turn] = abort
        read.users += 1
        self._start_next()
        return read

    def _abort_slow(self) -> None:
        """Abort the requests of the oldest read if it is slow and others must wait for it."""
        if len(self._running) >= self._limits.max_leaves:
            read, started_at = next(iter(self._running.items()))
            if started_at <= anyio.current_time() - self._limits.slow_leaves_seconds:
                for abort in list(read.turns.values()):
                    abort()
                del self._running[read]  # their tasks end only after the connections

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._limits.max_leaves:
            read = self._waiting.pop(next(iter(self._waiting)))
            self._running[read] = anyio.current_time()
            for turn in read.turns:
                if not turn.done():
                    turn.set_result(None)

    async def _get_response(
        self,
        read: _Read,
        forward: contextlib.AbstractAsyncContextManager[StreamedResponse],
        stack: contextlib.AsyncExitStack,
    ) -> StreamedResponse:
        """Return the shared response or error, or send the request and share its response if others want it."""

        def share(size: int) -> bool:
            read.shared_bytes += size
            self._shared_bytes += size
            return self._shared_bytes <= self._limits.max_shared_bytes

        if isinstance(read.outcome, ChainError):
            raise read.outcome
        if read.outcome is not None:
            return read.outcome
        try:
            response = await stack.enter_async_context(forward)
            if self._running.pop(read, None) is not None:
                self._running[read] = anyio.current_time()  # as much time for the body
            if len(read.turns) > 1 and await response.buffer(share):
                read.outcome = response
                await stack.aclose()  # releases the connection to the node
        except ChainError as error:
            read.outcome = error
            raise
        return response

    def _end_turn(self, read: _Read, turn: asyncio.Future[None]) -> None:
        """End the part of one request in a read. The read ends with the last one."""
        read.turns.pop(turn, None)
        if len(read.turns) <= 1:
            read.scope.shield = False
        if not read.turns:
            self._running.pop(read, None)
            if self._waiting.get(read.target) is read:
                del self._waiting[read.target]
            self._start_next()


@dataclass(eq=False, repr=False)
class _Read:
    """A read of one page.

    Attributes:
        turns: of requests without a response yet, in order; with what aborts the request. A turn comes when the read
            begins; its error is that another request has taken the place.
        users: number of requests that have not ended.
        lock: held by the request that reads.
        scope: of this request while it reads; shielded while others wait for the response.
        outcome: the complete response, or the error; None before, or if it is not shared.
        shared_bytes: bytes of the response that are in memory.
    """

    target: str
    turns: dict[asyncio.Future[None], Callable[[], None]] = field(default_factory=dict)
    users: int = 0
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    outcome: StreamedResponse | ChainError | None = None
    shared_bytes: int = 0


def _describe_operation(path: str, method: str) -> Operation:
    """The description of a listed path, without the responses, which depend on the node."""
    heights = {
        name: {"description": "Block height.", "schema": _HEIGHT_SCHEMA} for name in ("from_height", "to_height")
    }
    return Operation(
        "Forwarded to a chain node; returns the node's response.",
        Any,
        body={"type": "object"} if method == "POST" else None,
        path={
            part[1:-1]: {"type": "string", "pattern": f"^{_PLACEHOLDERS[part]}$"}
            for part in _PLACEHOLDERS
            if part in path
        },
        query=heights if path.endswith("/leaves") else {},
        refusals=(404, 408, 413, 502, 504) if method == "POST" else (404, 502, 504),
        is_forwarded=True,
    )


def _target(scope: Scope) -> str:
    """Path and listed parameters of a request to a listed path. A node reads the first of several."""
    heights: dict[bytes, bytes] = {}
    for name, height in _HEIGHT_PARAMETER.findall(scope.get("query_string", b"")):
        heights.setdefault(name, height)
    query = b"?" + b"&".join(b"%b=%b" % each for each in heights.items()) if heights else b""
    path: bytes = scope["raw_path"]
    return (path + query).decode("ascii")
