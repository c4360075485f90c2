"""Who may read what holds witnesses and tokens."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from helper.doctor.result import CheckResult, ok, warn

PARTS: Final = ("", "-wal", "-shm", ".lock")
"""What stands beside a database, by the end of its name."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def look_at_modes(databases: Iterable[Path], secrets: Iterable[Path]) -> list[CheckResult]:
    """A line for each file that others may use, and one line where there is none.

    Args:
        databases: the files with shares and registrations, which need not be there.
        secrets: whatever else is for one user alone: the control socket, files with tokens in them.
    """
    private = [*(Path(f"{database}{part}") for database in databases for part in PARTS), *secrets]
    there = {path: mode for path in private if (mode := _mode(path)) is not None}
    found = [_open(path, mode) for path, mode in there.items() if mode & _OTHERS]
    for folder in {path.parent for path in there}:
        mode = _mode(folder) or 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            advice = f"chmod o-w {folder}"
            found.append(warn("file modes", f"everybody may put files into {folder} ({oct(mode)})", advice))
    return found or [ok("file modes", f"{len(there)} files are for their owner alone", files=len(there))]


def _open(path: Path, mode: int) -> CheckResult:
    text = f"others may use {path} ({oct(mode)[2:]})"
    return warn("file modes", text, f"chmod 600 {path}", path=str(path), mode=oct(mode)[2:])


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
