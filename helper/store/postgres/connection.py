"""Connection settings, certificates of the servers, and errors of PostgreSQL.

Unencrypted network connections are refused.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import PoolTimeout

from helper.core.text_forms import is_loopback
from helper.errors import StoreError, StoreFull, StoreRefused, StoreUnreachable

CERTIFICATE_REFUSED: Final = "certificate verify failed"
"""Part of libpq's message for a certificate that it refused, whatever the reason."""
SYSTEM_AUTHORITIES: Final = "system"
"""Value of `sslrootcert` for the certificate authorities of the system."""
_SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""SSLRequest message, see "Message Formats" in the documentation of PostgreSQL."""
_SSL_ACCEPTED: Final = b"S"
_DEFAULT_PORT: Final = "5432"
_AUTHORITY_FILES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """The certificate of a server.

    Attributes:
        problem: why it does not pass verification, None if it does. The host name is not compared.
        expires_at: Unix seconds of its expiry, None if it does not pass verification.
    """

    host: str
    problem: str | None = None
    expires_at: float | None = None


def find_system_authorities() -> str:
    """Return the file with the certificate authorities of the system, "system" if there is none.

    The libpq of psycopg's wheels does not find them, because its OpenSSL looks in a directory of its own.
    `SSL_CERT_FILE` overrides the file, as in OpenSSL.
    """
    known = (ssl.get_default_verify_paths().cafile, *_AUTHORITY_FILES)
    return next((path for path in known if path is not None and Path(path).is_file()), SYSTEM_AUTHORITIES)


def read_server_certificates(conninfo: str) -> list[ServerCertificate]:
    """Connect to each server of a completed connection string with verified TLS, and verify its certificate.

    libpq reports "certificate verify failed" for an expired certificate as well as for an unknown authority, and does
    not tell when a valid certificate expires. A server that cannot be reached or has no TLS is omitted, because libpq
    reports that clearly.
    """
    params = {name: str(value) for name, value in conninfo_to_dict(conninfo).items() if value is not None}
    authorities = params.get("sslrootcert", "")
    if not params.get("sslmode", "").startswith("verify-") or params.get("sslnegotiation") == "direct":
        return []
    names = params.get("host", "").split(",")
    addresses = params.get("hostaddr", "").split(",") if params.get("hostaddr") else names
    ports = params.get("port", _DEFAULT_PORT).split(",")
    ports = ports * len(names) if len(ports) == 1 else ports
    certificates = []
    for name, address, port in zip(names, addresses, ports, strict=False):
        if address and not address.startswith(("/", "@")):
            certificate = _read_certificate(name or address, address, int(port or _DEFAULT_PORT), authorities)
            certificates += [] if certificate is None else [certificate]
    return certificates


def _read_certificate(name: str, address: str, port: int, authorities: str) -> ServerCertificate | None:
    try:
        context = ssl.create_default_context(cafile=None if authorities == SYSTEM_AUTHORITIES else authorities)
        context.check_hostname = False  # libpq states clearly that a name differs
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # libpq does not require it
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
            connection.sendall(_SSL_REQUEST)
            if connection.recv(1) != _SSL_ACCEPTED:
                return None
            with context.wrap_socket(connection, server_hostname=name) as encrypted:
                not_after = str((encrypted.getpeercert() or {})["notAfter"])
    except ssl.SSLCertVerificationError as error:
        return ServerCertificate(name, problem=error.verify_message)
    except (OSError, ValueError):
        return None
    return ServerCertificate(name, expires_at=float(ssl.cert_time_to_seconds(not_after)))


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
POOLER_ADVICE: Final = (
    "Connect to the server directly, without a pooler such as PgBouncer, and without PGTZ in the environment; see "
    "docs/cluster.md."
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
    ("startup parameter", POOLER_ADVICE),  # a server knows all parameters of the helper
    ("command-line options", POOLER_ADVICE),
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


@contextmanager
def translating() -> Iterator[None]:
    """Raise the `StoreError` for an error of PostgreSQL in the block."""
    try:
        yield
    except (psycopg.Error, PoolTimeout) as error:
        raise translate(error) from error


def _server_message(error: psycopg.Error) -> str:
    """Return the primary message only, because the details quote rows."""
    return error.diag.message_primary or type(error).__name__


def _connection_error(error: BaseException) -> str:
    """Return the reason in one line; for several hosts, that of each."""
    return "; ".join(_FAILED_ATTEMPT.findall(str(error))) or _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


CONNECT_SECONDS: Final = 5
IDLE_TRANSACTION_SECONDS: Final = 3.0
_VERIFIED_SSL_MODES: Final = frozenset({"verify-ca", "verify-full"})
_PRIMARY: Final = "primary"
_WRITABLE_SESSIONS: Final = frozenset({"any", "read-write", _PRIMARY})
"""Values of `target_session_attrs` that may select a primary."""
_KEEPALIVE: Final = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""Detects a lost connection within 11 s."""
_SERVER_KEEPALIVE: Final = (
    "-c tcp_keepalives_idle=5",
    "-c tcp_keepalives_interval=2",
    "-c tcp_keepalives_count=3",
    "-c tcp_user_timeout=10000",
)
"""The same for the server, so that a host can soon acquire the lock on its name again after a network failure."""
_FIXED_SETTINGS: Final = (
    *("-c statement_timeout=0", "-c lock_timeout=0", "-c idle_session_timeout=0"),
    *("-c standard_conforming_strings=on", "-c array_nulls=on", "-c client_min_messages=warning"),
)
"""Defaults that a role or database may change: timeouts would end the wait of a commit for a standby, or an idle
connection; literals would have another meaning; and `require_confirmed_commit` would get no warning."""
LOCKED_READ_SECONDS: Final = 10
"""Seconds for which a read waits for a table that another session has locked. The writer reports that it waits."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Connection settings of one host.

    Attributes:
        conninfo: libpq connection string; may contain a password.
        host: name of this host, unique among the hosts of the database.
        idle_transaction_seconds: seconds after which the server ends an idle transaction, so that a stopped host does
            not retain locks.
        proves: whether this host proves shares; hosts that do not can see that one does.
    """

    conninfo: str = field(repr=False)
    schema: str
    host: str
    idle_transaction_seconds: float = IDLE_TRANSACTION_SECONDS
    proves: bool = False

    def to_display_text(self) -> str:
        """Return the URL without the password, and with `hostaddr` if it differs from the host."""
        params = conninfo_to_dict(self.conninfo)
        user, name = f"{params['user']}@" if params.get("user") else "", params.get("dbname") or ""
        host, port, address = (str(params.get(key) or "") for key in ("host", "port", "hostaddr"))
        if host.startswith("/"):  # the directory of a Unix socket
            return f"postgresql://{user}/{name}?host={host}{port and f'&port={port}'}"
        hosts = host.split(",")
        ports = port.split(",") if "," in port else [port] * len(hosts)
        servers = ",".join(
            f"{server}:{number}" if number else server for server, number in zip(hosts, ports, strict=False)
        )
        different_address = address and address != host
        return f"postgresql://{user}{servers}/{name}{f'?hostaddr={address}' if different_address else ''}"

    @property
    def connect_seconds(self) -> float:
        """Time limit of one attempt to connect, which tries all hosts."""
        params = conninfo_to_dict(self.conninfo)
        seconds = float(params["connect_timeout"] or 0)
        return (seconds if seconds > 0 else CONNECT_SECONDS) * len(_list_hosts(params))

    def options(self, *, reading: bool = False) -> dict[str, Any]:
        """Return the keyword arguments for `psycopg.connect`; `reading` makes the connection read-only."""
        settings = [
            f"-c search_path={self.schema}",
            r"-c default_transaction_isolation=read\ committed",
            "-c timezone=UTC",
            f"-c idle_in_transaction_session_timeout={int(self.idle_transaction_seconds * 1000)}",
            "-c log_parameter_max_length_on_error=0",
            *_SERVER_KEEPALIVE,
            *_FIXED_SETTINGS,
        ]
        if reading:
            settings += ["-c default_transaction_read_only=on", f"-c lock_timeout={LOCKED_READ_SECONDS}s"]
        return {
            "application_name": self.host,
            "client_encoding": "UTF8",
            "options": " ".join(settings),
            "autocommit": True,
        }


