"""The API's own description, OpenAPI 3.1, made from what the code has: the routes, the table of fields that payloads
are read by, the types that answers are made of.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final, Literal

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from helper.ingest.payload import ErrorAnswer
from helper.ingest.schema import Field, ObjectField
from helper.server.middleware import TOKEN_HEADER, JsonResponse

PATH: Final = "/openapi.json"

ANY_TIME: Final = (400, 408, 429, 431, 500, 503)
"""What any request can be answered: most of it comes before there is a route."""
_REFUSALS: Final = {
    400: "Something is not as it must be; the text begins with the field's name where it is about one.",
    401: "The token or signature that is asked for is missing or wrong.",
    404: "There is no such path, or nothing of this name.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    429: "Come again: too much at once, too many refused requests, or the chain's node is a moment behind.",
    431: "The headers are too large.",
    500: "An error of this helper's own; X-Request-Id names its line in the log.",
    502: "The chain, or who publishes what was asked for, gave no answer.",
    503: "Nothing can be taken now: the helper starts, or has no chain to judge by, or no room.",
    504: "The chain's node was too slow with its answer.",
}
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer", "minimum": 1}}
}
_WALLETS: Final = "helperToken"
_OPERATORS: Final = "operatorToken"
_SCHEMES: Final[Mapping[str, Mapping[str, str]]] = {
    _WALLETS: {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
    _OPERATORS: {"type": "http", "scheme": "bearer"},
}
_COMPONENTS: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"
_CONVERTED: Final = re.compile(r"\{(\w+):\w+\}")
"""A part of a path with its kind, as Starlette writes it: `{path:path}`."""

Handler = Callable[[Request], Awaitable[Response]]
Holder = Literal["wallets", "operators"]
"""Who has a token of their own."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What one route does, as far as its path and method do not say it.

    Attributes:
        summary: a line for people.
        answer: the type of what 200 brings.
        media: what kind of content that is.
        also: statuses that bring the same kind of content as 200.
        body: the fields of the JSON that is sent, or its schema, if any is sent.
        path: the fields in the path: each one, or its schema.
        query: what may be asked for in the query: description and schema by name.
        refusals: statuses of its errors, beside those that any request can get.
        error: the type of its errors.
        passed_on: whether any other status may come too, with any JSON: what a node answered.
        asks: whose token it asks for, where one is set.
    """

    summary: str
    answer: Any
    media: str = _JSON
    also: Sequence[int] = ()
    body: ObjectField | Mapping[str, Any] | None = None
    path: Mapping[str, Field | Mapping[str, Any]] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: Sequence[int] = ()
    error: Any = ErrorAnswer
    passed_on: bool = False
    asks: Holder | None = None


class ApiRoute(Route):
    """A route that says what it does."""

    def __init__(self, path: str, handler: Any, method: str, operation: Operation) -> None:
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.operation = operation


class ApiMount(Mount):
    """An application under a path, whose routes say what they do."""

    def __init__(self, path: str, app: ASGIApp, inside: Sequence[ApiRoute]) -> None:
        super().__init__(path, app)
        self.inside = tuple(inside)


class ApiDescription:
    """The document of an application's routes, its own among them; made when it is first asked for.

    Args:
        tokens: whose tokens are set.
    """

    def __init__(self, tokens: Iterable[Holder]) -> None:
        self._tokens = frozenset(tokens)
        self._routes: Sequence[BaseRoute] = ()
        self._made: dict[str, Any] | None = None
        self.route = ApiRoute(PATH, self._answer, "GET", Operation("This description.", dict[str, Any]))

    def of(self, routes: Sequence[BaseRoute]) -> None:
        """Take these routes, of which those that are an ApiRoute or an ApiMount are described."""
        self._routes = routes

    def told(self) -> dict[str, Any]:
        """The document as plain JSON."""
        if self._made is None:
            self._made = document(self._routes, tokens=self._tokens)
        return self._made

    async def _answer(self, _request: Request) -> Response:
        return JsonResponse(self.told())


def document(routes: Iterable[BaseRoute], *, tokens: Iterable[Holder]) -> dict[str, Any]:
    """The whole document as plain JSON."""
    given = frozenset(tokens)
    described = [(path, route) for path, route in _described(routes) if _is_open(route.operation, given)]
    answers, schemas = _answer_schemas([route.operation for _, route in described])
    paths: dict[str, dict[str, Any]] = {}
    for path, route in described:
        paths.setdefault(path, {})[route.method.lower()] = _operation(route.operation, answers, given)
    asked = {_scheme(route.operation, given) for _, route in described} - {None}
    schemes = {name: dict(scheme) for name, scheme in _SCHEMES.items() if name in asked}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "svote-helper",
            "version": metadata.version("svote-helper"),
            "description": "Takes encrypted vote shares from wallets and reveals each at its wallet's time. Every"
            " answer has an X-Request-Id, by which an operator finds an error in the log.",
        },
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": schemes} if schemes else {})},
    }


def _described(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, ApiRoute]]:
    """Every route that says what it does, with its whole path."""
    for route in routes:
        if isinstance(route, ApiRoute):
            yield _CONVERTED.sub(r"{\1}", route.path), route
        elif isinstance(route, ApiMount):
            yield from ((route.path + path, inner) for path, inner in _described(route.inside))


def _is_open(about: Operation, given: frozenset[Holder]) -> bool:
    """Whether it can be used at all: the operators' part is shut without a token."""
    return about.asks != "operators" or about.asks in given


