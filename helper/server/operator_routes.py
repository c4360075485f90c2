"""Operator API: queries of the queue, the rounds and the audit log, and actions on the queue.

The service provides it on the control socket, whose file mode controls access. Commands serve it in process on the
database file while no helper is running (`helper.cli.offline`). Only the control socket serves actions, which are
recorded with the user whom the kernel reports.
"""

from __future__ import annotations

import asyncio
import pwd
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from helper.core.json_records import fact, first_error, to_json
from helper.core.share import ShareState
from helper.errors import ActionRefused, ExportFileError, HelperError, NotFound, UsageError
from helper.observability.queue_snapshot import MAX_FAILURE_GROUPS, SOURCE, Source, read_snapshot, stats_json
from helper.observability.service_state import StatusSource
from helper.operations.operator_actions import OperatorActions, SkippedRow, split_lines
from helper.server import operator_json, operator_parameters
from helper.server.edge import USER_EXTENSION, JsonResponse, json_application
from helper.server.operator_json import KnownRound
from helper.store.audit_log import Actor
from helper.store.models import QueueFilter
from helper.store.queue_reader import QueueReader

if TYPE_CHECKING:
    from helper.chain.chain_data import RoundAuthentication
    from helper.chain.round_registry import RoundRegistry
    from helper.clock import Clock


Handler = Callable[[Request], Awaitable[Any]]
"""Returns a document or plain values."""
KnownRounds = tuple[list[KnownRound], float]
"""The rounds, and the time in Unix seconds."""

_STATUSES: Final = {UsageError: 400, NotFound: 404, ActionRefused: 409, ExportFileError: 422, HelperError: 503}
"""Response statuses of errors, subclasses first."""