def create_connection_settings(
    address: str, *, schema: str, host: str, idle_seconds: float = IDLE_TRANSACTION_SECONDS, proves: bool = False
) -> ConnectionSettings:
    """Check a database URL and complete it.

    Args:
        address: `postgresql://user@host/database?…` or a libpq `key=value` string.
        schema: lower-case letters, digits and _.

    Raises:
        StoreError: the URL is invalid, or uses a network without verified TLS.
    """
    try:
        params = conninfo_to_dict(address)
    except psycopg.ProgrammingError:
        raise StoreError("invalid database URL", advice="See `svote-helper config init`.") from None
    if "service" in params or "PGSERVICE" in os.environ:
        raise StoreError("the database URL must not use a service file, because the host in it cannot be checked")
    if not schema.isidentifier() or not schema.isascii() or schema != schema.lower():
        raise StoreError(f"{schema!r} is not a valid schema name: use lower-case letters, digits and _")
    if not host.isprintable() or not 0 < len(host.encode()) < 64:
        raise StoreError(f"{host!r} is not a valid host name: use up to 63 printable characters")
    _resolve_hosts(params)
    if not all(_is_local(host) for host in _list_hosts(params)):
        mode = params.setdefault("sslmode", "verify-full")
        if mode not in _VERIFIED_SSL_MODES:
            raise StoreError(
                f"sslmode={mode} does not protect the network connection to the database",
                advice="Use sslmode=verify-full, or a database on this host.",
            )
        if mode == "verify-full":
            params.setdefault("sslrootcert", SYSTEM_AUTHORITIES)
    if params.get("sslrootcert") == SYSTEM_AUTHORITIES:
        if params.setdefault("sslmode", "verify-full") != "verify-full":
            raise StoreError(  # as in libpq: anyone can get a certificate from these authorities
                f"sslrootcert={SYSTEM_AUTHORITIES} requires sslmode=verify-full, not sslmode={params['sslmode']}",
                advice="Use sslmode=verify-full.",
            )
        params["sslrootcert"] = find_system_authorities()
    _require_primary(params)
    for name, value in _KEEPALIVE.items():
        params.setdefault(name, str(value))
    return ConnectionSettings(
        make_conninfo("", **{name: str(value) for name, value in params.items() if value is not None}),
        schema,
        host,
        idle_seconds,
        proves,
    )


