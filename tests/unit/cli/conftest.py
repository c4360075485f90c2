"""Fixtures of all command tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import isolate_commands


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty directory, no settings from outside, and no irreversible change of the test process."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "BACKUP_PASSPHRASE"):
        monkeypatch.delenv(f"SVOTE_HELPER_{name}", raising=False)
    with isolate_commands():
        yield
