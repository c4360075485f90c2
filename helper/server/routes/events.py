"""The feed of states as server-sent events: `GET /shielded-vote/v1/events` for who has the operator token, and
`GET /events` on the control socket, where `GET /overview` is the state of this moment alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.observability.status_feed import Event, Feed
from helper.server.middleware import JsonResponse, token_matches
from helper.server.openapi import ApiRoute, Operation

PATH: Final = "/shielded-vote/v1/events"
PING: Final = 15
"""Seconds between two comments that keep proxies from cutting a silent stream."""


EVENTS: Final = Operation(
    "The queue's state, in sums, each second: events named `state` with the JSON as data.",
    str,
    media="text/event-stream",
    asks="operators",
)


def events_route(feed: Feed, token: str) -> Route:
    """The route.

    Args:
        feed: the states.
        token: the operators', as a Bearer header; empty serves nothing (404).
    """

    async def events(request: Request) -> Response:
        if not token:
            raise HTTPException(404)
        if not bearer_matches(request, token):
            raise HTTPException(401, "the operator token is needed, as a Bearer header", {"WWW-Authenticate": "Bearer"})
        return _stream(feed, request)

    return ApiRoute(PATH, events, "GET", EVENTS)


def overview_routes(feed: Feed, snapshot: Callable[[], Awaitable[dict[str, Any]]]) -> list[Route]:
    """The control socket's routes.

    Args:
        feed: the states.
        snapshot: makes the state of this moment.
    """

    async def overview(_request: Request) -> Response:
        return JsonResponse(await snapshot())

    async def events(request: Request) -> Response:
        return _stream(feed, request)

    return [Route("/overview", overview, methods=["GET"]), Route("/events", events, methods=["GET"])]


def _stream(feed: Feed, request: Request) -> Response:
    """The states from the one that was seen last on, for ever.

    A listener that does not read is dropped by its connection (`helper.server.connection`), a slow one by the feed.
    """
    if feed.full:
        raise HTTPException(503, "too many listen already")
    states = _encoded(feed.listen(request.headers.get("last-event-id")))
    return EventSourceResponse(states, ping=PING, sep="\n")


def bearer_matches(request: Request, token: str) -> bool:
    """Whether a request carries the operators' token, in time that does not tell how much of it is right."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return token_matches(given.strip(), token) and scheme.lower() == "bearer"


async def _encoded(states: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    async for state in states:
        yield b"id: %b\nevent: state\ndata: %b\n\n" % (state.name.encode(), state.data)
