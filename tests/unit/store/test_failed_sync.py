"""After a failed fsync the kernel shows what may not be on the disk: what was so written is written again."""

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
from tests.unit.store.fixtures import ROUND, Opener, files, put

LEAF = b"\x0d\x00\x00\x00\x02\x0f\x00\x00"
"""A table leaf with two cells, the first of them at byte 0x0f00."""


def fails(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


def test_gaps_whose_zeros_were_not_synced_are_zeroed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(4096) + LEAF + b"stale" + bytes(4083))
    synced: list[int] = []
    with path.open("r+b") as file:
        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input"):
            scrub_pages(file.fileno(), {2}, 4096)
        monkeypatch.setattr(os, "fsync", synced.append)
        assert scrub_pages(file.fileno(), {2}, 4096) == 0, "it looks clean"
        assert synced == []
        assert scrub_pages(file.fileno(), {2}, 4096, again=True) == 1
        assert synced == [file.fileno()]


async def crashed_copy(store: SqliteStore, path: Path) -> Path:
    """The files of a daemon that was killed with commits in its WAL."""
    await put(store, 1, 2)
    there = path.parent / "crashed" / path.name
    there.parent.mkdir()
    for name, data in files(path).items():
        if not name.endswith("-shm"):
            (there.parent / name).write_bytes(data)
    return there


async def test_what_a_crash_left_in_the_wal_is_in_the_database_before_anything_is_answered(
    store: SqliteStore, path: Path, clock: FakeClock
) -> None:
    there = await crashed_copy(store, path)
    opened = open_database(there, clock)
    assert Path(f"{there}-wal").stat().st_size == 0
    opened.close()


@pytest.mark.parametrize("mark", ["open\n", "clean\n"])
async def test_a_start_is_refused_while_that_can_not_be_written(
    mark: str, store: SqliteStore, path: Path, clock: FakeClock, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an orderly end on a failing disk: a WAL is left then."""
    there = await crashed_copy(store, path)
    Path(f"{there}.lock").write_text(mark)
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", fails)
        with pytest.raises(StoreError, match="could not be written back"):
            open_database(there, clock)
    assert await (await opened(there)).counts() == {ROUND: {ShareState.RECEIVED: 2}}


async def test_a_full_disk_refuses_no_start_and_erasure_is_tried_again(
    store: SqliteStore, path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    there = await crashed_copy(store, path)
    with monkeypatch.context() as patch:
        patch.setattr("helper.store.sqlite.erasure.scrub_pages", full)
        opened = open_database(there, clock)
    assert opened.eraser.pending
    opened.eraser.run_due(idle=True)
    assert opened.eraser.pending, "not at once"
    clock.advance(1)
    opened.eraser.run_due(idle=True)
    assert not opened.eraser.pending
    opened.close()
