"""Serves the web page: its files, its index for other paths outside the API, and the status feed as server-sent events.

`GET /shielded-vote/v1/events` requires the operator token. The control socket serves the same stream at `GET /events`,
and what `doctor` checks at `GET /snapshot`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from mimetypes import guess_type
from pathlib import Path
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from helper.clock import Clock
from helper.errors import ConfigError
from helper.observability.queue_snapshot import QueueObserver
from helper.observability.status_feed import MAX_LISTENERS, StatusFeed
from helper.server.edge import PREFIX, JsonResponse, token_matches
from helper.server.openapi import ApiRoute, Operation

INDEX: Final = "index.html"
RESERVED: Final = ("api", "shielded-vote", "cosmos", "devnet", "openapi.json", "livez", "readyz", "metrics")
"""First segments of the API's paths, which the page never serves, even if no route matches."""

_IMMUTABLE: Final = "public, max-age=31536000, immutable"
"""`Cache-Control` of files in /assets: their names change with their content."""
_NO_CACHE: Final = "no-cache"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


PAGE: Final = Operation(
    "The web page: its files, and its index for every other path outside the API.",
    str,
    media_type="*/*",
    path={"path": {"type": "string", "description": "Path of a file, or of a view of the page."}},
    refusals=(404,),
)


def _content_security_policy(connect_to: Sequence[str]) -> str:
    """The Content-Security-Policy; limits the origins to which an injected script could send data."""
    sources = " ".join(("'self'", *connect_to))
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        f"connect-src {sources}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _PageRoute(ApiRoute):
    """Matches every path outside the API, with any method."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["path"].lstrip("/").split("/", 1)[0] in RESERVED:
            return Match.NONE, {}
        return super().matches(scope)


def page_route(directory: Path, *, connect_to: Callable[[], Sequence[str]] = tuple) -> ApiRoute:
    """The route of all other paths, with the built web page in memory; it must be the last route.

    A request opens no file and uses no thread. A file would remain open while its client reads nothing, and a path of
    31,000 segments would take a thread for 0.2 s.

    Args:
        directory: directory of the built page; must contain an index. A link that leads out of it is ignored.
        connect_to: returns the other origins that the page may connect to.

    Raises:
        ConfigError: there is no index, or a file cannot be read.
    """
    advice = "Set dist_path to the directory of the built page, or leave it empty for the bundled page."
    try:
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file() and path.resolve().is_relative_to(directory.resolve())
        }
    except OSError as error:
        text = f"[ui] dist_path: cannot read {error.filename}: {error.strerror}"
        raise ConfigError(text, advice=advice) from None
    if INDEX not in files:
        raise ConfigError(f"[ui] dist_path: no {INDEX} in {directory}", advice=advice)

    async def serve(request: Request) -> Response:
        path: str = request.path_params["path"]
        is_asset = path.startswith("assets/")
        if path not in files:
            if is_asset:  # an outdated page may request a deleted script; the index would not be a valid response
                raise HTTPException(404)
            path = INDEX
        headers = {
            **_HEADERS,
            "Content-Security-Policy": _content_security_policy(connect_to()),
            "Cache-Control": _IMMUTABLE if is_asset else _NO_CACHE,
        }
        return Response(files[path], headers=headers, media_type=guess_type(path)[0])

    return _PageRoute("/{path:path}", serve, "GET", PAGE)


PATH: Final = f"{PREFIX}/events"
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
    """
    guesses, counted_at = 0.0, clock.monotonic()  # of the latest seconds, and the time of this count

    async def events(request: Request) -> Response:
        nonlocal guesses, counted_at
        now = clock.monotonic()
        guesses, counted_at = max(0.0, guesses - (now - counted_at) * GUESSES_PER_SECOND), now
        if guesses > GUESS_BURST - 1:
            raise HTTPException(429, "too many requests with a wrong operator token", {"Retry-After": "1"})
        if not bearer_matches(request, token):
            guesses += 1
            message = "the operator token is required as a bearer token"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        return _stream(feed)

    return ApiRoute(PATH, events, "GET", EVENTS)


def state_routes(feed: StatusFeed, observer: QueueObserver) -> list[Route]:
    """The control socket's routes of the feed and of the current state."""

    async def snapshot(_request: Request) -> Response:
        return JsonResponse(await observer.read_helper())

    async def events(_request: Request) -> Response:
        return _stream(feed)

    return [Route("/snapshot", snapshot, methods=["GET"]), Route("/events", events, methods=["GET"])]


def _stream(feed: StatusFeed) -> Response:
    """Stream the states endlessly. The connection drops a client that does not read (`helper.server.protocol`)."""
    if feed.listener_count >= MAX_LISTENERS:
        raise HTTPException(503, "too many clients are listening; retry later")
    return EventSourceResponse(_encode_events(feed.subscribe()), ping=PING_SECONDS, sep="\n")


def bearer_matches(request: Request, token: str) -> bool:
    """Whether a request has the operator token as a bearer token. Compares in constant time."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return token_matches(bearer.strip().encode("latin-1"), token) and scheme.lower() == "bearer"


async def _encode_events(states: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for state in states:
        yield b"event: state\ndata: %b\n\n" % state
