"""A second daemon on one database is refused before anything that takes time is loaded, the parser included."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from helper.config import find_file, glimpse_database
from helper.errors import StoreLocked


def refuse_a_second(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Look whether these arguments are a `serve` on a database that another daemon has.

    It only looks: the store takes the lock when it opens. What else may be wrong, with the arguments too, is for others
    to say.

    Raises:
        StoreLocked: another daemon has it open.
    """
    database = _database(arguments, env)
    if database is None:
        return
    with contextlib.suppress(OSError):
        lock = os.open(f"{database}.lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(f"another daemon has this database open: {database}.lock is locked") from None
        finally:
            os.close(lock)


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
    chosen: Path | None = given.db or glimpse_database(find_file(given.config, env), env)
    return chosen
