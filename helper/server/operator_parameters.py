"""Parsers of the operator API's parameters. Pure, and fast to import, because commands use them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helper.core.share import ShareState
from helper.errors import UsageError
from helper.store.models import MIN_REF_CHARS, QueueFilter

DEFAULT_LIST_LIMIT = 100
DEFAULT_ACTION_LIMIT = 50
MAX_LIST_LIMIT = 10_000


def parse_filter(parameters: Mapping[str, Any]) -> QueueFilter:
    """Parse the filter of a list. An empty parameter is the same as an absent one, and others are ignored.

    Args:
        parameters: `round`, 64 hex characters; `state`, by label or JSON name; `due_before` in Unix seconds; `stage` of
            the latest history entry.

    Raises:
        UsageError: a parameter is invalid; the text contains its name.
    """
    round_hex, state, due_before, stage = (parameters.get(name) for name in ("round", "state", "due_before", "stage"))
    return QueueFilter(
        round_id=parse_hex32("round", round_hex) if round_hex else None,
        state=_state(state) if state else None,
        due_before_ms=_due_ms(due_before) if due_before else None,
        stage=stage or None,
    )


def parse_limit(text: str | None, default: int = DEFAULT_LIST_LIMIT) -> int:
    """Parse the maximum number of entries; empty is `default`.

    Raises:
        UsageError: it is not a number from 1 to 10,000.
    """
    if not text:
        return default
    is_short = len(text) <= len(str(MAX_LIST_LIMIT))  # int() refuses thousands of digits
    if not (is_short and text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_LIST_LIMIT):
        raise UsageError(f"limit must be a number from 1 to {MAX_LIST_LIMIT}")
    return int(text)


def parse_hex32(name: str, text: str) -> bytes:
    """Parse 32 bytes in hex.

    Raises:
        UsageError: it is not 64 hex characters; the text begins with the name.
    """
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32:
        raise UsageError(f"{name} must be 64 hex characters")
    return value


def parse_ref(text: str) -> str:
    """Parse a share's reference or a prefix of it; returns it in lower case.

    Raises:
        UsageError: it is not 6 to 64 hex characters.
    """
    if not MIN_REF_CHARS <= len(text) <= 64 or set(text.lower()) - set("0123456789abcdef"):
        raise UsageError(f"a share reference must be {MIN_REF_CHARS} to 64 hex characters")
    return text.lower()


def _state(text: str) -> ShareState:
    try:
        return ShareState.parse(text)
    except ValueError as error:
        raise UsageError(f"state must be {error}") from None


def _due_ms(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise UsageError("due_before must be a time in Unix seconds")
    return int(text) * 1000
