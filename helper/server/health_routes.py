"""`GET /livez` and `GET /readyz` for orchestrators and load balancers, and the metrics listener with `GET /metrics`.

The health routes respond in plain text, as in Kubernetes. `/livez` reports that the server responds. `/readyz` reports
that shares are accepted *and* revealed: it also fails while only the reveals are paused, when shares are still accepted
and `/shielded-vote/v1/status` is ok. It lists its checks with `?verbose` and whenever it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from helper.core.refusals import RETRY_AFTER_SECONDS
from helper.core.text_forms import is_loopback
from helper.observability.service_state import Check, all_passed, format_checks
from helper.server.connection_limits import ConnectionLimits
from helper.server.edge import error_response, json_application
from helper.server.openapi import ApiRoute, Operation

if TYPE_CHECKING:
    from helper.observability.metrics import Metrics

LIVE_PATH: Final = "/livez"
READY_PATH: Final = "/readyz"
METRICS_PATH: Final = "/metrics"
METRICS_LIMITS: Final = ConnectionLimits(max_connections=32, eviction_seconds=0.5)
"""Limits of the metrics listener: sufficient for a few scrapers, and leaves file descriptors to wallets.

A scraper sends its request at once, so a slower connection may be closed for a new one soon.
"""

CheckRunner = Callable[[], Sequence[Check]]

_NO_STORE: Final = {"Cache-Control": "no-store"}
_NOT_READY: Final = {**_NO_STORE, "Retry-After": str(RETRY_AFTER_SECONDS)}
_VERBOSE: Final = {
    "verbose": {"description": "List the checks even if all of them pass.", "schema": {"type": "string"}}
}
LIVE: Final = Operation("Whether the server responds to requests.", str, media_type="text/plain")
READY: Final = Operation(
    "Whether shares are accepted and revealed: one line per check.",
    str,
    media_type="text/plain",
    same_content_statuses=(503,),
    query=_VERBOSE,
)


def health_routes(run_checks: CheckRunner) -> list[ApiRoute]:
    """The two routes."""

    async def live(_request: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_NO_STORE)

    async def ready(request: Request) -> Response:
        results = run_checks()
        if not all_passed(results):
            return PlainTextResponse(format_checks(results), 503, headers=_NOT_READY)
        text = format_checks(results) if "verbose" in request.query_params else "ok\n"
        return PlainTextResponse(text, headers=_NO_STORE)

    return [ApiRoute(LIVE_PATH, live, "GET", LIVE), ApiRoute(READY_PATH, ready, "GET", READY)]


def _check_host(app: ASGIApp) -> ASGIApp:
    """Refuse `Host` names other than localhost on loopback addresses.

    A web page can make its own name resolve to 127.0.0.1 and read from local services (DNS rebinding); its requests
    have its name as `Host`. The check uses the local address of the connection, because listeners on `0.0.0.0` and `::`
    also accept connections to loopback addresses. On other addresses any name is accepted, because scrapers may use
    host names there.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is not None and is_loopback((scope.get("server") or ("",))[0]) and not _is_local_host(host):
            await error_response(421, "Host must be localhost or an IP address")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve


def _is_local_host(host: str) -> bool:
    """Whether a Host header is localhost or an IP address, with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost":
            ip_address(name)
    except ValueError:
        return False
    return True


def create_metrics_app(metrics: Metrics, run_checks: CheckRunner) -> ASGIApp:
    """Create the application of the metrics listener."""

    async def scrape(request: Request) -> Response:
        text, kind = await metrics.render(request.headers.get("accept", ""))
        return Response(text, media_type=kind)

    return _check_host(json_application([Route(METRICS_PATH, scrape, methods=["GET"]), *health_routes(run_checks)]))
