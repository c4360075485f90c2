"""Refuses a path that is not a file, or a database that may have a second name.

SQLite derives the path of the write-ahead log (WAL) from the opened name. After a crash, a database that is opened by
another name lacks the commits in the WAL.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from helper.errors import StoreDisplaced, StoreForeign


def refuse_non_file(database: Path) -> None:
    """Raise StoreForeign if there is something other than a file at the resolved path."""
    with suppress(OSError):  # missing or inaccessible: opening it fails later
        if not stat.S_ISREG(database.stat().st_mode):
            raise StoreForeign(f"{database} is not a file", advice="Set [helper] db_path to the database file.")


def refuse_second_name(database: Path) -> None:
    """Refuse a database that has more than one hard link or is a mount point.

    A path that is missing, inaccessible or not a regular file is accepted here; opening it fails later.

    Uses O_PATH descriptors. Closing an ordinary descriptor would release SQLite's locks on the file in this process.

    Args:
        database: the resolved path.

    Raises:
        StoreDisplaced: the file has, or may have, a second name.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    fds: list[int] = []
    try:
        with suppress(OSError):
            fds.append(os.open(database.parent, flags | os.O_DIRECTORY))
            fds.append(os.open(database.name, flags, dir_fd=fds[0]))
        if len(fds) < 2:
            return
        about = os.fstat(fds[1])
        mounts = [_mount_id(fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)
    if not stat.S_ISREG(about.st_mode):
        return
    if about.st_nlink > 1:
        raise StoreDisplaced(
            f"{database} has {about.st_nlink} hard links, but its write-ahead log is found only through one of them",
            advice=f"List them with `find / -xdev -samefile {database}`. Keep the path that has a file ending in "
            "-wal next to it (or any, if there is none), and remove the other links with rm; the data remains. Do not "
            "remove a file ending in -wal.",
        )
    if mounts[0] != mounts[1]:
        raise StoreDisplaced(
            f"{database} is a mount point: its write-ahead log would not be next to the mounted file",
            advice="Mount the directory that contains the database instead of the file. If there is a file "
            f"{database}-wal, do not delete it: with the helper stopped, move it next to the mounted file, "
            "under that file's name with -wal.",
        )


def _mount_id(fd: int) -> str:
    """Return the mount id of a descriptor; the same value for all descriptors if /proc is not mounted.

    The device number does not identify a mount: a bind mount may be on the same device, and on overlayfs a file and its
    directory may have different device numbers.
    """
    with suppress(OSError), open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("mnt_id:"):
                return line
    return ""
