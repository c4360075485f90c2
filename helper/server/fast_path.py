"""Fast path for `POST /shares`. Bypasses routing and middleware for accepted shares, which are almost all requests.

It calls the same validation functions as the regular route and sends a precomputed response. Anything else (refusals,
other paths) falls through to the application. The application raises the same refusal without reading or enqueuing
anything a second time (`helper.server.routes.wallet.Taking`), and responds, logs and charges for it as usual.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from helper.server.middleware import CORS_HEADERS
from helper.server.rate_limits import RefusalLimiter
from helper.server.request_ids import NAME, new_names
from helper.server.routes.wallet import TAKE_PATH, Taking, taken_response
from helper.store.rows import Enqueued


class FastPath:
    """Accepts posted shares directly; forwards all other requests to the application.

    Args:
        app: the regular application: the wallets' routes with their middleware.
        taking: accepts a share, like the one of the regular route.
        limits: limits refused requests of each client; None for no limit.
    """

    def __init__(self, app: ASGIApp, taking: Taking, limits: RefusalLimiter | None) -> None:
        self._app = app
        self._taking = taking
        self._limits = limits
        self._names = new_names()
        self._responses = {outcome: taken_response(outcome) for outcome in (Enqueued.QUEUED, Enqueued.DUPLICATE)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        outcome: Enqueued | None = None
        if scope["type"] == "http" and scope["path"] == TAKE_PATH and scope["method"] == "POST":
            try:
                if self._limits is None or self._limits.admits(scope):
                    outcome = await self._taking(scope, receive)
            except Exception:  # noqa: S110 - the application raises it again and responds
                pass
        if outcome is None:
            await self._app(scope, receive, send)
            return
        response = self._responses[outcome]
        headers = [*response.raw_headers, *CORS_HEADERS, (NAME, next(self._names).encode())]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})
