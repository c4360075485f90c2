"""Read-only routes for operators on the control socket, whose file mode controls access."""

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
    """The known rounds; implemented by `helper.chain.round_registry.RoundRegistry`."""

    def all(self) -> list[Round]:
        """All stored rounds."""
        ...

    def open(self) -> list[Round]:
        """The rounds that are not known to be closed."""
        ...

    def frozen(self, round_id: bytes) -> str | None:
        """Why processing of a round is suspended, or None."""
        ...


def create_operator_app(queue: QueueReader, service: Facts, *, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Create the operators' application.

    Args:
        queue: the operators' reads of the store.
        service: state of the running service (node health, timings, pauses) as plain JSON.
        more: routes of other packages.
    """
    return wrapped([*operator_routes(queue, service), *more])


def operator_routes(queue: QueueReader, service: Facts) -> list[Route]:
    """`GET /queue?round=&state=&due_before=&stage=&limit=`, `/queue/{ref}`, `/stats`, `/spent/{nullifier}`."""

    async def list_shares(request: Request) -> Response:
        params = request.query_params
        try:
            query = views.parse_filter(
                params.get("round"), params.get("state"), params.get("due_before"), params.get("stage")
            )
            limit = views.parse_limit(params.get("limit"))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return JsonResponse(await queue_responses.list_answer(queue, query, limit, source="daemon"))

    async def show(request: Request) -> Response:
        story = await queue.show(request.path_params["ref"])
        if story is None:
            raise HTTPException(404, "no share, or more than one, matches this reference")
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
        queue: counts the shares of each round.
        rounds: the known rounds.
        now: the chain's time in unix seconds.
    """

    async def all_rounds(_request: Request) -> Response:
        listing = action_views.rounds_json(rounds(), await queue.counts(), now=now(), source="daemon")
        return JsonResponse(listing)

    return Route("/rounds", all_rounds, methods=["GET"])


def round_states(rounds: KnownRounds, tree_size: Callable[[bytes], int]) -> list[RoundState]:
    """The state of each known round; `tree_size` returns the number of known leaves of a round."""
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
