"""After a failed fsync the page cache may differ from the disk: affected pages are rewritten."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.page_scrubber import scrub_pages
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import ROUND, StoreOpener, enqueue_shares, read_database_files

LEAF_PAGE_HEADER = b"\x0d\x00\x00\x00\x02\x0f\x00\x00"
"""A table leaf with two cells, the first of them at byte 0x0f00."""


def raise_io_error(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


def test_scrub_after_failed_sync_zeroes_gaps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(4096) + LEAF_PAGE_HEADER + b"stale" + bytes(4083))
    synced: list[int] = []
    with path.open("r+b") as file:
        monkeypatch.setattr(os, "fsync", raise_io_error)
        with pytest.raises(OSError, match="Input"):
            scrub_pages(file.fileno(), {2}, 4096)
        monkeypatch.setattr(os, "fsync", synced.append)
        assert scrub_pages(file.fileno(), {2}, 4096) == 0, "it appears clean"
        assert synced == []
        assert scrub_pages(file.fileno(), {2}, 4096, again=True) == 1
        assert synced == [file.fileno()]


async def copy_as_crashed(store: SqliteStore, path: Path) -> Path:
    """The files of a helper that was killed with commits in its WAL."""
    await enqueue_shares(store, 1, 2)
    copied = path.parent / "crashed" / path.name
    copied.parent.mkdir()
    for name, data in read_database_files(path).items():
        if not name.endswith("-shm"):
            (copied.parent / name).write_bytes(data)
    return copied


async def test_open_after_crash_checkpoints_wal_first(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    copied = await copy_as_crashed(store, path)
    opened = open_database(copied, clock)
    assert Path(f"{copied}-wal").stat().st_size == 0
    opened.close()


@pytest.mark.parametrize("mark", ["open\n", "clean\n"])
async def test_open_after_crash_with_failing_sync_is_refused(
    mark: str,
    store: SqliteStore,
    path: Path,
    clock: FakeClock,
    open_sqlite_store: StoreOpener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after a clean shutdown on a failing disk, which leaves a WAL."""
    copied = await copy_as_crashed(store, path)
    Path(f"{copied}.lock").write_text(mark)
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", raise_io_error)
        with pytest.raises(StoreError, match="could not be checkpointed"):
            open_database(copied, clock)
    assert await (await open_sqlite_store(copied)).count_shares() == {ROUND: {ShareState.RECEIVED: 2}}


async def test_open_on_full_disk_succeeds_and_retries_erasure(
    store: SqliteStore, path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    copied = await copy_as_crashed(store, path)
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", full)
        opened = open_database(copied, clock)
    assert opened.eraser.is_pending
    opened.eraser.run_due(idle=True)
    assert opened.eraser.is_pending, "not immediately"
    clock.advance(1)
    opened.eraser.run_due(idle=True)
    assert not opened.eraser.is_pending
    opened.close()
