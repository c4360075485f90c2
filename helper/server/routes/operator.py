"""What operators ask, over the control socket: its file mode is what lets them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from helper.chain.models import Round
from helper.server import action_views, queue_responses, views
from helper.server.action_views import RoundState
from helper.server.application import wrapped
from helper.server.middleware import JsonResponse
from helper.store.queue_reader import QueueReader

Facts = Callable[[], Mapping[str, Any]]
Rounds = Callable[[], Iterable[RoundState]]


class KnownRounds(Protocol):
    """The rounds that the service knows, as `helper.chain.round_registry.RoundRegistry` has them."""

    def all(self) -> list[Round]:
        """Every round that is kept."""
        ...

    def open(self) -> list[Round]:
        """Those that are not known to be closed."""
        ...

    def frozen(self, round_id: bytes) -> str | None:
        """Why nothing may be done about one now, or None."""
        ...


def create_operator_app(queue: QueueReader, service: Facts, *, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The operators' application.

    Args:
        queue: the store, as operators may see it.
        service: what only the running service knows (endpoints' health, timings, pauses), as plain JSON.
        more: routes of other parts of the product.
    """
    return wrapped([*operator_routes(queue, service), *more])


def operator_routes(queue: QueueReader, service: Facts) -> list[Route]:
    """`GET /queue?round=&state=&due_before=&stage=&limit=`, `/queue/{ref}`, `/stats`, `/spent/{nullifier}`."""

    async def list_shares(request: Request) -> Response:
        asked = request.query_params
        try:
            query = views.parse_filter(
                asked.get("round"), asked.get("state"), asked.get("due_before"), asked.get("stage")
            )
            limit = views.parse_limit(asked.get("limit"))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return JsonResponse(await queue_responses.list_answer(queue, query, limit, source="daemon"))

    async def show(request: Request) -> Response:
        story = await queue.show(request.path_params["ref"])
        if story is None:
            raise HTTPException(404, "no share, or more than one, has this name")
        return JsonResponse(views.story_json(story, source="daemon"))

    async def stats(_request: Request) -> Response:
        return JsonResponse(await queue_responses.stats_answer(queue, source="daemon", service=service()))

    async def spent(request: Request) -> Response:
        try:
            return JsonResponse(
                await queue_responses.spent_answer(queue, request.path_params["nullifier"], source="daemon")
            )
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    return [
        Route("/queue", list_shares, methods=["GET"]),
        Route("/queue/{ref}", show, methods=["GET"]),
        Route("/stats", stats, methods=["GET"]),
        Route("/spent/{nullifier}", spent, methods=["GET"]),
    ]


def rounds_route(queue: QueueReader, rounds: Rounds, now: Callable[[], float]) -> Route:
    """`GET /rounds`.

    Args:
        queue: for the shares in each.
        rounds: the rounds known.
        now: the chain's time, in unix seconds.
    """

    async def all_rounds(_request: Request) -> Response:
        told = action_views.rounds_json(rounds(), await queue.counts(), now=now(), source="daemon")
        return JsonResponse(told)

    return Route("/rounds", all_rounds, methods=["GET"])


def round_states(rounds: KnownRounds, tree_size: Callable[[bytes], int]) -> list[RoundState]:
    """What is known of each round; `tree_size` tells how many leaves of one are here."""
    still_open = {known.round_id for known in rounds.open()}
    return [
        RoundState(
            round_id=known.round_id,
            status=known.status.value,
            vote_end_time=known.vote_end_time,
            created_at_height=known.created_at_height,
            tree_size=tree_size(known.round_id),
            closed=known.round_id not in still_open,
            frozen=rounds.frozen(known.round_id),
        )
        for known in rounds.all()
    ]
