"""Readiness checks and their text form, as in `/readyz?verbose`. Pure, and fast to import.

The text is public: it contains no data of a single share and no node names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from helper.core.json_records import fact

_CHECK_LINE: Final = re.compile(r"\[([+-])\](\S+) (?:ok(?:: (.*))?|failed: (.*))")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one readiness check."""

    name: str = fact("Name of the check.")
    problem: str | None = fact("Why it failed, null if it passed.", default=None)
    note: str | None = fact(
        "Information for operators on a check that passed, such as an unconfirmed change.", default=None
    )

    @property
    def has_passed(self) -> bool:
        """Whether the check passed."""
        return self.problem is None


def all_passed(checks: Sequence[Check]) -> bool:
    """Return whether all checks passed."""
    return all(check.has_passed for check in checks)


def format_checks(checks: Sequence[Check]) -> str:
    """Format checks as text, one line per check and a summary line."""
    lines = [_format_check(check) for check in checks]
    return "\n".join([*lines, f"readyz check {'passed' if all_passed(checks) else 'failed'}", ""])


def _format_check(check: Check) -> str:
    if not check.has_passed:
        return f"[-]{check.name} failed: {check.problem}"
    return f"[+]{check.name} ok" + (f": {check.note}" if check.note else "")


def parse_checks(text: str) -> list[Check]:
    """Parse the text form. Other lines are ignored."""
    matches = (_CHECK_LINE.fullmatch(line) for line in text.splitlines())
    return [
        Check(match[2], None, match[3]) if match[1] == "+" else Check(match[2], match[4] or "unknown reason")
        for match in matches
        if match
    ]
