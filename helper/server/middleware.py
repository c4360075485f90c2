"""Around every request: errors as JSON in one shape, CORS for wallets in browsers, tokens, refusals in the log."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helper.errors import ShareRefused
from helper.ingest.payload import error_answer
from helper.ingest.schema import WireError
from helper.server.request_ids import HEADER, LATER, request_id

log = structlog.get_logger("helper.api")

TOKEN_HEADER: Final = "X-Helper-Token"  # noqa: S105 (the header's name)
CORS_PREFIXES: Final = ("/shielded-vote/v1/", "/cosmos/")
"""What wallets ask; the second is the chain's, where it is passed on."""
RETRY_AFTER_SECONDS: Final = 2
"""What a 429 asks a wallet to wait."""

CORS_HEADERS: Final = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", f"Retry-After, {HEADER}".encode()),
)
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": f"Content-Type, {TOKEN_HEADER}",
    "Access-Control-Max-Age": "86400",
}
_TEXTS: Final = {404: "no such path", 405: "method not allowed"}


class JsonResponse(Response):
    """JSON by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a plain value."""
        return orjson.dumps(content)


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """An error in its one shape; a 429 asks the wallet to wait."""
    extra = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 429 else {}
    return JsonResponse(error_answer(message), status, {**extra, **(headers or {})})


def note_refusal(request: Request, status: int, reason: str) -> None:
    """A line at debug about a refusal that is final: which request, and why. Of the others there is none.

    Args:
        request: it is named, and nothing else of it is told.
        status: of the answer.
        reason: a text of ours, without a value that was sent.
    """
    if status not in LATER:
        log.debug("a request was refused", status=status, reason=reason, request_id=request_id(request.scope))


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method), and ours."""
    assert isinstance(error, HTTPException)
    own = error.detail != HTTPStatus(error.status_code).phrase
    text = error.detail if own else _TEXTS.get(error.status_code, error.detail)
    note_refusal(request, error.status_code, text)
    return error_response(error.status_code, text, error.headers)


async def wire_error(request: Request, error: Exception) -> Response:
    """What was sent is not what it should be."""
    note_refusal(request, 400, str(error))
    return error_response(400, str(error))


async def share_refused(request: Request, error: Exception) -> Response:
    """A share was not taken."""
    assert isinstance(error, ShareRefused)
    text = f"{error.field}: {error}" if error.field else str(error)
    note_refusal(request, error.status, text)
    return error_response(error.status, text)


async def disconnected(_request: Request, _error: Exception) -> Response:
    """The client went away while it sent; nobody reads this."""
    return error_response(400, "the request ended early")


async def unexpected(_request: Request, _error: Exception) -> Response:
    """Anything else: no details. Starlette raises the exception again, for `ErrorMiddleware` to log."""
    return error_response(500, "internal error")


EXCEPTION_HANDLERS: Final = {
    Exception: unexpected,
    HTTPException: http_error,
    WireError: wire_error,
    ShareRefused: share_refused,
    ClientDisconnect: disconnected,
}


def token_matches(given: str | None, expected: str) -> bool:
    """Whether a header's value is this token, in time that does not tell how much of it is right."""
    # headers are latin-1 to the server; the token is compared as the bytes that came
    return hmac.compare_digest((given or "").encode("latin-1", "replace"), expected.encode())


def check_token(scope: Scope, expected: str) -> None:
    """Raise HTTPException (401) where a request has not this token."""
    if not token_matches(Headers(scope=scope).get(TOKEN_HEADER), expected):
        raise HTTPException(401, f"{TOKEN_HEADER} is missing or wrong")


class ErrorMiddleware:
    """The outermost layer: an unexpected exception becomes a 500 without details, and a line in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            log.exception("a request failed", request_id=request_id(scope))
            if not started:
                await error_response(500, "internal error")(scope, receive, send)


class CorsMiddleware:
    """Any page may ask what any wallet may ask; no credentials, so there is nothing to steal."""

    def __init__(self, app: ASGIApp, prefixes: tuple[str, ...] = CORS_PREFIXES) -> None:
        self._app = app
        self._prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; answer a preflight at once."""
        if not scope["path"].startswith(self._prefixes):
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *CORS_HEADERS]
            await send(message)

        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)
