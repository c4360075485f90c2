"""Middleware and error handlers: JSON errors, CORS, tokens, logging of refusals."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson
import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from helper.core.refusals import (
    ATTEMPT_HEADER,
    RETRYABLE_STATUSES,
    Situation,
    TemporaryRefusal,
    attempt_token,
    find_refusal,
    retry_after_of,
)
from helper.errors import ClientLeft, ShareRefused
from helper.ingest.payload import PayloadError, error_body, ingress_receipt, no_route_body
from helper.server.request_ids import (
    REQUEST_ID_HEADER,
    WALLET_PREFIX,
    RequestIdMiddleware,
    get_request_id,
)

log = structlog.get_logger("helper.server")

TOKEN_HEADER: Final = "X-Helper-Token"  # noqa: S105 (the header's name)
CORS_PREFIXES: Final = ("/shielded-vote/v1/", "/cosmos/")
"""Path prefixes that wallets use; the second belongs to the chain API, for the gateway."""
CORS_HEADERS: Final = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", f"Retry-After, {REQUEST_ID_HEADER}".encode()),
)
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": f"Content-Type, {TOKEN_HEADER}, {ATTEMPT_HEADER}",
    "Access-Control-Max-Age": "86400",
}
_STATUS_TEXTS: Final = {404: "not found", 405: "method not allowed"}


class JsonResponse(Response):
    """JSON response, encoded by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode a plain value."""
        return orjson.dumps(content)


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """An error response; a 429 or 503 has a `Retry-After` header."""
    retry_after = retry_after_of(status)
    extra = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JsonResponse(error_body(message), status, {**extra, **(headers or {})})


def refusal_response(
    scope: Scope, situation: Situation, *details: object, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """The response to a request that may pass later, from the table of refusals.

    The response to a slow body is a receipt, which proves that this attempt had no effect (vote-sdk,
    `X-Vote-Ingress-Attempt-V1`), so nothing of the request may have been stored or sent. It is valid only for the
    attempt whose token it repeats. A wallet that gets no response cannot tell whether its share was accepted.
    """
    token = attempt_token(scope["headers"])
    refusal = find_refusal(situation, *details, names_attempt=token is not None)
    if token is not None and refusal.is_receipt:
        return JsonResponse(ingress_receipt(token), refusal.status, {"Cache-Control": "no-store", **(headers or {})})
    retry_after = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return error_response(refusal.status, refusal.text, {**retry_after, **(headers or {})})


def route_error_response(path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error response of a route, or because there is none.

    Wallets recognize a route of the wallet API that does not exist by a body with only the field `error`.
    """
    if has_bare_error(path, status):
        return JsonResponse(no_route_body(message), status, headers)
    return error_response(status, message, headers)


def has_bare_error(path: str, status: int) -> bool:
    """Whether the body of an error response has only the field `error`."""
    return status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and path.startswith(WALLET_PREFIX)


