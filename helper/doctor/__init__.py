"""Diagnostic checks, which run with or without settings, helper, database or chain. Here: the result of a check.

No check writes to the database, sends share data to a node, or prints a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from helper.core.json_records import fact


class Level(StrEnum):
    """Severity: `fail` means shares cannot be accepted or revealed, or secrets may leak. `warn` is less serious."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    subject: str = fact("The checked item, in one or two words.")
    level: Level = fact("Severity.")
    message: str = fact("The state, in one line.")
    advice: str = fact("How to fix it; empty if no action is needed.", default="")
    facts: Mapping[str, Any] = fact("The measured values, as plain JSON values.", default_factory=dict)


def ok(subject: str, message: str, **facts: Any) -> CheckResult:
    """Create a passing result."""
    return CheckResult(subject, Level.OK, message, "", facts)


def warn(subject: str, message: str, advice: str, **facts: Any) -> CheckResult:
    """Create a warning: the helper works, but an operator should act."""
    return CheckResult(subject, Level.WARN, message, advice, facts)


def fail(subject: str, message: str, advice: str, **facts: Any) -> CheckResult:
    """Create a failed result: a function or guarantee of the helper is violated."""
    return CheckResult(subject, Level.FAIL, message, advice, facts)


def all_ok(findings: Iterable[CheckResult]) -> bool:
    """Report whether all results are ok."""
    return all(finding.level is Level.OK for finding in findings)
