"""Reading a node's JSON with suspicion: every value is checked for its type, range and length.

A node may answer anything: HTML of a proxy, half a JSON, another program's JSON. Each reader either returns
a value of the promised type or raises `InvalidAnswer` naming the field and what was wrong with it. Go
leaves zero values out, so an absent number is 0, an absent list is empty and an absent string is "".
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from datetime import datetime

import orjson

from helper.core.text import clean_text
from helper.errors import InvalidAnswer

UINT64_MAX = 2**64 - 1

MOST_CONTAINERS = 100_000
"""Objects and lists in an answer. A full block has some 40 for a transaction."""

_ANY_DENSITY = 1 << 16  # bytes up to which an answer may have values of any size
_LEAST_VALUE = 6  # mean bytes of a value in a longer answer; nodes' answers have 12 and more


def loads(body: bytes, what: str) -> object:
    """The JSON value of an answer's body, or `InvalidAnswer` saying how the body begins.

    A long body that consists of tiny values (`[[],[],…]`) is refused: as Python objects it would take some 30 times its
    size, and the interpreter would stand still while it searches them for cycles.
    """
    if len(body) > _ANY_DENSITY:
        containers = body.count(b"{") + body.count(b"[")
        if containers > MOST_CONTAINERS or containers + body.count(b",") > len(body) // _LEAST_VALUE:
            raise InvalidAnswer(f"{what}: the answer has too many values for its {len(body)} bytes")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        kind = "HTML" if body.lstrip()[:1] == b"<" else "nothing" if not body.strip() else "no valid JSON"
        raise InvalidAnswer(f"{what}: the answer is {kind}") from None


class Fields:
    """One JSON object under examination.

    Attributes:
        where: the path to this object inside the answer, for error messages.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise InvalidAnswer(f"{where}: an object was expected, not {_kind(value)}")
        self._value = value
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._value.get(name) is not None

    def uint(self, name: str, *, maximum: int = UINT64_MAX) -> int:
        """A number, or a string of digits as Cosmos writes 64-bit numbers; 0 when absent."""
        value = self._value.get(name)
        if value is None:
            return 0
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(name, f"a whole number was expected, not {_kind(value)}")
        if not 0 <= value <= maximum:
            raise self.bad(name, f"{value} is out of range")
        return value

    def text(self, name: str) -> str:
        """A string without control characters (`clean_text`); "" when absent."""
        value = self._value.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.bad(name, f"a string was expected, not {_kind(value)}")
        return clean_text(value)

    def flag(self, name: str) -> bool:
        """A boolean; False when absent."""
        value = self._value.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.bad(name, f"true or false was expected, not {_kind(value)}")
        return value

    def blob(self, name: str, length: int) -> bytes:
        """Base64 of exactly `length` bytes."""
        return self.decode(name, self.text(name), length)

    def digest(self, name: str) -> bytes:
        """64 lower-case hex digits: 32 bytes."""
        value = self.text(name)
        if len(value) != 64 or value != value.lower():
            raise self.bad(name, "64 lower-case hex digits were expected")
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise self.bad(name, "64 lower-case hex digits were expected") from None

    def moment(self, name: str) -> float:
        """An RFC 3339 time as unix seconds."""
        value = self.text(name)
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise self.bad(name, "a time was expected") from None
        if time.tzinfo is None:
            raise self.bad(name, "the time has no zone")
        return time.timestamp()

    def child(self, name: str) -> Fields:
        """An object inside this one; absent is an error."""
        return Fields(self._value.get(name), f"{self.where}.{name}")

    def items(self, name: str) -> list[object]:
        """A list; empty when absent or null."""
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.bad(name, f"a list was expected, not {_kind(value)}")
        return value

    def children(self, name: str) -> list[Fields]:
        """A list of objects; empty when absent or null."""
        return [Fields(value, f"{self.where}.{name}[{i}]") for i, value in enumerate(self.items(name))]

    def decode(self, name: str, value: object, length: int | None) -> bytes:
        """Base64 text found under `name` as bytes, of `length` bytes unless that is None."""
        if not isinstance(value, str):
            raise self.bad(name, f"base64 was expected, not {_kind(value)}")
        try:
            raw = b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise self.bad(name, "base64 was expected") from None
        if length is not None and len(raw) != length:
            raise self.bad(name, f"{length} bytes were expected, not {len(raw)}")
        return raw

    def bad(self, name: str, problem: str) -> InvalidAnswer:
        """The error that names a field of this object."""
        return InvalidAnswer(f"{self.where}.{name}: {problem}")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number"}
    return "null" if value is None else names.get(type(value), "a fraction")
