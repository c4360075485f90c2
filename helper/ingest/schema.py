"""Field types of JSON payloads, with OpenAPI schemas and error texts. Pure.

Native code validates payloads (`proofs.read_shares`) and returns the invalid field and the reason; this module has the
texts. No error text contains a value of the request: a witness field must not appear in a response or a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from proofs import InvalidReason

_BASE64_32: Final = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
_HEX_32: Final = re.compile(r"[0-9a-fA-F]{64}")
_LOWER_HEX_32: Final = re.compile(r"[0-9a-f]{64}")
_FIELD_BYTES: Final = 32
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


class PayloadError(Exception):
    """A payload or path parameter is not valid.

    Attributes:
        field: name of the invalid field, as on the wire (`enc_share.c1`, `share_comms[3]`), or `body`.
        message: why it is invalid, without its value.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class IntegerField:
    """An integer from `minimum` to `maximum`; optional if it has a default."""

    description: str
    minimum: int
    maximum: int
    default: int | None = None

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


@dataclass(frozen=True, slots=True)
class Base64Field:
    """32 bytes in base64."""

    description: str

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


@dataclass(frozen=True, slots=True)
class HexField:
    """32 bytes as 64 hex characters, in lower case unless `allows_upper_case`."""

    description: str
    allows_upper_case: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """The valid texts."""
        return _HEX_32 if self.allows_upper_case else _LOWER_HEX_32

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _string_schema(self.pattern, self.description)

    def messages(self, _actual: int | None) -> Messages:
        """Not a string of hex characters."""
        kind = "a string of 64 hex characters" if self.allows_upper_case else "64 lower-case hex characters"
        return {"not-hex": f"must be {kind}"}


@dataclass(frozen=True, slots=True)
class ArrayField:
    """An array of `count` values of 32 bytes."""

    description: str
    count: int
    item: Base64Field

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


Field = IntegerField | Base64Field | HexField | ArrayField | ObjectField
"""A field type. `schema` is its JSON Schema (draft 2020-12, as in OpenAPI 3.1).

`messages` are its error texts by reason; `actual` is the number of entries or bytes that a text contains.
"""


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
