"""Security of a process: no core dumps or debugging, and root acts as the owner of a file. Standard library only.

A command that works in the directory of another user drops the privileges of root to those of its owner. The owner of a
directory can replace any entry in it with a link, and so make a command that runs there as root write or chown any file
of the system. See `docs/decisions/0018-root-acts-as-the-owner.md`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import resource
import stat
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from helper.core.json_records import fact

PR_GET_DUMPABLE = 3
"""prctl(2) option: returns 1 if the process is dumpable."""
PR_SET_DUMPABLE = 4
"""prctl(2) option: 0 makes the process not dumpable and gives its /proc entries to root."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Resource limits of a process."""

    pid: int = fact("Its process id.")
    core_bytes: int = fact("Size limit of core dumps (-1: unlimited).")
    dumpable: bool | None = fact("Whether the process is dumpable, null if unknown.")
    open_files: list[int] = fact("Soft and hard limits of open files (-1: unlimited).")


def harden_process() -> list[str]:
    """Disable core dumps and debugging, and make new files private. Call this first in every process.

    Returns:
        One message for each measure that failed; empty on success. Never raises.
    """
    failures = []
    os.umask(0o077)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as error:
        failures.append(f"core dumps could not be disabled: {error}")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            failures.append(f"the process could not be made non-dumpable: errno {ctypes.get_errno()}")
    return failures


def get_process_limits() -> ProcessLimits:
    """Return limits of this process for operators."""
    dumpable = None
    if sys.platform == "linux":
        dumpable = ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    return ProcessLimits(
        pid=os.getpid(),
        core_bytes=resource.getrlimit(resource.RLIMIT_CORE)[0],
        dumpable=dumpable,
        open_files=list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    )


_ROOT_UID: Final = 0
_MAX_LINKS: Final = 40
"""Symbolic links that the kernel follows while it resolves a path (path_resolution(7))."""


@dataclass(frozen=True, slots=True)
class _Identity:
    """Effective user, group and supplementary groups."""

    uid: int
    gid: int
    groups: Sequence[int]


@dataclass(slots=True)
class _Resolution:
    """A resolved path.

    Attributes:
        path: the absolute path, without symbolic links.
        directory: the status of the directory that contains the file.
        file: the status of the file; None if there is none.
        directories: each directory in which a name was looked up, with its status.
        links: each symbolic link that was followed, with its status.
    """

    path: Path
    directory: os.stat_result
    file: os.stat_result | None = None
    directories: list[tuple[str, os.stat_result]] = field(default_factory=list)
    links: list[tuple[str, os.stat_result]] = field(default_factory=list)


@contextmanager
def acting_as_owner(path: Path) -> Iterator[Path]:
    """Run the body with the effective user and groups of the owner of a path; only if this process runs as root.

    The owner is that of the path's directory or, if root owns the directory, that of the file. The real and saved user
    stay root: the owner can neither trace nor signal the process, and root's rights are restored afterwards. The
    effective user applies to the entire process, so use this in commands, never in the service.

    Only root and the owner can change where the path leads, because a directory or link that another user controls is
    refused. The body may therefore open the path again: with the owner's rights, it can access only what the owner can.

    Nested calls do not change the user. Import all modules that the body needs before it, because the owner may not
    be able to read this installation.

    Args:
        path: a file, which need not exist; its directory must. Symbolic links are followed.

    Yields:
        The path without symbolic links. In a directory such as /tmp, another user may create a file of this name:
        do not follow a link there.

    Raises:
        FileNotFoundError: this process runs as root, and the directory does not exist.
        PermissionError: a third user could change where the path leads, or this process may not change its user.
    """
    if os.geteuid() != _ROOT_UID:
        yield Path(os.path.realpath(path))
        return
    resolved = _resolve(path)
    owner = _find_owner(path, resolved)
    if owner.uid == _ROOT_UID:
        yield resolved.path
        return
    before = _Identity(_ROOT_UID, os.getegid(), os.getgroups())
    try:
        _switch_user(owner)
    except PermissionError:
        with suppress(PermissionError):
            _switch_user(before)
        raise PermissionError(
            f"{path} belongs to user {owner.uid}, and this process may not act as that user: run the command as them"
        ) from None
    try:
        yield resolved.path
    finally:
        _switch_user(before)


def _find_owner(path: Path, resolved: _Resolution) -> _Identity:
    """Return the user whose rights are sufficient for a path.

    Raises:
        PermissionError: a third user could change where the path leads.
    """
    status = resolved.directory
    if status.st_uid == _ROOT_UID and resolved.file is not None:
        status = resolved.file
    trusted = {_ROOT_UID, status.st_uid}
    for link, link_status in resolved.links:
        if link_status.st_uid not in trusted:
            raise PermissionError(
                f"{path} contains a symbolic link of user {link_status.st_uid}: {link}; root does not follow it"
            )
    for directory, directory_status in resolved.directories:
        owner = directory_status.st_uid
        if owner not in trusted:
            raise PermissionError(
                f"{path} is inside a directory of user {owner}, who could replace it with a link: {directory}; "
                f"run the command as user {status.st_uid}"
            )
        if owner == _ROOT_UID and _others_can_rename(directory_status.st_mode):
            raise PermissionError(
                f"{path} is inside a directory in which other users can replace files with links: {directory}; "
                f"remove their write permission (chmod go-w), or run the command as user {status.st_uid}"
            )
    try:
        account = pwd.getpwuid(status.st_uid)
    except KeyError:  # a user without an account, for instance in a container
        return _Identity(status.st_uid, status.st_gid, [])
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return _Identity(status.st_uid, account.pw_gid, groups)


def _others_can_rename(mode: int) -> bool:
    """Return whether users other than the owner can rename files in a directory. False if it is sticky, as /tmp is."""
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _resolve(path: Path) -> _Resolution:
    """Resolve a path step by step through descriptors, so that exactly the directories and links used are checked.

    Raises:
        FileNotFoundError: the directory does not exist.
        OSError: it cannot be resolved.
    """
    rest, followed = deque(_split_path(str(Path.cwd() / path))), 0
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        real = Path("/")
        resolved = _Resolution(real, os.fstat(here))
        while rest:
            name = rest.popleft()
            status = os.fstat(here)
            resolved.directories.append((str(real), status))
            resolved.path, resolved.directory, resolved.file = real / name, status, None
            try:
                entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except FileNotFoundError:
                if rest:
                    raise FileNotFoundError(errno.ENOENT, "no such directory", str(real / name)) from None
                return resolved
            status = os.fstat(entry)
            if not stat.S_ISLNK(status.st_mode):
                os.close(here)
                here, real = entry, real.parent if name == ".." else real / name
                resolved.path, resolved.file = real, status
                continue
            try:
                target = os.readlink("", dir_fd=entry)
            finally:
                os.close(entry)
            followed += 1
            if followed > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            resolved.links.append((str(real / name), status))
            if target.startswith("/"):
                os.close(here)
                here, real = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), Path("/")
            rest.extendleft(reversed(_split_path(target)))
    finally:
        os.close(here)
    return resolved


def _split_path(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in {"", "."}]


def _switch_user(identity: _Identity) -> None:
    os.seteuid(_ROOT_UID)  # the groups and any other user can be set only as root
    os.setgroups(identity.groups)
    os.setegid(identity.gid)
    os.seteuid(identity.uid)