def create_operator_app(
    queue: QueueReader,
    read_rounds: Callable[[], Awaitable[KnownRounds]],
    *,
    operations: OperatorActions | None = None,
    service_status: StatusSource | None = None,
    source: Source = "daemon",
    more_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """Create the operator application.

    Args:
        read_rounds: reads what is known of the rounds.
        operations: performs the actions; None to serve none.
        service_status: state of the running service (node health, timings, pauses); None if none runs.
        source: `source` in the responses.
    """
    handlers = {"GET": _query_handlers(queue, read_rounds, service_status, source)}
    if operations is not None:
        handlers["POST"] = _action_handlers(operations, source)
    routes = [_json_route(method, *each) for method, paths in handlers.items() for each in paths.items()]
    return json_application([*routes, *more_routes], {UsageError: _handle_error, HelperError: _handle_error})


def _json_route(method: str, path: str, handler: Handler) -> Route:
    async def respond(request: Request) -> Response:
        result = await handler(request)
        return JsonResponse(result if isinstance(result, dict) else to_json(result))

    return Route(path, respond, methods=[method])


def _query_handlers(
    queue: QueueReader,
    read_rounds: Callable[[], Awaitable[KnownRounds]],
    service_status: StatusSource | None,
    source: Source,
) -> dict[str, Handler]:
    async def list_shares(request: Request) -> operator_json.ShareList:
        query = operator_parameters.parse_filter(request.query_params)
        limit = operator_parameters.parse_limit(request.query_params.get("limit"))
        failed = None
        if query.state is ShareState.FAILED:
            failed = await queue.list_matching_failures(query, limit=MAX_FAILURE_GROUPS)
        return operator_json.ShareList(source=source, shares=await queue.list_shares(query, limit), failed=failed)

    async def show(request: Request) -> operator_json.ShareHistory:
        details = await queue.get_share_details(request.path_params["ref"])
        if details is None:
            raise HTTPException(404, "no share, or more than one, matches this reference; confirmed shares are erased")
        return operator_json.describe_share(details, source=source)

    async def stats(_request: Request) -> dict[str, Any]:
        snapshot = await read_snapshot(queue, max_failures=MAX_FAILURE_GROUPS)
        return stats_json(snapshot, source=source, service=None if service_status is None else service_status())

    async def spent(request: Request) -> dict[str, Any]:
        nullifier = operator_parameters.parse_hex32("nullifier", request.path_params["nullifier"])
        rounds = await queue.find_rounds_of_nullifier(nullifier)
        return {"source": source, "rounds": [round_id.hex() for round_id in rounds]}

    async def actions(request: Request) -> operator_json.ActionList:
        limit = operator_parameters.parse_limit(
            request.query_params.get("limit"), operator_parameters.DEFAULT_ACTION_LIMIT
        )
        return operator_json.ActionList(source=source, actions=await queue.list_actions(limit=limit))

    async def all_rounds(_request: Request) -> operator_json.RoundList:
        known, now = await read_rounds()
        return operator_json.list_rounds(known, await queue.count_shares(), now=now, source=source)

    async def rescan(_request: Request) -> operator_json.RescanState:
        ledger = await queue.get_ledger()
        if ledger is None or ledger.rescan is None:
            raise NotFound("no rescan was requested", advice="Request one with --from.")
        return operator_json.describe_rescan(ledger, ledger.rescan, source=source)

    return {
        "/queue": list_shares,
        "/queue/{ref}": show,
        "/stats": stats,
        "/spent/{nullifier}": spent,
        "/actions": actions,
        "/rounds": all_rounds,
        "/chain/rescan": rescan,
    }


async def _handle_error(_request: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    advice = {"advice": error.advice} if isinstance(error, HelperError) else {}
    return JsonResponse({"status": "error", "error": str(error), **advice}, status)


async def live_rounds(
    registry: RoundRegistry,
    tree_size: Callable[[bytes], int],
    authentication: Callable[[bytes], RoundAuthentication],
    clock: Clock,
) -> KnownRounds:
    """The rounds as a running helper knows them, and the chain's time.

    Args:
        tree_size: returns the number of known leaves of a round.
        authentication: returns whether the published voting configuration authenticates a round.
        clock: the time before the first block.
    """
    still_open = {known.round_id for known in registry.open_rounds()}
    rounds = [
        KnownRound(
            known,
            tree_size(known.round_id),
            known.round_id not in still_open,
            registry.frozen_reason(known.round_id),
            authentication(known.round_id),
        )
        for known in registry.all_rounds()
    ]
    return rounds, registry.chain_now() or clock.now()


async def stored_rounds(queue: QueueReader, clock: Clock) -> KnownRounds:
    """The rounds as they were last stored, and this machine's time."""
    sizes = await queue.count_leaves()
    rounds = [
        KnownRound(stored, sizes.get(stored.round_id, 0), stored.closed_at is not None)
        for stored in await queue.list_rounds()
    ]
    return rounds, clock.now()


CHUNK_SECONDS: Final = 60.0
"""Maximum seconds between two chunks of a body."""
MAX_ACTION_BODY_BYTES: Final = 64 << 20
"""Maximum bytes of a JSON body: the marks of two million shares."""
MAX_REFS: Final = 10_000

MARK_STRUCT: Final = struct.Struct(">q8s")
"""A row's number and its checksum."""

ShortText = Annotated[str, Field(max_length=64)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class ActionRequest(BaseModel):
    """The body of a request for an action."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


Body = TypeVar("Body", bound=ActionRequest)


class ActionFilter(ActionRequest):
    """Selects shares; an empty field matches any."""

    round: ShortText = ""
    state: ShortText = ""
    due_before: ShortText = ""
    stage: Annotated[str, Field(max_length=32)] = ""

    def filter(self) -> QueueFilter:
        """Convert to the store's filter.

        Raises:
            ValueError: a field is invalid; the text contains its name.
        """
        return operator_parameters.parse_filter(self.model_dump())


class RetryRequest(ActionFilter):
    """`POST /queue/retry`."""

    refs: Annotated[list[ShortText], Field(max_length=MAX_REFS)] = []
    dry_run: bool = False


class ExportRequest(ActionFilter):
    """`POST /queue/export`: the contents of an export file. With `marks` (`MARK_STRUCT` each), these rows are moved."""

    model_config = ConfigDict(val_json_bytes="base64")

    named: Count = 0
    shares: Count
    marks: bytes | None = Field(default=None, repr=False)


class PurgeRequest(ActionRequest):
    """`POST /rounds/{round}/purge`."""

    dry_run: bool = False


class RescanRequest(ActionRequest):
    """`POST /chain/rescan`."""

    first: Annotated[int, Field(ge=1, alias="from")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """Result of an action, or the expected result of a dry run."""

    source: Source = fact(SOURCE)
    dry_run: bool = fact("Whether --dry-run was used.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryResult(ActionResult):
    """`queue retry`."""

    retried: int = fact("Number of retried shares.")
    closed: int = fact("Number of shares that remain failed because the chain has closed their round.")
    moved: int = fact(
        "Number of shares that remain failed because they were moved to another helper. `--stage moved` retries them."
    )
    not_failed: int = fact("Number of given shares that have not failed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeResult(ActionResult):
    """`queue purge`."""

    received: int = fact("Number of deleted shares in state waiting.")
    witnessed: int = fact("Number of deleted shares in state proving.")
    submitted: int = fact("Number of deleted shares in state confirmed.")
    failed: int = fact("Number of deleted shares in state failed.")
    broadcast: int = fact("Number of deleted shares in state sent.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord(ActionResult):
    """An export in the audit log."""

    copied: int | None = fact(
        "Without --move: number of exported shares, which also remain in this queue.", optional=True
    )
    moved: int | None = fact("With --move: number of shares that this machine no longer processes.", optional=True)
    stayed: int | None = fact(
        "With --move: number of exported shares that could not be moved and remain in this queue.", optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary(ActionResult):
    """`queue import`."""

    taken: int = fact("Number of imported shares.")
    revived: int = fact(
        "Part of `taken`: shares that an earlier export had moved from this queue, and that are queued again."
    )
    known: int = fact("Shares not imported because they are already live in this queue.")
    queued: int = fact("Part of `known`: shares that are queued here.")
    failed: int = fact("Part of `known`: shares that failed here and were not moved.")
    damaged: int = fact("Part of `known`: shares whose rows here are damaged.")
    conflict: int = fact("Part of `known`: shares that are live here with other content.")
    spent: int = fact("Shares not imported because they are confirmed.")
    closed: int = fact("Shares not imported because the chain has closed their round.")
    unknown: int = fact("Shares not imported because their round is unknown here.")
    invalid: int = fact("Shares not imported because they are invalid.")
    left: Sequence[SkippedRow] = fact("The first 1,000 shares that were not imported, in file order.")
    submitted: int | None = fact(
        "With --from-svoted: rows of the file without a witness, because their shares are already revealed.",
        optional=True,
    )
    deleted: bool | None = fact("With --from-svoted: whether the file was deleted.", optional=True)


def _action_handlers(operations: OperatorActions, source: Source) -> dict[str, Handler]:
    async def retry(request: Request) -> RetryResult:
        params, actor = await _read_json(request, RetryRequest), await identify_actor(request, source)
        counts = await operations.retry(actor, params.filter(), params.refs, dry_run=params.dry_run)
        return RetryResult(source=source, dry_run=params.dry_run, **counts)

    async def export(request: Request) -> ExportRecord:
        params, actor = await _read_json(request, ExportRequest), await identify_actor(request, source)
        selected = params.filter()
        if params.marks is None:
            counts = await operations.record_export(actor, selected, params.named, params.shares)
            return ExportRecord(source=source, dry_run=False, **counts)
        if len(params.marks) % MARK_STRUCT.size:
            raise HTTPException(400, f"marks: must be a multiple of {MARK_STRUCT.size} bytes")
        marks = [(number, check) for number, check in MARK_STRUCT.iter_unpack(params.marks)]
        counts = await operations.move_shares(actor, selected, params.named, marks)
        return ExportRecord(source=source, dry_run=False, **counts)

    async def import_shares(request: Request) -> ImportSummary:
        actor, dry_run = await identify_actor(request, source), request.query_params.get("dry_run") == "1"
        chunks = _read_chunks(request)
        try:
            counts, left = await operations.import_shares(actor, split_lines(chunks), dry_run=dry_run)
        except HelperError:
            async for _ in chunks:
                pass  # a refused client still sends the rest of the body, and reads the response afterwards
            raise
        facts: dict[str, Any] = {**counts, "left": left}
        return ImportSummary(source=source, dry_run=dry_run, **facts)

    async def purge(request: Request) -> PurgeResult:
        params, actor = await _read_json(request, PurgeRequest), await identify_actor(request, source)
        round_id = operator_parameters.parse_hex32("round", request.path_params["round"])
        counts = await operations.purge(actor, round_id, dry_run=params.dry_run)
        return PurgeResult(source=source, dry_run=params.dry_run, **counts)

    async def rescan(request: Request) -> operator_json.RescanState:
        params, actor = await _read_json(request, RescanRequest), await identify_actor(request, source)
        ledger, latest = await operations.rescan(actor, params.first)
        return operator_json.describe_rescan(ledger, latest, source=source)

    return {
        "/queue/retry": retry,
        "/queue/export": export,
        "/queue/import": import_shares,
        "/rounds/{round}/purge": purge,
        "/chain/rescan": rescan,
    }


async def identify_actor(request: Request, source: Source) -> Actor:
    """Return the user that sent a request, for the audit log. Raise HTTPException (403) if unknown."""
    uid = request.scope.get("extensions", {}).get(USER_EXTENSION)
    if uid is None:
        raise HTTPException(403, "unknown user: operator actions require the control socket")
    name = await anyio.to_thread.run_sync(user_name, uid)
    return Actor(uid, name, "socket" if source == "daemon" else "file")


def user_name(uid: int) -> str:
    """The name of a user, or the user id if it has none. May block on a directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


async def _read_chunks(request: Request) -> AsyncIterator[bytes]:
    """The chunks of a request's body. An import holds the lock of all actions, so a client that stops is refused."""
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(CHUNK_SECONDS):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise HTTPException(408, f"the rest of the body did not arrive within {CHUNK_SECONDS:.0f} s") from None
        if chunk is None:
            return
        yield chunk


async def _read_json(request: Request, kind: type[Body]) -> Body:
    body = bytearray()
    async for chunk in _read_chunks(request):
        body += chunk
        if len(body) > MAX_ACTION_BODY_BYTES:
            raise HTTPException(413, f"body: is larger than {MAX_ACTION_BODY_BYTES} bytes")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        field, reason = first_error(error)
        raise HTTPException(400, f"{field or 'body'}: {reason}") from None
