"""The disk under the database: room, how long an fsync takes, whether it is one that can carry a database."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from helper.clock import Clock
from helper.doctor.result import CheckResult, fail, ok, warn

LEAST_FREE: Final = 64 << 20
"""Bytes; below it a round's first burst may fill the disk."""
ENOUGH_FREE: Final = 512 << 20
SLOW_SYNC: Final = 0.1
"""Seconds; wallets wait for one fsync at the least, and some give up after five seconds."""
USELESS_SYNC: Final = 2.0
SYNCS: Final = 5
_PAGE: Final = bytes(4096)
NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "afs", "ceph", "glusterfs"})
"""Kinds of file systems that do not carry a write-ahead log shared by processes."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What was measured.

    Attributes:
        free: bytes that this user may write.
        inodes: files that can still be made; None where the file system does not count them.
        sync_seconds: of the median fsync of a page, None where none could be made.
        problem: why nothing could be written, None where it could.
    """

    free: int
    inodes: int | None
    sync_seconds: float | None = None
    problem: str | None = None


def measure(folder: Path, clock: Clock) -> Disk:
    """Look at a folder's disk: five fsyncs of a file without a name, which leaves nothing behind. Raises OSError."""
    about = os.statvfs(folder)
    free, inodes = about.f_bavail * about.f_frsize, about.f_favail if about.f_files else None
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            seconds = []
            for _ in range(SYNCS):
                file.write(_PAGE)
                began = clock.monotonic()
                os.fsync(file.fileno())
                seconds.append(clock.monotonic() - began)
    except OSError as error:
        return Disk(free, inodes, problem=error.strerror or str(error))
    return Disk(free, inodes, median(seconds))


def judge_disk(folder: Path, disk: Disk, kind: str) -> list[CheckResult]:
    """A line about room, one about fsync, and one about the file system where it is of the wrong kind.

    Args:
        folder: of the database.
        disk: what was measured.
        kind: the file system's type, "" where it is not known.
    """
    found = [_room(folder, disk), _sync(folder, disk)]
    if kind in NETWORK:
        advice = "Put the database on a local disk ([helper] db_path): a network file system can damage it."
        found.append(fail("file system", f"{folder} is on {kind}", advice, kind=kind))
    return found


def _room(folder: Path, disk: Disk) -> CheckResult:
    text = f"{disk.free >> 20} MB free in {folder}"
    facts = {"free_bytes": disk.free, "free_inodes": disk.inodes}
    if disk.free < LEAST_FREE or disk.inodes == 0:
        advice = "Free some: shares are answered 503 when it is full. The helper goes on by itself then."
        return fail(
            "disk space", text if disk.inodes != 0 else f"no more files can be made in {folder}", advice, **facts
        )
    if disk.free < ENOUGH_FREE:
        return warn("disk space", text, "Free some before a round's first burst comes.", **facts)
    return ok("disk space", text, **facts)


def _sync(folder: Path, disk: Disk) -> CheckResult:
    if disk.sync_seconds is None:
        advice = f"Let this user write in {folder}, or run the doctor as the helper's user."
        return fail("fsync", f"nothing can be written in {folder}: {disk.problem}", advice)
    milliseconds = round(disk.sync_seconds * 1000, 2)
    text, facts = f"{milliseconds:g} ms", {"milliseconds": milliseconds}
    advice = "Take other work off this disk, or use a quicker one: a share is answered after an fsync."
    if disk.sync_seconds > USELESS_SYNC:
        return fail("fsync", f"{text}: wallets give up before they are answered", advice, **facts)
    if disk.sync_seconds > SLOW_SYNC:
        return warn("fsync", text, advice, **facts)
    return ok("fsync", text, **facts)


def file_system(folder: Path, mounts: str) -> str:
    """The type of the file system that holds a folder, by the text of /proc/mounts; "" where it is not in it."""
    best, kind = -1, ""
    parents = {str(parent) for parent in (folder, *folder.parents)}
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if point in parents and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind
