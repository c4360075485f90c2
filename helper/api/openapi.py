"""The API's own description, OpenAPI 3.1, made from what the code has: the routes, the table of fields that payloads
are read by, the types that answers are made of.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from helper.api.guard import TOKEN_HEADER, JsonResponse
from helper.fields import Field, Record
from helper.wire import ErrorAnswer

PATH: Final = "/openapi.json"

ANY_TIME: Final = (400, 408, 429, 431, 500, 503)
"""What any request can be answered: most of it comes before there is a route."""
_REFUSALS: Final = {
    400: "Something is not as it must be; the text begins with the field's name where it is about one.",
    401: f"{TOKEN_HEADER} is missing or wrong.",
    404: "There is no such path.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    429: "Come again: too much at once, too many refused requests, or the chain's node is a moment behind.",
    431: "The headers are too large.",
    500: "An error of this helper's own.",
    503: "Nothing can be taken now: the helper starts, or has no chain to judge by, or no room.",
}
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer", "minimum": 1}}
}
_TOKEN_SCHEME: Final = "helperToken"  # noqa: S105 (a name)
_COMPONENTS: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What one route does, as far as its path and method do not say it.

    Attributes:
        summary: a line for people.
        answer: the type of what 200 brings.
        media: what kind of content that is.
        also: statuses that bring the same kind of content as 200.
        body: the fields of the JSON that is sent, if any is.
        path: the fields in the path.
        query: what may be asked for in the query: description and schema by name.
        refusals: statuses of its errors, beside those that any request can get.
        guarded: whether a token is asked for where one is set.
    """

    summary: str
    answer: Any
    media: str = _JSON
    also: Sequence[int] = ()
    body: Record | None = None
    path: Mapping[str, Field] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: Sequence[int] = ()
    guarded: bool = False


class ApiRoute(Route):
    """A route that says what it does."""

    def __init__(self, path: str, handler: Handler, method: str, operation: Operation) -> None:
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.operation = operation


def document_route(routes: Sequence[BaseRoute], *, token: bool) -> ApiRoute:
    """`GET /openapi.json` for these routes and itself; made when it is first asked for.

    Args:
        routes: of which those that are an ApiRoute are described.
        token: whether guarded ones ask for a token.
    """
    made: list[dict[str, Any]] = []

    async def answer(_request: Request) -> Response:
        if not made:
            made.append(document([*routes, route], token=token))
        return JsonResponse(made[0])

    route = ApiRoute(PATH, answer, "GET", Operation("This description.", dict[str, Any]))
    return route


def document(routes: Iterable[BaseRoute], *, token: bool) -> dict[str, Any]:
    """The whole document as plain JSON."""
    described = [route for route in routes if isinstance(route, ApiRoute)]
    answers, schemas = _answer_schemas(described)
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route.operation, answers, token=token)
    scheme = {"type": "apiKey", "in": "header", "name": TOKEN_HEADER}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "svote-helper",
            "version": metadata.version("svote-helper"),
            "description": "Takes encrypted vote shares from wallets and reveals each at its wallet's time.",
        },
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": {_TOKEN_SCHEME: scheme}} if token else {})},
    }


def _answer_schemas(routes: Iterable[ApiRoute]) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """The schema of each answer's type by its type, and those that they refer to."""
    types = [ErrorAnswer, *(route.operation.answer for route in routes)]
    found, shared = TypeAdapter.json_schemas(
        [(number, "serialization", TypeAdapter(one)) for number, one in enumerate(types)], ref_template=_COMPONENTS
    )
    return lambda one: found[types.index(one), "serialization"], shared.get("$defs", {})


def _operation(about: Operation, schema_of: Callable[[Any], Any], *, token: bool) -> dict[str, Any]:
    guarded = token and about.guarded
    statuses = sorted({*ANY_TIME, *about.refusals, *((401,) if guarded else ())})
    good = {about.media: {"schema": schema_of(about.answer)}}
    refused = {str(status): _refusal(status, schema_of(ErrorAnswer)) for status in statuses}
    for status in about.also:
        refused[str(status)]["content"] = refused[str(status)]["content"] | good
    told: dict[str, Any] = {
        "summary": about.summary,
        "responses": {"200": {"description": "Done.", "content": good}, **refused},
    }
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": one.schema()} for name, one in about.path.items()
    ]
    in_query = [{"name": name, "in": "query", **one} for name, one in about.query.items()]
    if in_path or in_query:
        told["parameters"] = [*in_path, *in_query]
    if about.body is not None:
        told["requestBody"] = {"required": True, "content": _json(about.body.schema())}
    if guarded:
        told["security"] = [{_TOKEN_SCHEME: []}]
    return told


def _refusal(status: int, schema: Any) -> dict[str, Any]:
    told = {"description": _REFUSALS[status], "content": _json(schema)}
    return {**told, "headers": _RETRY_AFTER} if status == 429 else told


def _json(schema: Any) -> dict[str, Any]:
    return {_JSON: {"schema": schema}}
