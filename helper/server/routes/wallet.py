"""Routes for wallets: post a share, status of a share, of the helper and of the rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry
from helper.core.pause import PauseReason
from helper.errors import ShareRefused
from helper.ingest import payload
from helper.ingest.admission import AdmissionController
from helper.ingest.payload import SMALL_BODY
from helper.ingest.schema import WireError
from helper.server.body_reader import BodyReader
from helper.server.middleware import JsonResponse, check_token, error_response
from helper.server.openapi import ApiRoute, Handler, Operation
from helper.server.rate_limits import RefusalLimiter
from helper.store.rows import Enqueued
from helper.store.store import Store

PREFIX: Final = "/shielded-vote/v1"
TAKE_PATH: Final = f"{PREFIX}/shares"
STARTING: Final = "starting"
_RAISED: Final = "svote-helper.raised"
"""Key in a request's scope of the exception that `Taking` raised."""
_BY_STATUS: Final = {
    400: "refused",
    401: "unauthorised",
    408: "too_slow",
    409: "refused",
    413: "too_large",
    429: "come_again",
    503: "unavailable",
}


@dataclass(frozen=True, slots=True)
class WalletView:
    """The services that the wallets' routes use.

    Attributes:
        intake: accepts shares.
        store: returns the states of shares.
        rounds: the active rounds.
        trees: their commitment trees.
        ready: whether start-up is complete (proving keys loaded, chain state known); until then the status is 503.
        paused: why no share is accepted now, or None; the status must not be ok when a share would get 503.
        count: counts the outcome of a POST: `post_` and one of `helper.observability.metric_definitions.OUTCOMES`.
    """

    intake: AdmissionController
    store: Store
    rounds: RoundRegistry
    trees: CommitmentTreeSync
    ready: Callable[[], bool]
    paused: Callable[[], PauseReason | None] = lambda: None
    count: Callable[[str], None] = lambda _: None


TAKE: Final = Operation(
    "Submit one share. 200 means that it is stored on disk and will be revealed at its time.",
    payload.TakenAnswer,
    body=payload.SHARE,
    refusals=(413,),
    asks="wallets",
)
SHARE_STATUS: Final = Operation(
    "Whether a share is confirmed on chain.",
    payload.ShareStatusAnswer,
    path={"round_id": payload.PATH_HEX, "nullifier": payload.PATH_HEX},
    refusals=(404,),
    asks="wallets",
)
STATUS: Final = Operation("Whether this helper accepts shares.", payload.StatusAnswer)
QUEUE_STATUS: Final = Operation(
    "Number of shares of each round, by state.", dict[str, payload.RoundCounts], asks="wallets"
)


class Taking:
    """Accepts the share of a request and counts the outcome.

    Args:
        view: accepts the share and counts.
        api_token: token required in X-Helper-Token; empty for none.
        bodies: reads the request's body.
        limits: identifies clients and charges them for large bodies; None for no limits.
    """

    def __init__(
        self, view: WalletView, *, api_token: str, bodies: BodyReader, limits: RefusalLimiter | None = None
    ) -> None:
        self._view = view
        self._token = api_token
        self._bodies = bodies
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive) -> Enqueued:
        """Accept the share of a request, or raise.

        A second call for a refused request raises the same exception and does nothing else: `helper.server.fast_path`
        calls it first and leaves the error response to the regular route.

        Raises:
            Exception: why it was refused; `helper.server.middleware.EXCEPTION_HANDLERS` has the response.
        """
        if _RAISED in scope:
            raise scope.pop(_RAISED)
        try:
            if self._token:
                check_token(scope, self._token)
            client = None if self._limits is None else self._limits.client(scope)
            body = self._bodies.received(scope)
            if body is not None:
                outcome = await self._view.intake.take(body, client)
            else:
                async with self._bodies.reading(scope, receive, client) as body:
                    self._charge(client, len(body))
                    outcome = await self._view.intake.take(body, client)
        except Exception as error:
            self._view.count(f"post_{_outcome_of(error)}")
            scope[_RAISED] = error
            raise
        self._view.count("post_duplicate" if outcome is Enqueued.DUPLICATE else "post_queued")
        return outcome

    def _charge(self, client: bytes | None, size: int) -> None:
        """Charge a client for a body larger than any real one, whether or not it is accepted."""
        if size > SMALL_BODY and client is not None and self._limits is not None:
            self._limits.pay(client, tokens=ceil(size / SMALL_BODY) - 1)


def taken_response(outcome: Enqueued) -> JsonResponse:
    """The response for an accepted share: queued now, or a duplicate."""
    return JsonResponse(payload.taken_answer(known=outcome is Enqueued.DUPLICATE))


def wallet_routes(
    view: WalletView,
    *,
    api_token: str,
    expose_queue_status: bool,
    bodies: BodyReader,
    limits: RefusalLimiter | None = None,
) -> list[ApiRoute]:
    """The wallets' routes; an empty `api_token` requires no token."""

    taking = Taking(view, api_token=api_token, bodies=bodies, limits=limits)

    async def take(request: Request) -> Response:
        return taken_response(await taking(request.scope, request.receive))

    async def share_status(request: Request) -> Response:
        round_id = payload.parse_hex32("round_id", request.path_params["round_id"])
        nullifier = payload.parse_hex32("nullifier", request.path_params["nullifier"])
        confirmed = await view.store.is_spent(round_id, nullifier)
        return JsonResponse(payload.share_status_answer(confirmed=confirmed))

    async def status(_request: Request) -> Response:
        if (reason := view.paused()) is not None:
            return error_response(503, reason.refusal)
        if not view.ready():
            return error_response(503, STARTING)
        return JsonResponse(_status_of(view))

    async def queue_status(_request: Request) -> Response:
        return JsonResponse(payload.queue_status_answer(await view.store.counts()))

    def guarded(handler: Handler) -> Handler:
        return with_token(handler, api_token)

    share_path = "/share-status/{round_id}/{nullifier}"
    routes = [
        ApiRoute(TAKE_PATH, take, "POST", TAKE),
        ApiRoute(f"{PREFIX}{share_path}", guarded(share_status), "GET", SHARE_STATUS),
        ApiRoute(f"{PREFIX}/status", status, "GET", STATUS),
    ]
    if expose_queue_status:
        routes.append(ApiRoute(f"{PREFIX}/queue-status", guarded(queue_status), "GET", QUEUE_STATUS))
    return routes


def with_token(handler: Handler, token: str) -> Handler:
    """The handler with a token check (401 before the body is read); unchanged if the token is empty."""
    if not token:
        return handler

    async def checked(request: Request) -> Response:
        check_token(request.scope, token)
        return await handler(request)

    return checked


def _outcome_of(error: Exception) -> str:
    if isinstance(error, WireError):
        return "refused"
    if isinstance(error, ClientDisconnect):
        return "broken_off"
    if isinstance(error, ShareRefused):
        return _BY_STATUS.get(error.status, "error")
    return _BY_STATUS.get(error.status_code, "error") if isinstance(error, HTTPException) else "error"


def _status_of(view: WalletView) -> payload.StatusAnswer:
    """The status, with the tree of the newest active round or zeros."""
    newest = max(view.rounds.active(), key=lambda r: r.created_at_height, default=None)
    if newest is None:
        return payload.status_answer(0, 0)
    anchor = view.trees.anchor(newest.round_id)
    return payload.status_answer(view.trees.size(newest.round_id), anchor.height if anchor else 0)
