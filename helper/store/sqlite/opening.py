"""Creates, checks and opens the database file: file system, file modes, schema, and start-up checks."""

from __future__ import annotations

import os
import secrets
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.errors import StoreCorrupt, StoreError, StoreFull
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.displacement import PathMonitor, file_size, refuse_incomplete, wal_path
from helper.store.sqlite.erasure import Eraser
from helper.store.sqlite.errors import is_disk_full, not_a_database, result_code, translate
from helper.store.sqlite.file_lock import FileLock, open_regular, refuse_non_file
from helper.store.sqlite.reader import BUSY_SECONDS, connect_read_only, require_readable
from helper.store.sqlite.schema import (
    FileIdentity,
    check_file,
    check_pages,
    compare_schema,
    migrate_schema,
    open_encryption,
    read_identity,
    record_keys,
    refuse_unencrypted,
)
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.table_rows import (
    RANK_KEY,
    ROW_CHECK_KEY,
    RUN_KEY,
    make_meta_row,
    read_key,
    read_meta_value,
    refuse_marked,
)
from helper.store.transaction import DatabaseKeys, read_round_key

CHECKED_AT_START: Final = 64 << 20
"""Maximum size in bytes of a file that is checked before the start; this takes a few tenths of a second.

Checking a larger file would delay responses to wallets. The background check detects damage in it; until then, the row
checks do.
"""
DATABASE_HEADER: Final = b"SQLite format 3\0"
"""First bytes of a database, and of the content of a backup. An export begins with a line of JSON."""
_RUN_BYTES: Final = 16
_FORMATS: Final = slice(18, 20)
"""Header bytes with the write and read version of the format: 1 for a rollback journal, 2 for a WAL."""
_PAGE_SIZE: Final = slice(16, 18)
_PAGES: Final = slice(28, 32)
_USER_VERSION: Final = slice(60, 64)
_APPLICATION_ID: Final = slice(68, 72)


@dataclass(slots=True)
class OpenedDatabase:
    """An open database."""

    tx: SqliteTransaction
    eraser: Eraser
    lock: FileLock
    path_monitor: PathMonitor

    def close(self) -> None:
        """Complete pending erasure and close the file.

        If the database was moved, nothing is written to it. The write-ahead log (WAL) at the old path stays complete,
        because SQLite does not delete the WAL of a file that has moved. The next start then reports the missing
        database.
        """
        clean = False
        try:
            if not self.path_monitor.is_database_displaced():
                self.eraser.finish()
                clean = not self.eraser.is_pending
                with suppress(OSError):  # disk full: the record is unchanged
                    self.lock.mark_open()  # closing deletes the WAL, so the next start must not require it
            self.tx.conn.close()
        finally:
            self.eraser.close()
            self.lock.release(clean=clean)


def open_database(
    path: Path,
    clock: Clock,
    *,
    encryption: RowEncryption = UNENCRYPTED,
    for_copy: bool = False,
) -> OpenedDatabase:
    """Open the file for writing, or create it; called on the writer thread.

    Args:
        path: the file.
        clock: measures the delay of erasure.
        encryption: made from the key file. With a key, a new file is encrypted.
        for_copy: open it even if a copy has marked it, or if it is not encrypted and there is a key file.

    Raises:
        StoreKeyError: it is encrypted, and a key that it needs is missing; or there is a key file, and it is not
            encrypted.
        StoreMoved: a copy has marked it, so the queue is in another database.
        StoreLocked: another helper has it open.
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
        StoreDisplaced: after a crash, the database or its write-ahead log is missing or was replaced.
        StoreFull: there is no space left on its disk.
        StoreError: it cannot be opened.
    """
    # SQLite names the write-ahead log after the resolved path.
    given, path = path, Path(os.path.realpath(path))
    try:
        refuse_other_file(path)
        lock = FileLock(path)
        # Without a crash there is no WAL, unless the disk failed at the last close.
        clean = lock.acquire()
        try:
            refuse_incomplete(path, lock, clean=clean)
            clean = clean and not file_size(wal_path(path))
            return _open_locked(path, clock, lock, encryption, watched=given, clean=clean, for_copy=for_copy)
        except BaseException:
            lock.release(clean=False)
            raise
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        if is_disk_full(error):
            raise StoreFull(
                f"cannot open {path}: no space left on the disk of {path.parent}",
                advice=f"Free space on that disk (`df -h {path.parent}`), and start again.",
            ) from error
        if isinstance(error, OSError):
            raise StoreError(
                f"cannot open {path}: {error.strerror}",
                advice="Create the directory of [helper] db_path, and make it writable by the service's user.",
            ) from error
        if isinstance(error, sqlite3.Error) and result_code(error) == sqlite3.SQLITE_ERROR:
            # All statements are valid for an undamaged file, so the schema of this file must be damaged.
            raise StoreCorrupt(f"the database is damaged: invalid schema: {error}") from error
        raise translate(error, str(path)) from error


