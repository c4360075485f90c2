"""Checks file modes of databases, the control socket and files with secrets."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from helper.doctor.result import CheckResult, ok, warn

DATABASE_SUFFIXES: Final = ("", "-wal", "-shm", ".lock")
"""Suffixes of the files of a database."""
_OTHER_USERS_MODE: Final = stat.S_IRWXG | stat.S_IRWXO


def check_modes(databases: Iterable[Path], secrets: Iterable[Path]) -> list[CheckResult]:
    """Return one warning for each file or directory that other users can access, else one `ok`.

    Args:
        databases: database files; they may be missing.
        secrets: other private files: the control socket, files with tokens.
    """
    private = [*(Path(f"{database}{part}") for database in databases for part in DATABASE_SUFFIXES), *secrets]
    existing = {path: mode for path in private if (mode := _read_mode(path)) is not None}
    results = [_accessible_result(path, mode) for path, mode in existing.items() if mode & _OTHER_USERS_MODE]
    for folder in {path.parent for path in existing}:
        mode = _read_mode(folder) or 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            advice = f"chmod o-w {folder}"
            results.append(warn("file modes", f"every user can create files in {folder} ({oct(mode)})", advice))
    return results or [
        ok("file modes", f"{len(existing)} private files are accessible only to their owner", files=len(existing))
    ]


def _accessible_result(path: Path, mode: int) -> CheckResult:
    text = f"other users can access {path} ({oct(mode)[2:]})"
    return warn("file modes", text, f"chmod 600 {path}", path=str(path), mode=oct(mode)[2:])


def _read_mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
