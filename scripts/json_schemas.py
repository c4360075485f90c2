"""Generate the JSON schemas of the commands' output from the classes that describe it.

`python -m scripts.json_schemas` writes them to docs/schemas. A test compares them with the classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

import audit.check_results
import conformance.runner
import devnet.demo.report
from helper.cli import admin, chain, config, db, demo, doctor, healthcheck, plan, proof, queue_transfer, version
from helper.cli.main import COMMANDS
from helper.observability import queue_snapshot
from helper.observability.queue_snapshot import Overview
from helper.observability.service_state import ServiceState
from helper.server import operator_json, operator_routes
from scripts.cli_docs import SCHEMAS

Schema = dict[str, Any]

MODULES = (
    *(audit.check_results, conformance.runner, devnet.demo.report, queue_snapshot, operator_json, operator_routes),
    *(admin, chain, config, db, demo, doctor, healthcheck, plan, proof, queue_transfer, version),
)
"""Modules with classes of `--json` output. The docstring of such a class begins with the commands that write it."""
_COMMAND = re.compile(r"`([a-z ]+)(?: --json)?`")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ROUND_ID = {"pattern": "^[0-9a-f]{64}$"}


class _WrittenJson(GenerateJsonSchema):
    """Describes JSON that is written: every field is present."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a class by the first paragraph of its docstring."""
        described = super().dataclass_schema(schema)
        del described["title"]
        kind = schema["cls"]
        described["description"] = _first_paragraph(kind)
        for each in dataclasses.fields(kind):
            if each.metadata.get("optional"):
                name = each.metadata.get("serialization_alias", each.name)
                described["required"].remove(name)
                described["properties"][name] = _without_null(described["properties"][name])
        if kind is ServiceState:
            described["required"] = list(ServiceState().to_json())
        return described

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a field without its default, which is for readers of another version's JSON."""
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a value that can be null, without `anyOf` if it is not an object."""
        described = super().nullable_schema(schema)
        value, null = described["anyOf"]
        if "type" not in value:
            return described
        values = {"enum": [*value["enum"], None]} if "enum" in value else {}
        return {**value, "type": [value["type"], null["type"]], **values}

    def enum_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe an enumeration by the first paragraph of its docstring."""
        described = super().enum_schema(schema)
        return {**described, "description": _first_paragraph(schema["cls"])}

    def field_is_required(self, field: Any, total: bool) -> bool:  # noqa: ARG002 - the signature of pydantic
        """Report that the field is always written."""
        return True

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Report that the name of a field is sufficient."""
        return False


class _ClosedJson(_WrittenJson):
    """Describes documents to which no properties are added."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a class."""
        return {**super().dataclass_schema(schema), "additionalProperties": False}


class _Totals(_WrittenJson):
    """Describes documents whose integers are not negative."""

    def int_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe an integer."""
        return {"minimum": 0, **super().int_schema(schema)}


class _ClosedTotals(_Totals, _ClosedJson):
    """Describes documents with both."""


_GENERATORS: dict[str, type[GenerateJsonSchema]] = {"db copy": _ClosedJson, "demo": _Totals}
"""Commands whose output has negative integers, or gets more properties."""


def _list_documents() -> Iterator[tuple[str, type]]:
    """Yield each command and the class of its output."""
    for module in MODULES:
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__:
                sentence = _first_paragraph(kind).partition(":")[0]
                yield from ((name, kind) for name in _COMMAND.findall(sentence) if name in COMMANDS)


def render_schemas() -> dict[str, str]:
    """Return the text of each schema by its name."""
    documents = dict(_list_documents())
    schemas = {command: _describe(kind, _GENERATORS.get(command, _ClosedTotals)) for command, kind in documents.items()}
    stats, service = schemas["queue stats"], _describe(ServiceState, _WrittenJson)
    stats["properties"] |= {"service": service}
    stats["properties"]["rounds"]["propertyNames"] = _ROUND_ID
    stats["$defs"] |= service.pop("$defs")
    schemas["proof verify"]["properties"] |= _describe(proof.BundleFields, _ClosedTotals)["properties"]
    state = _describe(Overview, _Totals)
    definitions = state.pop("$defs")
    gone = {"type": "string", "description": "Why no state is available."}
    events = [
        _describe_record(event={"const": "state"}, state=state),
        _describe_record(event={"const": "gone"}, reason=gone),
    ]
    schemas |= {
        "queue watch": {"description": "Each line.", "oneOf": events, "$defs": definitions},
    }
    return {command.replace(" ", "-"): _render(command, schema) for command, schema in schemas.items()}


def _first_paragraph(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


def _without_null(schema: Schema) -> Schema:
    """Return the schema of a value that is absent instead of null."""
    if "anyOf" in schema:
        value = next(each for each in schema.pop("anyOf") if each != {"type": "null"})
        return {**value, **schema}
    return {**schema, "type": schema["type"][0]}


def _render(command: str, schema: Schema) -> str:
    title = f"svote-helper {command} --json"
    return json.dumps({"$schema": _DIALECT, "title": title, **schema}, indent=2) + "\n"


def _describe(kind: type, generator: type[GenerateJsonSchema]) -> Schema:
    return TypeAdapter(kind).json_schema(schema_generator=generator, mode="serialization")


def _describe_record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    for name, text in render_schemas().items():
        (SCHEMAS / f"{name}.json").write_text(text)
