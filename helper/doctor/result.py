"""What a check found: one line, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How it stands: `warn` wants a look, `fail` keeps shares from being taken or revealed, or secrets from being kept
    secret.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the doctor's.

    Attributes:
        subject: what was looked at, a word or two.
        level: how it stands.
        message: how it is, in one line.
        advice: what to do about it; empty where there is nothing to do.
        facts: the figures behind it, plain JSON values.
    """

    subject: str
    level: Level
    message: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def ok(subject: str, message: str, **facts: Any) -> CheckResult:
    """All is well."""
    return CheckResult(subject, Level.OK, message, "", facts)


def warn(subject: str, message: str, advice: str, **facts: Any) -> CheckResult:
    """It works, and somebody should look at it."""
    return CheckResult(subject, Level.WARN, message, advice, facts)


def fail(subject: str, message: str, advice: str, **facts: Any) -> CheckResult:
    """It does not work, or does not keep a promise."""
    return CheckResult(subject, Level.FAIL, message, advice, facts)


def healthy(findings: Iterable[CheckResult]) -> bool:
    """Whether every one is ok."""
    return all(finding.level is Level.OK for finding in findings)


def as_json(finding: CheckResult) -> dict[str, Any]:
    """One as plain JSON values."""
    return {
        "subject": finding.subject,
        "level": finding.level.value,
        "message": finding.message,
        "advice": finding.advice,
        "facts": dict(finding.facts),
    }
