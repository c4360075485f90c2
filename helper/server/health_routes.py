"""`GET /livez` and `GET /readyz` for orchestrators and load balancers; plain text, as in Kubernetes.

`/livez` reports that the server responds. `/readyz` reports that shares are accepted *and* revealed: it also fails
while only the reveals are paused, when shares are still accepted and `/shielded-vote/v1/status` is ok. It lists its
checks with `?verbose` and whenever it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from helper.core.refusals import RETRY_AFTER_SECONDS
from helper.observability.readiness_text import Check, all_passed, format_checks
from helper.server.openapi import ApiRoute, Operation

LIVE_PATH: Final = "/livez"
READY_PATH: Final = "/readyz"

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
    """The two routes.

    Args:
        run_checks: runs the readiness checks.
    """

    async def live(_request: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_NO_STORE)

    async def ready(request: Request) -> Response:
        results = run_checks()
        if not all_passed(results):
            return PlainTextResponse(format_checks(results), 503, headers=_NOT_READY)
        text = format_checks(results) if "verbose" in request.query_params else "ok\n"
        return PlainTextResponse(text, headers=_NO_STORE)

    return [ApiRoute(LIVE_PATH, live, "GET", LIVE), ApiRoute(READY_PATH, ready, "GET", READY)]
