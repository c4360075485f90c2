"""Operator actions, on the control socket only: its file mode controls access, the kernel reports the user."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

import anyio.to_thread
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.errors import ActionRefused, ExportFileError, HelperError, NothingThere
from helper.ingest.payload import error_answer
from helper.operations.actions import Operations
from helper.operations.import_queue import split_lines
from helper.server import action_views, views
from helper.server.middleware import JsonResponse
from helper.server.peer_credentials import KEY, Peer, user_name
from helper.store.action_rows import Actor
from helper.store.rows import QueueFilter

MAX_BODY: Final = 64 << 20
"""Maximum bytes of a JSON body: the marks of two million shares."""
MAX_REFS: Final = 10_000

MARK: Final = struct.Struct(">Q8s")
"""A row's number and its checksum."""

Text = Annotated[str, Field(max_length=64)]
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class ActionFilter(BaseModel):
    """Selects shares; an empty field matches any."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: Text = ""
    state: Text = ""
    due_before: Text = ""
    stage: Annotated[str, Field(max_length=32)] = ""

    def filter(self) -> QueueFilter:
        """Convert to the store's filter.

        Raises:
            ValueError: a field is not valid; the text names it.
        """
        return views.parse_filter(self.round, self.state, self.due_before, self.stage)


class Retry(ActionFilter):
    """`POST /queue/retry`."""

    refs: Annotated[list[Text], Field(max_length=MAX_REFS)] = []
    dry_run: bool = False


class Exported(ActionFilter):
    """`POST /queue/export`: the contents of an export file; with `marks` (`MARK` each), these rows are moved."""

    named: Annotated[int, Field(ge=0)] = 0
    shares: Annotated[int, Field(ge=0)]
    marks: Base64Bytes | None = Field(default=None, repr=False)


class Purge(BaseModel):
    """`POST /rounds/{round}/purge`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dry_run: bool = False


def operator_action_routes(operations: Operations) -> list[Route]:
    """The routes of actions, and of the audit log."""

    async def retry(request: Request) -> Response:
        params, actor = await _read(request, Retry), await actor_of(request)
        selected = _value(params.filter)
        return await _answer(operations.retry(actor, selected, params.refs, dry=params.dry_run), dry=params.dry_run)

    async def export(request: Request) -> Response:
        params, actor = await _read(request, Exported), await actor_of(request)
        selected = _value(params.filter)
        if params.marks is None:
            return await _answer(operations.note_export(actor, selected, params.named, params.shares))
        if len(params.marks) % MARK.size:
            raise HTTPException(400, f"marks: must be a multiple of {MARK.size} bytes")
        marks = [(number, check) for number, check in MARK.iter_unpack(params.marks)]
        return await _answer(operations.hand_over(actor, selected, params.named, marks))

    async def import_shares(request: Request) -> Response:
        actor, dry = await actor_of(request), request.query_params.get("dry_run") == "1"
        chunks = request.stream()

        async def facts() -> Mapping[str, Any]:
            return action_views.import_facts(await operations.import_shares(actor, split_lines(chunks), dry=dry))

        response = await _answer(facts(), dry=dry)
        async for _ in chunks:
            pass  # a client that is refused early still sends the rest, and reads the response afterwards
        return response

    async def purge(request: Request) -> Response:
        params, actor = await _read(request, Purge), await actor_of(request)
        round_id = _value(lambda: views.parse_round(request.path_params["round"]))
        return await _answer(operations.purge(actor, round_id, dry=params.dry_run), dry=params.dry_run)

    async def actions(request: Request) -> Response:
        limit = _value(lambda: views.parse_limit(request.query_params.get("limit"), action_views.ACTIONS_SHOWN))
        return JsonResponse(action_views.actions_json(await operations.acts(limit), source="daemon"))

    return [
        Route("/queue/retry", retry, methods=["POST"]),
        Route("/queue/export", export, methods=["POST"]),
        Route("/queue/import", import_shares, methods=["POST"]),
        Route("/rounds/{round}/purge", purge, methods=["POST"]),
        Route("/actions", actions, methods=["GET"]),
    ]


async def actor_of(request: Request) -> Actor:
    """The user that sends a request, for the audit log; raises HTTPException (403) if it is unknown."""
    peer = getattr(request.state, KEY, None)
    if not isinstance(peer, Peer):
        raise HTTPException(403, "unknown user: operator actions require the control socket")
    return Actor(peer.uid, await anyio.to_thread.run_sync(user_name, peer.uid), "socket")


async def _answer(work: Awaitable[Mapping[str, Any]], *, dry: bool = False) -> Response:
    """The result of an action, or its error: not found (404), refused (409), no valid export (422), other (503)."""
    try:
        return JsonResponse(action_views.act_json(await work, dry=dry, source="daemon"))
    except NothingThere as error:
        return _refusal(404, error)
    except ActionRefused as error:
        return _refusal(409, error)
    except ExportFileError as error:
        return _refusal(422, error)
    except HelperError as error:
        return _refusal(503, error)


def _refusal(status: int, error: HelperError) -> Response:
    return JsonResponse({**error_answer(str(error)), "advice": error.advice}, status)


async def _read(request: Request, kind: type[Body]) -> Body:
    """Parse the JSON of a request's body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"body: is larger than {MAX_BODY} bytes")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise HTTPException(400, f"{field}: {first['msg']}") from None


def _value(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
