"""`GET /metrics`, on a listener of its own, with the health routes beside it."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helper.api.app import wrapped
from helper.api.connection import ConnectionLimits
from helper.api.health import Checks, health_routes
from helper.telemetry.metrics import Metrics

PATH: Final = "/metrics"
LIMITS: Final = ConnectionLimits(connections=32, connections_each=32)
"""Of the listener: a few scrapers, and none of them can take what wallets need."""


def make_metrics_app(metrics: Metrics, checks: Checks) -> ASGIApp:
    """The application."""

    async def scrape(request: Request) -> Response:
        text, kind = await metrics.text(request.headers.get("accept", ""))
        return Response(text, media_type=kind)

    return wrapped([Route(PATH, scrape, methods=["GET"]), *health_routes(checks)])
