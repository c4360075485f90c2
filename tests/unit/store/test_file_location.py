"""A database that is locked under each of its names, and one that is moved while it is in use."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from helper.cli.single_instance import require_single_instance
from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import BackupError, StoreDisplaced, StoreLocked
from helper.store.backup import restore
from helper.store.disk_health import LOCATION_EVERY
from helper.store.migration.sqlite_endpoint import SqliteEndpoint
from helper.store.sqlite.file_check import look_through
from helper.store.sqlite.file_location import DISPLACED, LOG_DISPLACED
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.snapshot import take_snapshot
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import ROUND, Opener, files, put

PATIENCE = 60.0

WRITER = """
import asyncio, sys
from pathlib import Path
import structlog
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import put

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "unwatched":  # as in the moment between a check and the commit
            store._writer._opened.watch.reason = lambda: None
        try:
            await put(store, *map(int, numbers))
        except Exception as error:
            print(type(error).__name__, flush=True)
        else:
            print("stored", flush=True)
    await store.close()

asyncio.run(main())
"""

OPENING = """
import asyncio, sys
from pathlib import Path
from helper.errors import StoreError
from helper.store.sqlite.store import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    await store.close()

try:
    asyncio.run(main())
except StoreError as error:
    print(error, error.advice, sep="\\n")
