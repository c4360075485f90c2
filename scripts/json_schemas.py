"""Generate the JSON schemas of the commands whose output is described by classes.

`python -m scripts.json_schemas` writes them to docs/schemas. A test compares them with the classes.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from helper.cli.doctor import DoctorReport
from helper.cli.healthcheck import HealthReport
from helper.observability.queue_snapshot import Overview, QueueStats
from helper.observability.service_state import ServiceState
from helper.server.operator_json import RoundList, ShareList, ShareStory
from scripts.cli_docs import SCHEMAS

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_ROUND_ID = {"pattern": "^[0-9a-f]{64}$"}


class _WrittenJson(GenerateJsonSchema):
    """Describes JSON that is written: every field is present."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a class by the first paragraph of its docstring, and its fields by the section `Attributes`."""
        described = super().dataclass_schema(schema)
        del described["title"]
        text, _, attributes = inspect.cleandoc(described["description"]).partition("Attributes:\n")
        described["description"] = " ".join(text.split("\n\n")[0].split())
        for name, about in _ATTRIBUTE.findall(attributes):
            sentence = " ".join(about.split()).replace("None", "null")
            described["properties"][name].setdefault("description", sentence[0].upper() + sentence[1:])
        if schema["cls"] is ServiceState:
            described["required"] = list(ServiceState().to_json())
        return described

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a field without its default, which is for readers of another version's JSON."""
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a value that can be null, without `anyOf` if it is not an object."""
        described = super().nullable_schema(schema)
        value, null = described["anyOf"]
        return {**value, "type": [value["type"], null["type"]]} if "type" in value else described

    def field_is_required(self, field: Any, total: bool) -> bool:  # noqa: ARG002 - the signature of pydantic
        """Report that the field is always written."""
        return True

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Report that the name of a field is sufficient."""
        return False


class _Totals(_WrittenJson):
    """Describes totals, whose integers are not negative."""

    def int_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe an integer."""
        return {**super().int_schema(schema), "minimum": 0}


class _ClosedTotals(_Totals):
    """Describes totals to which no properties are added."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a class."""
        return {**super().dataclass_schema(schema), "additionalProperties": False}


def render_schemas() -> dict[str, str]:
    """Return the text of each generated schema by its name."""
    stats, service = _describe(QueueStats, _ClosedTotals), _describe(ServiceState, _WrittenJson)
    stats["properties"] |= {"service": service}
    stats["properties"]["rounds"]["propertyNames"] = _ROUND_ID
    stats["$defs"] |= service.pop("$defs")
    state = _describe(Overview, _Totals)
    state["$defs"]["RoundOverview"]["properties"]["round_id"] |= _ROUND_ID
    definitions = state.pop("$defs")
    gone = {"type": "string", "description": "Why no state is available."}
    events = [
        _describe_record(event={"const": "state"}, state=state),
        _describe_record(event={"const": "gone"}, reason=gone),
    ]
    shares, rounds, story = (_describe(kind, _ClosedTotals) for kind in (ShareList, RoundList, ShareStory))
    shares["required"].remove("failed")
    rounds["$defs"]["RoundRow"]["properties"]["round"] |= _ROUND_ID
    story["$defs"]["TransactionRow"]["properties"]["hash"] |= {"pattern": "^[0-9A-F]{64}$"}
    schemas = {
        "doctor": _describe(DoctorReport, _ClosedTotals),
        "healthcheck": _describe(HealthReport, _ClosedTotals),
        "queue list": shares,
        "queue show": story,
        "queue stats": stats,
        "queue watch": {"description": "Each line.", "oneOf": events, "$defs": definitions},
        "rounds": rounds,
    }
    return {command.replace(" ", "-"): _render(command, schema) for command, schema in schemas.items()}


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
