"""Opening the registration database: regular files only, no symbolic links, mode 0600."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from admin import admin_database
from admin.admin_database import AdminStore
from helper.errors import StoreForeign
from tests.support.fakes import TIMEOUT_SECONDS

pytestmark = pytest.mark.rule("R16")


async def open_store(path: Path) -> None:
    opening = AdminStore(path)
    await opening.open()
    await opening.close()


@pytest.mark.parametrize("content", [None, b"", b"an existing file"])
async def test_open_through_link_is_refused_and_writes_nothing(tmp_path: Path, content: bytes | None) -> None:
    target, link = tmp_path / "target", tmp_path / "admin.db"
    if content is not None:
        target.write_bytes(content)
        os.utime(target, (1, 1))
    link.symlink_to(target)
    with pytest.raises(StoreForeign, match="is not a regular file"):
        await open_store(link)
    assert target.exists() == (content is not None)
    if content is not None:
        assert (target.read_bytes(), target.stat().st_mtime) == (content, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path != target) == ["admin.db"]


async def test_open_with_link_created_during_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, path = tmp_path / "target", tmp_path / "admin.db"
    target.write_bytes(b"")
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def replace_first(*args: Any, **options: Any) -> sqlite3.Connection:
        path.unlink()
        path.symlink_to(target)
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", replace_first)
    with pytest.raises(StoreForeign, match="is not a regular file"):
        await open_store(path)
    assert target.read_bytes() == b""


async def test_open_of_another_programs_database_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "admin.db"
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE songs (title TEXT)")
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(StoreForeign, match="is not a registration database"):
        await open_store(path)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o644)


async def test_open_non_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreForeign, match="is not a regular file"):
        await open_store(tmp_path / "pipe")


async def test_open_with_special_characters_in_path_uses_that_file(tmp_path: Path) -> None:
    directory = tmp_path / "a %3F?mode=memory#ü"
    directory.mkdir()
    await open_store(directory / "admin.db")
    assert (directory / "admin.db").stat().st_size > 0


async def test_open_of_readable_file_sets_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "admin.db"
    await open_store(path)
    path.chmod(0o644)
    await open_store(path)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_cancelled_open_ends_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a service that is stopped while it starts would not end: Python waits for this thread."""

    async def cancel(*_arguments: Any) -> None:
        opening.cancel()
        await asyncio.Event().wait()

    monkeypatch.setattr(admin_database, "_fetch_one", cancel)
    before = set(threading.enumerate())
    opening = asyncio.ensure_future(AdminStore(tmp_path / "admin.db").open())
    with pytest.raises(asyncio.CancelledError):
        await opening
    for thread in set(threading.enumerate()) - before:
        if "asyncio" not in thread.name:  # the loop's own threads end with it
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()
