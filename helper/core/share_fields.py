"""Types of the fields of a posted share: JSON, its schema, error texts, and the width in a row. Pure.

`helper.core.share.Share` is the table of the fields. Native code validates them (`proofs/src/payload.rs`) and returns
the invalid field and the reason; the texts are here. No text contains a value of the request: a witness field must not
appear in a response or a log.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from proofs import InvalidReason

_FIELD_BYTES: Final = 32
_BASE64_32: Final = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
_HEX_32: Final = re.compile(r"[0-9a-fA-F]{64}")
_MESSAGES: Final[Mapping[InvalidReason, str]] = {
    "not-utf8": "is not UTF-8",
    "not-json": "is not valid JSON here",
    "missing": "is missing",
    "non-canonical": "is not a canonical field element",
    "off-curve": "is not a point on the curve",
    "identity": "must not be the identity",
    "shares_hash": "is not the hash of share_comms",
    "share_comm": "is not the commitment to primary_blind and enc_share",
}
"""Texts that are the same for all types of fields, by reason."""

Messages = Mapping["InvalidReason", str]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class IntegerField:
    """An integer from `minimum` to `maximum`; optional if it has a default."""

    description: str
    minimum: int
    maximum: int
    default: int | None = None

    @property
    def row_format(self) -> str:
        """The integer in a row, as in `struct`."""
        return "I" if self.maximum < 1 << 32 else "q"

    def schema(self) -> Schema:
        """The schema: an integer with bounds."""
        schema: Schema = {
            "type": "integer",
            "minimum": self.minimum,
            "maximum": self.maximum,
            "description": self.description,
        }
        if self.default is not None:
            schema |= {"type": ["integer", "null"], "default": self.default}
        return schema

    def messages(self, _actual: int | None) -> Messages:
        """Not an integer, or out of range."""
        bounds = f"from {self.minimum} to {self.maximum}"
        return {"type": f"must be an integer {bounds}", "range": f"must be {bounds}"}

    def encode(self, value: int) -> int:
        """Return the integer."""
        return value

    def decode(self, value: object) -> int:
        """Return the integer, or its default for null. Raises TypeError if it is not an integer."""
        if value is None and self.default is not None:
            return self.default
        if type(value) is not int:
            raise TypeError("not an integer")
        return value


@dataclass(frozen=True, slots=True)
class Base64Field:
    """32 bytes in base64."""

    description: str
    row_format = f"{_FIELD_BYTES}s"

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _string_schema(_BASE64_32, self.description) | {"contentEncoding": "base64"}

    def messages(self, actual: int | None) -> Messages:
        """Not a string, not base64, or of another length."""
        return {
            "type": f"must be a string, base64 of {_FIELD_BYTES} bytes",
            "not-base64": f"must be standard base64 with padding, of {_FIELD_BYTES} bytes",
            "length": f"must be {_FIELD_BYTES} bytes, not {actual}",
        }

    def encode(self, value: bytes) -> str:
        """Return the base64 of 32 bytes."""
        return b64encode(value).decode()

    def decode(self, value: Any) -> bytes:
        """Return the 32 bytes. Raises TypeError or ValueError."""
        if _BASE64_32.fullmatch(value) is None:
            raise ValueError("not base64")
        return b64decode(value)


@dataclass(frozen=True, slots=True)
class HexField:
    """32 bytes as 64 hex characters."""

    description: str
    row_format = f"{_FIELD_BYTES}s"

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _string_schema(_HEX_32, self.description)

    def messages(self, _actual: int | None) -> Messages:
        """Not a string of hex characters."""
        return {"not-hex": "must be a string of 64 hex characters"}

    def encode(self, value: bytes) -> str:
        """Return the hex of 32 bytes."""
        return value.hex()

    def decode(self, value: Any) -> bytes:
        """Return the 32 bytes. Raises TypeError or ValueError."""
        if _HEX_32.fullmatch(value) is None:
            raise ValueError("not hex")
        return bytes.fromhex(value)


@dataclass(frozen=True, slots=True)
class ArrayField:
    """An array of `count` values of 32 bytes."""

    description: str
    count: int
    item: Base64Field

    @property
    def row_format(self) -> str:
        """The values in a row, concatenated."""
        return f"{self.count * _FIELD_BYTES}s"

    def schema(self) -> Schema:
        """The schema: an array of a fixed length."""
        size = {"minItems": self.count, "maxItems": self.count}
        return {"type": "array", "items": self.item.schema(), **size, "description": self.description}

    def messages(self, actual: int | None) -> Messages:
        """Not an array, or of another length."""
        return {
            "type": f"must be a list of {self.count}",
            "count": f"must have {self.count} entries, not {actual}",
        }

    def encode(self, value: bytes) -> list[str]:
        """Return the base64 of each value."""
        return [self.item.encode(value[start : start + _FIELD_BYTES]) for start in range(0, len(value), _FIELD_BYTES)]

    def decode(self, value: Any) -> bytes:
        """Return the values, concatenated. Raises TypeError or ValueError."""
        if not isinstance(value, list) or len(value) != self.count:
            raise ValueError("not a list of this length")
        return b"".join(map(self.item.decode, value))


@dataclass(frozen=True, slots=True)
class ObjectField:
    """An object; its fields are validated in their order."""

    description: str
    fields: Mapping[str, Field]
    kind: str = "an object"

    def schema(self) -> Schema:
        """The schema: an object. Unknown names are ignored, so additional properties are allowed."""
        return {
            "type": "object",
            "properties": {key: field.schema() for key, field in self.fields.items()},
            "required": [
                key
                for key, field in self.fields.items()
                if not (isinstance(field, IntegerField) and field.default is not None)
            ],
            "description": self.description,
        }

    def messages(self, _actual: int | None) -> Messages:
        """Not an object."""
        return {"type": f"must be {self.kind}"}


ValueField = IntegerField | Base64Field | HexField | ArrayField
"""The type of a value. `encode` and `decode` convert it to JSON and back; `decode` does not check ranges and points."""
Field = ValueField | ObjectField
"""A field type. `schema` is its JSON Schema (draft 2020-12, as in OpenAPI 3.1).

