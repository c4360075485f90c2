"""Field types of JSON payloads: each parses a value and generates its OpenAPI schema. Pure.

The table of fields `helper.ingest.payload.SHARE` both parses payloads and generates the API's documentation.

Where JSON and base64 leave a choice:

- base64 is the standard alphabet with padding and nothing else, not even line breaks. Only the canonical encoding is
  valid (the unused bits of the last character are zero). Real wallets write exactly this.
- Integers are JSON integers: no `1.0`, no `1e3`, no strings, no booleans.
- `null` means that a field is absent; only an integer with a default may be absent.
- Names are case-sensitive; the last of repeated names counts; unknown names are ignored.
- No error text contains a value of the request: a witness field must not appear in a response or a log.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

_BASE64_32: Final = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
_HEX_32: Final = re.compile(r"[0-9a-fA-F]{64}")
_LOWER_HEX_32: Final = re.compile(r"[0-9a-f]{64}")
_FIELD_BYTES: Final = 32

Schema = dict[str, Any]


class WireError(Exception):
    """A payload or path parameter is not valid.

    Attributes:
        field: name of the invalid field, as on the wire (`enc_share.c1`, `share_comms[3]`), or `body`.
        message: why it is invalid, without its value.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Field(Protocol):
    """A field type."""

    @property
    def optional(self) -> bool:
        """Whether the field may be absent."""
        ...

    def read(self, name: str, value: Any) -> Any:
        """Parse a JSON value; None is an absent field.

        Raises:
            WireError: the value is not valid.
        """
        ...

    def schema(self) -> Schema:
        """It as JSON Schema (2020-12, as OpenAPI 3.1 has it)."""
        ...


@dataclass(frozen=True, slots=True)
class IntegerField:
    """An integer from `least` to `most`; optional if it has a default."""

    about: str
    least: int
    most: int
    default: int | None = None

    @property
    def optional(self) -> bool:
        """Whether it has a default."""
        return self.default is not None

    def read(self, name: str, value: Any) -> int:
        """Parse an integer; booleans and floats such as 1.0 are not valid."""
        if value is None and self.default is not None:
            return self.default
        if type(value) is not int:  # isinstance() would accept a bool
            # The JSON parser returns integers beyond 64 bits as float; these are out of range anyway.
            raise WireError(name, f"must be an integer from {self.least} to {self.most}")
        if not self.least <= value <= self.most:
            raise WireError(name, f"must be from {self.least} to {self.most}")
        return value

    def schema(self) -> Schema:
        """The schema: an integer with bounds."""
        schema: Schema = {"type": "integer", "minimum": self.least, "maximum": self.most, "description": self.about}
        if self.default is not None:
            schema |= {"type": ["integer", "null"], "default": self.default}
        return schema


@dataclass(frozen=True, slots=True)
class Base64Field:
    """32 bytes in base64."""

    about: str
    optional: bool = False

    def read(self, name: str, value: Any) -> bytes:
        """Decode the 32 bytes."""
        if not isinstance(value, str):
            raise WireError(name, f"must be a string, base64 of {_FIELD_BYTES} bytes")
        if _BASE64_32.fullmatch(value) is None:
            raise WireError(name, _base64_error(value))
        return binascii.a2b_base64(value)

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _text(_BASE64_32, self.about) | {"contentEncoding": "base64"}


@dataclass(frozen=True, slots=True)
class HexField:
    """32 bytes as 64 hex characters, in lower case unless `any_case`."""

    about: str
    any_case: bool = False
    optional: bool = False

    def read(self, name: str, value: Any) -> bytes:
        """Decode the 32 bytes."""
        if not isinstance(value, str) or _pattern_of(self).fullmatch(value) is None:
            kind = "a string of 64 hex characters" if self.any_case else "64 lower-case hex characters"
            raise WireError(name, f"must be {kind}")
        return bytes.fromhex(value)

    def schema(self) -> Schema:
        """The schema: a string with a pattern."""
        return _text(_pattern_of(self), self.about)


@dataclass(frozen=True, slots=True)
class ArrayField:
    """An array of `count` values of 32 bytes."""

    about: str
    count: int
    each: Base64Field
    optional: bool = False

    def read(self, name: str, value: Any) -> bytes:
        """Decode all values and concatenate them."""
        if not isinstance(value, list):
            raise WireError(name, f"must be a list of {self.count}")
        if len(value) != self.count:
            raise WireError(name, f"must have {self.count} entries, not {len(value)}")
        return b"".join(self.each.read(f"{name}[{index}]", entry) for index, entry in enumerate(value))

    def schema(self) -> Schema:
        """The schema: an array of a fixed length."""
        size = {"minItems": self.count, "maxItems": self.count}
        return {"type": "array", "items": self.each.schema(), **size, "description": self.about}


@dataclass(frozen=True, slots=True)
class ObjectField:
    """An object; its fields are validated in their order."""

    about: str
    fields: Mapping[str, Field]
    optional: bool = False

    def read(self, name: str, value: Any) -> dict[str, Any]:
        """Parse each field; returns the values by name."""
        if not isinstance(value, dict):
            raise WireError(name, "must be an object")
        prefix = f"{name}." if name else ""
        parsed = {}
        for key, field in self.fields.items():
            entry = value.get(key)
            if entry is None and not field.optional:
                raise WireError(prefix + key, "is missing")
            parsed[key] = field.read(prefix + key, entry)
        return parsed

    def schema(self) -> Schema:
        """The schema: an object. Unknown names are ignored, so additional properties are allowed."""
        return {
            "type": "object",
            "properties": {key: field.schema() for key, field in self.fields.items()},
            "required": [key for key, field in self.fields.items() if not field.optional],
            "description": self.about,
        }


def _pattern_of(field: HexField) -> re.Pattern[str]:
    return _HEX_32 if field.any_case else _LOWER_HEX_32


def _text(pattern: re.Pattern[str], about: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern.pattern}$", "description": about}


def _base64_error(value: str) -> str:
    """Why a text is not canonical base64 of 32 bytes: its length or its encoding."""
    try:
        length = len(binascii.a2b_base64(value.encode("ascii"), strict_mode=True))
    except (binascii.Error, UnicodeEncodeError):
        length = _FIELD_BYTES
    if length == _FIELD_BYTES:
        return f"must be standard base64 with padding, of {_FIELD_BYTES} bytes"
    return f"must be {_FIELD_BYTES} bytes, not {length}"
