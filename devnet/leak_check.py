"""What a curious node reads out of requests: whether one names a thing that it should not know yet.

A value counts as named in whatever way it is written, in path, query or body: raw bytes, hex of either case, base64
(both alphabets, at any offset inside something longer), percent-encoded. A number counts where it stands by itself.
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
class Needle:
    """A thing and the time from which on it may be named.

    Attributes:
        what: for the report: "nullifier", "position", …
        value: bytes, or a number (which should be one that no height or page has).
        not_before: unix seconds; 0: it may be named at any time.
    """

    what: str
    value: bytes | int
    not_before: float


@dataclass(frozen=True, slots=True)
class Named:
    """A request that named a thing before its time."""

    needle: Needle
    entry: Mapping[str, Any]


def named_early(requests: Iterable[Mapping[str, Any]], needles: Sequence[Needle]) -> list[Named]:
    """Every request of a log that named one of these things before its time."""
    written: dict[bytes, list[Needle]] = defaultdict(list)
    for needle in needles:
        for form in _forms(needle.value):
            written[form].append(needle)
    lengths = {len(form) for needle in needles if isinstance(needle.value, bytes) for form in _forms(needle.value)}
    found: list[Named] = []
    for entry in requests:
        pieces = {piece for text in _texts(entry) for piece in _pieces(text, lengths)}
        named = {id(needle): needle for piece in pieces & written.keys() for needle in written[piece]}
        found += [Named(needle, entry) for needle in named.values() if entry["time"] < needle.not_before]
    return found


def _texts(entry: Mapping[str, Any]) -> set[bytes]:
    """Path, query and body as they came, decoded once more, and in lower case for hex."""
    said = entry["path"].encode("latin-1", "backslashreplace") + b"\n" + entry["body"].encode("latin-1")
    decoded = unquote_to_bytes(said)
    return {said, decoded, decoded.lower()}


def _pieces(text: bytes, lengths: Iterable[int]) -> Iterator[bytes]:
    """Everything of these lengths, and every number that stands by itself."""
    for length in lengths:
        for start in range(len(text) - length + 1):
            yield text[start : start + length]
    yield from _NUMBER.findall(text)


def _forms(value: bytes | int) -> list[bytes]:
    """The ways in which a value may be written."""
    if isinstance(value, int):
        return [str(value).encode()]
    forms = [value, value.hex().encode()]
    for offset in range(3):
        # Of base64 at an offset, the characters that hold only bits of the value.
        text = base64.b64encode(bytes(offset) + value)
        inner = text[-(-offset * 8 // 6) : (offset + len(value)) * 8 // 6]
        forms += [inner, inner.replace(b"+", b"-").replace(b"/", b"_")]
    return forms
