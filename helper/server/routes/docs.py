"""`GET /docs`: API documentation as HTML, rendered from the OpenAPI document.

The page has no scripts and no external resources, so it works offline and under a strict Content-Security-Policy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from helper.server.docs_html import render_page
from helper.server.openapi import ApiRoute, Operation

PATH: Final = "/docs"
STYLE_PATH: Final = "/docs/style.css"

_STYLE_FILE: Final = Path(__file__).with_name("docs.css")
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def docs_routes(document: Callable[[], dict[str, Any]]) -> list[ApiRoute]:
    """The routes of the page and its style sheet.

    Args:
        document: returns the OpenAPI document.
    """
    rendered: dict[str, bytes] = {}

    async def html(_request: Request) -> Response:
        if PATH not in rendered:
            rendered[PATH] = render_page(document(), style=STYLE_PATH).encode()
        return Response(rendered[PATH], media_type="text/html", headers=_HEADERS)

    async def style(_request: Request) -> Response:
        if STYLE_PATH not in rendered:
            rendered[STYLE_PATH] = _STYLE_FILE.read_bytes()
        return Response(rendered[STYLE_PATH], media_type="text/css", headers=_HEADERS)

    return [
        ApiRoute(PATH, html, "GET", Operation("API documentation as HTML.", str, media_type="text/html")),
        ApiRoute(STYLE_PATH, style, "GET", Operation("Style sheet of the documentation.", str, media_type="text/css")),
    ]
