"""Assembles the wallet API application from routes and middleware, with a fast path for `POST /shares`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from helper.server.body_reader import BodyReader
from helper.server.middleware import CORS_HEADERS, CorsMiddleware, ErrorMiddleware, JsonResponse, json_application
from helper.server.openapi import ApiRoute, Operation, TokenHolder, generate_document
from helper.server.request_ids import REQUEST_ID_HEADER_BYTES, RequestIdMiddleware, generate_request_ids
from helper.server.wallet_routes import SHARES_PATH, ShareSubmission, WalletView, accepted_response, wallet_routes
from helper.store.models import EnqueueResult


class FastPath:
    """Accepts posted shares without routing and middleware; forwards all other requests to the application.

    Almost all requests are shares that are accepted. They pass the same validation functions as in the regular route,
    and their response is computed in advance. For a refused share the application raises the same exception without
    reading or enqueuing anything a second time (`ShareSubmission`). It responds and logs as usual.

    Args:
        app: the regular application: the wallet routes with their middleware.
        submission: accepts shares, as in the regular route.
    """

    def __init__(self, app: ASGIApp, submission: ShareSubmission) -> None:
        self._app = app
        self._submission = submission
        self._request_ids = generate_request_ids()
        self._queued = accepted_response(EnqueueResult.QUEUED)
        self._duplicate = accepted_response(EnqueueResult.DUPLICATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        outcome: EnqueueResult | None = None
        if scope["type"] == "http" and scope["path"] == SHARES_PATH and scope["method"] == "POST":
            with contextlib.suppress(Exception):  # the application raises it again and responds
                outcome = await self._submission(scope, receive)
        if outcome is None:
            await self._app(scope, receive, send)
            return
        response = self._duplicate if outcome is EnqueueResult.DUPLICATE else self._queued
        headers = [*response.raw_headers, *CORS_HEADERS, (REQUEST_ID_HEADER_BYTES, next(self._request_ids).encode())]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})


DOCUMENT: Final = Operation("OpenAPI document of this API.", dict[str, Any])


def create_app(
    view: WalletView | None,
    *,
    api_token: str = "",
    expose_queue_status: bool = False,
    body_reader: BodyReader | None = None,
    refusals: Counter[int] | None = None,
    more_routes: Sequence[BaseRoute] = (),
    operator_token: str = "",
) -> ASGIApp:
    """Create the application on the port of the wallet API.

    Args:
        view: the services that the wallet routes use; None for an application without these routes.
        api_token: token that wallets must send in X-Helper-Token; empty for none.
        expose_queue_status: whether `/queue-status` is served.
        body_reader: reads request bodies within limits.
        refusals: counts the responses by status, from 400 on; None to count none.
        more_routes: routes of other packages, matched after the wallet routes.
        operator_token: token of operators for `more_routes`; empty disables these routes.
    """
    if view is None:
        return add_middleware(add_document_route([], more_routes, operator_token=operator_token), refusals)
    submission = ShareSubmission(view, api_token=api_token, body_reader=body_reader or BodyReader())
    wallets = wallet_routes(view, submission, api_token=api_token, expose_queue_status=expose_queue_status)
    routes = add_document_route(wallets, more_routes, api_token=api_token, operator_token=operator_token)
    return FastPath(add_middleware(routes, refusals), submission)


def add_document_route(
    routes: Sequence[BaseRoute], more_routes: Sequence[BaseRoute] = (), *, api_token: str = "", operator_token: str = ""
) -> list[BaseRoute]:
    """Add the route of the OpenAPI document, which describes all routes.

    Args:
        routes: matched first.
        more_routes: matched last; one of them may match every path.
        api_token: token of the wallet API; empty for none.
        operator_token: token of the operator API; empty for none.
    """
    tokens: dict[TokenHolder, str] = {"wallets": api_token, "operators": operator_token}

    @cache
    def get_document() -> bytes:
        roles = [holder for holder, token in tokens.items() if token]
        return orjson.dumps(generate_document(all_routes, authorized_roles=roles))

    async def document(_request: Request) -> Response:
        return Response(get_document(), media_type=JsonResponse.media_type)

    all_routes = [*routes, ApiRoute("/openapi.json", document, "GET", DOCUMENT), *more_routes]
    return all_routes


def add_middleware(routes: Sequence[BaseRoute], refusals: Counter[int] | None = None) -> ASGIApp:
    """An application of these routes with error handlers and middleware."""
    return RequestIdMiddleware(ErrorMiddleware(CorsMiddleware(json_application(routes)), refusals))
