"""What operators have done, over the control socket alone: its file mode lets them in, and the kernel names them."""

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
"""Bytes of the longest JSON body: the marks of two million shares."""
MAX_REFS: Final = 10_000

MARK: Final = struct.Struct(">Q8s")
"""A row's number and its check."""

Text = Annotated[str, Field(max_length=64)]
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class ActionFilter(BaseModel):
    """Which shares are meant; empty is any."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: Text = ""
    state: Text = ""
    due_before: Text = ""
    stage: Annotated[str, Field(max_length=32)] = ""

    def filter(self) -> QueueFilter:
        """It as the store takes it.

        Raises:
            ValueError: one of them is not that; the text names it.
        """
        return views.parse_filter(self.round, self.state, self.due_before, self.stage)


class Retry(ActionFilter):
    """`POST /queue/retry`."""

    refs: Annotated[list[Text], Field(max_length=MAX_REFS)] = []
    dry_run: bool = False


class Exported(ActionFilter):
    """`POST /queue/export`: what a file carries; with `marks` (`MARK` each), these rows are given up here."""

    named: Annotated[int, Field(ge=0)] = 0
    shares: Annotated[int, Field(ge=0)]
    marks: Base64Bytes | None = Field(default=None, repr=False)


class Purge(BaseModel):
    """`POST /rounds/{round}/purge`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dry_run: bool = False


def operator_action_routes(operations: Operations) -> list[Route]:
    """The routes that change something, and the record of what was changed."""

    async def retry(request: Request) -> Response:
        asked, actor = await _read(request, Retry), await actor_of(request)
        wanted = _value(asked.filter)
        return await _answer(operations.retry(actor, wanted, asked.refs, dry=asked.dry_run), dry=asked.dry_run)

    async def export(request: Request) -> Response:
        asked, actor = await _read(request, Exported), await actor_of(request)
        wanted = _value(asked.filter)
        if asked.marks is None:
            return await _answer(operations.note_export(actor, wanted, asked.named, asked.shares))
        if len(asked.marks) % MARK.size:
            raise HTTPException(400, "marks: must be whole")
        marks = [(number, check) for number, check in MARK.iter_unpack(asked.marks)]
        return await _answer(operations.hand_over(actor, wanted, asked.named, marks))

    async def import_shares(request: Request) -> Response:
        actor, dry = await actor_of(request), request.query_params.get("dry_run") == "1"
        pieces = request.stream()

        async def facts() -> Mapping[str, Any]:
            return action_views.import_facts(await operations.import_shares(actor, split_lines(pieces), dry=dry))

        answer = await _answer(facts(), dry=dry)
        async for _ in pieces:
            pass  # who is refused early still sends, and reads the answer afterwards
        return answer

    async def purge(request: Request) -> Response:
        asked, actor = await _read(request, Purge), await actor_of(request)
        round_id = _value(lambda: views.parse_round(request.path_params["round"]))
        return await _answer(operations.purge(actor, round_id, dry=asked.dry_run), dry=asked.dry_run)

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
    """Who asks; nobody changes anything unnamed."""
    peer = getattr(request.state, KEY, None)
    if not isinstance(peer, Peer):
        raise HTTPException(403, "who asks for it is not known")
    return Actor(peer.uid, await anyio.to_thread.run_sync(user_name, peer.uid), "socket")


async def _answer(work: Awaitable[Mapping[str, Any]], *, dry: bool = False) -> Response:
    """What came of an act, or why it was not done: there is no such thing (404), it is refused as things stand (409),
    what came is no export (422), or something of the helper's own stood in its way (503).
    """
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
    """The JSON of a request's body."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413, "the request is too large")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise HTTPException(400, f"{where}: {first['msg']}") from None


def _value(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
