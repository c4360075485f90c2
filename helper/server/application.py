"""Assembles the wallets' application from routes and middleware."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from helper.server.body_reader import BodyReader
from helper.server.fast_path import FastPath
from helper.server.middleware import CorsMiddleware, ErrorMiddleware, json_application
from helper.server.openapi import ApiDescription, TokenHolder
from helper.server.rate_limits import RateLimitMiddleware, RefusalLimiter
from helper.server.request_ids import RequestIdMiddleware
from helper.server.routes.docs import docs_routes
from helper.server.routes.wallet import Taking, WalletView, wallet_routes


def create_app(
    view: WalletView,
    *,
    api_token: str = "",
    expose_queue_status: bool = False,
    body_reader: BodyReader | None = None,
    limiter: RefusalLimiter | None = None,
    more_routes: Sequence[BaseRoute] = (),
    operator_token: str = "",
) -> ASGIApp:
    """Create the wallets' application.

    Args:
        view: the services that the routes use.
        api_token: token that wallets must send in X-Helper-Token; empty for none.
        expose_queue_status: whether `/queue-status` is served.
        body_reader: reads request bodies within limits.
        limiter: limits refused requests of each client; None for no limit.
        more_routes: routes of other packages, matched after the wallets' routes.
        operator_token: token of operators for `more_routes`; empty disables these routes.
    """
    body_reader = body_reader or BodyReader()
    app = add_middleware(
        wallet_app_routes(
            view,
            api_token=api_token,
            expose_queue_status=expose_queue_status,
            body_reader=body_reader,
            limiter=limiter,
            more_routes=more_routes,
            operator_token=operator_token,
        ),
        limiter,
    )
    return FastPath(app, Taking(view, api_token=api_token, body_reader=body_reader, limiter=limiter), limiter)


def wallet_app_routes(
    view: WalletView,
    *,
    api_token: str,
    expose_queue_status: bool,
    body_reader: BodyReader,
    more_routes: Sequence[BaseRoute],
    limiter: RefusalLimiter | None = None,
    operator_token: str = "",
) -> list[BaseRoute]:
    """The routes of the wallets' application in matching order, with their documentation routes."""
    wallets = wallet_routes(
        view, api_token=api_token, expose_queue_status=expose_queue_status, body_reader=body_reader, limiter=limiter
    )
    return add_docs_routes([*wallets], more_routes, api_token=api_token, operator_token=operator_token)


def add_docs_routes(
    routes: Sequence[BaseRoute], more_routes: Sequence[BaseRoute] = (), *, api_token: str = "", operator_token: str = ""
) -> list[BaseRoute]:
    """Add `/openapi.json` and `/docs`, which describe all routes.

    Args:
        routes: matched first.
        more_routes: matched last; one of them may match every path.
        api_token: the wallets' token; empty for none.
        operator_token: the operators' token; empty for none.
    """
    tokens: dict[TokenHolder, str] = {"wallets": api_token, "operators": operator_token}
    description = ApiDescription(holder for holder, token in tokens.items() if token)
    own = [description.route, *docs_routes(description.get_document)]
    all_routes = [*routes, *own, *more_routes]
    description.set_routes(all_routes)
    return all_routes


def add_middleware(routes: Sequence[BaseRoute], limiter: RefusalLimiter | None = None) -> ASGIApp:
    """An application of these routes with error handlers and middleware."""
    app = json_application(routes)
    return RequestIdMiddleware(
        ErrorMiddleware(CorsMiddleware(app if limiter is None else RateLimitMiddleware(app, limiter)))
    )
