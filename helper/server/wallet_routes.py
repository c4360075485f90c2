"""Routes for wallets: post a share, status of a share, of the helper and of the rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from typing_extensions import TypedDict

from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry
from helper.circuits import share_body_schema
from helper.clock import Clock, SystemClock
from helper.core.refusals import Situation, TemporaryRefusal, find_refusal
from helper.core.share import ShareState
from helper.core.share_fields import HexField, error_message
from helper.errors import ClientLeft, ShareRefused
from helper.ingest.admission import AdmissionController, longest_wait
from helper.observability.queue_summary import InvalidRoundError, QueueSummaries, QueueSummary
from helper.server import protocol
from helper.server.body_reader import BodyReader
from helper.server.edge import (
    PREFIX,
    Edge,
    JsonResponse,
    PlainHandler,
    check_token,
    error_response,
    json_application,
    refusal_response,
)
from helper.server.openapi import ApiRoute, Operation, add_document_route
from helper.store.models import EnqueueResult
from helper.store.store import Store

SHARES_PATH: Final = f"{PREFIX}/shares"
SHARE_STATUS_PATH: Final = f"{PREFIX}/share-status/{{round_id}}/{{nullifier}}"
QUEUE_SUMMARY_PATH: Final = f"{PREFIX}/queue-summary/{{round_id}}"
_OUTCOMES_BY_STATUS: Final = {
    400: "refused",
    401: "unauthorised",
    408: "too_slow",
    413: "too_large",
    429: "come_again",
    503: "unavailable",
}


class AcceptedResponse(TypedDict):
    """Response to an accepted share: queued now, or already known."""

    status: Literal["queued", "duplicate"]


class ShareStatusResponse(TypedDict):
    """Whether a nullifier is confirmed on chain; an unknown share is also pending."""

    status: Literal["pending", "confirmed"]


class TreeResponse(TypedDict):
    """The commitment tree of the newest active round, zeros if there is none."""

    leaf_count: int
    anchor_height: int


class StatusResponse(TypedDict):
    """Status of a helper that accepts shares; wallets request it before posting shares."""

    status: Literal["ok"]
    tree: TreeResponse


class RoundCounts(TypedDict):
    """Number of shares of a round, in total and by state.

    `pending` shares are not confirmed yet: the sum of those that are due (`ready`), that wait (`not_yet_due`), and that
    are being proven or were sent (`processing`).
    """

    total: int
    pending: int
    ready: int
    not_yet_due: int
    processing: int
    submitted: int
    failed: int


_PATH_HEX_FIELD: Final = HexField("32 bytes, little-endian, in hex.")


@dataclass(frozen=True, slots=True)
class WalletView:
    """The services that the wallet routes use.

    Attributes:
        is_ready: whether start-up is complete (proving keys loaded, chain state known); until then the status is 503.
        clock: the time at which a share is due.
        queue_summaries: summaries of the rounds; None if they are not served.
        pending_status: HTTP status of share-status for a share that is not confirmed.
        pause_reason: why no share is accepted now, or None; the status is not ok while shares are refused with 503.
        count_outcome: counts the outcome of a POST: `post_` and one of
            `helper.observability.metrics.POST_OUTCOMES`.
    """

    admission: AdmissionController
    store: Store
    rounds: RoundRegistry
    trees: CommitmentTreeSync
    is_ready: Callable[[], bool]
    clock: Clock = field(default_factory=SystemClock)
    queue_summaries: QueueSummaries | None = None
    pending_status: int = 202
    pause_reason: Callable[[], str | None] = lambda: None
    count_outcome: Callable[[str], None] = lambda _: None


_PATH_HEX: Final = _PATH_HEX_FIELD.schema()
POST_SHARE: Final = Operation(
    "Submit one share. 200 means that it is stored on disk and will be revealed at its time.",
    AcceptedResponse,
    body=share_body_schema(),
    refusals=(408, 413),
    authorized_role="wallets",
)
SHARE_STATUS: Final = Operation(
    "Whether a share is confirmed on chain; 202 if it is not.",
    ShareStatusResponse,
    same_content_statuses=(202,),
    path={"round_id": _PATH_HEX, "nullifier": _PATH_HEX},
    refusals=(404,),
    authorized_role="wallets",
)
STATUS: Final = Operation("Whether this helper accepts shares.", StatusResponse)
QUEUE_STATUS: Final = Operation(
    "Number of shares per round and state.", dict[str, RoundCounts], authorized_role="wallets"
)

QUEUE_SUMMARY: Final = Operation(
    "Number of shares of a round by due time, in hundreds, of the last full hour. Needs no token.",
    QueueSummary,
    path={"round_id": _PATH_HEX},
    refusals=(404,),
)


def share_handler(view: WalletView, *, api_token: str, body_reader: BodyReader) -> PlainHandler:
    """A handler that accepts posted shares and counts the outcomes; an empty `api_token` requires no token."""

    async def accept(request: protocol.Request) -> Response:
        try:
            check_token(request.head.headers, api_token)
            async with body_reader.buffer_body(request) as body:
                seconds = longest_wait(request.head.headers)
                outcome = await view.admission.admit(body, wait_seconds=seconds, has_left=lambda: request.has_left)
        except Exception as error:
            view.count_outcome(f"post_{_classify_error(error)}")
            raise
        is_duplicate = outcome is EnqueueResult.DUPLICATE
        view.count_outcome("post_duplicate" if is_duplicate else "post_queued")
        return _DUPLICATE if is_duplicate else _QUEUED

    return accept


_QUEUED: Final = JsonResponse(AcceptedResponse(status="queued"))
_DUPLICATE: Final = JsonResponse(AcceptedResponse(status="duplicate"))


def create_wallet_edge(
    view: WalletView | None,
    *,
    api_token: str = "",
    expose_queue_status: bool = False,
    body_reader: BodyReader | None = None,
    refusals: Counter[int] | None = None,
    more_routes: Sequence[BaseRoute] = (),
    trace_clock: Clock | None = None,
) -> Edge:
    """Create what serves the port of the wallet API.

    Args:
        view: the services that the wallet routes use; None to serve none of these routes.
        api_token: token that wallets must send in X-Helper-Token; empty for none.
        expose_queue_status: whether `/queue-status` is served.
        refusals: counts the responses by status, from 400 on; None to count none.
        more_routes: routes of other packages, matched after the wallet routes.
    """
    wallets: list[ApiRoute] = []
    posts: dict[str, PlainHandler] = {}
    if view is not None:
        wallets = wallet_routes(view, api_token=api_token, expose_queue_status=expose_queue_status)
        posts[SHARES_PATH] = share_handler(view, api_token=api_token, body_reader=body_reader or BodyReader())
    routes = add_document_route(wallets, more_routes, api_token=api_token)
    return Edge(json_application(routes), refusals, posts, trace_clock)


def wallet_routes(view: WalletView, *, api_token: str, expose_queue_status: bool) -> list[ApiRoute]:
    """The wallet routes; an empty `api_token` requires no token."""

    async def post_share(_request: Request) -> Response:
        raise HTTPException(404)  # `share_handler` answers; this route describes it and refuses other methods

    async def share_status(request: Request) -> Response:
        check_token(request.headers.raw, api_token)
        round_id = parse_hex32("round_id", request.path_params["round_id"])
        nullifier = parse_hex32("nullifier", request.path_params["nullifier"])
        confirmed = await view.store.is_spent(round_id, nullifier)
        # A cache would keep a nullifier, and a later response would be that of an earlier time.
        # Each known wallet takes any 2xx and reads the body, or takes 200 alone for confirmed without reading it.
        return JsonResponse(
            ShareStatusResponse(status="confirmed" if confirmed else "pending"),
            200 if confirmed else view.pending_status,
            {"Cache-Control": "no-store"},
        )

    async def status(request: Request) -> Response:
        if (reason := view.pause_reason()) is not None:
            return refusal_response(request.headers.raw, Situation.PAUSED, reason)
        if not view.is_ready():
            return refusal_response(request.headers.raw, Situation.STARTING)
        return JsonResponse(_create_status(view))

    async def queue_status(request: Request) -> Response:
        check_token(request.headers.raw, api_token)
        counts, ready = await view.store.count_shares(), await view.store.count_ready(now=view.clock.now())
        return JsonResponse(queue_status_body(counts, ready))

    async def queue_summary(request: Request) -> Response:
        assert view.queue_summaries is not None
        round_id = parse_hex32("round_id", request.path_params["round_id"])
        try:
            summary = view.queue_summaries.get(round_id)
        except InvalidRoundError:
            return error_response(400, "the round ends before it begins")
        return error_response(404, "round not found") if summary is None else JsonResponse(summary)

    routes = [
        ApiRoute(SHARES_PATH, post_share, "POST", POST_SHARE),
        ApiRoute(SHARE_STATUS_PATH, share_status, "GET", SHARE_STATUS),
        ApiRoute(f"{PREFIX}/status", status, "GET", STATUS),
    ]
    if expose_queue_status:
        routes.append(ApiRoute(f"{PREFIX}/queue-status", queue_status, "GET", QUEUE_STATUS))
    if view.queue_summaries is not None:
        routes.append(ApiRoute(QUEUE_SUMMARY_PATH, queue_summary, "GET", QUEUE_SUMMARY))
    return routes


def _classify_error(error: Exception) -> str:
    if isinstance(error, ShareRefused):
        return "refused"
    if isinstance(error, ClientLeft):
        return "broken_off"
    if isinstance(error, TemporaryRefusal):  # the outcome names the situation, not who asked
        status = find_refusal(error.situation, *error.details, names_attempt=True).status
        return _OUTCOMES_BY_STATUS[status]
    return _OUTCOMES_BY_STATUS.get(error.status_code, "error") if isinstance(error, HTTPException) else "error"


def _create_status(view: WalletView) -> StatusResponse:
    """The status, with the tree of the newest active round or zeros."""
    rounds = view.rounds
    newest = max(
        rounds.active_rounds(), key=lambda r: (rounds.is_agreed(r.round_id), r.created_at_height), default=None
    )
    anchor = None if newest is None else view.trees.anchor(newest.round_id)
    leaf_count, height = (anchor.size, anchor.height) if anchor else (0, 0)
    return {"status": "ok", "tree": {"leaf_count": leaf_count, "anchor_height": height}}


def parse_hex32(field: str, text: str) -> bytes:
    """Parse 32 bytes in hex from a path.

    Raises:
        ShareRefused: 400, it is not 64 hex characters.
    """
    try:
        return _PATH_HEX_FIELD.decode(text)
    except ValueError:
        raise ShareRefused(400, error_message(_PATH_HEX_FIELD, "not-hex"), field=field) from None


def queue_status_body(
    counts: Mapping[bytes, Mapping[ShareState, int]], ready: Mapping[bytes, int]
) -> dict[str, RoundCounts]:
    """Counts of each round, by round id in hex.

    Args:
        counts: number of shares by state and round.
        ready: number of waiting shares that are due, by round; read separately, so it may differ slightly.
    """
    summary: dict[str, RoundCounts] = {}
    for round_id, states in counts.items():
        submitted = states.get(ShareState.CONFIRMED, 0)
        failed = states.get(ShareState.FAILED, 0)
        total = sum(states.values())
        waiting = states.get(ShareState.WAITING, 0)
        due = min(ready.get(round_id, 0), waiting)
        summary[round_id.hex()] = {
            "total": total,
            "pending": total - submitted - failed,
            "ready": due,
            "not_yet_due": waiting - due,
            "processing": total - submitted - failed - waiting,
            "submitted": submitted,
            "failed": failed,
        }
    return summary
