"""An OpenAPI document as one page of HTML. Pure; every text in it is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, Final

Json = Mapping[str, Any]

_NAME: Final = re.compile(r"[^A-Za-z0-9]+")
_LIMITS: Final = {
    "minimum": "at least",
    "maximum": "at most",
    "minLength": "at least, in characters,",
    "maxLength": "at most, in characters,",
    "minItems": "at least, in entries,",
    "maxItems": "at most, in entries,",
    "pattern": "pattern",
    "default": "else",
    "const": "always",
}


def page(document: Json, *, style: str) -> str:
    """The whole page.

    Args:
        document: as OpenAPI 3.1 has it.
        style: path of the style sheet.
    """
    info = document["info"]
    operations = [
        (path, method, about) for path, methods in document["paths"].items() for method, about in methods.items()
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
        '<p>For programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p></header>',
        "<nav><ul>",
        *(f"<li>{_link(path, method)}</li>" for path, method, _ in operations),
        "</ul></nav><main>",
        *(part for one in operations for part in _operation(*one, document)),
        *_schemas(document),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _anchor(path: str, method: str) -> str:
    return _NAME.sub("-", f"{method}{path}").strip("-").lower()


def _link(path: str, method: str) -> str:
    name = f'<span class="method">{escape(method.upper())}</span> <code>{escape(path)}</code>'
    return f'<a href="#{_anchor(path, method)}">{name}</a>'


def _operation(path: str, method: str, about: Json, document: Json) -> Iterator[str]:
    yield f'<section id="{_anchor(path, method)}">'
    yield f'<h2><span class="method">{escape(method.upper())}</span> <code>{escape(path)}</code></h2>'
    yield f"<p>{escape(about['summary'])}</p>"
    for asked in about.get("security", ()):
        yield f"<p>{escape(_token(document['components']['securitySchemes'][next(iter(asked))]))}</p>"
    if "parameters" in about:
        yield "<h3>Parameters</h3>"
        yield from _table(
            ("name", "where", "what"),
            (
                (f"<code>{escape(one['name'])}</code>", escape(one["in"]), _what(one["schema"], one.get("description")))
                for one in about["parameters"]
            ),
        )
    if "requestBody" in about:
        for kind, content in about["requestBody"]["content"].items():
            yield f"<h3>Body, {escape(kind)}</h3>"
            yield from _fields(content["schema"])
    yield "<h3>Answers</h3>"
    yield from _table(("status", "what", "content"), (_response(*one) for one in about["responses"].items()))
    yield "</section>"


def _token(scheme: Json) -> str:
    if scheme["type"] == "apiKey":
        return f"Asks for a token in the header {scheme['name']}."
    return f"Asks for a token in the header Authorization ({scheme['scheme']})."


def _response(status: str, about: Json) -> tuple[str, str, str]:
    kinds = [f"{escape(kind)}: {_what(one['schema'])}" for kind, one in about.get("content", {}).items()]
    headers = [
        f"<code>{escape(name)}</code>: {escape(one['description'])}" for name, one in about.get("headers", {}).items()
    ]
    return f"<code>{escape(status)}</code>", escape(about["description"]), "<br>".join([*kinds, *headers])


def _schemas(document: Json) -> Iterator[str]:
    """The shapes that answers refer to, each with its fields."""
    for name, schema in document["components"]["schemas"].items():
        yield f'<section id="schema-{escape(name)}"><h2>{escape(name)}</h2>'
        if "description" in schema:
            yield f"<p>{escape(schema['description'])}</p>"
        yield from _fields(schema)
        yield "</section>"


def _fields(schema: Json) -> Iterator[str]:
    """An object's fields, those within it below it."""
    if "properties" not in schema:
        yield f"<p>{_what(schema)}</p>"
        return
    yield from _table(("field", "needed", "what"), _rows(schema, ""))


def _rows(schema: Json, inside: str) -> Iterator[tuple[str, str, str]]:
    for name, one in schema["properties"].items():
        needed = "yes" if name in schema.get("required", ()) else "no"
        yield f"<code>{escape(inside + name)}</code>", needed, _what(one)
        for nested, prefix in ((one, f"{inside}{name}."), (one.get("items", {}), f"{inside}{name}[].")):
            if "properties" in nested:
                yield from _rows(nested, prefix)


def _what(schema: Json, about: str | None = None) -> str:
    """A value in words: its type, its bounds, what it means."""
    limits = [f"{words} {_shown(schema[key])}" for key, words in _LIMITS.items() if key in schema]
    text = "; ".join([_type(schema), *limits])
    meaning = about or schema.get("description", "")
    return f"{text}. {escape(meaning)}" if meaning else text


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#schema-{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(one) for one in schema[key])
    if "enum" in schema:
        return " or ".join(_shown(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object, each value {_type(schema['additionalProperties'])}"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))


def _shown(value: object) -> str:
    return f"<code>{escape(str(value))}</code>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table of cells that are HTML already."""
    yield "<table><thead><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</tbody></table>"