def _open_locked(
    path: Path, clock: Clock, lock: FileLock, configured: RowEncryption, *, watched: Path, clean: bool, for_copy: bool
) -> OpenedDatabase:
    _prepare_file(path)
    lock.lock_database()
    conn = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS, cached_statements=256)
    # A damaged text must not prevent the start; its row check detects the damage.
    conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    try:
        encryption = _check_database(conn, path, configured)
        if not for_copy:
            refuse_unencrypted(encryption, configured, str(path))
        _configure_connection(conn)
        migrate_schema(conn, is_encrypted=encryption.is_encrypted)
        compare_schema(conn, str(path))
        keys = _load_keys(conn)
        if encryption.keyring is not None:
            record_keys(conn, encryption.keyring)
        if not for_copy:
            refuse_marked(conn.execute(sqlite_statements()["get_marks"]).fetchall(), str(path))
        round_keys = conn.execute(sqlite_statements()["round_keys"]).fetchall()
        for row in encryption.decrypt_rows("round_keys", round_keys):
            read_round_key(row, keys)
        next_id = int(conn.execute(sqlite_statements()["last_share_id"]).fetchone()[0]) + 1
        if lock.crashed_run is None:  # otherwise the record of the crash applies until this run ends cleanly
            lock.mark_open()
        run = _write_run_id(conn, lock.crashed_run)
        eraser = Eraser(conn, path, clock)
    except BaseException:
        _close_refused(conn, lock, clean=clean)
        raise
    if not clean:
        try:
            eraser.erase_all()
        except (sqlite3.Error, OSError) as error:
            _close_refused(conn, lock, clean=clean)
            eraser.close()
            raise StoreError(f"the last run's WAL could not be checkpointed into {path}: {error}") from error
    if run is not None and run != lock.crashed_run and eraser.write_back():
        lock.mark_open(run)
    tx = SqliteTransaction(keys, conn, next_id, encryption, clock=clock)
    return OpenedDatabase(tx, eraser, lock, PathMonitor(watched))


def _write_run_id(conn: sqlite3.Connection, recorded: str | None) -> str | None:
    """Write a run identifier to the database, so that the next start recognizes the database after a crash.

    After a crash, the identifier of the crashed run (`recorded`) is used again, because database and lock file must
    have the same identifier until the lock file is rewritten. Returns the identifier; None if the disk is full.
    """
    run = recorded or secrets.token_hex(_RUN_BYTES)
    if read_meta_value(conn.execute(sqlite_statements()["get_meta"], (RUN_KEY,)).fetchall()) != run:
        try:
            conn.execute(sqlite_statements()["set_meta"], make_meta_row(RUN_KEY, run))
        except sqlite3.Error as error:
            if not is_disk_full(error):
                raise
            return None
    return run


def _close_refused(conn: sqlite3.Connection, lock: FileLock, *, clean: bool) -> None:
    if not clean:
        with suppress(OSError):  # disk full: the record is unchanged
            lock.mark_open()  # closing may delete the WAL, so the next start must not require it
    conn.close()


def _prepare_file(path: Path) -> None:
    """Create the file with mode 0600, or check the existing one before SQLite opens it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    _check_header(path)
    for name in (path, wal_path(path), Path(f"{path}-shm")):
        fd = open_regular(name)
        if fd >= 0:
            try:
                if os.fstat(fd).st_mode & 0o077:
                    os.fchmod(fd, 0o600)
            finally:
                os.close(fd)


def refuse_other_file(path: Path, *, may_be_damaged: bool = False) -> None:
    """Refuse a file of another program before anything is created next to it, or its mode is changed.

    Args:
        path: the resolved path.
        may_be_damaged: accept any content if there is a lock file, which shows that the file was a helper's.

    Raises:
        StoreForeign: it is not a file, or not a database of this helper, or was written by a newer version.
        StoreCorrupt: its header is damaged.
    """
    refuse_non_file(path)
    has_lock_file = Path(f"{path}.lock").exists()
    if not file_size(path) or (may_be_damaged and has_lock_file):
        return
    with path.open("rb") as file:
        head = file.read(_APPLICATION_ID.stop)
    if not head.startswith(DATABASE_HEADER):
        raise not_a_database(str(path))
    application_id, version = (int.from_bytes(head[field], "big") for field in (_APPLICATION_ID, _USER_VERSION))
    # After a crash, the id of a new database may be in the WAL only. There is a lock file then.
    if application_id or not has_lock_file:
        FileIdentity(application_id, version, objects=1).check(str(path))


def _check_header(path: Path) -> None:
    """Refuse damage that SQLite does not report when it opens a file.

    SQLite opens a file with an unknown format version but refuses every write. A truncated file is accepted if there is
    a WAL, which may contain the missing pages.
    """
    with path.open("rb") as file:
        head = file.read(_PAGES.stop)
    if not head:
        return
    if head[_FORMATS] not in (b"\x01\x01", b"\x02\x02"):
        raise StoreCorrupt(f"{path} is damaged: its header is not one that SQLite writes")
    pages, size = int.from_bytes(head[_PAGES], "big"), int.from_bytes(head[_PAGE_SIZE], "big")
    if not file_size(wal_path(path)) and path.stat().st_size < pages * (size if size > 1 else 65536):
        raise StoreCorrupt(f"{path} is damaged: it is truncated")


def _check_database(conn: sqlite3.Connection, path: Path, configured: RowEncryption) -> RowEncryption:
    """Return the encryption of a database. Refuses one that is damaged, of another program, or of other keys.

    Writes nothing.
    """
    identity = read_identity(conn)
    if not identity.is_new():
        identity.check(str(path))
    encryption = open_encryption(conn, configured, str(path))
    if path.stat().st_size <= CHECKED_AT_START:
        check_pages(conn, str(path), "quick_check(3)")
    return encryption


def _configure_connection(conn: sqlite3.Connection) -> None:
    mode = conn.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StoreError(
            "the database cannot use a write-ahead log",
            advice="Put the database on a local disk: network file systems do not support it.",
        )
    conn.execute("PRAGMA synchronous = FULL")
    conn.execute("PRAGMA secure_delete = ON")
    conn.execute("PRAGMA temp_store = MEMORY")
    conn.execute("PRAGMA foreign_keys = ON")
    conn.execute("PRAGMA trusted_schema = OFF")
    conn.execute("PRAGMA cell_size_check = ON")
    conn.execute("PRAGMA cache_size = -32000")
    # Only the eraser may checkpoint, because it must know which pages were written to the file.
    conn.execute("PRAGMA wal_autocheckpoint = 0")


def _load_keys(conn: sqlite3.Connection) -> DatabaseKeys:
    """Return the database's own keys; generate them in a new file."""
    keys = []
    for name in (ROW_CHECK_KEY, RANK_KEY):
        rows = conn.execute(sqlite_statements()["get_meta"], (name,)).fetchall()
        if not rows:
            rows = [make_meta_row(name, secrets.token_hex(32))]
            conn.execute(sqlite_statements()["set_meta"], rows[0])
        keys.append(read_key(rows, name))
    return DatabaseKeys(*keys)


