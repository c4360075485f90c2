"""Finds the type of a file system, and those on which a database is not safe."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from helper.errors import StoreError

MOUNTS_FILE: Final = Path("/proc/mounts")
UNSUITABLE_ADVICE: Final = (
    "Put the database on a local disk ([helper] db_path): this file system can lose or damage it."
)
_OF_NETWORKS: Final = {"afs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
_OF_VIRTUAL_MACHINES: Final = {"9p", "fakeowner", "prl_fs", "vboxsf", "virtiofs", "vmhgfs"}
_FUSE_PREFIX: Final = "fuse."
_LOCAL_FUSE: Final = {"fuse.fuse-overlayfs"}


def is_unsuitable(kind: str) -> bool:
    """Return whether a file system may not support a write-ahead log, or may not keep what was synced.

    On such a file system (of a network, of a virtual machine's host, or in user space) SQLite reports no error: memory
    that processes share is not shared, locks do not lock, or fsync returns before the data is stored.

    Args:
        kind: its type in /proc/mounts.
    """
    is_in_user_space = kind == "fuse" or (kind.startswith(_FUSE_PREFIX) and kind not in _LOCAL_FUSE)
    return is_in_user_space or kind in _OF_NETWORKS | _OF_VIRTUAL_MACHINES


def refuse_unsuitable_file_system(database: Path, mounts: str) -> None:
    """Refuse a database on a file system that may lose acknowledged shares.

    Args:
        database: path of the database.
        mounts: content of /proc/mounts.

    Raises:
        StoreError: it is not suitable.
    """
    directory = database.resolve().parent
    kind = find_file_system_type(directory, mounts)
    if is_unsuitable(kind):
        raise StoreError(f"{directory} is on {kind}, which is not safe for a database", advice=UNSUITABLE_ADVICE)


def find_file_system_type(directory: Path, mounts: str) -> str:
    """Type of the file system of a directory according to /proc/mounts; "" if not listed."""
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
