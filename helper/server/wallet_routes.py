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

from helper.circuits import share_body_schema
from helper.clock import Clock
from helper.core.refusals import Situation, TemporaryRefusal, find_refusal
from helper.core.share import ShareState
from helper.core.share_fields import HexField, error_message
from helper.errors import ClientLeft, ShareRefused
from helper.ingest.admission import AdmissionController, longest_wait
from helper.observability.queue_snapshot import ShareCounts
from helper.observability.queue_summary import InvalidRoundError, QueueSummaries, QueueSummary
from helper.server import protocol
from helper.server.body_reader import BodyReader
from helper.server.edge import (
    PREFIX,
    Edge,
    JsonResponse,
    check_token,
    error_response,
    json_application,
)
from helper.server.openapi import ApiRoute, Operation, TokenHolder, add_document_route
from helper.store.models import EnqueueResult

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
_PATH_HEX: Final = _PATH_HEX_FIELD.schema()
_QUEUED: Final = JsonResponse(AcceptedResponse(status="queued"))
_DUPLICATE: Final = JsonResponse(AcceptedResponse(status="duplicate"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WalletApi:
    """Answers the requests of wallets.

    Attributes:
        is_ready: whether start-up is complete (proving keys loaded, chain state known); until then the status is 503.
        queue_summaries: summaries of the rounds; None if they are not served.
        pending_status: HTTP status of share-status for a share that is not confirmed.
        count_outcome: counts the outcome of a POST: `post_` and one of
            `helper.observability.metrics.POST_OUTCOMES`.
        api_token: token that wallets must send in X-Helper-Token; empty for none.
        expose_queue_status: whether `/queue-status` is served.
    """

    admission: AdmissionController
    is_ready: Callable[[], bool]
    queue_summaries: QueueSummaries | None = None
    pending_status: int = 202
    count_outcome: Callable[[str], None] = lambda _: None
    api_token: str = ""
    expose_queue_status: bool = False
    body_reader: BodyReader = field(default_factory=BodyReader)

    async def post_share(self, request: protocol.Request) -> Response:
        """Accept a posted share, and count the outcome."""
        try:
            check_token(request.head.headers, self.api_token)
            async with self.body_reader.buffer_body(request) as body:
                seconds = longest_wait(request.head.headers)
                outcome = await self.admission.admit(body, wait_seconds=seconds, has_left=lambda: request.has_left)
        except Exception as error:
            self.count_outcome(f"post_{_classify_error(error)}")
            raise
        is_duplicate = outcome is EnqueueResult.DUPLICATE
        self.count_outcome("post_duplicate" if is_duplicate else "post_queued")
        return _DUPLICATE if is_duplicate else _QUEUED

    async def share_status(self, request: Request) -> Response:
        """Return whether a share is confirmed."""
        check_token(request.headers.raw, self.api_token)
        round_id = parse_hex32("round_id", request.path_params["round_id"])
        nullifier = parse_hex32("nullifier", request.path_params["nullifier"])
        confirmed = await self.admission.store.is_spent(round_id, nullifier)
        # A cache would keep a nullifier, and a later response would be that of an earlier time.
        # Each known wallet takes any 2xx and reads the body, or takes 200 alone for confirmed without reading it.
        return JsonResponse(
            ShareStatusResponse(status="confirmed" if confirmed else "pending"),
            200 if confirmed else self.pending_status,
            {"Cache-Control": "no-store"},
        )

    async def status(self, _request: Request) -> Response:
        """Return the tree of the newest active round, or zeros; refused while shares are refused with 503."""
        if (reason := self.admission.get_pause_reason()) is not None:
            raise TemporaryRefusal(Situation.PAUSED, reason)
        if not self.is_ready():
            raise TemporaryRefusal(Situation.STARTING)
        rounds = self.admission.rounds
        newest = max(
            rounds.active_rounds(), key=lambda r: (rounds.is_agreed(r.round_id), r.created_at_height), default=None
        )
        anchor = None if newest is None else self.admission.trees.anchor(newest.round_id)
        leaf_count, height = (anchor.size, anchor.height) if anchor else (0, 0)
        tree = TreeResponse(leaf_count=leaf_count, anchor_height=height)
        return JsonResponse(StatusResponse(status="ok", tree=tree))

    async def queue_status(self, request: Request) -> Response:
        """Return the number of shares per round and state."""
        check_token(request.headers.raw, self.api_token)
        store, now = self.admission.store, self.admission.clock.now()
        return JsonResponse(queue_status_body(await store.count_shares(), await store.count_ready(now=now)))

    async def queue_summary(self, request: Request) -> Response:
        """Return the number of shares of a round by due time."""
        assert self.queue_summaries is not None
        round_id = parse_hex32("round_id", request.path_params["round_id"])
        try:
            summary = self.queue_summaries.get(round_id)
        except InvalidRoundError:
            return error_response(400, "the round ends before it begins")
        return error_response(404, "round not found") if summary is None else JsonResponse(summary)

    def routes(self) -> list[ApiRoute]:
        """The routes with their descriptions. `Edge` calls `post_share` itself."""
        role: TokenHolder | None = "wallets" if self.api_token else None
        post_share = Operation(
            "Submit one share. 200 means that it is stored on disk and will be revealed at its time.",
            AcceptedResponse,
            body=share_body_schema(),
            refusals=(408, 413),
            authorized_role=role,
        )
        share_status = Operation(
            "Whether a share is confirmed on chain; 202 if it is not.",
            ShareStatusResponse,
            same_content_statuses=(202,),
            path={"round_id": _PATH_HEX, "nullifier": _PATH_HEX},
            refusals=(404,),
            authorized_role=role,
        )
        status = Operation("Whether this helper accepts shares.", StatusResponse)
        routes = [
            ApiRoute(SHARES_PATH, _refuse_post, "POST", post_share),
            ApiRoute(SHARE_STATUS_PATH, self.share_status, "GET", share_status),
            ApiRoute(f"{PREFIX}/status", self.status, "GET", status),
        ]
        if self.expose_queue_status:
            queue_status = Operation(
                "Number of shares per round and state.", dict[str, RoundCounts], authorized_role=role
            )
            routes.append(ApiRoute(f"{PREFIX}/queue-status", self.queue_status, "GET", queue_status))
        if self.queue_summaries is not None:
            queue_summary = Operation(
                "Number of shares of a round by due time, in hundreds, of the last full hour. Needs no token.",
                QueueSummary,
                path={"round_id": _PATH_HEX},
                refusals=(404,),
            )
            routes.append(ApiRoute(QUEUE_SUMMARY_PATH, self.queue_summary, "GET", queue_summary))
        return routes


async def _refuse_post(_request: Request) -> Response:
    """Respond 404. The route refuses other methods, and describes the one that `Edge` answers."""
    raise HTTPException(404)


def create_wallet_edge(
    wallets: WalletApi | None,
    *,
    refusals: Counter[int] | None = None,
    more_routes: Sequence[BaseRoute] = (),
    trace_clock: Clock | None = None,
) -> Edge:
    """Create what serves the port of the wallet API.

    Args:
        wallets: serves the wallet routes; None to serve none of them.
        refusals: counts the responses by status, from 400 on; None to count none.
        more_routes: routes of other packages, matched after the wallet routes.
    """
    own, posts = ([], {}) if wallets is None else (wallets.routes(), {SHARES_PATH: wallets.post_share})
    return Edge(json_application(add_document_route(own, more_routes)), refusals, posts, trace_clock)


def _classify_error(error: Exception) -> str:
    if isinstance(error, ShareRefused):
        return "refused"
    if isinstance(error, ClientLeft):
        return "broken_off"
    if isinstance(error, TemporaryRefusal):  # the outcome names the situation, not who asked
        status = find_refusal(error.situation, *error.details, names_attempt=True).status
        return _OUTCOMES_BY_STATUS[status]
    return _OUTCOMES_BY_STATUS.get(error.status_code, "error") if isinstance(error, HTTPException) else "error"


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
        shares = ShareCounts.of(states)
        due = min(ready.get(round_id, 0), shares.received)
        summary[round_id.hex()] = {
            "total": shares.total,
            "pending": shares.unproven + shares.broadcast,
            "ready": due,
            "not_yet_due": shares.received - due,
            "processing": shares.witnessed + shares.broadcast,
            "submitted": shares.submitted,
            "failed": shares.failed,
        }
    return summary
