"""OpenAPI 3.1 document, generated from routes, payload schema and response types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib import metadata
from typing import Any, Final, Literal

import orjson
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from helper.core.refusals import retry_after_of
from helper.server.edge import TOKEN_HEADER, BareErrorResponse, ErrorResponse, IngressReceipt, has_bare_error

COMMON_ERROR_STATUSES: Final = (400, 429, 431, 500, 503)
"""Error statuses of every operation; most of them are sent before routing."""
_REFUSALS: Final = {
    400: "Invalid request. If a field is invalid, the text begins with its name.",
    401: "The required token or signature is missing or invalid.",
    404: "No such path or resource.",
    408: "The body was too slow; the response is the receipt of the X-Vote-Ingress-Attempt-V1. Requests without a"
    " valid one get 503.",
    413: "The body is too large.",
    429: "Retry later: too many requests, or the helper has outdated chain state. Only requests with a valid"
    " X-Vote-Ingress-Attempt-V1 and registrations get this status; others get 503.",
    431: "The headers are too large.",
    500: "Internal error; the log has its details under the X-Request-Id.",
    502: "The chain or another upstream server sent no valid response.",
    503: "Not available now: the helper is starting, stopping, overloaded, or has no current chain state. Retry later,"
    " or take another helper.",
    504: "The chain node did not respond in time.",
}
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer", "minimum": 1}}
}
TokenHolder = Literal["wallets", "operators"]
_SCHEMES: Final[Mapping[TokenHolder, tuple[str, Mapping[str, str]]]] = {
    "wallets": ("helperToken", {"type": "apiKey", "in": "header", "name": TOKEN_HEADER}),
    "operators": ("operatorToken", {"type": "http", "scheme": "bearer"}),
}
"""Name and definition of the security scheme for each type of token holder."""
_COMPONENTS: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"
_CONVERTER_PARAMETER: Final = re.compile(r"\{(\w+):\w+\}")
"""A path parameter with a converter, in Starlette's notation: `{path:path}`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Describes the operation of one route.

    Attributes:
        response: type of the 200 response.
        same_content_statuses: statuses with the same content as 200.
        body: schema of the JSON request body, if there is one.
        path: schemas of the path parameters.
        query: description and schema of the query parameters, by name.
        refusals: error statuses in addition to `COMMON_ERROR_STATUSES`.
        is_forwarded: whether responses of a node are forwarded, with any status and any JSON.
        authorized_role: holder of the required token; None if none is required.
    """

    summary: str
    response: Any
    media_type: str = _JSON
    same_content_statuses: Sequence[int] = ()
    body: Mapping[str, Any] | None = None
    path: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: Sequence[int] = ()
    is_forwarded: bool = False
    authorized_role: TokenHolder | None = None


class ApiRoute(Route):
    """A route with a description."""

    def __init__(self, path: str, handler: Any, method: str, operation: Operation) -> None:
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.operation = operation


def generate_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Generate the document of the routes of type ApiRoute, as plain JSON."""
    described = [
        (_CONVERTER_PARAMETER.sub(r"{\1}", route.path), route) for route in routes if isinstance(route, ApiRoute)
    ]
    schema_of, schemas = _response_schemas([route.operation for _, route in described])
    paths: dict[str, dict[str, Any]] = {}
    for path, route in described:
        paths.setdefault(path, {})[route.method.lower()] = _describe_operation(path, route.operation, schema_of)
    roles = {route.operation.authorized_role for _, route in described}
    schemes = {name: dict(scheme) for holder, (name, scheme) in _SCHEMES.items() if holder in roles}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "svote-helper",
            "version": metadata.version("svote-helper"),
            "description": "Accepts encrypted vote shares from wallets and reveals each at the time that its wallet"
            " has set. Every response has an X-Request-Id, by which operators find errors in the log.",
        },
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": schemes} if schemes else {})},
    }


def _response_schemas(operations: Sequence[Operation]) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """A function from a response type to its schema, and the schemas that these refer to."""
    types = [*(operation.response for operation in operations), ErrorResponse, BareErrorResponse, IngressReceipt]
    schemas, shared = TypeAdapter.json_schemas(
        [(kind, "serialization", TypeAdapter(kind)) for kind in dict.fromkeys(types)], ref_template=_COMPONENTS
    )
    return lambda kind: schemas[kind, "serialization"], shared.get("$defs", {})


def _describe_operation(path: str, operation: Operation, schema_of: Callable[[Any], Any]) -> dict[str, Any]:
    scheme = None if operation.authorized_role is None else _SCHEMES[operation.authorized_role][0]
    statuses = sorted({*COMMON_ERROR_STATUSES, *operation.refusals, *((401,) if scheme else ())})
    success = {operation.media_type: {"schema": schema_of(operation.response)}}
    errors = {str(status): _describe_refusal(status, schema_of(_error_type(path, status))) for status in statuses}
    for status in operation.same_content_statuses:
        described_status = errors.setdefault(str(status), {"description": "Success.", "content": {}})
        described_status["content"] = described_status["content"] | success
    if operation.is_forwarded:
        errors["default"] = {"description": "Response of the node.", "content": _json({})}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "Success.", "content": success}, **errors},
    }
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": schema} for name, schema in operation.path.items()
    ]
    in_query = [{"name": name, "in": "query", **parameter} for name, parameter in operation.query.items()]
    if in_path or in_query:
        described["parameters"] = [*in_path, *in_query]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    if scheme:
        described["security"] = [{scheme: []}]
    return described


def _error_type(path: str, status: int) -> Any:
    if status == HTTPStatus.REQUEST_TIMEOUT:
        return IngressReceipt
    return BareErrorResponse if has_bare_error(path, status) else ErrorResponse


def _describe_refusal(status: int, schema: Any) -> dict[str, Any]:
    described = {"description": _REFUSALS[status], "content": _json(schema)}
    return described if retry_after_of(status) is None else {**described, "headers": _RETRY_AFTER}


def _json(schema: Any) -> dict[str, Any]:
    return {_JSON: {"schema": schema}}


def add_document_route(routes: Sequence[BaseRoute], more_routes: Sequence[BaseRoute] = ()) -> list[BaseRoute]:
    """Add the route of the OpenAPI document, which describes all routes.

    Args:
        routes: matched first.
        more_routes: matched last; one of them may match every path.
    """

    @cache
    def get_document() -> bytes:
        return orjson.dumps(generate_document(all_routes))

    async def document(_request: Request) -> Response:
        return Response(get_document(), media_type="application/json")

    operation = Operation("OpenAPI document of this API.", dict[str, Any])
    all_routes = [*routes, ApiRoute("/openapi.json", document, "GET", operation), *more_routes]
    return all_routes
