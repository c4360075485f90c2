"""Checks the database file or the shared database, and the disk.

The integrity of the file is checked only while no helper runs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

from helper.clock import Clock
from helper.config.sections import Config
from helper.core.text_forms import format_time
from helper.doctor import CheckResult, fail, ok, warn
from helper.doctor.machine import read_text
from helper.errors import HelperError
from helper.observability.queue_snapshot import QueueSnapshot, read_snapshot
from helper.store.factory import check_shared_database as connect_shared_database
from helper.store.factory import read_file_encryption
from helper.store.sqlite.opening import (
    MOUNTS_FILE,
    UNSUITABLE_ADVICE,
    find_file_system_type,
    is_unsuitable,
    quick_check,
)
from helper.store.sqlite.reader import open_queue_file

INTEGRITY_CHECK_SECONDS: Final = 4.0
"""Time limit in seconds for SQLite's integrity check."""
CERTIFICATE_WARNING_SECONDS: Final = 14 * 86_400.0
"""Seconds before its expiry from which a certificate of the database server is reported."""


async def read_database(path: Path, key_file: str, *, now: float) -> tuple[CheckResult, QueueSnapshot | None]:
    """Read a database. Returns the result, and the queue; None if it cannot be read. Never raises for a defective file.

    `key_file` is that of the settings, `now` is in Unix seconds.
    """
    try:
        size = path.stat().st_size
        if not size:
            empty = ok("database", f"{path} is empty: the first start creates the schema")
            return empty, QueueSnapshot(at=now)
        if not os.access(path, os.R_OK):
            raise PermissionError
        encryption = read_file_encryption(key_file)
        async with open_queue_file(path, encryption, allow_unencrypted=False) as reader:
            queue = await read_snapshot(reader, await reader.list_rounds(), now=now, with_retries=True)
    except (HelperError, OSError) as error:
        return _unreadable_result(path, error), None
    shares, rounds = queue.total.total, len(queue.rounds)
    text = f"{path}: {shares} shares in {rounds} rounds, {size >> 10} kB"
    return ok("database", text, bytes=size, shares=shares, rounds=rounds), queue


def check_integrity(path: Path, clock: Clock) -> CheckResult:
    """Run SQLite's integrity check on the file. Blocks for seconds."""
    try:
        complete = quick_check(path, clock, seconds=INTEGRITY_CHECK_SECONDS)
    except (HelperError, OSError) as error:
        return _unreadable_result(path, error)
    if not complete:
        text = (
            f"{path} could not be checked completely in {INTEGRITY_CHECK_SECONDS:g} s; no damage in the part that was"
        )
        return ok("integrity", f"{text}; run `svote-helper db check` for a complete check", complete=False)
    return ok("integrity", "SQLite finds no damage", complete=True)


def evaluate_missing_file(path: Path, *, running: bool) -> CheckResult:
    """Return the result for a missing database file."""
    if running:
        advice = (
            f"Move the file back to {path}: the helper then resumes automatically. If the file was deleted, do not"
            " stop the helper: root can still copy it from /proc/PID/fd, as docs/operations.md explains."
        )
        return fail("database", f"a helper runs, but {path} is missing", advice, path=str(path))
    if not path.parent.is_dir():
        advice = f"Create it (`mkdir -m 700 {path.parent}`), or set [helper] db_path."
        return fail("database", f"directory {path.parent} does not exist", advice, path=str(path))
    advice = (
        "If there was one, find it (a relative [helper] db_path is relative to the working directory) or restore the"
        " latest backup. Otherwise no action is needed: the first start creates it."
    )
    return warn("database", f"{path} does not exist yet", advice, path=str(path))


def check_shared_database(config: Config, *, now: float, running: bool) -> CheckResult:
    """Connect to the shared database as the helper does, without changes. Blocks. `now` is in Unix seconds."""
    text = "the queue is in a shared database ([store] url)"
    try:
        expires_at = connect_shared_database(config)
    except HelperError as error:
        return fail("database", str(error), error.advice)
    if expires_at is not None and expires_at < now + CERTIFICATE_WARNING_SECONDS:
        return warn(
            "database",
            f"the certificate of the server expires at {format_time(expires_at)} UTC",
            "Renew it. No host can connect after that time.",
            certificate_expires=expires_at,
        )
    used = f"{text}, and this host's helper has it open" if running else f"{text}, and this host can connect to it"
    return ok("database", used, **({} if expires_at is None else {"certificate_expires": expires_at}))


