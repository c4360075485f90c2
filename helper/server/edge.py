"""What every response passes: request id, CORS, errors as JSON, refusals, counting.

Request ids are sent as X-Request-Id, and logged with failed and refused requests. A share without a delay is revealed
seconds after its arrival, so the arrival time of a client's request nearly identifies the client's public reveal. A
proxy logs clients with its own request ids; a log line here with the same id and a time would link the two. Therefore:

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

import hmac
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

import orjson
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, ExceptionHandler, Message, Scope
from typing_extensions import TypedDict

from helper.clock import Clock
from helper.core.refusals import (
    ATTEMPT_HEADER,
    RETRYABLE_STATUSES,
    Refusal,
    TemporaryRefusal,
    attempt_token,
    find_refusal,
    retry_after_of,
)
from helper.errors import ClientLeft, ShareRefused
from helper.server import protocol
from helper.server.protocol import TRACE_HEADER, Headers, RequestTrace

log = structlog.get_logger("helper.server")

TOKEN_HEADER: Final = "X-Helper-Token"  # noqa: S105 (the header's name)
REQUEST_ID_HEADER: Final = "X-Request-Id"
WALLET_PREFIX: Final = "/shielded-vote/"
"""Prefix of the paths of shares, and of votes that are forwarded to the chain."""
PREFIX: Final = f"{WALLET_PREFIX}v1"
"""Prefix of these paths in the only version."""
API_PREFIX: Final = "/api/"
"""Prefix of the paths of onboarding."""
CORS_PREFIXES: Final = (f"{PREFIX}/", "/cosmos/", API_PREFIX)
"""Path prefixes that pages of any origin use: the wallet API, the chain API (for the gateway) and onboarding."""
CORS_HEADERS: Final = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", f"Retry-After, {REQUEST_ID_HEADER}, Link, X-Total-Count".encode()),
)
_WALLET_HEADERS: Final = f"Content-Type, {TOKEN_HEADER}, {ATTEMPT_HEADER}"
_API_HEADERS: Final = f"Authorization, {_WALLET_HEADERS}"  # elsewhere, pages could guess an operator token
_PREFLIGHT: Final = {"Access-Control-Allow-Methods": "GET, POST, OPTIONS", "Access-Control-Max-Age": "86400"}
_STATUS_TEXTS: Final = {404: "not found", 405: "method not allowed"}
_ID_HEADER: Final = REQUEST_ID_HEADER.lower().encode()
_WELL_FORMED_ID: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}")
_TRACE_ID: Final = re.compile(rb"[0-9A-Fa-f]{32}")
_ID_BYTES: Final = 8

REQUEST_EXTENSION: Final = "request"
"""Key of the connection's `Request` among the extensions in a scope, by which an application reads the body within
limits and aborts the response."""
USER_EXTENSION: Final = "user"
"""Key of the user id of the peer's process (None on a TCP socket) among them."""

PlainHandler = Callable[[protocol.Request], Awaitable[Response]]
"""Answers a request, or raises an error that `error_response_to` knows."""


class ErrorResponse(TypedDict):
    """Body of every error response."""

    status: Literal["error"]
    error: str


class BodyTimeoutDetails(TypedDict):
    """Which attempt timed out: the value of its `X-Vote-Ingress-Attempt-V1`. Nothing of it was stored or sent."""

    version: Literal[1]
    code: Literal["request_body_timeout"]
    dispatch: Literal["not_started"]
    attempt: str


class IngressReceipt(TypedDict):
    """Receipt of a request whose body timed out. Wallets accept these fields only."""

    error: BodyTimeoutDetails


class BareErrorResponse(TypedDict):
    """Body of an error response of onboarding, or if there is no such route."""

    error: str


class JsonResponse(Response):
    """JSON response, encoded by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode a plain value."""
        return orjson.dumps(content)


