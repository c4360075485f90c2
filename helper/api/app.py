"""The application that wallets talk to, put together."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from helper.api.body import BodyReader
from helper.api.guard import EXCEPTION_HANDLERS, Cors, LastResort
from helper.api.limits import Limited, RefusalLimits
from helper.api.openapi import document_route
from helper.api.request_ids import RequestIds
from helper.api.wallet import WalletView, wallet_routes


def make_app(
    view: WalletView,
    *,
    api_token: str = "",
    expose_queue_status: bool = False,
    bodies: BodyReader | None = None,
    limits: RefusalLimits | None = None,
    more: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The wallets' application.

    Args:
        view: what the routes look at.
        api_token: what wallets must send in X-Helper-Token; empty asks for nothing.
        expose_queue_status: whether the counts are served.
        bodies: reads request bodies within their limits.
        limits: how much each client may have refused; None for no end of it.
        more: routes of other parts of the product, matched after the wallets'.
    """
    return wrapped(
        wallet_app_routes(
            view,
            api_token=api_token,
            expose_queue_status=expose_queue_status,
            bodies=bodies or BodyReader(),
            more=more,
        ),
        limits,
    )


def wallet_app_routes(
    view: WalletView, *, api_token: str, expose_queue_status: bool, bodies: BodyReader, more: Sequence[BaseRoute]
) -> list[BaseRoute]:
    """Its routes, in the order in which they are matched; one of them describes them all."""
    wallets = wallet_routes(view, api_token=api_token, expose_queue_status=expose_queue_status, bodies=bodies)
    return [*wallets, document_route([*wallets, *more], token=bool(api_token)), *more]


def wrapped(routes: Sequence[BaseRoute], limits: RefusalLimits | None = None) -> ASGIApp:
    """Routes with everything around them that every request gets."""
    app = Starlette(routes=list(routes), exception_handlers=dict(EXCEPTION_HANDLERS))
    # a path with a slash too many is a path that does not exist, not a redirect to elsewhere
    app.router.redirect_slashes = False
    return RequestIds(LastResort(Cors(app if limits is None else Limited(app, limits))))
