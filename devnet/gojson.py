"""JSON in the style of the chain's Go programs.

Two differences matter to a client: fields with a zero value are omitted, and parse errors have Go's texts.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_SCANNER_STATES = {
    "Expecting property name enclosed in double quotes": "looking for beginning of object key string",
    "Expecting value": "looking for beginning of value",
    "Expecting ':' delimiter": "after object key",
    "Expecting ',' delimiter": "after object key:value pair",
    "Illegal trailing comma before end of object": "looking for beginning of object key string",
    "Illegal trailing comma before end of array": "looking for beginning of value",
    "Extra data": "after top-level value",
    "Invalid control character at": "in string literal",
    "Invalid \\escape": "in string escape code",
}


class GoJsonError(ValueError):
    """A body that Go's decoder rejects. The text is Go's error message."""


def dumps(value: Any) -> bytes:
    """Encode compact JSON with Go's escapes (HTML characters and the two line separators)."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for char, escape in _ESCAPED.items():
        text = text.replace(char, escape)
    return text.encode()


def omit_zero(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove fields with the value 0, false, None, or an empty string, list or object."""
    return {name: value for name, value in fields.items() if value not in (0, "", None, [], {})}


def b64(value: bytes) -> str:
    """Encode standard base64, like a byte slice in Go."""
    return base64.b64encode(value).decode("ascii")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request; raises GoJsonError."""
    text = body.decode("utf-8", errors="replace")
    if not text.strip():
        raise GoJsonError("EOF" if not text else "unexpected end of JSON input")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise GoJsonError(_go_syntax_error(error, text)) from None
    except RecursionError:
        raise GoJsonError("exceeded max depth") from None
    if not isinstance(value, dict):
        raise GoJsonError(f"json: cannot unmarshal {_go_kind(value)} into Go value of type map[string]any")
    return value


def take_bytes(fields: Mapping[str, Any], name: str) -> bytes:
    """Read a base64 field; absent and null are empty, like a byte slice in Go."""
    value = fields.get(name)
    if value is None:
        return b""
    if not isinstance(value, str):
        raise GoJsonError(f"json: cannot unmarshal {_go_kind(value)} into Go struct field .{name} of type []uint8")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise GoJsonError("illegal base64 data at input byte 0") from None


def take_uint(fields: Mapping[str, Any], name: str, bits: int) -> int:
    """Read an unsigned integer of this many bits; absent and null are 0."""
    value = fields.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**bits:
        kind = f"number {value}" if isinstance(value, int | float) and not isinstance(value, bool) else _go_kind(value)
        raise GoJsonError(f"json: cannot unmarshal {kind} into Go struct field .{name} of type uint{bits}")
    return value


def _go_syntax_error(error: json.JSONDecodeError, text: str) -> str:
    """Translate Python's parse error to the text of Go's scanner."""
    if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
        return "unexpected end of JSON input"
    return f"invalid character '{text[error.pos]}' {_SCANNER_STATES.get(error.msg, error.msg)}"


def _go_kind(value: Any) -> str:
    """The name of a JSON type in Go's error messages."""
    kinds = {bool: "bool", str: "string", list: "array", dict: "object", int: "number", float: "number"}
    return kinds.get(type(value), "null")
