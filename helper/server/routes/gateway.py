"""The chain under the helper's own address: wallets want one base URL for both (`[gateway] enable`).

What wallets ask a node is on a list, and nothing else is passed on: not what they ask the helper (its routes come
first), not `reveal-share`, not what any other path may lead to. Of a request goes on: its method, its path, the
parameters that are listed, and the body of a POST; no header, no address, nothing of who asks. Nothing is kept, logged,
or asked without being asked for.

The number of requests to nodes is limited. Slow clients cannot use up the slots: the body of a POST is read completely,
within the limits of all bodies, before its request takes a slot. It counts towards these limits until the request has
ended. Answers are streamed. When no slot is free, the client
with the most requests loses a GET to one with fewer (`Gateway._make_room`).
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import anyio
import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from helper.chain.gateway_proxy import GatewayProxy, PossiblySent, ProxyRequest
from helper.chain.node_http import Streamed
from helper.errors import ChainError, ChainUnavailable
from helper.server.body_reader import BodyReader
from helper.server.connection import CUT
from helper.server.middleware import error_response
from helper.server.openapi import ApiRoute, Operation
from helper.server.rate_limits import exempt_from_charge

log = structlog.get_logger("helper.api")

AT_ONCE: Final = 128
"""Concurrent requests to nodes, of all clients."""
AT_ONCE_EACH: Final = 64
"""Concurrent requests to nodes, of one client."""
WHOLE_SECONDS: Final = 300.0
"""Seconds until the last byte of an answer must be sent. Allows for a large page over a slow line."""
PIECE_SECONDS: Final = 10.0
"""Seconds in which a client must read a piece of an answer (at most 64 KiB)."""

_VOTE: Final = "/shielded-vote/v1"
_TENDERMINT: Final = "/cosmos/base/tendermint/v1beta1"
_STAKING: Final = "/cosmos/staking/v1beta1"

READ: Final = (
    f"{_VOTE}/rounds",
    f"{_VOTE}/rounds/active",
    f"{_VOTE}/round/{{name}}",
    f"{_VOTE}/commitment-tree/{{name}}/latest",
    f"{_VOTE}/commitment-tree/{{name}}/leaves",
    f"{_VOTE}/commitment-tree/{{name}}/{{height}}",
    f"{_VOTE}/vote-summary/{{name}}",
    f"{_VOTE}/tally/{{name}}/{{height}}",
    f"{_VOTE}/tally-results/{{name}}",
    f"{_VOTE}/endorsed-rounds/{{name}}",
    f"{_VOTE}/readiness",
    f"{_VOTE}/tx/{{name}}",
    f"{_TENDERMINT}/node_info",
    f"{_TENDERMINT}/syncing",
    f"{_TENDERMINT}/blocks/latest",
    f"{_TENDERMINT}/blocks/{{height}}",
    f"{_STAKING}/validators",
    f"{_STAKING}/validators/{{name}}",
)
"""What is read of a chain. A name is a round, a hash or an address; a height is any number."""
SENT: Final = (
    f"{_VOTE}/delegate-vote",
    f"{_VOTE}/cast-vote",
    f"{_VOTE}/cast-vote-batch",
    f"{_VOTE}/delegate-and-cast-vote-batch",
)
"""What wallets send to it. Newer chains have the batches; others say that there is no such path."""

_PARTS: Final = {"{name}": r"[A-Za-z0-9_-]{1,128}", "{height}": r"[0-9]{1,19}"}
_HEIGHT: Final = {"type": "string", "pattern": "^[0-9]{1,19}$"}
_PARAMETER: Final = re.compile(rb"(?:^|&)((?:from_height|to_height)=[0-9]{1,19})(?=&|$)")


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """How much at once, and for how long; see the constants of the same names."""

    at_once: int = AT_ONCE
    at_once_each: int = AT_ONCE_EACH
    whole_seconds: float = WHOLE_SECONDS
    piece_seconds: float = PIECE_SECONDS


class Gateway:
    """Passes requests on.

    Args:
        passage: the way to the nodes.
        client: who sends a request, None for nobody.
        bodies: reads bodies within their limits.
        limits: how much at once, and for how long.
    """

    def __init__(
        self,
        passage: GatewayProxy,
        *,
        client: Callable[[Scope], bytes | None],
        bodies: BodyReader | None = None,
        limits: GatewayLimits | None = None,
    ) -> None:
        self._passage = passage
        self._client = client
        self._bodies = bodies or BodyReader()
        self._limits = limits or GatewayLimits()
        self._active: defaultdict[bytes | None, set[_Passing]] = defaultdict(set)  # by client

    def routes(self) -> Sequence[Route]:
        """What is passed on, as routes that come behind the helper's own."""
        return [_Listed(path, "GET", self) for path in READ] + [_Listed(path, "POST", self) for path in SENT]

    async def aclose(self) -> None:
        """Close the connections to the nodes."""
        await self._passage.aclose()

    @property
    def under_way(self) -> int:
        """Requests that hold a slot."""
        return sum(map(len, self._active.values()))

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request whose path is on the list."""
        client = self._client(scope)
        async with contextlib.AsyncExitStack() as stack:
            body = None
            if scope["method"] == "POST":
                body = await stack.enter_async_context(self._bodies.reading(scope, receive, client))
            passing = _Passing(scope, receive, send, self._limits)
            stack.enter_context(self._slot(client, passing))
            await passing.run(self._passage, ProxyRequest(scope["method"], _target(scope), body))

    @contextlib.contextmanager
    def _slot(self, client: bytes | None, passing: _Passing) -> Iterator[None]:
        """Hold a slot for a request.

        Raises:
            HTTPException: 429 when this client holds as many as it may, 503 when none is free and none can be freed.
        """
        if client is not None and len(self._active.get(client, ())) >= self._limits.at_once_each:
            raise HTTPException(429, "too many concurrent requests to the chain; retry later")
        if self.under_way >= self._limits.at_once and not self._make_room(client):
            raise HTTPException(503, "too many concurrent requests to the chain; retry later")
        self._active[client].add(passing)
        try:
            yield
        finally:
            self._release(client, passing)

    def _release(self, client: bytes | None, passing: _Passing) -> None:
        self._active[client].discard(passing)
        if not self._active[client]:
            del self._active[client]

    def _make_room(self, client: bytes | None) -> bool:
        """Free a slot for a request of `client`; return whether that was possible.

        The client with the most slots loses a GET: the one that has waited longest for it to read, or if none does, the
        oldest. A client loses none to one that would then hold as many. A POST is never cut: its sender could not know
        whether the transaction was sent.
        """
        clients = (other for other in self._active if other is not None)  # None is on this machine: no limits
        busiest = max(clients, key=lambda other: len(self._active[other]), default=None)
        if busiest is None or len(self._active[busiest]) <= len(self._active.get(client, ())) + 1:
            return False
        reads = [passing for passing in self._active[busiest] if passing.method == "GET"]
        if not reads:
            return False
        worst = min(reads, key=lambda passing: (passing.stalled_since is None, passing.stalled_since or passing.began))
        worst.cut()
        self._release(busiest, worst)  # now: its task ends only after the connection has
        return True


class _Listed(ApiRoute):
    """A path of the list, as it was sent: no encoded character in it is taken for another."""

    def __init__(self, path: str, method: str, gateway: Gateway) -> None:
        super().__init__(path, gateway.serve, method, _operation(path, method))
        pattern = "".join(_PARTS.get(part) or re.escape(part) for part in re.split(r"(\{[a-z]+\})", path))
        self._raw = re.compile(pattern.encode())
        self._method = method
        self._gateway = gateway

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, if it is this very path and method."""
        if scope["method"] != self._method:
            raise HTTPException(405, headers={"Allow": self._method})
        if self._raw.fullmatch(scope.get("raw_path", b"")) is None:
            raise HTTPException(404)
        await self._gateway.serve(scope, receive, send)


