"""`GET /livez` and `GET /readyz`: for who starts, watches and balances; plain text, as Kubernetes has it.

livez says that requests are answered. readyz says that shares are taken *and* revealed: it fails also while only the
reveals are held up, when wallets' shares are still taken and `/shielded-vote/v1/status` says ok. With `?verbose`, and
whenever it fails, it lists its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from helper.observability.health_checks import Check, passed, to_text
from helper.server.openapi import ApiRoute, Operation

LIVE_PATH: Final = "/livez"
READY_PATH: Final = "/readyz"

Checks = Callable[[], Sequence[Check]]

_NO_STORE: Final = {"Cache-Control": "no-store"}
_VERBOSE: Final = {
    "verbose": {"description": "List the checks also when all of them pass.", "schema": {"type": "string"}}
}
LIVE: Final = Operation("Whether requests are answered.", str, media="text/plain")
READY: Final = Operation(
    "Whether shares are taken and revealed: a line a check.", str, media="text/plain", also=(503,), query=_VERBOSE
)


def health_routes(checks: Checks) -> list[ApiRoute]:
    """The two routes.

    Args:
        checks: looks at everything that must be well, now.
    """

    async def live(_request: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_NO_STORE)

    async def ready(request: Request) -> Response:
        found = checks()
        if not passed(found):
            return PlainTextResponse(to_text(found), 503, headers=_NO_STORE)
        text = to_text(found) if "verbose" in request.query_params else "ok\n"
        return PlainTextResponse(text, headers=_NO_STORE)

    return [ApiRoute(LIVE_PATH, live, "GET", LIVE), ApiRoute(READY_PATH, ready, "GET", READY)]
