"""`GET /docs`: the API's description for people, made of the same document as `/openapi.json`. No script, nothing from
elsewhere: it is read where there is no internet, under a policy that allows neither.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from helper.server.docs_html import page
from helper.server.openapi import ApiRoute, Operation

PATH: Final = "/docs"
STYLE_PATH: Final = "/docs/style.css"

_STYLE: Final = Path(__file__).with_name("docs.css")
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def docs_routes(told: Callable[[], dict[str, Any]]) -> list[ApiRoute]:
    """The page and its style.

    Args:
        told: the document.
    """
    made: dict[str, bytes] = {}

    async def html(_request: Request) -> Response:
        if PATH not in made:
            made[PATH] = page(told(), style=STYLE_PATH).encode()
        return Response(made[PATH], media_type="text/html", headers=_HEADERS)

    async def style(_request: Request) -> Response:
        if STYLE_PATH not in made:
            made[STYLE_PATH] = _STYLE.read_bytes()
        return Response(made[STYLE_PATH], media_type="text/css", headers=_HEADERS)

    return [
        ApiRoute(PATH, html, "GET", Operation("This description, for people.", str, media="text/html")),
        ApiRoute(STYLE_PATH, style, "GET", Operation("How it looks.", str, media="text/css")),
    ]
