"""The page: files of a built directory, its index for every other path, and never anything in place of the API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Match
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from helper.errors import ConfigError
from helper.server.openapi import ApiRoute, Operation

INDEX: Final = "index.html"
RESERVED: Final = ("api", "shielded-vote", "cosmos", "devnet", "openapi.json", "docs", "livez", "readyz", "metrics")
"""First parts of paths that are the API's own, also where nothing answers them."""

_FOR_EVER: Final = "public, max-age=31536000, immutable"
"""For what lies under /assets: its names change with its content."""
_ASK_AGAIN: Final = "no-cache"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


PAGE: Final = Operation(
    "The web page: its files, and its index for every path that nothing else answers.",
    str,
    media="*/*",
    path={"path": {"type": "string", "description": "Of a file, or of a view of the page."}},
    refusals=(404,),
)


def _content_security_policy(connect_to: Sequence[str]) -> str:
    """The policy of the page; a script that was smuggled in could send data to these origins only."""
    sources = " ".join(("'self'", *connect_to))
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        f"connect-src {sources}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _PageRoute(ApiRoute):
    """Every path but the API's own: another method of one of these is not the page's either.

    The `Range` header is ignored, as a server may (RFC 9110, section 14.2): the files are small, and Starlette answers
    an invalid range with an error that is not JSON.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a whole file."""
        headers = [header for header in scope["headers"] if header[0] != b"range"]
        await super().handle({**scope, "headers": headers}, receive, send)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether this is the page's to answer."""
        if scope["path"].lstrip("/").split("/", 1)[0] in RESERVED:
            return Match.NONE, {}
        return super().matches(scope)


class Page:
    """The built page.

    Args:
        folder: where it was built into; must hold an index.
        connect_to: returns the origins that the page may connect to, besides its own.

    Raises:
        ConfigError: it holds none.
    """

    def __init__(self, folder: Path, *, connect_to: Callable[[], Sequence[str]] = tuple) -> None:
        self._connect_to = connect_to
        self._index = folder / INDEX
        if not self._index.is_file():
            raise ConfigError(
                f"[ui] dist_path: there is no {INDEX} in {folder}",
                advice="Name the directory that the page was built into, or leave dist_path empty for the one that"
                " came along.",
            )
        self._files = StaticFiles(directory=folder, follow_symlink=False)

    def route(self) -> ApiRoute:
        """Every path that no other route has; the last of all routes."""
        return _PageRoute("/{path:path}", self._serve, "GET", PAGE)

    async def _serve(self, request: Request) -> Response:
        path: str = request.path_params["path"]
        answer = await self._file(path, request)
        answer.headers["Accept-Ranges"] = "none"
        for name, value in _HEADERS.items():
            answer.headers[name] = value
        answer.headers["Content-Security-Policy"] = _content_security_policy(self._connect_to())
        found = answer.status_code < 400 and path.startswith("assets/")
        answer.headers["Cache-Control"] = _FOR_EVER if found else _ASK_AGAIN
        return answer

    async def _file(self, path: str, request: Request) -> Response:
        try:
            return await self._files.get_response(path or INDEX, request.scope)
        except HTTPException:
            if path.startswith("assets/"):
                raise HTTPException(404) from None  # an old page asks for a script that is gone: no page instead
        return FileResponse(self._index)
