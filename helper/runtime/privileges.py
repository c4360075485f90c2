"""Acting as the owner of a file: what root does in another user's directory, it does with that user's rights.

Whoever owns a directory can replace any name in it with a link. A command that root runs there as root could be led to
write or chown any file of the system. See `docs/decisions/0018-root-acts-as-the-owner.md`.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_ROOT: Final = 0
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
        directory: the status of the directory that holds the file.
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
    """Run the body with the effective user and groups of the owner of a path; only if root runs this.

    The owner is that of the directory in which the path ends, or, if that is root, of the file itself. The real and
    saved user stay root: the owner can neither trace nor signal the process, and root's rights return afterwards.
    The effective user is that of the whole process, so this is for commands, never for the service.

    Only root and the owner can change where the path leads, because every other directory and link on it is refused.
    So the body may open the path again: with the owner's rights, it reaches nothing that the owner could not.

    Within another such body it changes no user. Import what the body needs before it: the owner need not be able
    to read this installation.

    Args:
        path: a file, which need not exist; its directory must. Symbolic links are followed.

    Yields:
        The path without symbolic links. Another user may create its last name in a directory such as /tmp: do not
        follow a link there.

    Raises:
        FileNotFoundError: root runs this, and the directory does not exist.
        PermissionError: a third user could change where the path leads, or this process may not change its user.
    """
    if os.geteuid() != _ROOT:
        yield Path(os.path.realpath(path))
        return
    resolved = _resolve(path)
    owner = _owner(path, resolved)
    if owner.uid == _ROOT:
        yield resolved.path
        return
    before = _Identity(_ROOT, os.getegid(), os.getgroups())
    try:
        _become(owner)
    except PermissionError:
        with suppress(PermissionError):
            _become(before)
        raise PermissionError(
            f"{path} belongs to user {owner.uid}, and this process may not act as that user: run the command as them"
        ) from None
    try:
        yield resolved.path
    finally:
        _become(before)


def _owner(path: Path, resolved: _Resolution) -> _Identity:
    """The user whose rights are enough for this path.

    Raises:
        PermissionError: a third user could change where the path leads.
    """
    found = resolved.directory
    if found.st_uid == _ROOT and resolved.file is not None:
        found = resolved.file
    trusted = {_ROOT, found.st_uid}
    for link, about in resolved.links:
        if about.st_uid not in trusted:
            raise PermissionError(f"{path} goes through a link of user {about.st_uid}: {link}; root does not follow it")
    for directory, about in resolved.directories:
        if about.st_uid not in trusted:
            raise PermissionError(
                f"{path} goes through a directory of user {about.st_uid}, who could replace it by a link: {directory}; "
                f"run the command as user {found.st_uid}"
            )
        if about.st_uid == _ROOT and _others_can_rename(about.st_mode):
            raise PermissionError(
                f"{path} goes through a directory in which others can replace names by links: {directory}; "
                f"remove their right to write in it (chmod go-w), or run the command as user {found.st_uid}"
            )
    try:
        account = pwd.getpwuid(found.st_uid)
    except KeyError:  # a user of a container, for instance
        return _Identity(found.st_uid, found.st_gid, [])
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return _Identity(found.st_uid, account.pw_gid, groups)


def _others_can_rename(mode: int) -> bool:
    """Whether users other than a directory's owner can replace any name in it; not in a sticky one such as /tmp."""
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _resolve(path: Path) -> _Resolution:
    """Resolve a path once, name by name, through descriptors: its directories and links are those that were checked.

    Raises:
        FileNotFoundError: the directory does not exist.
        OSError: it cannot be resolved.
    """
    rest, followed = deque(_names(str(Path.cwd() / path))), 0
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        real = Path("/")
        resolved = _Resolution(real, os.fstat(here))
        while rest:
            name = rest.popleft()
            about = os.fstat(here)
            resolved.directories.append((str(real), about))
            resolved.path, resolved.directory, resolved.file = real / name, about, None
            try:
                found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except FileNotFoundError:
                if rest:
                    raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(real / name)) from None
                return resolved
            about = os.fstat(found)
            if not stat.S_ISLNK(about.st_mode):
                os.close(here)
                here, real = found, real.parent if name == ".." else real / name
                resolved.path, resolved.file = real, about
                continue
            try:
                target = os.readlink("", dir_fd=found)
            finally:
                os.close(found)
            followed += 1
            if followed > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            resolved.links.append((str(real / name), about))
            if target.startswith("/"):
                os.close(here)
                here, real = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), Path("/")
            rest.extendleft(reversed(_names(target)))
    finally:
        os.close(here)
    return resolved


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in {"", "."}]


def _become(identity: _Identity) -> None:
    os.seteuid(_ROOT)  # the groups and any other user can be set only as root
    os.setgroups(identity.groups)
    os.setegid(identity.gid)
    os.seteuid(identity.uid)