class Edge:
    """Answers the requests of a listener with an application, and with plain handlers of single paths.

    Args:
        refusals: counts the responses by status, from 400 on; None to count none.
        posts: handlers of posted shares by path, which need no ASGI scope and do not wait behind other requests.
        trace_clock: the time for clients that trace their requests; None to trace none.
    """

    def __init__(
        self,
        app: ASGIApp,
        refusals: Counter[int] | None = None,
        posts: Mapping[str, PlainHandler] | None = None,
        trace_clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._refusals = Counter[int]() if refusals is None else refusals
        self._posts = posts or {}
        self._trace_clock = trace_clock

    async def __call__(self, request: protocol.Request) -> None:
        """Answer a request."""
        request.id = self._choose_id(request)
        if self._trace_clock is not None:
            self._begin_trace(request, self._trace_clock)
        try:
            if request.head.method == "OPTIONS" and request.head.path.startswith(CORS_PREFIXES):
                allowed = _API_HEADERS if request.head.path.startswith(API_PREFIX) else _WALLET_HEADERS
                headers = {**_PREFLIGHT, "Access-Control-Allow-Headers": allowed}
                response = Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)
            elif self.posts_share(request):
                response = await self._posts[request.head.path](request)
            else:
                await self._serve(request)
                return
        except Exception as error:
            expected = error_response_to(error, request.head.path, request.head.headers, request.id)
            if expected is None:
                log.exception("request_failed", request_id=request.id)
            if request.has_response_begun:
                return
            response = expected or error_response(500, "internal error", path=request.head.path)
        completed = self._complete_head(request, response.status_code, response.raw_headers)
        request.begin_response(response.status_code, completed)
        await request.send(bytes(response.body), more=False)

    def posts_share(self, request: protocol.Request) -> bool:
        """Whether a request posts a share, which does not wait behind other requests."""
        return request.head.method == "POST" and request.head.path in self._posts

    def refuse(self, refusal: Refusal) -> Response:
        """The response to a request that its connection refuses."""
        self._refusals[int(refusal.status)] += 1
        response = error_response(refusal.status, refusal.text)
        response.raw_headers.extend(CORS_HEADERS)
        return response

    async def _serve(self, request: protocol.Request) -> None:
        """Serve a request with the application. The connection aborts a response that it leaves incomplete.

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
        if not request.has_response_begun and request.connection is not None:
            raise RuntimeError("the application has not responded")

    def _choose_id(self, request: protocol.Request) -> str:
        if not request.head.path.startswith(WALLET_PREFIX):
            incoming = [value for name, value in request.head.headers if name == _ID_HEADER]
            if len(incoming) == 1 and _WELL_FORMED_ID.fullmatch(incoming[0]) is not None:
                return incoming[0].decode("ascii")
        return secrets.token_hex(_ID_BYTES)

    @staticmethod
    def _begin_trace(request: protocol.Request, clock: Clock) -> None:
        """Trace a request of the wallet API that has a valid id."""
        ids = [value for name, value in request.head.headers if name == TRACE_HEADER]
        if len(ids) == 1 and _TRACE_ID.fullmatch(ids[0]) and request.head.path.startswith(WALLET_PREFIX):
            request.trace = RequestTrace(ids[0], clock)
            if request.is_body_complete:
                request.trace.note_body_end()

    def _complete_head(self, request: protocol.Request, status: int, headers: Headers) -> Headers:
        """Count a response, and return its headers with those that every response has."""
        if status >= HTTPStatus.BAD_REQUEST:
            self._refusals[int(status)] += 1
        cors = CORS_HEADERS if request.head.path.startswith(CORS_PREFIXES) else ()
        traced = () if request.trace is None else request.trace.headers()
        return [*headers, *cors, *traced, (_ID_HEADER, request.id.encode())]


def _create_scope(request: protocol.Request) -> Scope:
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
        "extensions": {USER_EXTENSION: request.addresses.user, REQUEST_EXTENSION: request},
    }


def json_application(
    routes: Sequence[BaseRoute], more_handlers: Mapping[type[Exception], ExceptionHandler] | None = None
) -> Starlette:
    """An application of these routes that responds to errors with JSON."""
    handlers: dict[Any, ExceptionHandler] = dict.fromkeys(_EXPECTED, _handle_error)
    handlers[Exception] = _handle_unexpected_error
    app = Starlette(routes=list(routes), exception_handlers={**handlers, **(more_handlers or {})})
    # A path with an extra slash does not exist; Starlette would redirect it.
    app.router.redirect_slashes = False
    return app


async def _handle_error(request: Request, error: Exception) -> Response:
    response = error_response_to(error, request.scope["path"], request.scope["headers"], request_id_of(request))
    assert response is not None
    return response


async def _handle_unexpected_error(request: Request, _error: Exception) -> Response:
    """Respond 500 without details. Starlette raises the exception again, and `Edge` logs it."""
    return error_response(500, "internal error", path=request.scope["path"])


# ---------------------------------------------------------------------- errors

_EXPECTED: Final = (HTTPException, ShareRefused, TemporaryRefusal, ClientDisconnect, ClientLeft)
"""Errors to which `error_response_to` has a response."""


def error_response_to(error: Exception, path: str, headers: Headers, request_id: str) -> Response | None:
    """The response to an error of a request; None if it is unexpected.

    Logs a final refusal at debug level, with the request's id. Its reason has no value of the request.
    """
    if isinstance(error, TemporaryRefusal):  # not logged: the same share will arrive again
        return refusal_response(path, headers, error)
    if isinstance(error, HTTPException):
        is_phrase = error.detail == HTTPStatus(error.status_code).phrase  # of an exception of Starlette
        text = _STATUS_TEXTS.get(error.status_code, error.detail) if is_phrase else error.detail
        response = error_response(error.status_code, text, error.headers, path=path)
    elif isinstance(error, ShareRefused):
        text = f"{error.field}: {error}" if error.field else str(error)
        response = error_response(error.status, text)
    elif isinstance(error, (ClientDisconnect, ClientLeft)):  # counted; the client does not receive it
        return error_response(HTTPStatus.BAD_REQUEST, "client disconnected before the end of the request")
    else:
        return None
    if response.status_code not in RETRYABLE_STATUSES:
        log.debug("request_refused", status=response.status_code, reason=text, request_id=request_id)
    return response


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> JsonResponse:
    """An error response; a 429 or 503 has a `Retry-After` header.

    Args:
        path: of the request, if `has_bare_error` decides about the body; "" for the body that most errors have.
    """
    retry_after = retry_after_of(status)
    extra = {} if retry_after is None else {"Retry-After": str(retry_after)}
    is_bare = has_bare_error(path, status)
    body = BareErrorResponse(error=message) if is_bare else ErrorResponse(status="error", error=message)
    return JsonResponse(body, status, {**extra, **(headers or {})})


def refusal_response(path: str, request_headers: Headers, error: TemporaryRefusal) -> Response:
    """The response to a request that may pass later, from the table of refusals.

    The response to a slow body is a receipt, which proves that this attempt had no effect (vote-sdk,
    `X-Vote-Ingress-Attempt-V1`), so nothing of the request may have been stored or sent. It is valid only for the
    attempt whose token it repeats. A wallet that gets no response cannot tell whether its share was accepted.
    """
    token = attempt_token(request_headers)
    refusal = find_refusal(error.situation, *error.details, names_attempt=token is not None)
    if token is not None and refusal.is_receipt:
        headers = {"Cache-Control": "no-store", **(error.headers or {})}
        return JsonResponse(ingress_receipt(token), refusal.status, headers)
    return error_response(refusal.status, refusal.text, error.headers, path=path)


def has_bare_error(path: str, status: int) -> bool:
    """Whether the body of an error response of a route, or because there is none, has only the field `error`.

    Wallets recognize a route of the wallet API that does not exist by such a body.
    """
    is_no_route = status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and path.startswith(WALLET_PREFIX)
    return is_no_route or path.startswith(API_PREFIX)


def ingress_receipt(attempt: str) -> IngressReceipt:
    """The receipt of a request with this token."""
    return {"error": {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": attempt}}


# ---------------------------------------------------------------------- tokens and request ids


def token_matches(token: bytes | None, expected: str) -> bool:
    """Compare a header's value with the expected token in constant time."""
    return hmac.compare_digest(token or b"", expected.encode())


def check_token(headers: Headers, expected: str) -> None:
    """Raise HTTPException (401) unless the first token among these headers is the expected one, or none is ("")."""
    name = TOKEN_HEADER.lower().encode()
    if expected and not token_matches(next((value for each, value in headers if each == name), None), expected):
        raise HTTPException(401, f"{TOKEN_HEADER} is missing or invalid")


def request_of(scope: Scope) -> protocol.Request:
    """The connection's request of a request to an application."""
    request: protocol.Request = scope["extensions"][REQUEST_EXTENSION]
    return request


def request_id_of(request: Request) -> str:
    """The id of a request to an application; "" if another server received it."""
    return str(getattr(request.state, "request_id", ""))
