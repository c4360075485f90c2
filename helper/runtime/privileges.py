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
from dataclasses import dataclass
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


@contextmanager
def acting_as_owner(path: Path) -> Iterator[None]:
    """Run the body with the effective user and groups of the owner of a path; does nothing unless root runs this.

    The owner is that of the directory in which the path ends, or, if that is root, of the file itself. The real and
    saved user stay root: the owner can neither trace nor signal the process, and root's rights return afterwards.
    The effective user is that of the whole process, so this is for commands, never for the service.

    Within another such body it does nothing either. Import what the body needs before it: the owner need not be able
    to read this installation.

    Args:
        path: a file, which need not exist. Symbolic links are followed.

    Raises:
        PermissionError: the path goes through a link of a third user, or this process may not change its user.
    """
    owner = _owner(path) if os.geteuid() == _ROOT else None
    if owner is None or owner.uid == _ROOT:
        yield
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
        yield
    finally:
        _become(before)


def _owner(path: Path) -> _Identity | None:
    """Whose rights suffice for this path; None where its directory does not exist."""
    real = Path(os.path.realpath(path))
    try:
        found = real.parent.stat()
    except FileNotFoundError:
        return None
    if found.st_uid == _ROOT and os.path.lexists(real):
        found = real.lstat()
    for link, uid in _links(path):
        if uid not in {_ROOT, found.st_uid}:
            raise PermissionError(f"{path} goes through a link of user {uid}: {link}; root does not follow it")
    try:
        account = pwd.getpwuid(found.st_uid)
    except KeyError:  # a user of a container, for instance
        return _Identity(found.st_uid, found.st_gid, [])
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return _Identity(found.st_uid, account.pw_gid, groups)


def _links(path: Path) -> Iterator[tuple[str, int]]:
    """The symbolic links through which a path is resolved, each with its owner."""
    here, rest, followed = "/", deque(str(Path.cwd() / path).split("/")), 0
    while rest:
        part = rest.popleft()
        if part == "..":
            here = str(Path(here).parent)
        if part in {"", ".", ".."}:
            continue
        step = str(Path(here) / part)
        try:
            found = os.lstat(step)
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(found.st_mode):
            here = step
            continue
        followed += 1
        if followed > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        yield step, found.st_uid
        target = str(Path(step).readlink())
        here = "/" if target.startswith("/") else here
        rest.extendleft(reversed(target.split("/")))


def _become(identity: _Identity) -> None:
    os.seteuid(_ROOT)  # the groups and any other user can be set only as root
    os.setgroups(identity.groups)
    os.setegid(identity.gid)
    os.seteuid(identity.uid)