class _Passing:
    """One request that is being forwarded.

    Attributes:
        method: GET or POST.
        began: when it took its slot, in event loop time.
        stalled_since: since when it waits for the client to read, None while it does not.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: GatewayLimits) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._started = False
        self.method: str = scope["method"]
        self.began = anyio.current_time()
        self.stalled_since: float | None = None

    async def run(self, passage: GatewayProxy, question: ProxyRequest) -> None:
        """Pass it on until all is answered, the client goes away, or it takes too long."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, group.cancel_scope)
            try:
                with anyio.fail_after(self._limits.whole_seconds):
                    async with passage.ask(question) as answer:
                        await self._pass_on(answer)
            except PossiblySent:
                text = "the node's answer was lost: look for the transaction before this is sent again"
                await self._fail(502, text)
            except ChainUnavailable as error:
                # the words of errors name nodes: they are for operators
                text = "nothing was sent: " if question.method == "POST" else ""
                await self._fail(503, f"{text}no node of the chain answers", error)
            except ChainError as error:
                await self._fail(502, "the node's answer is none", error)
            except TimeoutError:
                # Not logged: a client that does not read can cause any number of these.
                await self._fail(504, "this took too long")
            group.cancel_scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """End it when the client goes away; the connection to the node is closed with it."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _pass_on(self, answer: Streamed) -> None:
        if answer.status == 404:
            exempt_from_charge(self._scope)  # a transaction that is not in a block yet is asked for again and again
        if answer.status == HTTPStatus.NO_CONTENT:
            await self._start(answer.status, [])  # whatever the node says of its length or type: there is no body
            await self._hand_over(b"", more=False)
            return
        if not answer.is_json:
            # A page of HTML would be one of this address.
            if answer.status < 400:
                await self._fail(502, "the node's answer is none")
            else:
                await self._refuse(answer.status, "the node answered this without a word")
            return
        headers = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
        if answer.length is not None:
            headers.append((b"content-length", str(answer.length).encode()))
        if answer.retry_after is not None:
            headers.append((b"retry-after", str(answer.retry_after).encode()))
        await self._start(answer.status, headers)
        async for piece in answer.pieces():
            await self._hand_over(piece, more=True)
        await self._hand_over(b"", more=False)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._started = True
        headers = [*headers, (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _hand_over(self, piece: bytes, *, more: bool) -> None:
        self.stalled_since = anyio.current_time()
        try:
            with anyio.fail_after(self._limits.piece_seconds):
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self.stalled_since = None

    async def _fail(self, status: int, text: str, error: ChainError | None = None) -> None:
        """Answer with an error. After the head of an answer has gone out, end the connection instead."""
        if not self._started:
            await self._refuse(status, text)
            return
        if error is not None:
            log.warning("an answer of the chain was cut off", status=status, reason=str(error))
        self.cut()
        await anyio.sleep_forever()  # until `_watch` sees that the client is gone

    def cut(self) -> None:
        """End the connection to the client at once; `_watch` then ends the request to the node."""
        abort: Callable[[], Any] | None = self._scope.get("state", {}).get(CUT)
        if abort is None:
            raise RuntimeError("this server can not end a connection")
        abort()

    async def _refuse(self, status: int, text: str) -> None:
        await error_response(status, text)(self._scope, self._receive, self._send)


def _operation(path: str, method: str) -> Operation:
    """What is said of a path of the list: little, as the answers are the nodes' own."""
    leaves = path.endswith("/leaves")
    about = {name: {"description": "A height.", "schema": _HEIGHT} for name in ("from_height", "to_height")}
    return Operation(
        "Passed on to a node of the chain, whose answer this is.",
        Any,
        body={"type": "object"} if method == "POST" else None,
        path={part[1:-1]: {"type": "string", "pattern": f"^{_PARTS[part]}$"} for part in _PARTS if part in path},
        query=about if leaves else {},
        refusals=(404, 413, 502, 504) if method == "POST" else (404, 502, 504),
        passed_on=True,
    )


def _target(scope: Scope) -> str:
    """Path and listed parameters of a request that is on the list."""
    found: Sequence[bytes] = _PARAMETER.findall(scope.get("query_string", b""))
    query = b"?" + b"&".join(found) if found else b""
    path: bytes = scope["raw_path"]
    return (path + query).decode("ascii")
