"""Reads untrusted JSON of a node. Checks type, range and length of every value.

A response may have any content: a proxy's HTML, truncated JSON, another program's JSON. Each method returns a value of
the declared type or raises `InvalidResponse` with the field and the problem. Go omits zero values, so a missing number
is 0, a missing list is empty and a missing string is "".
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from datetime import datetime
from typing import TypeVar

import orjson

from helper.core.text_forms import clean_text
from helper.errors import InvalidResponse

T = TypeVar("T")

UINT64_MAX = 2**64 - 1

MAX_TEXT_CHARACTERS = 4096
"""Characters of a text that are read. Longer ones are only logged, displayed or wrong."""

MAX_CONTAINERS = 100_000
"""Maximum number of objects and lists in a response. A full block has about 40 per transaction."""
MAX_VALUES = 400_000
"""Maximum number of values in a response. The longest page of leaves has 180,000; 400,000 need about 60 MB."""

_UNCHECKED_BYTES = 1 << 16  # responses up to this many bytes may have values of any size
_MIN_BYTES_PER_VALUE = 6  # minimum mean bytes per value in a longer response; nodes' responses have 12 or more
_MIN_BYTES_PER_STORED_VALUE = 8  # the same for stored documents, which are larger
_MIN_BYTES_PER_CONTAINER = 40  # a block with one leaf takes 90 bytes and has two


def loads(body: bytes, source: str) -> object:
    """Parse the body of a response as JSON.

    A long body of tiny values (`[[],[],…]`) is rejected: as Python objects it would take about 30 times its size, and
    garbage collection of them would block the interpreter.

    Raises:
        InvalidResponse: the body is not JSON, or has too many values.
    """
    _limit_values(body, source, MAX_CONTAINERS, min(MAX_VALUES, len(body) // _MIN_BYTES_PER_VALUE))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        kind = "HTML" if body.lstrip()[:1] == b"<" else "empty" if not body.strip() else "not valid JSON"
        raise InvalidResponse(f"{source}: the response is {kind}") from None


def limit_stored_values(body: bytes, source: str) -> None:
    """Check that the stored JSON of many responses does not consist of tiny values, as `loads` does for one.

    Raises:
        InvalidResponse: it has too many values.
    """
    max_containers = MAX_CONTAINERS + len(body) // _MIN_BYTES_PER_CONTAINER
    _limit_values(body, source, max_containers, len(body) // _MIN_BYTES_PER_STORED_VALUE)


def _limit_values(body: bytes, source: str, max_containers: int, max_values: int) -> None:
    if len(body) > _UNCHECKED_BYTES:
        containers = body.count(b"{") + body.count(b"[")
        if containers > max_containers or containers + body.count(b",") > max_values:
            raise InvalidResponse(f"{source}: response contains too many values for its size ({len(body)} bytes)")


class Fields:
    """One JSON object of a response.

    Attributes:
        path: path of this object in the response, for error messages.
    """

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidResponse(f"{path}: expected an object, got {_kind(value)}")
        self._value = value
        self.path = path

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._value.get(name) is not None

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._value)

    def value(self, name: str) -> object:
        """The value of a field as parsed, None if missing."""
        return self._value.get(name)

    def uint(self, name: str, *, maximum: int = UINT64_MAX) -> int:
        """A number, or a string of digits as Cosmos encodes 64-bit numbers; 0 if missing."""
        value = self._value.get(name)
        if value is None:
            return 0
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid_field(name, f"expected a whole number, got {_kind(value)}")
        if not 0 <= value <= maximum:
            raise self.invalid_field(name, f"{value} is out of range")
        return value

    def text(self, name: str) -> str:
        """The first `MAX_TEXT_CHARACTERS` of a string, without control characters (`clean_text`); "" if missing."""
        return clean_text(self._typed(name, str, "a string")[:MAX_TEXT_CHARACTERS])

    def boolean(self, name: str) -> bool:
        """A boolean; False if missing."""
        return self._typed(name, bool, "true or false")

    def _typed(self, name: str, kind: type[T], expected: str) -> T:
        """A value of this type; the empty one if missing or null."""
        value = self._value.get(name)
        if value is None:
            return kind()
        if not isinstance(value, kind):
            raise self.invalid_field(name, f"expected {expected}, got {_kind(value)}")
        return value

    def base64_bytes(self, name: str, length: int) -> bytes:
        """Base64 of exactly `length` bytes."""
        return self.decode(name, self._typed(name, str, "a string"), length)

    def hex_bytes(self, name: str) -> bytes:
        """64 lower-case hex digits: 32 bytes."""
        value = self.text(name)
        if len(value) != 64 or value != value.lower():
            raise self.invalid_field(name, "expected 64 lower-case hex digits")
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise self.invalid_field(name, "expected 64 lower-case hex digits") from None

    def timestamp(self, name: str) -> float:
        """An RFC 3339 time as Unix seconds."""
        value = self.text(name)
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise self.invalid_field(name, "expected a time") from None
        if time.tzinfo is None:
            raise self.invalid_field(name, "the time has no time zone")
        return time.timestamp()

    def child(self, name: str) -> Fields:
        """A nested object; an error if missing."""
        return Fields(self._value.get(name), f"{self.path}.{name}")

    def items(self, name: str) -> list[object]:
        """A list; empty if missing or null."""
        return self._typed(name, list, "a list")

    def children(self, name: str) -> list[Fields]:
        """A list of objects; empty if missing or null."""
        return [Fields(value, f"{self.path}.{name}[{i}]") for i, value in enumerate(self.items(name))]

    def decode(self, name: str, value: object, length: int | None) -> bytes:
        """Decode base64 text. `length` is the required number of bytes, None for any. `name` is for errors."""
        if not isinstance(value, str):
            raise self.invalid_field(name, f"expected base64, got {_kind(value)}")
        try:
            raw = b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise self.invalid_field(name, "expected base64") from None
        if length is not None and len(raw) != length:
            raise self.invalid_field(name, f"expected {length} bytes, got {len(raw)}")
        return raw

    def invalid_field(self, name: str, problem: str) -> InvalidResponse:
        """Create the error for a field of this object."""
        return InvalidResponse(f"{self.path}.{name}: {problem}")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number"}
    return "null" if value is None else names.get(type(value), "a fraction")
