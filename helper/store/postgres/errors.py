"""Classifies PostgreSQL errors and translates them to `StoreError`."""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from helper.errors import StoreError, StoreFull, StoreRefused, StoreUnreachable
from helper.store.postgres.server_certificate import CERTIFICATE_REFUSED

_RETRYABLE: Final = frozenset({"40001", "40P01", "23505", "23503", "55P03"})
"""Conflicts with another host: serialization failure, deadlock, duplicate row, purged round, lock timeout."""
_FULL: Final = frozenset({"53100", "53000"})
PRIVILEGES_ADVICE: Final = (
    "Grant the helper's role USAGE on its schema, and all privileges on the tables and sequences in it; some providers "
    "revoke them when the disk or a limit of the plan is full. The helper reconnects automatically."
)
_WRITES_REFUSED: Final = {
    "25006": "The server is a standby, or was made read-only; some providers do so when its disk is full. Free space, "
    "or promote a standby that is among the hosts of the database URL. The helper reconnects automatically.",
    "42501": PRIVILEGES_ADVICE,
    "42P01": PRIVILEGES_ADVICE,  # a role without USAGE on the schema does not see its tables
}
"""Advice by SQLSTATE of an error with which the server refuses to write at all: read-only, or no privilege."""
_FAILED_ATTEMPT: Final = re.compile(
    r"^- (?:host: .*?: connection (?:failed|is bad): (?=connection to server ))?(.*)$", re.MULTILINE
)
"""Line of psycopg's message for each host, if all of several hosts failed. libpq's message names the host again;
the one of a timeout is psycopg's and does not."""
_CERTIFICATE_ADVICE: Final = (
    "Renew the certificate of the server, or set sslrootcert in the database URL to the file of its authority. The "
    "helper reconnects automatically."
)
_NAME_ADVICE: Final = (
    "Use a name that the certificate contains as the host of the database URL; hostaddr=ADDRESS can specify its "
    "address."
)
_LOGIN_ADVICE: Final = (
    "Correct the user and the password: in [store] url or url_file, or in ~/.pgpass of the user of the service."
)
CONNECTIONS_ADVICE: Final = (
    "Raise max_connections of the server, or the limit of the role or the database: a host needs up to six connections."
)
_ADVICE: Final = (
    (CERTIFICATE_REFUSED, _CERTIFICATE_ADVICE),
    ("does not match host name", _NAME_ADVICE),
    ("does not support SSL", "Set ssl = on on the server, and install a certificate that this host can verify."),
    ("root certificate file", "Set sslrootcert in the database URL to the file of the server's authority."),
    ("password authentication failed", _LOGIN_ADVICE),
    ("no password supplied", _LOGIN_ADVICE),
    ("no pg_hba.conf entry", "Add a line for this user, database and address to pg_hba.conf on the server."),
    ("too many clients", CONNECTIONS_ADVICE),
    ("too many connections", CONNECTIONS_ADVICE),
    ("connection slots are reserved", CONNECTIONS_ADVICE),
    ("hot standby mode", "Promote the standby, or add the primary to the hosts of the database URL."),
)
"""Advice by a part of libpq's message."""


def is_retryable(error: BaseException) -> bool:
    """Return whether the error is a conflict with another host, after which a retry is likely to succeed."""
    return isinstance(error, psycopg.Error) and error.sqlstate in _RETRYABLE


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the connection is lost."""
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError) and (
        error.sqlstate is None or error.sqlstate.startswith(("08", "57P", "25P03"))
    )


def needs_new_connection(error: BaseException) -> bool:
    """Return whether to connect again: the connection is lost, or another server may accept writes."""
    return is_connection_lost(error) or (isinstance(error, psycopg.Error) and error.sqlstate in _WRITES_REFUSED)


def is_batch_wide(error: BaseException) -> bool:
    """Return whether a database error would affect any other operation too."""
    is_of_operation = isinstance(error, psycopg.DataError | psycopg.IntegrityError) or is_retryable(error)
    return isinstance(error, psycopg.Error) and not is_of_operation


def translate(error: BaseException) -> BaseException:
    """Return the `StoreError` for a PostgreSQL error, and any other error unchanged."""
    if isinstance(error, PoolTimeout) or is_connection_lost(error):
        reason = _connection_error(error)
        advice = next((advice for part, advice in _ADVICE if part in reason), None)
        return StoreUnreachable(f"the database is unreachable: {reason}", advice=advice)
    if not isinstance(error, psycopg.Error):
        return error
    state = error.sqlstate or ""
    if state in _FULL:
        return StoreFull(f"nothing was written: {_first_line(error)}")
    if state in _WRITES_REFUSED:
        return StoreRefused(f"nothing was written: {_server_message(error)}", advice=_WRITES_REFUSED[state])
    if state.startswith("23"):
        return StoreError(
            f"the schema rejected the change: {_server_message(error)}",
            advice="This is a bug in the helper; please report it.",
        )
    return StoreError(f"database error: {_server_message(error)} ({state})", advice="Check the log of the server.")


def _server_message(error: psycopg.Error) -> str:
    """Return the primary message only, because the details quote rows."""
    return error.diag.message_primary or type(error).__name__


def _connection_error(error: BaseException) -> str:
    """Return the reason in one line; for several hosts, that of each."""
    return "; ".join(_FAILED_ATTEMPT.findall(str(error))) or _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
