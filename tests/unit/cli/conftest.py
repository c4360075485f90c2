"""Fixtures of all command tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Restore the logging of the test process, which some commands configure."""
    loggers = [logging.getLogger(), logging.getLogger("helper")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    configuration = structlog.get_config() if structlog.is_configured() else None
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    if configuration is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**configuration)
