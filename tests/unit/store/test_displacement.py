"""Database locks under each of the file's names, and databases moved while in use."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import BackupError, StoreDisplaced, StoreLocked
from helper.store import rounds
from helper.store.backup import restore_database
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.sqlite.displacement import DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT
from helper.store.sqlite.errors import LOCATION_CHECK_SECONDS
from helper.store.sqlite.file_lock import FileLock, refuse_locked
from helper.store.sqlite.opening import quick_check
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.snapshot import read_contents, take_snapshot
from helper.store.sqlite.store import SqliteStore
from tests.support.fakes import wait_until
from tests.unit.store.fixtures import ROUND, StoreOpener, enqueue_shares, read_database_files

PATIENCE_SECONDS = 60.0
ShareCounter = Callable[[Path], Awaitable[int]]

WRITER_SCRIPT = """
import asyncio, sys
from pathlib import Path
import structlog
from helper.store.sqlite.store import SqliteStore
from tests.unit.store.fixtures import enqueue_shares

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "unwatched":  # as in the moment between a check and the commit
            store._writer._opened.path_monitor.displacement_reason = lambda: None
        try:
            await enqueue_shares(store, *map(int, numbers))
        except Exception as error:
            print(type(error).__name__, flush=True)
        else:
            print("stored", flush=True)
    await store.close()

asyncio.run(main())
"""

OPEN_SCRIPT = """
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


