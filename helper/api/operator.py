"""What operators ask, over the control socket: its file mode is what lets them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from helper.api import views
from helper.api.app import wrapped
from helper.api.guard import JsonResponse
from helper.store.base import Queue


def make_operator_app(
    queue: Queue, service: Callable[[], Mapping[str, Any]], *, more: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """The operators' application.

    Args:
        queue: the store, as operators may see it.
        service: what only the running service knows (endpoints' health, timings, pauses), as plain JSON.
        more: routes of other parts of the product.
    """
    return wrapped([*operator_routes(queue, service), *more])


def operator_routes(queue: Queue, service: Callable[[], Mapping[str, Any]]) -> list[Route]:
    """`GET /queue?round=&state=&due_before=&stage=&limit=`, `GET /queue/{ref}`, `GET /stats`."""

    async def list_shares(request: Request) -> Response:
        asked = request.query_params
        try:
            query = views.parse_filter(
                asked.get("round"), asked.get("state"), asked.get("due_before"), asked.get("stage")
            )
            limit = views.parse_limit(asked.get("limit"))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return JsonResponse(views.list_json(await queue.list_shares(query, limit), source="daemon"))

    async def show(request: Request) -> Response:
        story = await queue.show(request.path_params["ref"])
        if story is None:
            raise HTTPException(404, "no share, or more than one, has this name")
        return JsonResponse(views.story_json(story, source="daemon"))

    async def stats(_request: Request) -> Response:
        counts, damaged = await queue.counts(), await queue.damaged()
        return JsonResponse(views.stats_json(counts, damaged, source="daemon", service=service()))

    return [
        Route("/queue", list_shares, methods=["GET"]),
        Route("/queue/{ref}", show, methods=["GET"]),
        Route("/stats", stats, methods=["GET"]),
    ]
