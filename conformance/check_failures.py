"""How a check reports that the helper failed it, or that it could not run. Pure."""

from __future__ import annotations

from typing import Final

MAX_SEEN_CHARACTERS: Final = 300
"""Maximum length of an observation."""


class CheckFailed(Exception):
    """The helper does not meet the check. The text is the observation."""


class CheckSkipped(Exception):
    """The check could not run. The text is the reason."""


def require(condition: object, seen: str) -> str:
    """Return the observation; raise CheckFailed with it unless the condition holds."""
    if not condition:
        raise CheckFailed(seen)
    return seen


def shorten(text: str, limit: int = MAX_SEEN_CHARACTERS) -> str:
    """Truncate a text to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
