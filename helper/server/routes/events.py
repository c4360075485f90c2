"""The status feed as server-sent events.

`GET /shielded-vote/v1/events` requires the operator token. The control socket serves the same stream at `GET /events`,
a single state at `GET /overview`, and what `doctor` checks at `GET /snapshot`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.clock import Clock
from helper.observability.queue_observer import QueueObserver
from helper.observability.status_feed import FeedEvent, StatusFeed
from helper.server.middleware import JsonResponse, token_matches
from helper.server.openapi import ApiRoute, Operation
from helper.server.token_buckets import TokenBuckets

PATH: Final = "/shielded-vote/v1/events"
PING_SECONDS: Final = 15
"""Seconds between two comments, which prevent proxies from closing an idle stream."""

GUESS_BURST: Final = 20
"""Requests with a wrong operator token that may come at once."""
GUESSES_PER_SECOND: Final = 10.0
"""Requests with a wrong operator token in a second, from all clients together. It slows the search for a weak token."""


EVENTS: Final = Operation(
    "Totals of the queue once per second: events named `state` with JSON as data.",
    str,
    media_type="text/event-stream",
    authorized_role="operators",
)


def events_route(feed: StatusFeed, token: str, clock: Clock) -> Route:
    """The public route of the feed.

    Above `GUESSES_PER_SECOND` wrong tokens, no token is compared (429): also the right one waits, because the response
    would tell it from a wrong one. Operators can use the control socket meanwhile.

    Args:
        feed: the status feed.
        token: operator token, required as a bearer token; empty disables the route (404).
        clock: source of monotonic time.
    """
    guesses = TokenBuckets(GUESS_BURST, GUESSES_PER_SECOND, max_clients=1)

    async def events(request: Request) -> Response:
        if not token:
            raise HTTPException(404)
        if guesses.wait_seconds(b"", clock.monotonic()):
            raise HTTPException(429, "too many requests with a wrong operator token", {"Retry-After": "1"})
        if not bearer_matches(request, token):
            guesses.charge(b"", clock.monotonic())
            message = "the operator token is required as a bearer token"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        return _stream(feed, request)

    return ApiRoute(PATH, events, "GET", EVENTS)


def overview_routes(feed: StatusFeed, observer: QueueObserver) -> list[Route]:
    """The control socket's routes of the feed and of the current state.

    Args:
        feed: the status feed.
        observer: reads the current state.
    """

    async def overview(_request: Request) -> Response:
        return JsonResponse(await observer.read_overview())

    async def snapshot(_request: Request) -> Response:
        return JsonResponse(await observer.read_helper())

    async def events(request: Request) -> Response:
        return _stream(feed, request)

    handlers = {"/overview": overview, "/snapshot": snapshot, "/events": events}
    return [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]


def _stream(feed: StatusFeed, request: Request) -> Response:
    """Stream the states after `Last-Event-ID` endlessly.

    The connection drops a client that does not read (`helper.server.connection`); the feed drops a slow client.
    """
    if feed.is_full:
        raise HTTPException(503, "too many clients are listening; retry later")
    states = _encode_events(feed.subscribe(request.headers.get("last-event-id")))
    return EventSourceResponse(states, ping=PING_SECONDS, sep="\n")


def bearer_matches(request: Request, token: str) -> bool:
    """Whether a request has the operator token as a bearer token. Compares in constant time."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return token_matches(bearer.strip(), token) and scheme.lower() == "bearer"


async def _encode_events(states: AsyncIterator[FeedEvent]) -> AsyncIterator[bytes]:
    async for state in states:
        yield b"id: %b\nevent: state\ndata: %b\n\n" % (state.event_id.encode(), state.data)
