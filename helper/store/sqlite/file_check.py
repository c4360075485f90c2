"""Checks a database file for the doctor, without a daemon and without writing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.errors import HelperError, StoreCorrupt, StoreForeign
from helper.store.sqlite.errors import translate
from helper.store.sqlite.file_names import read_only_uri
from helper.store.sqlite.opening import MAGIC
from helper.store.sqlite.schema import APPLICATION_ID, compare_schema, latest_version

LOCK_SECONDS: Final = 2.0
_STEPS: Final = 20_000
"""Virtual machine instructions between two checks of the clock: a few milliseconds."""


def look_through(path: Path, clock: Clock, *, seconds: float) -> bool:
    """Run SQLite's quick check on a database that no daemon has open.

    A reader prevents the truncation of the WAL, and so the erasure of witnesses: a running daemon checks the file
    itself.

    Args:
        path: the file.
        clock: measures the time.
        seconds: time limit.

    Returns:
        Whether the check completed in time; no damage was found.

    Raises:
        StoreForeign: it is not a database of this helper, or of a newer version.
        StoreCorrupt: it is damaged.
        StoreDisplaced: it has another name.
        StoreError: it cannot be read.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) not in (b"", MAGIC):
            raise StoreForeign(f"{path} is not a database")
    deadline = clock.monotonic() + seconds
    try:
        uri = read_only_uri(path)
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=LOCK_SECONDS)) as conn:
            conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
            conn.execute("PRAGMA query_only = ON")
            conn.set_progress_handler(lambda: clock.monotonic() > deadline, _STEPS)
            _check(conn, path)
    except HelperError:
        raise
    except sqlite3.OperationalError as error:
        if clock.monotonic() > deadline:
            return False
        raise translate(error) from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error) from error
    return True


def _check(conn: sqlite3.Connection, path: Path) -> None:
    ((application,),) = conn.execute("PRAGMA application_id").fetchall()
    ((version,),) = conn.execute("PRAGMA user_version").fetchall()
    if application != APPLICATION_ID:
        raise StoreForeign(f"{path} is a database of another program")
    if version > latest_version():
        raise StoreForeign(f"{path} was written by a newer version (its schema is {version}, ours {latest_version()})")
    if version == latest_version():
        compare_schema(conn)
    problems = [str(row[0]) for row in conn.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise StoreCorrupt(f"{path} is damaged: {'; '.join(problems)}")
