"""Generate the JSON schemas of the commands' output from the classes that describe it.

`python -m scripts.json_schemas` writes them to docs/schemas. A test compares them with the classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from audit.check_results import AuditDocument
from conformance.runner import Report
from devnet.demo.report import DemoOutcome
from helper.cli.admin import PendingList, RegisteredValidator
from helper.cli.chain import PublicTransaction
from helper.cli.config import CheckedSettings, CreatedSettings, ShownSettings
from helper.cli.db import BackupResult, CheckedFile, MovedQueue, RestoreResult, RewrittenFile, UpgradeResult
from helper.cli.demo import VoteOutcome
from helper.cli.doctor import DoctorReport
from helper.cli.healthcheck import HealthReport
from helper.cli.plan import PlannedRound
from helper.cli.proof import BundleFields, ExportedBundle, VerifiedBundle
from helper.cli.queue_transfer import ExportResult
from helper.cli.version import Versions
from helper.observability.queue_snapshot import Overview, QueueStats
from helper.observability.service_state import ServiceState
from helper.server.operator_json import (
    ActionList,
    ImportSummary,
    PurgeResult,
    RescanState,
    RetryResult,
    RoundList,
    ShareList,
    ShareStory,
)
from scripts.cli_docs import SCHEMAS

Schema = dict[str, Any]

CLOSED = {
    "admin pending": PendingList,
    "admin register": RegisteredValidator,
    "audit": AuditDocument,
    "chain rescan": RescanState,
    "config init": CreatedSettings,
    "config show": ShownSettings,
    "config validate": CheckedSettings,
    "conformance": Report,
    "db backup": BackupResult,
    "db check": CheckedFile,
    "db decrypt": RewrittenFile,
    "db encrypt": RewrittenFile,
    "db migrate": UpgradeResult,
    "db restore": RestoreResult,
    "doctor": DoctorReport,
    "healthcheck": HealthReport,
    "plan": PlannedRound,
    "proof export": ExportedBundle,
    "proof verify": VerifiedBundle,
    "queue audit": ActionList,
    "queue export": ExportResult,
    "queue import": ImportSummary,
    "queue list": ShareList,
    "queue purge": PurgeResult,
    "queue retry": RetryResult,
    "queue show": ShareStory,
    "queue stats": QueueStats,
    "rounds": RoundList,
    "tx lookup": PublicTransaction,
    "version": Versions,
    "wallet vote": VoteOutcome,
}
"""The documents to which no properties are added, by command. Their integers are not negative."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_ROUND_ID = {"pattern": "^[0-9a-f]{64}$"}


class _WrittenJson(GenerateJsonSchema):
    """Describes JSON that is written: every field is present."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a class by the first paragraph of its docstring, and its fields by the section `Attributes`."""
        described = super().dataclass_schema(schema)
        del described["title"]
        kind = schema["cls"]
        described["description"] = _first_paragraph(kind)
        for base in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
            _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
            for name, about in _ATTRIBUTE.findall(attributes):
                sentence = " ".join(about.split()).replace("None", "null")
                described["properties"][name].setdefault("description", sentence[0].upper() + sentence[1:])
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


def render_schemas() -> dict[str, str]:
    """Return the text of each schema by its name."""
    schemas = {command: _describe(kind, _ClosedTotals) for command, kind in CLOSED.items()}
    stats, service = schemas["queue stats"], _describe(ServiceState, _WrittenJson)
    stats["properties"] |= {"service": service}
    stats["properties"]["rounds"]["propertyNames"] = _ROUND_ID
    stats["$defs"] |= service.pop("$defs")
    schemas["proof verify"]["properties"] |= _describe(BundleFields, _ClosedTotals)["properties"]
    state = _describe(Overview, _Totals)
    definitions = state.pop("$defs")
    gone = {"type": "string", "description": "Why no state is available."}
    events = [
        _describe_record(event={"const": "state"}, state=state),
        _describe_record(event={"const": "gone"}, reason=gone),
    ]
    schemas |= {
        "db copy": _describe(MovedQueue, _ClosedJson),
        "demo": _describe(DemoOutcome, _Totals),
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
