"""The way of a posted share past the layers: nearly every request is one, and nearly every answer `queued`.

The layers around the application and the router within it are for what differs from request to request. This asks what
they ask before a share is taken, of the same functions; where it is taken, the answer is what they would make of it,
made once. Every other request, and every share that is not taken, goes through the layers. They come to the same
refusal, without reading or taking anything a second time (`helper.api.wallet.Taking`), and answer, log and charge for
it as ever.
"""

from __future__ import annotations

from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from helper.api.guard import CORS_HEADERS
from helper.api.limits import RefusalLimits
from helper.api.ready_answer import ReadyAnswer
from helper.api.request_ids import NAME, new_names
from helper.api.wallet import TAKE_PATH, Taking, taken_response
from helper.store.base import Enqueued


class Lane:
    """The application, with the lane before it.

    Args:
        app: answers everything else: the wallets' routes in their layers.
        taking: takes a share; the routes' own does it in the same way.
        limits: how much each client may have refused; None for no end of it.
    """

    def __init__(self, app: ASGIApp, taking: Taking, limits: RefusalLimits | None) -> None:
        self._app = app
        self._taking = taking
        self._limits = limits
        self._names = new_names()
        self._queued, self._duplicate = (
            ReadyAnswer(taken_response(outcome), CORS_HEADERS) for outcome in (Enqueued.QUEUED, Enqueued.DUPLICATE)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        outcome: Enqueued | None = None
        if scope["type"] == "http" and scope["path"] == TAKE_PATH and scope["method"] == "POST":
            with suppress(Exception):  # it is raised again where it is answered
                if self._limits is None or self._limits.admits(scope):
                    outcome = await self._taking(scope, receive)
        if outcome is None:
            await self._app(scope, receive, send)
            return
        answer = self._duplicate if outcome is Enqueued.DUPLICATE else self._queued
        await answer.send(scope, send, (NAME, next(self._names).encode()))
