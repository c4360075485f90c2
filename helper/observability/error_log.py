"""Logs errors that do not end a loop: `HelperError` with its advice, others with a traceback."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from helper.core.log_limits import LoggedProblem
from helper.errors import HelperError


def log_error(log: FilteringBoundLogger, event: str, error: Exception) -> None:
    """Log an error under this event."""
    if isinstance(error, HelperError):
        log.error(event, error=str(error), advice=error.advice)
    else:
        log.error(event, exc_info=error)


class RecurringErrorLog:
    """Logs the first error of a loop and its recovery, instead of every failed iteration.

    Args:
        log: the logger.
        failed: event of an error.
        recovered: event of the first iteration without an error.
    """

    def __init__(self, log: FilteringBoundLogger, *, failed: str, recovered: str) -> None:
        self._log = log
        self._failed = failed
        self._recovered = recovered
        self._problem = LoggedProblem()

    def note(self, error: Exception | None) -> None:
        """Record the result of an iteration: its error, None if there was none."""
        if error is None:
            if self._problem.clear():
                self._log.info(self._recovered)
        elif self._problem.note(repr(error)):
            log_error(self._log, self._failed, error)