def _unreadable_result(path: Path, error: HelperError | OSError) -> CheckResult:
    if isinstance(error, PermissionError):
        return warn("database", f"no permission to read {path}", "Run doctor as the helper's user.")
    if isinstance(error, OSError):
        return fail("database", f"{path} cannot be read: {error.strerror}", "Check its disk.")
    return fail("database", str(error), error.advice)


MIN_FREE_BYTES: Final = 64 << 20
"""Bytes; with less, the first burst of shares in a round may fill the disk."""
LOW_FREE_BYTES: Final = 512 << 20
SLOW_FSYNC_SECONDS: Final = 0.1
"""Seconds; each share waits for at least one fsync, and some wallets give up after five seconds."""
UNUSABLE_FSYNC_SECONDS: Final = 2.0
FSYNC_SAMPLES: Final = 5
_PAGE_BYTES: Final = bytes(4096)


def check_disk(path: Path, clock: Clock) -> list[CheckResult]:
    """Check the disk of a database: free space, fsync latency, and whether its file system is suitable."""
    directory = Path(os.path.realpath(path)).parent
    try:
        stats = os.statvfs(directory)
    except OSError as error:
        advice = f"Create it with write access for the helper's user: `install -d -m 700 {directory}`."
        return [fail("disk space", f"cannot access {directory}: {error.strerror}", advice)]
    free_inodes = stats.f_favail if stats.f_files else None  # some file systems do not count them
    results = [evaluate_space(directory, stats.f_bavail * stats.f_frsize, free_inodes), _check_fsync(directory, clock)]
    kind = find_file_system_type(directory, read_text(MOUNTS_FILE) or "")
    if is_unsuitable(kind):
        results.append(fail("file system", f"{directory} is on {kind}", UNSUITABLE_ADVICE, kind=kind))
    return results


def evaluate_space(directory: Path, free_bytes: int, free_inodes: int | None) -> CheckResult:
    """Evaluate the bytes that are available to this user, and the number of files that can be created, if known."""
    text = f"{free_bytes >> 20} MB free in {directory}"
    facts = {"free_bytes": free_bytes, "free_inodes": free_inodes}
    if free_bytes < MIN_FREE_BYTES or free_inodes == 0:
        advice = (
            "Free some space: shares are refused with 503 while the disk is full. The helper recovers automatically."
        )
        return fail("disk space", text if free_inodes != 0 else f"no inodes are free in {directory}", advice, **facts)
    if free_bytes < LOW_FREE_BYTES:
        return warn("disk space", text, "Free some space before the next round starts.", **facts)
    return ok("disk space", text, **facts)


def _check_fsync(directory: Path, clock: Clock) -> CheckResult:
    try:
        return evaluate_fsync(measure_fsync(directory, clock))
    except OSError as error:
        advice = f"Give this user write access to {directory}, or run doctor as the helper's user."
        return fail("fsync", f"cannot write to {directory}: {error.strerror or error}", advice)


def measure_fsync(directory: Path, clock: Clock) -> float:
    """Return the median time in seconds of five fsyncs of a page, in an unnamed temporary file. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        seconds = []
        for _ in range(FSYNC_SAMPLES):
            file.write(_PAGE_BYTES)
            began = clock.monotonic()
            os.fsync(file.fileno())
            seconds.append(clock.monotonic() - began)
    return median(seconds)


def evaluate_fsync(seconds: float) -> CheckResult:
    """Evaluate the time of an fsync."""
    milliseconds = round(seconds * 1000, 2)
    text, facts = f"{milliseconds:g} ms", {"milliseconds": milliseconds}
    advice = "Reduce other load on this disk, or use a faster one: each share is acknowledged after an fsync."
    if seconds > UNUSABLE_FSYNC_SECONDS:
        return fail("fsync", f"fsync takes {text}: wallets time out before they get a response", advice, **facts)
    if seconds > SLOW_FSYNC_SECONDS:
        return warn("fsync", text, advice, **facts)
    return ok("fsync", text, **facts)
