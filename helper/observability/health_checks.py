"""Whether the service is ready, as a list of checks, and as the text of `/readyz?verbose`. Pure, and quick to load.

A check that fails is one line that says why. Nothing in it is of one share, and no node is named: the text is for
everybody who may ask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(r"\[([+-])\](\S+) (?:ok(?:: (.*))?|failed: (.*))")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be well.

    Attributes:
        name: what was looked at.
        problem: why it is not well, None when it is.
        note: what operators should know although the check passes, such as a change that is not confirmed.
    """

    name: str
    problem: str | None = None
    note: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it is well."""
        return self.problem is None


def passed(checks: Sequence[Check]) -> bool:
    """Whether all of them are well."""
    return all(check.ok for check in checks)


def to_text(checks: Sequence[Check]) -> str:
    """A line a check, and a last one that sums up."""
    lines = [_to_line(check) for check in checks]
    return "\n".join([*lines, f"readyz check {'passed' if passed(checks) else 'failed'}", ""])


def _to_line(check: Check) -> str:
    if not check.ok:
        return f"[-]{check.name} failed: {check.problem}"
    return f"[+]{check.name} ok" + (f": {check.note}" if check.note else "")


def from_text(text: str) -> list[Check]:
    """The checks in such a text; what is not one is left out."""
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return [
        Check(match[2], None, match[3]) if match[1] == "+" else Check(match[2], match[4] or "not told")
        for match in found
        if match
    ]