def _resolve_hosts(params: dict[str, Any]) -> None:
    """Add the hosts that libpq would take from the environment, and check `hostaddr`.

    Raises:
        StoreError: `hostaddr` is set and there is more than one host.
    """
    for name, variable in (("host", "PGHOST"), ("hostaddr", "PGHOSTADDR")):
        if params.get(name) is None and variable in os.environ:
            params[name] = os.environ[variable]
    if params.get("hostaddr") and ("," in str(params["hostaddr"]) or "," in str(params.get("host") or "")):
        raise StoreError(
            "the database URL must not combine hostaddr with several hosts",
            advice="Use several hosts in host, or one host with its hostaddr.",
        )


def _require_primary(params: dict[str, Any]) -> None:
    """Connect only to a primary, so that with several hosts a standby is skipped until it is promoted.

    `read-write` would also refuse the helper's connections that only read, because their sessions are read-only.

    Raises:
        StoreError: the URL selects a standby.
    """
    selected = params.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS") or "any"
    if selected not in _WRITABLE_SESSIONS:
        raise StoreError(
            f"target_session_attrs={selected} selects a standby, but the helper writes",
            advice="Remove it from the database URL: the helper connects to the primary among its hosts.",
        )
    params["target_session_attrs"] = _PRIMARY


def _list_hosts(params: dict[str, Any]) -> list[str]:
    """Return all hosts that libpq may connect to; an empty one is the Unix socket of this machine."""
    return str(params.get("hostaddr") or params.get("host") or "").split(",")


def _is_local(host: str) -> bool:
    return not host or host.startswith(("/", "@")) or host == "localhost" or is_loopback(host)
