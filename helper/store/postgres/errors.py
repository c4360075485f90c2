"""Classifies PostgreSQL errors and translates them to `StoreError`."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from helper.errors import StoreError, StoreFull, StoreUnreachable

_RETRYABLE: Final = frozenset({"40001", "40P01", "23505", "23503", "55P03"})
"""Conflicts with another host: serialization failure, deadlock, duplicate row, purged round, lock timeout."""
_FULL: Final = frozenset({"53100", "53000"})


def is_retryable(error: BaseException) -> bool:
    """Return whether the error is a conflict with another host, after which a retry is likely to succeed."""
    return isinstance(error, psycopg.Error) and error.sqlstate in _RETRYABLE


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the connection is lost."""
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError) and (
        error.sqlstate is None or error.sqlstate.startswith(("08", "57P", "25P03"))
    )


def translate(error: BaseException) -> BaseException:
    """Return the `StoreError` for a PostgreSQL error, and any other error unchanged."""
    if isinstance(error, PoolTimeout) or is_connection_lost(error):
        return StoreUnreachable(f"the database is unreachable: {_first_line(error)}")
    if not isinstance(error, psycopg.Error):
        return error
    state = error.sqlstate or ""
    if state in _FULL:
        return StoreFull(f"nothing was written: {_first_line(error)}")
    if state.startswith("23"):
        return StoreError(
            f"the schema rejected the change: {_server_message(error)}",
            advice="This is a bug in the helper; please report it.",
        )
    return StoreError(f"database error: {_server_message(error)} ({state})")


def _server_message(error: psycopg.Error) -> str:
    """Return the primary message only, because the details quote rows."""
    return error.diag.message_primary or type(error).__name__


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
