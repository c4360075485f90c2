"""Fixtures of all command tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty directory, no settings from outside, and no irreversible change of the test process."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "BACKUP_PASSPHRASE"):
        monkeypatch.delenv(f"SVOTE_HELPER_{name}", raising=False)
    for module in ("db", "db_copy", "db_encrypt", "queue", "queue_transfer"):
        monkeypatch.setattr(f"helper.cli.{module}.harden_process", list)
    monkeypatch.setattr("os.nice", lambda increment: increment)


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
