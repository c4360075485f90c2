"""Fast path for `POST /shares`, which is nearly every request. Bypasses routing and middleware for accepted shares.

It calls the same validation functions as the regular route and sends a precomputed response by ASGI messages. Anything
else (refusals, other paths) goes through the application, which reaches the same refusal without reading or enqueuing
anything a second time (`helper.server.routes.wallet.Taking`), and responds, logs and charges for it as always.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from helper.server.middleware import CORS_HEADERS
from helper.server.rate_limits import RefusalLimiter
from helper.server.request_ids import NAME, new_names
from helper.server.routes.wallet import TAKE_PATH, Taking, taken_response
from helper.store.rows import Enqueued


class FastPath:
    """The application, with the lane before it.

    Args:
        app: answers everything else: the wallets' routes in their layers.
        taking: takes a share; the routes' own does it in the same way.
        limits: how much each client may have refused; None for no end of it.
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
            except Exception:  # noqa: S110 - the application raises it again and answers it
                pass
        if outcome is None:
            await self._app(scope, receive, send)
            return
        response = self._responses[outcome]
        headers = [*response.raw_headers, *CORS_HEADERS, (NAME, next(self._names).encode())]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})
