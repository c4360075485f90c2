"""The kinds of fields that a JSON payload is made of: each can read a value and describe itself. Pure.

One table of fields (`helper.ingest.payload.SHARE`) is what payloads are read by and what the API's document shows.

Choices where JSON and base64 leave some:

- base64 is the standard alphabet with its padding and nothing else, not even line breaks, and one spelling
  for one value (the unused bits of the last character are zero). Real wallets write exactly this.
- integers are JSON integers: no `1.0`, no `1e3`, no strings, no booleans.
- `null` means that a field is absent; only an integer with a default may be.
- names are matched exactly; of a repeated name the last one counts; unknown names are ignored.
- no message repeats a value that was sent: a witness field must not come back in an error or reach a log.
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
    """What was sent is not what it should be.

    Attributes:
        field: what is wrong, as the wallet names it (`enc_share.c1`, `share_comms[3]`), or `body`.
        message: what is wrong with it, without its value.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Field(Protocol):
    """One kind of field."""

    @property
    def optional(self) -> bool:
        """Whether it may be absent."""
        ...

    def read(self, name: str, value: Any) -> Any:
        """What a JSON value stands for; None for an absent one.

        Raises:
            WireError: it stands for nothing; says what is wrong with the field of this name.
        """
        ...

    def schema(self) -> Schema:
        """It as JSON Schema (2020-12, as OpenAPI 3.1 has it)."""
        ...


@dataclass(frozen=True, slots=True)
class IntegerField:
    """An integer from least to most; one with a default may be absent."""

    about: str
    least: int
    most: int
    default: int | None = None

    @property
    def optional(self) -> bool:
        """Whether it has a default."""
        return self.default is not None

    def read(self, name: str, value: Any) -> int:
        """The number; a bool is none, nor is 1.0."""
        if value is None and self.default is not None:
            return self.default
        if type(value) is not int:  # a bool is an int to isinstance
            # beyond 64 bits the JSON parser has only a float left, which is out of range anyway
            raise WireError(name, f"must be an integer from {self.least} to {self.most}")
        if not self.least <= value <= self.most:
            raise WireError(name, f"must be from {self.least} to {self.most}")
        return value

    def schema(self) -> Schema:
        """An integer with its bounds."""
        told: Schema = {"type": "integer", "minimum": self.least, "maximum": self.most, "description": self.about}
        if self.default is not None:
            told |= {"type": ["integer", "null"], "default": self.default}
        return told


@dataclass(frozen=True, slots=True)
class Base64Field:
    """32 bytes as base64."""

    about: str
    optional: bool = False

    def read(self, name: str, value: Any) -> bytes:
        """The 32 bytes."""
        if not isinstance(value, str):
            raise WireError(name, f"must be a string, base64 of {_FIELD_BYTES} bytes")
        if _BASE64_32.fullmatch(value) is None:
            raise WireError(name, _what_is_wrong(value))
        return binascii.a2b_base64(value)

    def schema(self) -> Schema:
        """A string of one pattern."""
        return _text(_BASE64_32, self.about) | {"contentEncoding": "base64"}


@dataclass(frozen=True, slots=True)
class HexField:
    """32 bytes as 64 hex characters, lower case unless any case will do."""

    about: str
    any_case: bool = False
    optional: bool = False

    def read(self, name: str, value: Any) -> bytes:
        """The 32 bytes."""
        if not isinstance(value, str) or _pattern_of(self).fullmatch(value) is None:
            kind = "a string of 64 hex characters" if self.any_case else "64 lower-case hex characters"
            raise WireError(name, f"must be {kind}")
        return bytes.fromhex(value)

    def schema(self) -> Schema:
        """A string of one pattern."""
        return _text(_pattern_of(self), self.about)


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A list of so many values of 32 bytes."""

    about: str
    count: int
    each: Base64Field
    optional: bool = False

    def read(self, name: str, value: Any) -> bytes:
        """All of them, one after the other."""
        if not isinstance(value, list):
            raise WireError(name, f"must be a list of {self.count}")
        if len(value) != self.count:
            raise WireError(name, f"must have {self.count} entries, not {len(value)}")
        return b"".join(self.each.read(f"{name}[{index}]", one) for index, one in enumerate(value))

    def schema(self) -> Schema:
        """A list of exactly so many."""
        size = {"minItems": self.count, "maxItems": self.count}
        return {"type": "array", "items": self.each.schema(), **size, "description": self.about}


@dataclass(frozen=True, slots=True)
class ObjectField:
    """An object: its fields by name, in the order in which they are looked at."""

    about: str
    fields: Mapping[str, Field]
    optional: bool = False

    def read(self, name: str, value: Any) -> dict[str, Any]:
        """What each field stands for, by its name."""
        if not isinstance(value, dict):
            raise WireError(name, "must be an object")
        inside = f"{name}." if name else ""
        found = {}
        for key, field in self.fields.items():
            one = value.get(key)
            if one is None and not field.optional:
                raise WireError(inside + key, "is missing")
            found[key] = field.read(inside + key, one)
        return found

    def schema(self) -> Schema:
        """An object; names that it does not have are ignored, so any may be there."""
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


def _what_is_wrong(value: str) -> str:
    """Why a text is not the base64 of 32 bytes: its length, or its spelling."""
    try:
        length = len(binascii.a2b_base64(value.encode("ascii"), strict_mode=True))
    except (binascii.Error, UnicodeEncodeError):
        length = _FIELD_BYTES
    if length == _FIELD_BYTES:
        return f"must be standard base64 with padding, of {_FIELD_BYTES} bytes"
    return f"must be {_FIELD_BYTES} bytes, not {length}"