"""


class Other:
    """A process that has a database open for writing."""

    def __init__(self, database: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.put() == "stored"

    def put(self, *numbers: int, word: str = "put") -> str:
        """Have it store shares; what came of it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, *numbers, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def crash(self) -> None:
        """End it without any chance to tidy up."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)

    def stop(self) -> None:
        """End it in order."""
        self.process.communicate(timeout=PATIENCE)


@contextmanager
def other(database: Path) -> Iterator[Other]:
    started = Other(database)
    try:
        yield started
    finally:
        started.crash()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def number_of_shares(store: SqliteStore) -> int:
    return (await store.counts()).get(ROUND, {}).get(ShareState.RECEIVED, 0)


# ---------------------------------------------------------------------- locked under each name


def symbolic(path: Path, link: Path) -> None:
    link.symlink_to(path)


def hard(path: Path, link: Path) -> None:
    link.hardlink_to(path)


@pytest.mark.parametrize("create_link", [symbolic, hard])
async def test_lock_database_under_another_name_is_refused(
    path: Path, tmp_path: Path, create_link: Callable[[Path, Path], None]
) -> None:
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    with other(path) as writer:
        create_link(path, link)
        with pytest.raises(StoreLocked, match="another daemon"):
            require_single_instance(["serve", "--db", str(link)], {})
        with pytest.raises(StoreLocked, match="another daemon"):
            await SqliteStore(link).open()
        assert writer.put(1) == "stored"
        with pytest.raises(StoreLocked, match="another daemon"):
            restore(b"", link, set_aside=True)
        writer.stop()
    assert not Path(f"{link}-wal").exists()


async def test_lock_database_opened_by_link_is_refused_by_its_own_name(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with other(link) as writer:
        with pytest.raises(StoreLocked, match="another daemon"):
            await SqliteStore(path).open()
        assert writer.put(1, 2) == "stored"
        writer.stop()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.db", "queue.db", "queue.db.lock"]


async def test_store_opened_by_link_erases_its_log(path: Path, tmp_path: Path, opened: Opener) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    store = await opened(link)
    await put(store, *range(5))
    await store.erased()
    assert await store.purge(ROUND) == 5
    async with asyncio.timeout(PATIENCE):
        await store.erased()
    assert Path(f"{path}-wal").stat().st_size == 0


def test_restore_through_link_replaces_its_target(tmp_path: Path) -> None:
    real, link = tmp_path / "data" / "queue.db", tmp_path / "queue.db"
    real.parent.mkdir()
    link.symlink_to(real)
    restore(b"image", link, set_aside=False)
    assert (link.is_symlink(), real.read_bytes()) == (True, b"image")


# ---------------------------------------------------------------------- a second name


async def test_open_hard_link_after_crash_is_refused_until_one_name_is_left(
    path: Path, tmp_path: Path, opened: Opener
) -> None:
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        link.hardlink_to(path)
        writer.crash()
    for name in (link, path):
        with pytest.raises(StoreDisplaced, match=r"has 2 names \(hard links\)") as caught:
            await opened(name)
        assert "Do not remove a file ending in -wal" in caught.value.advice
    assert not Path(f"{link}-wal").exists()

    link.unlink()
    assert await number_of_shares(await opened(path)) == 5


async def test_read_hard_link_is_refused(path: Path, tmp_path: Path, opened: Opener) -> None:
    await (await opened(path)).close()
    link = tmp_path / "link.db"
    link.hardlink_to(path)
    clock = SystemClock()

    async def outlook(database: Path) -> None:
        async with open_queue_file(database) as queue:
            await queue.outlook(now=0.0)

    with pytest.raises(StoreDisplaced, match="has 2 names"):
        await outlook(link)
    for read in (
        lambda: take_snapshot(link, clock),
        lambda: look_through(link, clock, seconds=PATIENCE),
        lambda: restore(b"image", link, set_aside=True),
        SqliteEndpoint(link, clock).look,
        SqliteEndpoint(link, clock).hold,
    ):
        with pytest.raises(StoreDisplaced, match="has 2 names"):
            read()


def test_open_bind_mounted_file_after_crash_is_refused(path: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "elsewhere" / "queue.db"
    mounted.parent.mkdir()
    mounted.touch()
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        writer.crash()
    script = f"mount --bind {path} {mounted} || exit 77; exec {sys.executable} -c '{OPENING}' {mounted}"
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if ended.returncode not in (0, 1) or "Operation not permitted" in ended.stderr:
        pytest.skip(f"this user may not mount: {ended.stderr}")
    assert ended.stdout.splitlines()[0].endswith(
        "is a mount point: its write-ahead log would not be beside the file that is mounted there"
    )
    assert "Mount the directory" in ended.stdout
    assert sorted(file.name for file in mounted.parent.iterdir()) == ["queue.db", "queue.db.lock"]


# ---------------------------------------------------------------------- moved while it is in use


async def test_open_after_crash_without_database_is_refused_and_moving_back_recovers_all_shares(
    path: Path, tmp_path: Path, opened: Opener
) -> None:
    aside = tmp_path / "aside.db"
    with other(path) as writer:
        assert writer.put(*range(12)) == "stored"
        path.rename(aside)
        assert writer.put(*range(12, 24), word="unwatched") == "stored"
        writer.crash()
    log = Path(f"{path}-wal").read_bytes()
    assert log

    for _ in range(2):
        with pytest.raises(StoreDisplaced, match=r"is missing or empty, but .*queue\.db-wal holds") as caught:
            await SqliteStore(path).open()
        assert "Do not delete the log" in caught.value.advice
        assert f"Move the database file back to {path}" in caught.value.advice
    assert (Path(f"{path}-wal").read_bytes(), path.exists()) == (log, False)

    aside.rename(path)
    assert await number_of_shares(await opened(path)) == 24


async def test_open_after_crash_with_empty_file_in_place_of_database_is_refused(path: Path) -> None:
    with other(path) as writer:
        assert writer.put(1) == "stored"
        writer.crash()
    path.unlink()
    path.touch()
    with pytest.raises(StoreDisplaced, match="is missing or empty"):
        await SqliteStore(path).open()
    Path(f"{path}-wal").unlink()
    with pytest.raises(StoreDisplaced, match="did not end in order") as caught:
        await SqliteStore(path).open()
    assert f"delete {path}.lock" in caught.value.advice


async def test_open_after_crash_with_another_database_in_place_is_refused(
    path: Path, tmp_path: Path, opened: Opener
) -> None:
    old, aside = tmp_path / "old.db", tmp_path / "aside.db"
    await (await opened(path)).close()
    shutil.copy(path, old)
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        path.rename(aside)
        shutil.copy(old, path)
        writer.crash()
    before = files(path)

    with pytest.raises(StoreDisplaced, match="is not the database that"):
        await SqliteStore(path).open()
    assert files(path) == before

    aside.replace(path)
    assert await number_of_shares(await opened(path)) == 5


async def test_open_after_crash_without_log_is_refused(path: Path, tmp_path: Path, opened: Opener) -> None:
    log, aside = Path(f"{path}-wal"), tmp_path / "aside-wal"
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        writer.crash()
    log.rename(aside)
    with pytest.raises(StoreDisplaced, match=r"queue\.db-wal is missing"):
        await SqliteStore(path).open()
    aside.rename(log)
    assert await number_of_shares(await opened(path)) == 5


async def test_open_after_crash_of_files_copied_together_succeeds(path: Path, tmp_path: Path, opened: Opener) -> None:
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        writer.crash()
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    for name in files(path):
        shutil.copy(path.parent / name, copy.parent / name)
    assert await number_of_shares(await opened(copy)) == 5


async def test_open_after_crash_of_copies_succeeds_whatever_their_inodes(
    path: Path, tmp_path: Path, opened: Opener
) -> None:
    """On a new volume, one of the copies may have the inode number that the original had."""
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        writer.crash()
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    copy.replace(path)
    assert await number_of_shares(await opened(path)) == 5


async def test_open_after_crash_with_restored_snapshot_beside_log_is_refused(path: Path) -> None:
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        image = take_snapshot(path, SystemClock()).image
        assert writer.put(*range(5, 9)) == "stored"
        writer.crash()
    path.write_bytes(image)
    before = files(path)
    with pytest.raises(StoreDisplaced, match="is not the database that") as caught:
        await SqliteStore(path).open()
    assert "Do not delete the log" in caught.value.advice
    assert "elsewhere" not in caught.value.advice
    assert files(path) == before


async def test_open_again_after_two_crashes_recovers_all_shares(path: Path, opened: Opener) -> None:
    for first in (0, 5):
        with other(path) as writer:
            assert writer.put(*range(first, first + 5)) == "stored"
            writer.crash()
    record = Path(f"{path}.lock").read_bytes().split()
    assert (record[0], len(record[1])) == (b"open", 32)
    assert await number_of_shares(await opened(path)) == 10


async def test_open_after_log_was_written_back_at_close_succeeds(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing deletes the log before the lock records the end."""
    store = await opened(path)
    await put(store, 1)
    monkeypatch.setattr(FileLock, "release", lambda lock, *, clean: lock._close())  # killed before it is recorded
    await store.close()
    monkeypatch.undo()
    assert Path(f"{path}.lock").read_bytes() == b"open\n"
    assert await number_of_shares(await opened(path)) == 1


