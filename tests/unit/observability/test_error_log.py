"""Logging of errors that a loop survives: content and rate."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from helper.errors import StoreError
from helper.observability.log_config import RecurringErrorLog, log_error

log = structlog.get_logger("helper.test")


def test_own_error_is_logged_with_its_advice() -> None:
    with capture_logs() as logs:
        log_error(log, "failed", StoreError("no space"))
    assert logs == [{"event": "failed", "error": "no space", "advice": StoreError.advice, "log_level": "error"}]


def test_unexpected_error_is_logged_with_a_traceback() -> None:
    error = RuntimeError("a bug")
    with capture_logs() as logs:
        log_error(log, "failed", error)
    assert logs == [{"event": "failed", "exc_info": error, "log_level": "error"}]


def test_recurring_error_is_logged_once_until_it_changes_or_ends() -> None:
    errors = RecurringErrorLog(log, failed="failed", recovered="recovered")
    first, other = StoreError("no space"), StoreError("unreachable")
    with capture_logs() as logs:
        for error in (None, first, StoreError("no space"), other, None, None, first):
            errors.note(error)
    assert [(entry["event"], entry.get("error")) for entry in logs] == [
        ("failed", "no space"),
        ("failed", "unreachable"),
        ("recovered", None),
        ("failed", "no space"),
    ]