class WriterProcess:
    """A process that has a database open for writing."""

    def __init__(self, database: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER_SCRIPT, str(database)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.enqueue() == "stored"

    def enqueue(self, *numbers: int, command: str = "put") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, *numbers, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def crash(self) -> None:
        """Kill the process without cleanup."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_SECONDS)

    def stop(self) -> None:
        self.process.communicate(timeout=PATIENCE_SECONDS)


@contextmanager
def run_writer(database: Path) -> Iterator[WriterProcess]:
    started = WriterProcess(database)
    try:
        yield started
    finally:
        started.crash()


async def crash_with_shares(database: Path, number: int = 5) -> None:
    """Leave a database as a helper that has stored shares and was killed does, with all commits in its WAL."""
    running = database.with_name("running") / database.name
    running.parent.mkdir()
    store = SqliteStore(running)
    await store.open()
    await enqueue_shares(store, *range(number))
    for name in read_database_files(running):
        if not name.endswith("-shm"):
            shutil.copy(running.with_name(name), database.with_name(name))
    await store.close()
    shutil.rmtree(running.parent)


@pytest.fixture
def count_shares(open_sqlite_store: StoreOpener) -> ShareCounter:
    async def count(database: Path) -> int:
        return await number_of_shares(await open_sqlite_store(database))

    return count


async def number_of_shares(store: SqliteStore) -> int:
    return (await store.count_shares()).get(ROUND, {}).get(ShareState.WAITING, 0)


# ---------------------------------------------------------------------- locks under each name


def create_symlink(path: Path, link: Path) -> None:
    link.symlink_to(path)


def create_hard_link(path: Path, link: Path) -> None:
    link.hardlink_to(path)


@pytest.mark.parametrize("create_link", [create_symlink, create_hard_link])
async def test_lock_database_under_another_name_is_refused(
    path: Path, tmp_path: Path, create_link: Callable[[Path, Path], None]
) -> None:
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    with run_writer(path) as writer:
        create_link(path, link)
        with pytest.raises(StoreLocked, match="another helper"):
            refuse_locked(link)
        with pytest.raises(StoreLocked, match="another helper"):
            await SqliteStore(link).open()
        assert writer.enqueue(1) == "stored"
        with pytest.raises(StoreLocked, match="another helper"):
            restore_database(b"", link, set_aside=True)
        writer.stop()
    assert not Path(f"{link}-wal").exists()


async def test_lock_database_opened_by_link_is_refused_by_its_own_name(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with run_writer(link) as writer:
        with pytest.raises(StoreLocked, match="another helper"):
            await SqliteStore(path).open()
        assert writer.enqueue(1, 2) == "stored"
        writer.stop()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.db", "queue.db", "queue.db.lock"]


async def test_store_opened_by_link_erases_its_log(path: Path, tmp_path: Path, open_sqlite_store: StoreOpener) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    store = await open_sqlite_store(link)
    await enqueue_shares(store, *range(5))
    await store.wait_for_erasure()
    assert await store.run_batches(rounds.purge, ROUND) == 5
    async with asyncio.timeout(PATIENCE_SECONDS):
        await store.wait_for_erasure()
    assert Path(f"{path}-wal").stat().st_size == 0


def test_restore_through_link_replaces_its_target(tmp_path: Path) -> None:
    real, link = tmp_path / "data" / "queue.db", tmp_path / "queue.db"
    real.parent.mkdir()
    link.symlink_to(real)
    restore_database(b"image", link, set_aside=False)
    assert (link.is_symlink(), real.read_bytes()) == (True, b"image")


# ---------------------------------------------------------------------- a second name


async def test_open_hard_link_after_crash_is_refused_until_one_name_is_left(
    path: Path, tmp_path: Path, open_sqlite_store: StoreOpener, count_shares: ShareCounter
) -> None:
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    await crash_with_shares(path)
    link.hardlink_to(path)
    for name in (link, path):
        with pytest.raises(StoreDisplaced, match=r"has 2 hard links") as caught:
            await open_sqlite_store(name)
        assert "Do not remove a file ending in -wal" in caught.value.advice
    assert not Path(f"{link}-wal").exists()

    link.unlink()
    assert await count_shares(path) == 5


async def test_read_hard_link_is_refused(path: Path, tmp_path: Path, open_sqlite_store: StoreOpener) -> None:
    await (await open_sqlite_store(path)).close()
    link = tmp_path / "link.db"
    link.hardlink_to(path)
    clock = SystemClock()

    async def summarize(database: Path) -> None:
        async with open_queue_file(database) as queue:
            await queue.count_shares()

    with pytest.raises(StoreDisplaced, match="has 2 hard links"):
        await summarize(link)
    for read in (
        lambda: read_contents(link, clock),
        lambda: quick_check(link, clock, seconds=PATIENCE_SECONDS),
        lambda: restore_database(b"image", link, set_aside=True),
        SqliteEndpoint(link, clock).connect_read_only,
        SqliteEndpoint(link, clock).lock_exclusive,
    ):
        with pytest.raises(StoreDisplaced, match="has 2 hard links"):
            read()


async def test_open_bind_mounted_file_after_crash_is_refused(path: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "elsewhere" / "queue.db"
    mounted.parent.mkdir()
    mounted.touch()
    await crash_with_shares(path)
    script = f"mount --bind {path} {mounted} || exit 77; exec {sys.executable} -c '{OPEN_SCRIPT}' {mounted}"
    completed = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    if completed.returncode not in (0, 1) or "Operation not permitted" in completed.stderr:
        pytest.skip(f"this user may not mount: {completed.stderr}")
    assert completed.stdout.splitlines()[0].endswith(
        "is a mount point: its write-ahead log would not be next to the mounted file"
    )
    assert "Mount the directory" in completed.stdout
    assert sorted(file.name for file in mounted.parent.iterdir()) == ["queue.db", "queue.db.lock"]


# ---------------------------------------------------------------------- moved while it is in use


async def test_open_after_crash_without_database_is_refused_until_it_is_moved_back(
    path: Path, tmp_path: Path, count_shares: ShareCounter
) -> None:
    moved_path = tmp_path / "aside.db"
    with run_writer(path) as writer:
        assert writer.enqueue(*range(12)) == "stored"
        path.rename(moved_path)
        assert writer.enqueue(*range(12, 24), command="unwatched") == "stored"
        writer.crash()
    log = Path(f"{path}-wal").read_bytes()
    assert log

    for _ in range(2):
        with pytest.raises(StoreDisplaced, match=r"is missing or empty, but .*queue\.db-wal contains") as caught:
            await SqliteStore(path).open()
        assert "Do not delete the WAL" in caught.value.advice
        assert f"Move the database file back to {path}" in caught.value.advice
    assert (Path(f"{path}-wal").read_bytes(), path.exists()) == (log, False)

    moved_path.rename(path)
    assert await count_shares(path) == 24


async def test_open_after_crash_with_empty_file_in_place_of_database_is_refused(path: Path) -> None:
    await crash_with_shares(path, 1)
    path.unlink()
    path.touch()
    with pytest.raises(StoreDisplaced, match="is missing or empty"):
        await SqliteStore(path).open()
    Path(f"{path}-wal").unlink()
    with pytest.raises(StoreDisplaced, match="was not shut down cleanly") as caught:
        await SqliteStore(path).open()
    assert f"delete {path}.lock" in caught.value.advice


async def test_open_after_crash_with_another_database_in_place_is_refused(
    path: Path, tmp_path: Path, open_sqlite_store: StoreOpener, count_shares: ShareCounter
) -> None:
    old, moved_path = tmp_path / "old.db", tmp_path / "aside.db"
    await (await open_sqlite_store(path)).close()
    shutil.copy(path, old)
    with run_writer(path) as writer:
        assert writer.enqueue(*range(5)) == "stored"
        path.rename(moved_path)
        shutil.copy(old, path)
        writer.crash()
    before = read_database_files(path)

    with pytest.raises(StoreDisplaced, match="is not the database that"):
        await SqliteStore(path).open()
    assert read_database_files(path) == before

    moved_path.replace(path)
    assert await count_shares(path) == 5


async def test_open_after_crash_without_log_is_refused(path: Path, tmp_path: Path, count_shares: ShareCounter) -> None:
    log, moved_log = Path(f"{path}-wal"), tmp_path / "aside-wal"
    await crash_with_shares(path)
    log.rename(moved_log)
    with pytest.raises(StoreDisplaced, match=r"queue\.db-wal is missing"):
        await SqliteStore(path).open()
    moved_log.rename(log)
    assert await count_shares(path) == 5


async def test_open_after_crash_of_copies_succeeds(path: Path, tmp_path: Path, count_shares: ShareCounter) -> None:
    await crash_with_shares(path)
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    for name in read_database_files(path):
        shutil.copy(path.parent / name, copy.parent / name)
    same_inode = tmp_path / "copy.db"  # on a new volume, a copy may have the inode number of the original
    shutil.copy(path, same_inode)
    same_inode.replace(path)
    assert (await count_shares(copy), await count_shares(path)) == (5, 5)


async def test_open_after_crash_with_restored_snapshot_and_old_log_is_refused(path: Path) -> None:
    with run_writer(path) as writer:
        assert writer.enqueue(*range(5)) == "stored"
        with take_snapshot(path, SystemClock()) as snapshot:
            image = snapshot.file.read()
        assert writer.enqueue(*range(5, 9)) == "stored"
        writer.crash()
    path.write_bytes(image)
    before = read_database_files(path)
    with pytest.raises(StoreDisplaced, match="is not the database that") as caught:
        await SqliteStore(path).open()
    assert "Do not delete the WAL" in caught.value.advice
    assert "elsewhere" not in caught.value.advice
    assert read_database_files(path) == before


async def test_open_again_after_two_crashes_recovers_all_shares(path: Path, count_shares: ShareCounter) -> None:
    for first in (0, 5):
        with run_writer(path) as writer:
            assert writer.enqueue(*range(first, first + 5)) == "stored"
            writer.crash()
    record = Path(f"{path}.lock").read_bytes().split()
    assert (record[0], len(record[1])) == (b"open", 32)
    assert await count_shares(path) == 10


async def test_open_after_log_was_written_back_at_close_succeeds(
    path: Path, open_sqlite_store: StoreOpener, count_shares: ShareCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing deletes the WAL before the lock records the clean end."""
    store = await open_sqlite_store(path)
    await enqueue_shares(store, 1)
    monkeypatch.setattr(FileLock, "release", lambda lock, *, clean: lock._close())  # killed before it is recorded
    await store.close()
    monkeypatch.undo()
    assert Path(f"{path}.lock").read_bytes() == b"open\n"
    assert await count_shares(path) == 1


@pytest.mark.parametrize(("suffix", "reason"), [("", DATABASE_DISPLACED_TEXT), ("-wal", WAL_DISPLACED_TEXT)])
async def test_write_after_file_was_moved_is_refused_until_it_is_back(
    store: SqliteStore, path: Path, tmp_path: Path, suffix: str, reason: str
) -> None:
    await enqueue_shares(store, 1)
    moved, renamed = Path(f"{path}{suffix}"), tmp_path / "aside"
    moved.rename(renamed)

    with structlog.testing.capture_logs() as logged, pytest.raises(StoreDisplaced, match="no longer at its path"):
        await enqueue_shares(store, 2)
    assert [line["event"] for line in logged] == ["database_displaced"]
    assert (logged[0]["reason"], logged[0]["path"]) == (reason, str(path))
    assert store.write_error == reason
    assert await number_of_shares(store) == 1

    renamed.rename(moved)
    await wait_until(lambda: store.write_error is None)
    await enqueue_shares(store, 3)
    assert await number_of_shares(store) == 2


async def test_idle_store_detects_that_its_database_was_replaced(
    store: SqliteStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LOCATION_CHECK_SECONDS <= 10
    monkeypatch.setattr("helper.store.sqlite.errors.LOCATION_CHECK_SECONDS", 0.01)
    await enqueue_shares(store, 1)
    renamed = tmp_path / "aside"
    path.rename(renamed)
    path.write_bytes(renamed.read_bytes())
    await wait_until(lambda: store.write_error == DATABASE_DISPLACED_TEXT)
    renamed.replace(path)
    await wait_until(lambda: store.write_error is None)


async def test_write_after_symlink_changed_is_refused(
    path: Path, tmp_path: Path, open_sqlite_store: StoreOpener
) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    store = await open_sqlite_store(link)
    await enqueue_shares(store, 1)
    link.unlink()
    link.symlink_to(tmp_path / "none.db")
    with pytest.raises(StoreDisplaced):
        await enqueue_shares(store, 2)


async def test_close_after_database_was_moved_keeps_its_log(
    path: Path, tmp_path: Path, count_shares: ShareCounter
) -> None:
    moved_path = tmp_path / "aside.db"
    with run_writer(path) as writer:
        assert writer.enqueue(*range(5)) == "stored"
        path.rename(moved_path)
        assert writer.enqueue(*range(5, 12), command="unwatched") == "stored"
        writer.stop()

    with pytest.raises(StoreDisplaced):
        await SqliteStore(path).open()
    moved_path.rename(path)
    assert await count_shares(path) == 12


async def test_deleted_database_is_rescued_from_the_running_process(
    path: Path, tmp_path: Path, count_shares: ShareCounter
) -> None:
    """Follows the procedure in docs/operations.md."""
    rescued = tmp_path / "rescued"
    with run_writer(path) as writer:
        assert writer.enqueue(*range(5)) == "stored"
        path.unlink()
        assert writer.enqueue(5) == "StoreDisplaced"
        descriptors = Path(f"/proc/{writer.process.pid}/fd")
        deleted = [fd for fd in descriptors.iterdir() if str(fd.readlink()) == f"{path} (deleted)"]
        shutil.copyfile(deleted[0], rescued)
        writer.stop()
    rescued.rename(path)
    assert await count_shares(path) == 5


async def test_restore_without_database_renames_the_log_of_a_crash(path: Path) -> None:
    await crash_with_shares(path)
    path.unlink()
    with pytest.raises(BackupError, match="already"):
        restore_database(b"image", path, set_aside=False)
    old_path = restore_database(b"image", path, set_aside=True)
    assert old_path is not None
    assert Path(f"{old_path}-wal").stat().st_size > 0
