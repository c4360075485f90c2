"""How a check reports that the helper failed it, or that it could not be made. Pure."""

from __future__ import annotations

from typing import Final

MAX_SEEN_CHARACTERS: Final = 300
"""Maximum length of what was seen."""


class CheckFailed(Exception):
    """The helper does not meet the check. The text is what was seen."""


class CheckSkipped(Exception):
    """The check could not be made. The text is the reason."""


def require(condition: object, seen: str) -> None:
    """Raise CheckFailed unless the condition holds."""
    if not condition:
        raise CheckFailed(seen)


def shorten(text: str, limit: int = MAX_SEEN_CHARACTERS) -> str:
    """Cut a text to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
