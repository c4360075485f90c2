"""Operator API: actions on the queue, recorded with the user who requests them.

Only the control socket serves them. Its file mode controls access, and the kernel reports the user.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.errors import HelperError
from helper.observability.queue_snapshot import Source
from helper.operations.actions import Operations, SkippedShare
from helper.server import operator_json, operator_parameters
from helper.server.middleware import JsonResponse
from helper.server.peer_credentials import PEER_KEY, Peer, user_name
from helper.server.routes.operator import parsed
from helper.store.action_models import Actor
from helper.store.models import QueueFilter

MAX_ACTION_BODY_BYTES: Final = 64 << 20
"""Maximum bytes of a JSON body: the marks of two million shares."""
MAX_REFS: Final = 10_000

MARK_STRUCT: Final = struct.Struct(">Q8s")
"""A row's number and its checksum."""

ShortText = Annotated[str, Field(max_length=64)]
Body = TypeVar("Body", bound=BaseModel)


class ActionFilter(BaseModel):
    """Selects shares; an empty field matches any."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    round: ShortText = ""
    state: ShortText = ""
    due_before: ShortText = ""
    stage: Annotated[str, Field(max_length=32)] = ""

    def filter(self) -> QueueFilter:
        """Convert to the store's filter.

        Raises:
            ValueError: a field is invalid; the text contains its name.
        """
        return operator_parameters.parse_filter(self.round, self.state, self.due_before, self.stage)


class RetryRequest(ActionFilter):
    """`POST /queue/retry`."""

    refs: Annotated[list[ShortText], Field(max_length=MAX_REFS)] = []
    dry_run: bool = False


class ExportRequest(ActionFilter):
    """`POST /queue/export`: the contents of an export file. With `marks` (`MARK_STRUCT` each), these rows are moved."""

    model_config = ConfigDict(val_json_bytes="base64")

    named: Annotated[int, Field(ge=0)] = 0
    shares: Annotated[int, Field(ge=0)]
    marks: bytes | None = Field(default=None, repr=False)


class PurgeRequest(BaseModel):
    """`POST /rounds/{round}/purge`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    dry_run: bool = False


class RescanRequest(BaseModel):
    """`POST /chain/rescan`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    first: Annotated[int, Field(ge=1, alias="from")]


def operator_action_routes(operations: Operations, *, source: Source = "daemon") -> list[Route]:
    """The routes of actions.

    Args:
        operations: performs the actions.
        source: `source` in the responses and the audit log.
    """

    async def retry(request: Request) -> Response:
        params, actor = await _read_json(request, RetryRequest), await identify_actor(request, source)
        selected = parsed(params.filter)
        counts = await operations.retry(actor, selected, params.refs, dry_run=params.dry_run)
        return _result(counts, source, dry=params.dry_run)

    async def export(request: Request) -> Response:
        params, actor = await _read_json(request, ExportRequest), await identify_actor(request, source)
        selected = parsed(params.filter)
        if params.marks is None:
            return _result(await operations.record_export(actor, selected, params.named, params.shares), source)
        if len(params.marks) % MARK_STRUCT.size:
            raise HTTPException(400, f"marks: must be a multiple of {MARK_STRUCT.size} bytes")
        marks = [(number, check) for number, check in MARK_STRUCT.iter_unpack(params.marks)]
        return _result(await operations.move_shares(actor, selected, params.named, marks), source)

    async def import_shares(request: Request) -> Response:
        from helper.operations.import_queue import split_lines  # noqa: PLC0415 - its models are slow to import

        actor, dry_run = await identify_actor(request, source), request.query_params.get("dry_run") == "1"
        chunks = request.stream()
        try:
            report = await operations.import_shares(actor, split_lines(chunks), dry_run=dry_run)
        except HelperError:
            async for _ in chunks:
                pass  # a refused client still sends the rest of the body, and reads the response afterwards
            raise
        return _result(
            {**report.counts, "left": [_skipped_share_json(share) for share in report.skipped]}, source, dry=dry_run
        )

    async def purge(request: Request) -> Response:
        params, actor = await _read_json(request, PurgeRequest), await identify_actor(request, source)
        round_id = parsed(operator_parameters.parse_round, request.path_params["round"])
        return _result(await operations.purge(actor, round_id, dry_run=params.dry_run), source, dry=params.dry_run)

    async def rescan(request: Request) -> Response:
        params, actor = await _read_json(request, RescanRequest), await identify_actor(request, source)
        ledger, latest = await operations.rescan(actor, params.first)
        return JsonResponse(operator_json.rescan_json(ledger, latest, source=source))

    return [
        Route("/queue/retry", retry, methods=["POST"]),
        Route("/queue/export", export, methods=["POST"]),
        Route("/queue/import", import_shares, methods=["POST"]),
        Route("/rounds/{round}/purge", purge, methods=["POST"]),
        Route("/chain/rescan", rescan, methods=["POST"]),
    ]


async def identify_actor(request: Request, source: Source) -> Actor:
    """Return the user that sent a request, for the audit log. Raise HTTPException (403) if unknown."""
    peer = getattr(request.state, PEER_KEY, None)
    if not isinstance(peer, Peer):
        raise HTTPException(403, "unknown user: operator actions require the control socket")
    name = await anyio.to_thread.run_sync(user_name, peer.uid)
    return Actor(peer.uid, name, "socket" if source == "daemon" else "file")


def _result(facts: Mapping[str, Any], source: Source, *, dry: bool = False) -> Response:
    """The response with the result of an action, or with the expected result of a dry run."""
    return JsonResponse({"source": source, "dry_run": dry, **facts})


def _skipped_share_json(share: SkippedShare) -> dict[str, Any]:
    return {
        "number": share.number,
        "ref": share.ref,
        "round": None if share.round_id is None else share.round_id.hex(),
        "reason": share.reason.value,
    }


async def _read_json(request: Request, kind: type[Body]) -> Body:
    """Parse the JSON of a request's body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_ACTION_BODY_BYTES:
            raise HTTPException(413, f"body: is larger than {MAX_ACTION_BODY_BYTES} bytes")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise HTTPException(400, f"{field}: {first['msg']}") from None
