"""Finds the line numbers of keys in a TOML file.

The standard parser does not provide them. This is not a second parser: it scans files that the standard parser has
accepted, and finds only `[section]` headers and `key =` at the start of lines, outside brackets and multi-line strings.
Pure.
"""

from __future__ import annotations

import re
from typing import Final

_BARE: Final = r"[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'"
_DOTTED: Final = rf"(?:{_BARE})(?:\s*\.\s*(?:{_BARE}))*"
_HEADER: Final = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]")
_KEY: Final = re.compile(rf"\s*({_DOTTED})\s*=(.*)")
_PART: Final = re.compile(_BARE)
_STRING: Final = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_SYNTAX: Final = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")

Path = tuple[str, ...]


def find_key_lines(text: str) -> dict[Path, int]:
    """Return the line (from 1) of each section and key, by its path: `("helper",)`, `("helper", "port")`."""
    lines: dict[Path, int] = {}
    section: Path = ()
    depth = 0
    quote = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if quote:
            quote = "" if quote in line else quote
            continue
        if depth:
            depth += _nesting_change(line)
            continue
        if header := _HEADER.match(line):
            section = _split_key(header[1])
            lines.setdefault(section, number)
            continue
        if entry := _KEY.match(line):
            path = section + _split_key(entry[1])
            for length in range(1, len(path) + 1):
                lines.setdefault(path[:length], number)
            quote = _find_open_quote(entry[2])
            depth = 0 if quote else _nesting_change(entry[2])
    return lines


def find_line(lines: dict[Path, int], path: Path) -> int | None:
    """Return the line of a key, else of its nearest parent, else None."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def parse_syntax_error(message: str, text: str) -> tuple[int, str]:
    """Split an error message of the standard TOML parser into line and text."""
    match = _SYNTAX.search(message)
    line = int(match[1]) if match and match[1] else max(1, len(text.splitlines()))
    return line, _SYNTAX.sub("", message).strip()


def _split_key(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _find_open_quote(value: str) -> str:
    """Return the multi-line quote that a value opens and does not close, or ""."""
    for quote in ('"""', "'''"):
        if value.count(quote) % 2:
            return quote
    return ""


def _nesting_change(line: str) -> int:
    """Return opening minus closing brackets of a line, outside strings and comments."""
    bare = _STRING.sub("", line).split("#", 1)[0]
    return sum(bare.count(bracket) for bracket in "[{") - sum(bare.count(bracket) for bracket in "]}")
