"""The application that wallets talk to, put together."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from helper.server.body_reader import BodyReader
from helper.server.fast_path import FastPath
from helper.server.middleware import EXCEPTION_HANDLERS, CorsMiddleware, ErrorMiddleware
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
    """The wallets' application.

    Args:
        view: what the routes look at.
        api_token: what wallets must send in X-Helper-Token; empty asks for nothing.
        expose_queue_status: whether the counts are served.
        bodies: reads request bodies within their limits.
        limits: how much each client may have refused; None for no end of it.
        more: routes of other parts of the product, matched after the wallets'.
        operator_token: what `more` may ask for; empty keeps that shut.
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
    """Its routes, in the order in which they are matched, with those that describe them all."""
    wallets = wallet_routes(
        view, api_token=api_token, expose_queue_status=expose_queue_status, bodies=bodies, limits=limits
    )
    return described([*wallets], more, api_token=api_token, operator_token=operator_token)


def described(
    routes: Sequence[BaseRoute], more: Sequence[BaseRoute] = (), *, api_token: str = "", operator_token: str = ""
) -> list[BaseRoute]:
    """These routes, then their description for programs and for people, then `more`, which it describes as well.

    Args:
        routes: come first.
        more: come last; one of them may answer every path.
        api_token: the wallets', empty for none.
        operator_token: the operators'.
    """
    tokens: dict[Holder, str] = {"wallets": api_token, "operators": operator_token}
    description = ApiDescription(holder for holder, token in tokens.items() if token)
    own = [description.route, *docs_routes(description.told)]
    found = [*routes, *own, *more]
    description.of(found)
    return found


def wrapped(routes: Sequence[BaseRoute], limits: RefusalLimiter | None = None) -> ASGIApp:
    """Routes with everything around them that every request gets."""
    app = Starlette(routes=list(routes), exception_handlers=dict(EXCEPTION_HANDLERS))
    # a path with a slash too many is a path that does not exist, not a redirect to elsewhere
    app.router.redirect_slashes = False
    return RequestIds(ErrorMiddleware(CorsMiddleware(app if limits is None else RateLimitMiddleware(app, limits))))
