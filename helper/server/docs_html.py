"""Renders an OpenAPI document as one HTML page. Pure; all text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, Final

Json = Mapping[str, Any]

_NAME: Final = re.compile(r"[^A-Za-z0-9]+")
_LIMITS: Final = {
    "minimum": "minimum",
    "maximum": "maximum",
    "minLength": "minimum length",
    "maxLength": "maximum length",
    "minItems": "minimum items",
    "maxItems": "maximum items",
    "pattern": "pattern",
    "default": "default",
    "const": "constant",
}


def render_page(document: Json, *, style: str) -> str:
    """Render the page.

    Args:
        document: an OpenAPI 3.1 document.
        style: path of the style sheet.
    """
    info = document["info"]
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(info['title'])}: API</title>",
        f'<link rel="stylesheet" href="{escape(style)}"></head><body>',
        f"<header><h1>{escape(info['title'])}</h1>",
        f"<p>Version {escape(info['version'])}. {escape(info['description'])}</p>",
        '<p>Machine-readable: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p></header>',
        "<nav><ul>",
        *(f"<li>{_link(path, method)}</li>" for path, method, _ in operations),
        "</ul></nav><main>",
        *(part for operation in operations for part in _render_operation(*operation, document)),
        *_render_schemas(document),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _anchor(path: str, method: str) -> str:
    return _NAME.sub("-", f"{method}{path}").strip("-").lower()


def _link(path: str, method: str) -> str:
    name = f'<span class="method">{escape(method.upper())}</span> <code>{escape(path)}</code>'
    return f'<a href="#{_anchor(path, method)}">{name}</a>'


def _render_operation(path: str, method: str, operation: Json, document: Json) -> Iterator[str]:
    yield f'<section id="{_anchor(path, method)}">'
    yield f'<h2><span class="method">{escape(method.upper())}</span> <code>{escape(path)}</code></h2>'
    yield f"<p>{escape(operation['summary'])}</p>"
    for requirement in operation.get("security", ()):
        yield f"<p>{escape(_describe_token(document['components']['securitySchemes'][next(iter(requirement))]))}</p>"
    if "parameters" in operation:
        yield "<h3>Parameters</h3>"
        yield from _render_table(("name", "in", "description"), map(_parameter, operation["parameters"]))
    if "requestBody" in operation:
        for kind, content in operation["requestBody"]["content"].items():
            yield f"<h3>Request body, {escape(kind)}</h3>"
            yield from _render_fields(content["schema"])
    yield "<h3>Responses</h3>"
    responses = (_response(status, response) for status, response in operation["responses"].items())
    yield from _render_table(("status", "description", "content"), responses)
    yield "</section>"


def _describe_token(scheme: Json) -> str:
    if scheme["type"] == "apiKey":
        return f"Requires a token in the header {scheme['name']}."
    return f"Requires a token in the header Authorization ({scheme['scheme']})."


def _parameter(parameter: Json) -> tuple[str, str, str]:
    description = _describe(parameter["schema"], parameter.get("description"))
    return f"<code>{escape(parameter['name'])}</code>", escape(parameter["in"]), description


def _response(status: str, response: Json) -> tuple[str, str, str]:
    kinds = [f"{escape(kind)}: {_describe(content['schema'])}" for kind, content in response.get("content", {}).items()]
    headers = [
        f"<code>{escape(name)}</code>: {escape(header['description'])}"
        for name, header in response.get("headers", {}).items()
    ]
    return f"<code>{escape(status)}</code>", escape(response["description"]), "<br>".join([*kinds, *headers])


def _render_schemas(document: Json) -> Iterator[str]:
    """The schemas that responses refer to, each with its fields."""
    for name, schema in document["components"]["schemas"].items():
        yield f'<section id="schema-{escape(name)}"><h2>{escape(name)}</h2>'
        if "description" in schema:
            yield f"<p>{escape(schema['description'])}</p>"
        yield from _render_fields(schema)
        yield "</section>"


def _render_fields(schema: Json) -> Iterator[str]:
    """The fields of an object, nested fields after their parent."""
    if "properties" not in schema:
        yield f"<p>{_describe(schema)}</p>"
        return
    yield from _render_table(("field", "required", "description"), _rows(schema, ""))


def _rows(schema: Json, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in schema["properties"].items():
        required = "yes" if name in schema.get("required", ()) else "no"
        yield f"<code>{escape(prefix + name)}</code>", required, _describe(field)
        for nested, inner in ((field, f"{prefix}{name}."), (field.get("items", {}), f"{prefix}{name}[].")):
            if "properties" in nested:
                yield from _rows(nested, inner)


def _describe(schema: Json, description: str | None = None) -> str:
    """The type, limits and description of a value."""
    limits = [f"{label} {_code(schema[key])}" for key, label in _LIMITS.items() if key in schema]
    text = "; ".join([_describe_type(schema), *limits])
    description = description or schema.get("description", "")
    return f"{text}. {escape(description)}" if description else text


def _describe_type(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#schema-{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_describe_type(option) for option in schema[key])
    if "enum" in schema:
        return " or ".join(_code(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_describe_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object, each value {_describe_type(schema['additionalProperties'])}"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))


def _code(value: object) -> str:
    return f"<code>{escape(str(value))}</code>"


def _render_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table; its cells are already HTML."""
    yield "<table><thead><tr>" + "".join(f"<th>{escape(head)}</th>" for head in headings) + "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</tbody></table>"
