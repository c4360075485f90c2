"""Logs errors that a loop survives: ours with their advice, all others with a traceback."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from helper.errors import HelperError


def log_error(log: FilteringBoundLogger, event: str, error: Exception) -> None:
    """Log an error under this event."""
    if isinstance(error, HelperError):
        log.error(event, error=str(error), advice=error.advice)
    else:
        log.error(event, exc_info=error)


class RecurringErrorLog:
    """Logs the error of a loop when it first occurs, and the recovery, instead of a line per iteration.

    Args:
        log: the logger.
        failed: event of an error.
        recovered: event of the first iteration without an error.
    """

    def __init__(self, log: FilteringBoundLogger, *, failed: str, recovered: str) -> None:
        self._log = log
        self._failed = failed
        self._recovered = recovered
        self._logged: str | None = None  # the error that was logged last; None after a recovery

    def note(self, error: Exception | None) -> None:
        """Record the result of an iteration: its error, None if there was none."""
        text = None if error is None else repr(error)
        if error is not None and text != self._logged:
            log_error(self._log, self._failed, error)
        elif error is None and self._logged is not None:
            self._log.info(self._recovered)
        self._logged = text