def _scheme(about: Operation, given: frozenset[Holder]) -> str | None:
    if about.asks is None or about.asks not in given:
        return None
    return _WALLETS if about.asks == "wallets" else _OPERATORS


def _answer_schemas(operations: Sequence[Operation]) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """The schema of each answer's type by its type, and those that they refer to."""
    types = [one for about in operations for one in (about.answer, about.error)] or [ErrorAnswer]
    found, shared = TypeAdapter.json_schemas(
        [(number, "serialization", TypeAdapter(one)) for number, one in enumerate(types)], ref_template=_COMPONENTS
    )
    return lambda one: found[types.index(one), "serialization"], shared.get("$defs", {})


def _operation(about: Operation, schema_of: Callable[[Any], Any], given: frozenset[Holder]) -> dict[str, Any]:
    scheme = _scheme(about, given)
    statuses = sorted({*ANY_TIME, *about.refusals, *((401,) if scheme else ())})
    good = {about.media: {"schema": schema_of(about.answer)}}
    refused = {str(status): _refusal(status, schema_of(about.error)) for status in statuses}
    for status in about.also:
        refused[str(status)]["content"] = refused[str(status)]["content"] | good
    if about.passed_on:
        refused["default"] = {"description": "What the node answered.", "content": _json({})}
    told: dict[str, Any] = {
        "summary": about.summary,
        "responses": {"200": {"description": "Done.", "content": good}, **refused},
    }
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _schema(one)} for name, one in about.path.items()
    ]
    in_query = [{"name": name, "in": "query", **one} for name, one in about.query.items()]
    if in_path or in_query:
        told["parameters"] = [*in_path, *in_query]
    if about.body is not None:
        told["requestBody"] = {"required": True, "content": _json(_schema(about.body))}
    if scheme:
        told["security"] = [{scheme: []}]
    return told


def _schema(about: Field | Mapping[str, Any]) -> Mapping[str, Any]:
    return about if isinstance(about, Mapping) else about.schema()


def _refusal(status: int, schema: Any) -> dict[str, Any]:
    told = {"description": _REFUSALS[status], "content": _json(schema)}
    return {**told, "headers": _RETRY_AFTER} if status == 429 else told


def _json(schema: Any) -> dict[str, Any]:
    return {_JSON: {"schema": schema}}
