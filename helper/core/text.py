"""Sanitizes text from nodes, files and other programs. Pure."""

from __future__ import annotations

import re
from typing import Final

_UNSAFE: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters: end lines, command terminals; PostgreSQL rejects NUL
    "\u2028\u2029"  # line and paragraph separators
    "\u202a-\u202e\u2066-\u2069"  # bidirectional embeddings, overrides and isolates: reorder displayed text
    "\ud800-\udfff"  # lone surrogates: not encodable as UTF-8
    "]"
)


def clean_text(text: str) -> str:
    """Replace every character that is unsafe in a database, a log or a terminal with a space.

    Letters of all scripts, combining characters and emoji (with their joiners) are not changed.
    """
    return text if text.isprintable() else _UNSAFE.sub(" ", text)
