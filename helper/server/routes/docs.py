"""`GET /openapi.json`, and `GET /docs`: the same document as HTML.

The page has no scripts and no external resources, so it works offline and under a strict Content-Security-Policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from helper.server.docs_html import render_page
from helper.server.middleware import JsonResponse
from helper.server.openapi import ApiRoute, Operation, TokenHolder, generate_document

PATH: Final = "/docs"
DOCUMENT_PATH: Final = "/openapi.json"
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

DOCUMENT: Final = Operation("OpenAPI document of this API.", dict[str, Any])
PAGE: Final = Operation("API documentation as HTML.", str, media_type="text/html")
STYLE: Final = Operation("Style sheet of the documentation.", str, media_type="text/css")


def add_docs_routes(
    routes: Sequence[BaseRoute], more_routes: Sequence[BaseRoute] = (), *, api_token: str = "", operator_token: str = ""
) -> list[BaseRoute]:
    """Add the routes of the documentation, which describes all routes.

    Args:
        routes: matched first.
        more_routes: matched last; one of them may match every path.
        api_token: token of the wallet API; empty for none.
        operator_token: token of the operator API; empty for none.
    """
    tokens: dict[TokenHolder, str] = {"wallets": api_token, "operators": operator_token}

    @cache
    def get_document() -> dict[str, Any]:
        return generate_document(all_routes, authorized_roles=[holder for holder, token in tokens.items() if token])

    @cache
    def render_html() -> bytes:
        return render_page(get_document(), style=STYLE_PATH).encode()

    async def document(_request: Request) -> Response:
        return JsonResponse(get_document())

    async def html(_request: Request) -> Response:
        return Response(render_html(), media_type="text/html", headers=_HEADERS)

    async def style(_request: Request) -> Response:
        return Response(_read_style(), media_type="text/css", headers=_HEADERS)

    all_routes: list[BaseRoute] = [
        *routes,
        ApiRoute(DOCUMENT_PATH, document, "GET", DOCUMENT),
        ApiRoute(PATH, html, "GET", PAGE),
        ApiRoute(STYLE_PATH, style, "GET", STYLE),
        *more_routes,
    ]
    return all_routes


@cache
def _read_style() -> bytes:
    return _STYLE_FILE.read_bytes()
