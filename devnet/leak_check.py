"""Finds values in requests that a node must not know yet.

A value is found in every encoding, in path, query or body: raw bytes, hex of either case, base64 (both alphabets, at
any offset in longer data), percent-encoding. A number is found as a separate token.
"""

from __future__ import annotations

import base64
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

_NUMBER = re.compile(rb"(?<![0-9A-Za-z.])[0-9]+(?![0-9A-Za-z.])")


@dataclass(frozen=True, slots=True)
class SensitiveValue:
    """A value and the time from which requests may contain it.

    Attributes:
        kind: kind of the value for the report: "nullifier", "position", …
        value: bytes, or a number that is unlikely to be a height or page.
        not_before: Unix seconds; 0 for any time.
    """

    kind: str
    value: bytes | int
    not_before: float


@dataclass(frozen=True, slots=True)
class Leak:
    """A request that contained a value too early."""

    sensitive_value: SensitiveValue
    request: Mapping[str, Any]


def find_leaks(requests: Iterable[Mapping[str, Any]], sensitive_values: Sequence[SensitiveValue]) -> list[Leak]:
    """Return every request of a log that contained one of these values too early."""
    written: dict[bytes, list[SensitiveValue]] = defaultdict(list)
    for needle in sensitive_values:
        for form in _encodings(needle.value):
            written[form].append(needle)
    lengths = {
        len(form) for needle in sensitive_values if isinstance(needle.value, bytes) for form in _encodings(needle.value)
    }
    leaks: list[Leak] = []
    for entry in requests:
        pieces = {piece for text in _texts(entry) for piece in _substrings(text, lengths)}
        named = {id(needle): needle for piece in pieces & written.keys() for needle in written[piece]}
        leaks += [Leak(needle, entry) for needle in named.values() if entry["time"] < needle.not_before]
    return leaks


def _texts(entry: Mapping[str, Any]) -> set[bytes]:
    """Path, query and body: raw, percent-decoded, and in lower case for hex."""
    raw = entry["path"].encode("latin-1", "backslashreplace") + b"\n" + entry["body"].encode("latin-1")
    decoded = unquote_to_bytes(raw)
    return {raw, decoded, decoded.lower()}


def _substrings(text: bytes, lengths: Iterable[int]) -> Iterator[bytes]:
    """All substrings of these lengths, and all separate numbers."""
    for length in lengths:
        for start in range(len(text) - length + 1):
            yield text[start : start + length]
    yield from _NUMBER.findall(text)


def _encodings(value: bytes | int) -> list[bytes]:
    """All encodings of a value."""
    if isinstance(value, int):
        return [str(value).encode()]
    forms = [value, value.hex().encode()]
    for offset in range(3):
        # Only the base64 characters that contain no bits of the surrounding data.
        text = base64.b64encode(bytes(offset) + value)
        inner = text[-(-offset * 8 // 6) : (offset + len(value)) * 8 // 6]
        forms += [inner, inner.replace(b"+", b"-").replace(b"/", b"_")]
    return forms
