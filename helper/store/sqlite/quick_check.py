"""Checks a database file for the doctor, while no helper is running and without writing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.store.sqlite.errors import translate_opening
from helper.store.sqlite.reader import connect_read_only, require_readable
from helper.store.sqlite.schema import check_pages, compare_schema, latest_version, read_identity

LOCK_WAIT_SECONDS: Final = 2.0
_STEPS_PER_DEADLINE_CHECK: Final = 20_000
"""Virtual machine instructions between two checks of the clock; they take a few milliseconds."""


def quick_check(path: Path, clock: Clock, *, seconds: float) -> bool:
    """Run SQLite's quick check on a database that no helper has open.

    Do not call this while a helper is running: a reader blocks the truncation of the WAL and therefore the erasure of
    witnesses. A running helper checks the file itself.

    Args:
        path: the file.
        clock: measures the time.
        seconds: time limit.

    Returns:
        Whether the check completed in time; no damage was found.

    Raises:
        StoreForeign: it is not a database of this helper, or was written by a newer version.
        StoreCorrupt: it is damaged.
        StoreDisplaced: it has a second name.
        StoreError: it cannot be read.
        OSError: it cannot be opened.
    """
    require_readable(path)
    deadline = clock.monotonic() + seconds
    try:
        with closing(connect_read_only(path, timeout=LOCK_WAIT_SECONDS)) as conn:
            conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
            conn.set_progress_handler(lambda: clock.monotonic() > deadline, _STEPS_PER_DEADLINE_CHECK)
            identity = read_identity(conn)
            identity.check(str(path))
            if identity.version == latest_version():
                compare_schema(conn, str(path))
            check_pages(conn, str(path), "quick_check(3)")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if isinstance(error, sqlite3.OperationalError) and clock.monotonic() > deadline:
            return False
        raise translate_opening(error, str(path)) from error
    return True