def log_refusal(request: Request, status: int, reason: str) -> None:
    """Log a final refusal at debug level. A refusal that clients retry (`RETRYABLE_STATUSES`) is not logged.

    Args:
        request: only its id is logged.
        status: of the response.
        reason: error text without any value of the request.
    """
    if status not in RETRYABLE_STATUSES:
        log.debug("request_refused", status=status, reason=reason, request_id=get_request_id(request.scope))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Respond to an HTTPException of a route, or of Starlette (unknown path, wrong method)."""
    assert isinstance(error, HTTPException)
    text = http_error_text(error, _STATUS_TEXTS)
    log_refusal(request, error.status_code, text)
    return route_error_response(request.scope["path"], error.status_code, text, error.headers)


def http_error_text(error: HTTPException, texts: Mapping[int, str]) -> str:
    """The text of a route's exception; for one of Starlette, which has the status's phrase, that of `texts`."""
    is_phrase = error.detail == HTTPStatus(error.status_code).phrase
    return texts.get(error.status_code, error.detail) if is_phrase else error.detail


async def handle_wire_error(request: Request, error: Exception) -> Response:
    """Respond to an invalid payload or path parameter."""
    log_refusal(request, 400, str(error))
    return error_response(400, str(error))


async def handle_share_refused(request: Request, error: Exception) -> Response:
    """Respond to a refused share."""
    assert isinstance(error, ShareRefused)
    text = f"{error.field}: {error}" if error.field else str(error)
    log_refusal(request, error.status, text)
    return error_response(error.status, text)


async def handle_temporary_refusal(request: Request, error: Exception) -> Response:
    """Respond to a request that may pass later. This is not logged: the same share will arrive again."""
    assert isinstance(error, TemporaryRefusal)
    return refusal_response(request.scope, error.situation, *error.details, headers=error.headers)


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    """Return a response for a disconnected client. Middleware counts it; the client does not receive it."""
    return error_response(400, "client disconnected before the end of the request")


async def handle_unexpected_error(_request: Request, _error: Exception) -> Response:
    """Respond 500 without details. Starlette raises the exception again, and `ErrorMiddleware` logs it."""
    return error_response(500, "internal error")


EXCEPTION_HANDLERS: Final = {
    Exception: handle_unexpected_error,
    HTTPException: handle_http_exception,
    PayloadError: handle_wire_error,
    ShareRefused: handle_share_refused,
    TemporaryRefusal: handle_temporary_refusal,
    ClientDisconnect: handle_disconnect,
    ClientLeft: handle_disconnect,
}


def token_matches(token: str | None, expected: str) -> bool:
    """Compare a header's value with the expected token in constant time."""
    # The server decodes headers as latin-1; compare the received bytes.
    return hmac.compare_digest((token or "").encode("latin-1", "replace"), expected.encode())


def check_token(scope: Scope, expected: str) -> None:
    """Raise HTTPException (401) unless the request has this token."""
    if not token_matches(Headers(scope=scope).get(TOKEN_HEADER), expected):
        raise HTTPException(401, f"{TOKEN_HEADER} is missing or invalid")


class ErrorMiddleware:
    """Logs unexpected exceptions and responds 500 without details.

    Args:
        app: the application.
        refusals: counts the responses by status, from 400 on; None to count none.
    """

    def __init__(self, app: ASGIApp, refusals: Counter[int] | None = None) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        started = False

        async def send_and_track(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._refusals is not None and message["status"] >= 400:
                    self._refusals[int(message["status"])] += 1
            await send(message)

        try:
            await self._app(scope, receive, send_and_track)
        except Exception:
            log.exception("request_failed", request_id=get_request_id(scope))
            if not started:
                await error_response(500, "internal error")(scope, receive, send_and_track)


class CorsMiddleware:
    """Allows all origins on some paths. No credentials are involved, so this exposes nothing.

    Args:
        app: the application.
        prefixes: beginnings of these paths.
        headers: added to each response.
        preflight: headers of the response to a preflight request.
    """

    def __init__(
        self,
        app: ASGIApp,
        prefixes: tuple[str, ...] = CORS_PREFIXES,
        headers: Sequence[tuple[bytes, bytes]] = CORS_HEADERS,
        preflight: Mapping[str, str] = _PREFLIGHT,
    ) -> None:
        self._app = app
        self._prefixes = prefixes
        self._headers = headers
        self._preflight = preflight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; answer preflight requests directly."""
        if not scope["path"].startswith(self._prefixes):
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=self._preflight)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def json_application(
    routes: Sequence[BaseRoute], more_handlers: Mapping[type[Exception], ExceptionHandler] | None = None
) -> Starlette:
    """An application of these routes that responds to errors with JSON.

    Args:
        routes: the routes.
        more_handlers: handlers of additional exceptions.
    """
    app = Starlette(routes=list(routes), exception_handlers={**EXCEPTION_HANDLERS, **(more_handlers or {})})
    # A path with an extra slash does not exist; Starlette would redirect it.
    app.router.redirect_slashes = False
    return app


def internal_application(
    routes: Sequence[BaseRoute], more_handlers: Mapping[type[Exception], ExceptionHandler] | None = None
) -> ASGIApp:
    """An application for operators and monitoring: as `json_application`, with request ids and without CORS."""
    return RequestIdMiddleware(ErrorMiddleware(json_application(routes, more_handlers)))
