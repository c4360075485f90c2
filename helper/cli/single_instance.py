"""A second daemon on one database is refused before anything that takes time is loaded, the parser included."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from helper.config import find_file, peek_database_path
from helper.store.sqlite.file_lock import open_regular, try_lock


def require_single_instance(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Check whether these arguments are a `serve` on a database that another daemon has open.

    The locks are released again: the store takes them when it opens. Nothing else about the arguments is checked.

    Raises:
        StoreLocked: another daemon has it open.
    """
    database = _database(arguments, env)
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


def _database(arguments: Sequence[str], env: Mapping[str, str]) -> Path | None:
    """The database of a `serve` with these arguments; None where it is none, or one that is not plain to read."""
    if list(arguments[:1]) != ["serve"]:
        return None
    # not one option more than `serve` has: what is left over is for its own parser to judge
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--config", "--db", "--host", "--port", "--ready-file"):
        parser.add_argument(option, type=Path if option in {"--config", "--db"} else str)
    try:
        given, others = parser.parse_known_args(arguments[1:])
    except argparse.ArgumentError:
        return None
    if others:
        return None
    chosen: Path | None = given.db or peek_database_path(find_file(given.config, env), env)
    return chosen
