"""Whether the service is ready, as a list of checks, and as the text of `/readyz?verbose`. Pure, and quick to load.

A check that fails is one line that says why. Nothing in it is of one share, and no node is named: the text is for
everybody who may ask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(r"\[([+-])\](\S+) (?:ok|failed: (.*))")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be well.

    Attributes:
        name: what was looked at.
        problem: why it is not well, None when it is.
    """

    name: str
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it is well."""
        return self.problem is None


def passed(checks: Sequence[Check]) -> bool:
    """Whether all of them are well."""
    return all(check.ok for check in checks)


def to_text(checks: Sequence[Check]) -> str:
    """A line a check, and a last one that sums up."""
    lines = [f"[+]{check.name} ok" if check.ok else f"[-]{check.name} failed: {check.problem}" for check in checks]
    return "\n".join([*lines, f"readyz check {'passed' if passed(checks) else 'failed'}", ""])


def from_text(text: str) -> list[Check]:
    """The checks in such a text; what is not one is left out."""
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return [Check(match[2], None if match[1] == "+" else match[3] or "not told") for match in found if match]
