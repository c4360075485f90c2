"""PostgreSQL connection settings. Unencrypted network connections are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from helper.core.text_forms import is_loopback
from helper.errors import StoreError
from helper.store.postgres.server_certificate import SYSTEM_AUTHORITIES, find_system_authorities

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
)
"""The same for the server, so that a host can soon acquire the lock on its name again after a network failure."""
_NO_TIMEOUTS: Final = ("-c statement_timeout=0", "-c lock_timeout=0", "-c idle_session_timeout=0")
"""A provider's or role's timeout would end the wait of a commit for a standby, or an idle connection."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Connection settings of one host.

    Attributes:
        conninfo: libpq connection string; may contain a password.
        schema: schema of the tables.
        host: name of this host, unique among the hosts of the database.
        idle_transaction_seconds: seconds after which the server ends an idle transaction, so that a stopped host does
            not retain locks.
        proves: whether this host proves shares; hosts that do not can see that one does.
    """

    conninfo: str
    schema: str
    host: str
    idle_transaction_seconds: float = IDLE_TRANSACTION_SECONDS
    proves: bool = False

    def __repr__(self) -> str:
        return f"ConnectionSettings(schema={self.schema!r}, host={self.host!r})"

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
            *_NO_TIMEOUTS,
        ]
        if reading:
            settings.append("-c default_transaction_read_only=on")
        return {"application_name": self.host, "options": " ".join(settings), "autocommit": True}


def create_connection_settings(
    address: str, *, schema: str, host: str, idle_transaction_seconds: float = IDLE_TRANSACTION_SECONDS
) -> ConnectionSettings:
    """Check a database URL and complete it.

    Args:
        address: `postgresql://user@host/database?…` or a libpq `key=value` string.
        schema: lower-case letters, digits and _.
        host: name of this host, up to 63 printable characters.
        idle_transaction_seconds: seconds after which the server ends an idle transaction.

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
        idle_transaction_seconds,
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
    """Return whether a host is a Unix socket or a loopback address."""
    return not host or host.startswith(("/", "@")) or host == "localhost" or is_loopback(host)