MOUNTS_FILE: Final = Path("/proc/self/mounts")
"""The mounts that this process sees. The systemd unit hides /proc/mounts."""
UNSUITABLE_ADVICE: Final = (
    "Put the database on a local disk ([helper] db_path): this file system can lose or damage it."
)
_OF_NETWORKS: Final = {"afs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
_OF_VIRTUAL_MACHINES: Final = {"9p", "fakeowner", "prl_fs", "vboxsf", "virtiofs", "vmhgfs"}
_FUSE_PREFIX: Final = "fuse."
_LOCAL_FUSE: Final = {"fuse.fuse-overlayfs"}


def is_unsuitable(kind: str) -> bool:
    """Return whether a file system of this type may not support a write-ahead log, or may not keep what was synced.

    On such a file system (of a network, of a virtual machine's host, or in user space) SQLite reports no error: memory
    that processes share is not shared, locks do not lock, or fsync returns before the data is stored.
    """
    is_in_user_space = kind == "fuse" or (kind.startswith(_FUSE_PREFIX) and kind not in _LOCAL_FUSE)
    return is_in_user_space or kind in _OF_NETWORKS | _OF_VIRTUAL_MACHINES


def refuse_unsuitable_file_system(database: Path, mounts: str) -> None:
    """Raise StoreError if a database is on a file system that may lose acknowledged shares.

    `mounts` is the content of `MOUNTS_FILE`.
    """
    directory = Path(os.path.realpath(database)).parent
    kind = find_file_system_type(directory, mounts)
    if is_unsuitable(kind):
        raise StoreError(f"{directory} is on {kind}, which is not safe for a database", advice=UNSUITABLE_ADVICE)


def find_file_system_type(directory: Path, mounts: str) -> str:
    """Type of the file system of a directory according to `mounts`; "" if not listed."""
    best, kind = -1, ""
    parents = {str(parent) for parent in (directory, *directory.parents)}
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if point in parents and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


LOCK_WAIT_SECONDS: Final = 2.0
_STEPS_PER_DEADLINE_CHECK: Final = 20_000
"""Virtual machine instructions between two checks of the clock; they take a few milliseconds."""


def quick_check(path: Path, clock: Clock, *, seconds: float) -> bool:
    """Run SQLite's quick check on a database that no helper has open.

    Do not call this while a helper is running: a reader blocks the truncation of the WAL and therefore the erasure of
    witnesses. A running helper checks the file itself.

    Returns:
        Whether the check completed in `seconds`; no damage was found.

    Raises:
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
        StoreDisplaced: it has a second name.
        StoreError: it cannot be read.
        OSError: it cannot be opened.
    """
    require_readable(path)
    deadline = clock.monotonic() + seconds
    try:
        with closing(connect_read_only(path, timeout=LOCK_WAIT_SECONDS)) as conn:
            conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
            conn.set_progress_handler(lambda: clock.monotonic() > deadline, _STEPS_PER_DEADLINE_CHECK)
            check_file(conn, str(path), "quick_check(3)")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if isinstance(error, sqlite3.OperationalError) and clock.monotonic() > deadline:
            return False
        raise translate(error, str(path)) from error
    return True
