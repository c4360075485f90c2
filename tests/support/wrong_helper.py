"""A deliberately wrong helper: a proxy of the real service that injects one fault.

Without a fault it forwards every request and response unchanged; it has its own timeout for bodies, because it forwards
complete bodies only. The faults that reveal shares themselves use fake proofs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any, Final

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import proofs
from devnet.stand_in_proofs import create_stand_in_proof
from helper.ingest.validator import CheckedShare, checked_share
from proofs import InvalidShare
from tests.support.conformance import serve_app

PREFIX: Final = "/shielded-vote/v1"
SHARES: Final = f"{PREFIX}/shares"
ATTEMPT_HEADER: Final = "x-vote-ingress-attempt-v1"
STALL_SECONDS: Final = 11.0
"""Seconds without a byte of the body after which the body times out."""
SLOW_STATUS_SECONDS: Final = 2.2
MAX_PARALLEL_POSTS: Final = 32
RESEND_SECONDS: Final = 4.0
LOST_INDEX: Final = 3
MAX_BODY_BYTES: Final = 1 << 20
MAX_DELAY_SECONDS: Final = 3000
TOKEN: Final = "conformance-token"
_NOT_FORWARDED: Final = {
    "connection",
    "content-length",
    "date",
    "expect",
    "host",
    "keep-alive",
    "server",
    "trailer",
    "transfer-encoding",
}


class Fault(Enum):
    """A planted fault. The value is a short description."""

    NONE = "none"
    REPEAT_IS_QUEUED = "responds `queued` to a repeat"
    ALTERED_IS_DUPLICATE = "responds `duplicate` to different content with a known key"
    UNKNOWN_ROUND_IS_500 = "responds 500 for an unknown round"
    HTML_404 = "responds to unknown paths with an HTML page"
    SLASH_REDIRECT = "redirects a path with a slash at the end"
    TEXT_ERRORS = "sends refusals as text"
    NON_CANONICAL_ACCEPTED = "accepts a blind above the modulus"
    HASH_MISMATCH_ACCEPTED = "accepts a share whose shares_hash does not match"
    INTEGERS_WRAP = "reads integers modulo 2^32"
    LATE_ACCEPTED = "accepts a submit_at after the end of the round"
    OVERSIZE_IS_500 = "responds 500 to an oversized body"
    NO_CORS = "sends no CORS headers"
    STATUS_SLOW = "responds to status after more than 2 s"
    UNKNOWN_SHARE_IS_500 = "responds 500 for the status of an unknown share"
    CONFIRMED_EARLY = "reports confirmed before the share is in a block"
    RECEIPT_WITH_MORE = "has another field in the receipt"
    RECEIPT_FOR_ANY_TOKEN = "gives a receipt for an invalid token"
    STORED_BEFORE_RECEIPT = "stores a share before it gives a receipt"
    OVERLOADED_IS_503 = "responds 503 to more than 32 posts at once"
    LATER_IS_429 = "responds 429 to every request that may pass later"
    LATER_IS_400 = "responds 400 to a share that may pass later"
    LATER_IN_MINUTES = "asks to wait for two minutes"
    LATER_WITHOUT_TIME = "does not say when to repeat what may pass later"
    SLOW_BODY_IS_400 = "responds 400 to a slow body without a token"
    PENDING_IS_200 = "responds 200 for the status of a share that is not confirmed"
    REVEALED_EARLY = "reveals shares at once"
    TIME_MOVED = "reveals a share early when it is repeated with a later time"
    SENT_AGAIN = "sends a reveal again after it was counted"
    SHARE_LOST = "loses the share with index 3 of every vote"
    REVEALED_IS_FORGOTTEN = "forgets a share after its reveal"
    OPTION_0_REFUSED = "refuses option 0"
    INDEX_NEEDED = "refuses share 0 without share_index"
    BLOCKED_BY_REFUSED = "refuses a share after an altered one with its key was refused"
    TOKEN_BEGINNING = "accepts every token that begins with the right one"
    STORED_AFTER_RECEIPT = "stores a share after it gave a receipt"
    STORED_WITHOUT_END = "stores a share when the connection ends before the body does"
    LOST_ON_RESTART = "loses waiting shares when it restarts"
    NODE_ASKED_ON_ARRIVAL = "requests the tree from the node when a share arrives"
    NODE_ASKED_FOR_NULLIFIER = "queries the node whether a new share is spent"


_STATUSES: Final = {
    (Fault.LATER_IS_429, 503): 429,
    (Fault.LATER_IS_400, 429): 400,
    (Fault.LATER_IS_400, 503): 400,
    (Fault.PENDING_IS_200, 202): 200,
}
"""Statuses that a fault replaces."""


class WrongHelper:
    """The proxy.

    Args:
        chain_url: REST URL of a node, for the faults that talk to it.
    """

    def __init__(self, target: str, chain_url: str, fault: Fault = Fault.NONE) -> None:
        self._target = target
        self._chain_url = chain_url
        self._fault = fault
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(timeout=60, limits=limits, trust_env=False)
        self._known: dict[tuple[object, ...], CheckedShare] = {}
        self._revealed: set[bytes] = set()
        self._refused: set[tuple[object, ...]] = set()
        self._memory: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._posting = 0

    def app(self) -> ASGIApp:
        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        routes = [
            Route("/restart", self._restart, methods=["POST"]),
            Route("/{path:path}", self._serve, methods=methods),
        ]
        return Starlette(routes=routes)

    async def aclose(self) -> None:
        for task in (*self._tasks, *self._memory.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._memory.values(), return_exceptions=True)
        await self._http.aclose()

    async def _restart(self, _request: Request) -> Response:
        for task in self._memory.values():
            task.cancel()
        self._memory.clear()
        return JSONResponse({})

    async def _serve(self, request: Request) -> Response:
        try:
            body = await self._read_body(request)
        except ClientDisconnect:
            return Response(status_code=400)
        if isinstance(body, Response):
            return body
        path = request.url.path
        if (early := await self._respond_early(request, path)) is not None:
            return early
        if request.method == "POST" and path == SHARES:
            return self._finish(await self._post(request, body))
        if self._fault is Fault.CONFIRMED_EARLY and path.startswith(f"{PREFIX}/share-status/"):
            return self._finish(await self._get_early_status(request, body))
        response = await self._forward(request, body)
        if self._fault is Fault.UNKNOWN_SHARE_IS_500 and path.startswith(f"{PREFIX}/share-status/"):
            is_known = any(path.endswith(share.nullifier.hex()) for share in self._known.values())
            if response.status_code == 202 and not is_known:
                response = _error(500, "sql: no rows in result set")
        if self._fault is Fault.HTML_404 and response.status_code == 404:
            response = Response("<html><body>404</body></html>", 404, _cors(response), "text/html")
        return self._finish(response)

    async def _respond_early(self, request: Request, path: str) -> Response | None:
        """The response of the faults that do not depend on the body."""
        is_status = path == f"{PREFIX}/status"
        if self._fault is Fault.STATUS_SLOW and is_status:
            await asyncio.sleep(SLOW_STATUS_SECONDS)
        token = request.headers.get("x-helper-token", "")
        if self._fault is Fault.TOKEN_BEGINNING and not is_status and not token.startswith(TOKEN):
            return _error(401, "unauthorized")
        if self._fault is Fault.SLASH_REDIRECT and path.endswith("/") and path != f"{PREFIX}/":
            return RedirectResponse(path.rstrip("/"), 308)
        return None

    def _finish(self, response: Response) -> Response:
        fault = self._fault
        response.status_code = _STATUSES.get((fault, response.status_code), response.status_code)
        if fault is Fault.LATER_IN_MINUTES and "retry-after" in response.headers:
            response.headers["retry-after"] = "120"
        if fault is Fault.LATER_WITHOUT_TIME:
            del response.headers["retry-after"]
        if self._fault is Fault.NO_CORS:
            for name in [name for name in response.headers if name.startswith("access-control-")]:
                del response.headers[name]
        if self._fault is Fault.TEXT_ERRORS and response.status_code == 400:
            return Response("bad request", 400, _cors(response), "text/plain")
        return response

    async def _read_body(self, request: Request) -> bytes | Response:
        body, stream = b"", request.stream().__aiter__()
        while True:
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    body += await anext(stream)
            except StopAsyncIteration:
                return body
            except TimeoutError:
                return await self._time_out(request, body)
            except ClientDisconnect:
                if self._fault is Fault.STORED_WITHOUT_END:
                    await self._http.post(self._target + SHARES, content=body)
                raise

    async def _time_out(self, request: Request, body: bytes) -> Response:
        values = request.headers.getlist(ATTEMPT_HEADER)
        is_valid = len(values) == 1 and len(values[0]) == 64 and set(values[0]) <= set("0123456789abcdef")
        closing = {"Connection": "close", "Access-Control-Allow-Origin": "*"}
        if self._fault is Fault.STORED_BEFORE_RECEIPT:
            await self._http.post(self._target + SHARES, content=body)
        if not is_valid and not (self._fault is Fault.RECEIPT_FOR_ANY_TOKEN and values):
            status = 400 if self._fault is Fault.SLOW_BODY_IS_400 else 503
            return JSONResponse({"status": "error", "error": "body timed out"}, status, {**closing, "Retry-After": "2"})
        if self._fault is Fault.STORED_AFTER_RECEIPT:
            self._start(self._store_later(body))
        receipt = {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": values[0]}
        if self._fault is Fault.RECEIPT_WITH_MORE:
            receipt["retry"] = True
        return JSONResponse({"error": receipt}, 408, {**closing, "Cache-Control": "no-store"})

    async def _store_later(self, body: bytes) -> None:
        await asyncio.sleep(0.1)
        await self._http.post(self._target + SHARES, content=body)

    async def _forward(self, request: Request, body: bytes) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_FORWARDED]
        url = f"{self._target}{request.scope['raw_path'].decode()}"
        if request.url.query:
            url += f"?{request.url.query}"
        received = await self._http.request(request.method, url, content=body or None, headers=headers)
        kept = {name: value for name, value in received.headers.items() if name not in _NOT_FORWARDED}
        return Response(received.content, received.status_code, kept)

    async def _post(self, request: Request, body: bytes) -> Response:
        self._posting += 1
        try:
            if self._fault is Fault.OVERLOADED_IS_503 and self._posting > MAX_PARALLEL_POSTS:
                return _error(503, "busy")
            return await self._submit(request, body)
        finally:
            self._posting -= 1

    async def _submit(self, request: Request, body: bytes) -> Response:
        (result,) = await asyncio.to_thread(proofs.read_shares, [body])
        read = result if isinstance(result, InvalidShare) else checked_share(result)
        before = self._respond_before(body, read)
        if before is not None:
            return before
        response = await self._forward(request, self._altered(body, read))
        word = json.loads(bytes(response.body)).get("status") if response.status_code == 200 else None
        if isinstance(read, InvalidShare):
            if (key := _read_key(body)) is not None:
                self._refused.add(key)
            return response
        is_new = word == "queued"
        if is_new:
            self._known[_key(read)] = read
        return await self._respond_after(response, read, word, is_new=is_new)

    def _respond_before(self, body: bytes, read: CheckedShare | InvalidShare) -> Response | None:
        """The response of the faults that do not forward a share."""
        fault = self._fault
        if len(body) > MAX_BODY_BYTES:
            return _error(500, "internal error") if fault is Fault.OVERSIZE_IS_500 else _error(413, "too large")
        if isinstance(read, InvalidShare):
            return self._respond_to_invalid(body, read)
        if (refusal := self._refuse_valid(body, read)) is not None:
            return refusal
        if fault is Fault.LOST_ON_RESTART and read.share.submit_at > time.time():
            return self._keep_in_memory(body, read)
        if fault is Fault.SHARE_LOST and read.share.share_index == LOST_INDEX:
            is_known = _key(read) in self._known
            self._known[_key(read)] = read
            return _accepted("duplicate" if is_known else "queued")
        return None

    def _refuse_valid(self, body: bytes, read: CheckedShare) -> Response | None:
        fault = self._fault
        if fault is Fault.OPTION_0_REFUSED and not read.share.vote_decision:
            return _error(400, "vote_decision is missing")
        if fault is Fault.INDEX_NEEDED and "share_index" not in json.loads(body)["enc_share"]:
            return _error(400, "share_index is missing")
        if fault is Fault.BLOCKED_BY_REFUSED and _key(read) in self._refused - self._known.keys():
            return _error(409, "conflict")
        return None

    def _respond_to_invalid(self, body: bytes, read: InvalidShare) -> Response | None:
        fault = self._fault
        is_accepted = fault is Fault.NON_CANONICAL_ACCEPTED and read == ("primary_blind", "non-canonical", None)
        is_accepted |= fault is Fault.HASH_MISMATCH_ACCEPTED and read.reason == "shares_hash"
        if is_accepted:
            return _accepted("queued")
        if fault is Fault.ALTERED_IS_DUPLICATE and _read_key(body) in self._known:
            return _accepted("duplicate")
        return None

    def _altered(self, body: bytes, read: CheckedShare | InvalidShare) -> bytes:
        if self._fault is Fault.INTEGERS_WRAP and isinstance(read, InvalidShare):
            return _wrap_integers(body)
        if isinstance(read, InvalidShare):
            return body
        latest = int(time.time()) + MAX_DELAY_SECONDS
        if self._fault is Fault.REVEALED_EARLY:
            return json.dumps({**json.loads(body), "submit_at": 0}).encode()
        if self._fault is Fault.LATE_ACCEPTED and read.share.submit_at > latest:
            return json.dumps({**json.loads(body), "submit_at": latest}).encode()
        return body

    async def _respond_after(
        self, response: Response, read: CheckedShare, word: str | None, *, is_new: bool
    ) -> Response:
        """The response of the faults that forward a share first."""
        fault = self._fault
        if fault is Fault.UNKNOWN_ROUND_IS_500 and response.status_code == 503 and not read.share.tree_position >> 20:
            return _error(500, "round lookup failed")
        if fault is Fault.ALTERED_IS_DUPLICATE and response.status_code == 400 and _key(read) in self._known:
            return _accepted("duplicate")
        if fault is Fault.REPEAT_IS_QUEUED and word == "duplicate":
            return _accepted("queued")
        if fault is Fault.REVEALED_IS_FORGOTTEN and word == "duplicate" and await self._is_counted(read):
            return _error(409, "conflict")
        if (
            fault is Fault.TIME_MOVED
            and word == "duplicate"
            and read.share.submit_at > time.time()
            and not await self._is_counted(read)
        ):
            self._start(self._reveal(read, 0))
        if fault is Fault.SENT_AGAIN and is_new:
            self._start(self._send_again(read))
        if fault is Fault.NODE_ASKED_ON_ARRIVAL and is_new:
            await self._http.get(f"{self._chain_url}{PREFIX}/commitment-tree/{read.share.round_id.hex()}/latest")
        if fault is Fault.NODE_ASKED_FOR_NULLIFIER and is_new:
            await self._http.get(f"{self._chain_url}{PREFIX}/tx/{read.nullifier.hex()}")
        return response

    def _keep_in_memory(self, body: bytes, read: CheckedShare) -> Response:
        if read.nullifier in self._memory:
            return _accepted("duplicate")
        self._memory[read.nullifier] = asyncio.create_task(self._forward_when_due(body, read))
        return _accepted("queued")

    async def _forward_when_due(self, body: bytes, read: CheckedShare) -> None:
        await asyncio.sleep(read.share.submit_at - time.time())
        await self._http.post(self._target + SHARES, content=body)

    async def _get_early_status(self, request: Request, body: bytes) -> Response:
        """Report confirmed from two seconds before the time of a share."""
        for known in self._known.values():
            if request.url.path.endswith(known.nullifier.hex()) and time.time() > known.share.submit_at - 2:
                return JSONResponse({"status": "confirmed"}, 200, {"Access-Control-Allow-Origin": "*"})
        return await self._forward(request, body)

    async def _is_counted(self, read: CheckedShare) -> bool:
        path = f"{PREFIX}/share-status/{read.share.round_id.hex()}/{read.nullifier.hex()}"
        response = await self._http.get(self._target + path)
        return bool(response.json()["status"] == "confirmed")

    async def _send_again(self, read: CheckedShare) -> None:
        while not await self._is_counted(read):
            await asyncio.sleep(0.2)
        await self._reveal(read, RESEND_SECONDS)

    async def _reveal(self, read: CheckedShare, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        share = read.share
        url = f"{self._chain_url}{PREFIX}/commitment-tree/{share.round_id.hex()}/latest"
        tree = (await self._http.get(url)).json()["tree"]
        statement = proofs.Statement(
            read.nullifier,
            share.c1,
            share.c2,
            share.proposal_id,
            share.vote_decision,
            base64.b64decode(tree["root"]),
            share.round_id,
        )
        message = {
            "share_nullifier": _b64(read.nullifier),
            "enc_share": _b64(share.c1 + share.c2),
            "proposal_id": share.proposal_id,
            "vote_decision": share.vote_decision,
            "proof": _b64(create_stand_in_proof(statement)),
            "vote_round_id": _b64(share.round_id),
            "vote_comm_tree_anchor_height": tree["height"],
        }
        await self._http.post(f"{self._chain_url}{PREFIX}/reveal-share", json=message)

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wrap_integers(body: bytes) -> bytes:
    try:
        fields: Any = json.loads(body)
        sealed = fields["enc_share"]
        for parent, name in ((fields, "proposal_id"), (fields, "vote_decision"), (sealed, "share_index")):
            if type(parent[name]) is int and parent[name] >= 1 << 32:
                parent[name] %= 1 << 32
    except (ValueError, TypeError, KeyError):
        return body
    return json.dumps(fields).encode()


def _key(read: CheckedShare) -> tuple[object, ...]:
    share = read.share
    return (share.round_id.hex(), share.share_index, share.proposal_id, share.tree_position)


def _read_key(body: bytes) -> tuple[object, ...] | None:
    """The key of a share that may be invalid; None if it cannot be read."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        fields = json.loads(body)
        key = (
            fields["vote_round_id"],
            fields["enc_share"].get("share_index", 0),
            fields["proposal_id"],
            fields["tree_position"],
        )
        hash(key)
        return key
    return None


def _accepted(word: str) -> Response:
    return JSONResponse({"status": word}, 200, {"Access-Control-Allow-Origin": "*"})


def _error(status: int, text: str) -> Response:
    return JSONResponse({"status": "error", "error": text}, status, {"Access-Control-Allow-Origin": "*"})


def _cors(response: Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def _b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@contextlib.asynccontextmanager
async def run_wrong_helper(target: str, chain_url: str, fault: Fault = Fault.NONE) -> AsyncIterator[str]:
    """Run the proxy on this event loop. Yields its base URL."""
    helper = WrongHelper(target, chain_url, fault)
    async with serve_app(helper.app()) as url:
        try:
            yield url
        finally:
            await helper.aclose()
