"""Refuses a second service on the same database early, before slow imports."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from helper.config import find_file, peek_database_path
from helper.store.sqlite.file_lock import open_regular, try_lock


def require_single_instance(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise if these arguments start a service on a database that another process has open.

    The locks are released again; the store acquires them when it opens. Invalid arguments are ignored.

    Raises:
        StoreLocked: another process has it open.
    """
    database = _find_database(arguments, env)
    if database is None:
        return
    real = Path(os.path.realpath(database))
    for path in (Path(f"{real}.lock"), real):
        with contextlib.suppress(OSError):
            fd = open_regular(path)
            if fd >= 0:
                try:
                    try_lock(fd, path)
                finally:
                    os.close(fd)


def _find_database(arguments: Sequence[str], env: Mapping[str, str]) -> Path | None:
    """Return the database of a `serve` command; None for other commands and unknown arguments."""
    if list(arguments[:1]) != ["serve"]:
        return None
    # only the options of `serve`; its own parser reports unknown ones
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--config", "--db", "--host", "--port", "--ready-file", "--role"):
        parser.add_argument(option, type=Path if option in {"--config", "--db"} else str)
    try:
        options, unknown = parser.parse_known_args(arguments[1:])
    except argparse.ArgumentError:
        return None
    if unknown:
        return None
    chosen: Path | None = options.db or peek_database_path(find_file(options.config, env), env)
    return chosen
