"""PostgreSQL's errors as errors of the house."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from helper.errors import StoreError, StoreFull, StoreUnreachable

_AGAIN: Final = frozenset({"40001", "40P01", "23505", "23503", "55P03"})
"""Another host was in the way: serialisation, deadlock, the same row made twice, a round purged meanwhile, a lock."""
_FULL: Final = frozenset({"53100", "53000"})


def worth_repeating(error: BaseException) -> bool:
    """Whether the operation is likely to succeed when it runs again, as another host's is done by then."""
    return isinstance(error, psycopg.Error) and error.sqlstate in _AGAIN


def is_lost(error: BaseException) -> bool:
    """Whether the connection is gone."""
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError) and (
        error.sqlstate is None or error.sqlstate.startswith(("08", "57P", "25P03"))
    )


def translate(error: BaseException) -> BaseException:
    """The error of the house that stands for an error of PostgreSQL; any other error as it is."""
    if isinstance(error, PoolTimeout) or is_lost(error):
        return StoreUnreachable(f"the database can not be reached: {_first_line(error)}")
    if not isinstance(error, psycopg.Error):
        return error
    state = error.sqlstate or ""
    if state in _FULL:
        return StoreFull(f"nothing was written: {_first_line(error)}")
    if state.startswith("23"):
        return StoreError(
            f"the schema refuses this: {_told(error)}", advice="This is a fault of the helper: report it."
        )
    return StoreError(f"the database could not be used: {_told(error)} ({state})")


def _told(error: psycopg.Error) -> str:
    """The server's own sentence: its details quote rows."""
    return error.diag.message_primary or type(error).__name__


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