@pytest.mark.parametrize(("suffix", "reason"), [("", DISPLACED), ("-wal", LOG_DISPLACED)])
async def test_write_after_file_was_moved_is_refused_until_it_is_back(
    store: SqliteStore, path: Path, tmp_path: Path, suffix: str, reason: str
) -> None:
    await put(store, 1)
    moved, aside = Path(f"{path}{suffix}"), tmp_path / "aside"
    moved.rename(aside)

    with structlog.testing.capture_logs() as logged, pytest.raises(StoreDisplaced, match="no longer at its path"):
        await put(store, 2)
    assert [line["event"] for line in logged] == ["database_displaced"]
    assert (logged[0]["reason"], logged[0]["path"]) == (reason, str(path))
    assert store.trouble == reason
    assert await number_of_shares(store) == 1

    aside.rename(moved)
    await until(lambda: store.trouble is None)
    await put(store, 3)
    assert await number_of_shares(store) == 2


async def test_idle_store_notices_that_its_database_was_replaced(
    store: SqliteStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LOCATION_EVERY <= 10
    monkeypatch.setattr("helper.store.disk_health.LOCATION_EVERY", 0.01)
    await put(store, 1)
    aside = tmp_path / "aside"
    path.rename(aside)
    path.write_bytes(aside.read_bytes())
    await until(lambda: store.trouble == DISPLACED)
    aside.replace(path)
    await until(lambda: store.trouble is None)


async def test_symbolic_link_pointed_elsewhere_is_noticed(path: Path, tmp_path: Path, opened: Opener) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    store = await opened(link)
    await put(store, 1)
    link.unlink()
    link.symlink_to(tmp_path / "none.db")
    with pytest.raises(StoreDisplaced):
        await put(store, 2)


async def test_close_after_database_was_moved_keeps_its_log(path: Path, tmp_path: Path, opened: Opener) -> None:
    aside = tmp_path / "aside.db"
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        path.rename(aside)
        assert writer.put(*range(5, 12), word="unwatched") == "stored"
        writer.stop()

    with pytest.raises(StoreDisplaced):
        await SqliteStore(path).open()
    aside.rename(path)
    assert await number_of_shares(await opened(path)) == 12


async def test_deleted_database_is_rescued_from_the_running_process(path: Path, tmp_path: Path, opened: Opener) -> None:
    """As docs/operations.md tells operators."""
    rescued = tmp_path / "rescued"
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        path.unlink()
        assert writer.put(5) == "StoreDisplaced"
        descriptors = Path(f"/proc/{writer.process.pid}/fd")
        deleted = [fd for fd in descriptors.iterdir() if str(fd.readlink()) == f"{path} (deleted)"]
        shutil.copyfile(deleted[0], rescued)
        writer.stop()
    rescued.rename(path)
    assert await number_of_shares(await opened(path)) == 5


def test_restore_without_database_keeps_the_log_of_a_crash_aside(path: Path) -> None:
    with other(path) as writer:
        assert writer.put(*range(5)) == "stored"
        writer.crash()
    path.unlink()
    with pytest.raises(BackupError, match="already"):
        restore(b"image", path, set_aside=False)
    aside = restore(b"image", path, set_aside=True)
    assert aside is not None
    assert Path(f"{aside}-wal").stat().st_size > 0