`messages` are its error texts by reason; `actual` is the number of entries or bytes that a text contains.
"""


class ShareField(NamedTuple):
    """A field of a share. Its name in JSON is that in errors: `enc_share.c1`."""

    name: str
    json_name: str
    type: ValueField


def list_fields(share_class: type) -> tuple[ShareField, ...]:
    """Return the fields of a class whose annotations have a type and, if it differs, a name in JSON."""
    fields = []
    for name, hint in get_type_hints(share_class, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            kind, *json_name = hint.__metadata__
            fields.append(ShareField(name, json_name[0] if json_name else name, kind))
    return tuple(fields)


def nest_fields(fields: Sequence[ShareField], objects: Mapping[str, str]) -> dict[str, Field]:
    """Return the fields of the JSON object by name.

    Args:
        fields: the fields, at most one level deep.
        objects: the descriptions of inner objects by name.
    """
    outer: dict[str, Field] = {}
    inner: dict[str, dict[str, Field]] = {name: {} for name in objects}
    for field in fields:
        name, _, key = field.json_name.partition(".")
        if key:
            inner[name][key] = field.type
        outer[name] = ObjectField(objects[name], inner[name]) if key else field.type
    return outer


def error_message(field: Field | None, reason: InvalidReason, actual: int | None = None) -> str:
    """Why a field is invalid.

    Args:
        field: the invalid field; None if it is not one of these types.
        reason: one of `proofs.InvalidReason`.
        actual: the actual number of entries or bytes, for the reasons that have one.
    """
    own: Messages = {} if field is None else field.messages(actual)
    return own.get(reason) or _MESSAGES[reason]


def wire_names(fields: Mapping[str, Field], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """All fields by their name in errors: `enc_share.c1`, `share_comms[3]`."""
    for key, field in fields.items():
        name = prefix + key
        yield name, field
        if isinstance(field, ObjectField):
            yield from wire_names(field.fields, f"{name}.")
        elif isinstance(field, ArrayField):
            yield from ((f"{name}[{index}]", field.item) for index in range(field.count))


def _string_schema(pattern: re.Pattern[str], description: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern.pattern}$", "description": description}
