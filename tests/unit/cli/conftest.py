"""Fixtures of all command tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from helper.chain.round_registry import to_stored_round
from helper.observability import log_config
from helper.store import rounds, shares
from helper.store.models import EnqueueResult
from helper.store.sqlite.store import SqliteStore
from tests.support.command import isolate_commands
from tests.unit.ingest.admission_fixtures import END, FakeClock, create_body, create_payload, make_round, parse_share


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty directory, no settings from outside, and no irreversible change of the test process."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "BACKUP_PASSPHRASE"):
        monkeypatch.delenv(f"SVOTE_HELPER_{name}", raising=False)
    with isolate_commands():
        yield


@pytest.fixture
def captured_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the log of commands that configure it from the output."""
    monkeypatch.setattr(log_config, "configure", lambda *_: None)
    with capture_logs():
        yield


async def fill_database(path: Path, count: int) -> None:
    store = SqliteStore(path)
    await store.open()
    now = FakeClock().now()
    await store.run(rounds.save_rounds, [to_stored_round(make_round())], now)
    for index in range(count):
        share = parse_share(
            create_body(submit_at=END - 60, enc_share={**create_payload()["enc_share"], "share_index": index})
        )
        assert await store.run(shares.EnqueueOperation(share, bytes([index]) * 32, now=now)) is EnqueueResult.QUEUED
    await store.close()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """An unencrypted database with three pending shares and no running helper."""
    path = tmp_path / "svote-helper.db"
    anyio.run(fill_database, path, 3)
    return path
