"""Fast path for `POST /shares`. Bypasses routing and middleware for accepted shares, which are almost all requests.

It calls the same validation functions as the regular route and sends a precomputed response. Refused shares and other
paths fall through to the application. For a refused share the application raises the same exception without reading or
enqueuing anything a second time (`ShareSubmission`). It responds and logs as usual.
"""

from __future__ import annotations

import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from helper.server.middleware import CORS_HEADERS
from helper.server.request_ids import REQUEST_ID_HEADER_BYTES, generate_request_ids
from helper.server.routes.wallet import SHARES_PATH, ShareSubmission, accepted_response
from helper.store.models import EnqueueResult


class FastPath:
    """Accepts posted shares directly; forwards all other requests to the application.

    Args:
        app: the regular application: the wallet routes with their middleware.
        submission: accepts shares, as in the regular route.
    """

    def __init__(self, app: ASGIApp, submission: ShareSubmission) -> None:
        self._app = app
        self._submission = submission
        self._request_ids = generate_request_ids()
        self._queued = accepted_response(EnqueueResult.QUEUED)
        self._duplicate = accepted_response(EnqueueResult.DUPLICATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        outcome: EnqueueResult | None = None
        if scope["type"] == "http" and scope["path"] == SHARES_PATH and scope["method"] == "POST":
            with contextlib.suppress(Exception):  # the application raises it again and responds
                outcome = await self._submission(scope, receive)
        if outcome is None:
            await self._app(scope, receive, send)
            return
        response = self._duplicate if outcome is EnqueueResult.DUPLICATE else self._queued
        headers = [*response.raw_headers, *CORS_HEADERS, (REQUEST_ID_HEADER_BYTES, next(self._request_ids).encode())]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})
