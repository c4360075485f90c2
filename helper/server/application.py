"""Assembles the wallets' application from routes and middleware."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from helper.server.body_reader import BodyReader
from helper.server.fast_path import FastPath
from helper.server.middleware import CorsMiddleware, ErrorMiddleware, json_application
from helper.server.openapi import ApiDescription, Holder
from helper.server.rate_limits import RateLimitMiddleware, RefusalLimiter
from helper.server.request_ids import RequestIds
from helper.server.routes.docs import docs_routes
from helper.server.routes.wallet import Taking, WalletView, wallet_routes


def create_app(
    view: WalletView,
    *,
    api_token: str = "",
    expose_queue_status: bool = False,
    bodies: BodyReader | None = None,
    limits: RefusalLimiter | None = None,
    more: Sequence[BaseRoute] = (),
    operator_token: str = "",
) -> ASGIApp:
    """Create the wallets' application.

    Args:
        view: the services that the routes use.
        api_token: token that wallets must send in X-Helper-Token; empty for none.
        expose_queue_status: whether `/queue-status` is served.
        bodies: reads request bodies within limits.
        limits: limits refused requests of each client; None for no limit.
        more: routes of other packages, matched after the wallets' routes.
        operator_token: token of operators for `more`; empty disables these routes.
    """
    bodies = bodies or BodyReader()
    layered = wrapped(
        wallet_app_routes(
            view,
            api_token=api_token,
            expose_queue_status=expose_queue_status,
            bodies=bodies,
            limits=limits,
            more=more,
            operator_token=operator_token,
        ),
        limits,
    )
    return FastPath(layered, Taking(view, api_token=api_token, bodies=bodies, limits=limits), limits)


def wallet_app_routes(
    view: WalletView,
    *,
    api_token: str,
    expose_queue_status: bool,
    bodies: BodyReader,
    more: Sequence[BaseRoute],
    limits: RefusalLimiter | None = None,
    operator_token: str = "",
) -> list[BaseRoute]:
    """The routes of the wallets' application in matching order, with their documentation routes."""
    wallets = wallet_routes(
        view, api_token=api_token, expose_queue_status=expose_queue_status, bodies=bodies, limits=limits
    )
    return described([*wallets], more, api_token=api_token, operator_token=operator_token)


def described(
    routes: Sequence[BaseRoute], more: Sequence[BaseRoute] = (), *, api_token: str = "", operator_token: str = ""
) -> list[BaseRoute]:
    """Add `/openapi.json` and `/docs`, which describe all routes.

    Args:
        routes: matched first.
        more: matched last; one of them may match every path.
        api_token: the wallets' token; empty for none.
        operator_token: the operators' token; empty for none.
    """
    tokens: dict[Holder, str] = {"wallets": api_token, "operators": operator_token}
    description = ApiDescription(holder for holder, token in tokens.items() if token)
    own = [description.route, *docs_routes(description.told)]
    all_routes = [*routes, *own, *more]
    description.of(all_routes)
    return all_routes


def wrapped(routes: Sequence[BaseRoute], limits: RefusalLimiter | None = None) -> ASGIApp:
    """An application of these routes with error handlers and middleware."""
    app = json_application(routes)
    return RequestIds(ErrorMiddleware(CorsMiddleware(app if limits is None else RateLimitMiddleware(app, limits))))
