"""How a host connects to PostgreSQL, and what it refuses: an unencrypted way over a network, a server that forgets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from helper.core.addresses import is_loopback
from helper.errors import StoreError

CONNECT_SECONDS: Final = 5
PATIENCE_SECONDS: Final = 3.0
_VERIFIED: Final = frozenset({"verify-ca", "verify-full"})
_LIVELINESS: Final = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""How soon a connection whose other end is gone is known to be lost: within 11 s."""
_SERVER_LIVELINESS: Final = (
    "-c tcp_keepalives_idle=5",
    "-c tcp_keepalives_interval=2",
    "-c tcp_keepalives_count=3",
)
"""The same at the other end: a host that comes back after its network did is to find its own name free."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Where the database is.

    Attributes:
        conninfo: what libpq is given; it may hold a password.
        schema: the namespace of the tables.
        host: the name of this host among those that share the database.
        patience: seconds that the server waits for the next word inside a transaction: a host that is stopped there
            must not hold what it has locked.
    """

    conninfo: str
    schema: str
    host: str
    patience: float = PATIENCE_SECONDS

    def __repr__(self) -> str:
        return f"Link(schema={self.schema!r}, host={self.host!r})"

    def shown(self) -> str:
        """The address without a password; with a `hostaddr` that differs from the host, this is shown as well."""
        words = conninfo_to_dict(self.conninfo)
        user, place, name = words.get("user"), str(words.get("host") or ""), words.get("dbname") or ""
        port = f":{words['port']}" if words.get("port") else ""
        address = words.get("hostaddr")
        if address and address != place:
            return f"postgresql://{f'{user}@' if user else ''}{place}{port}/{name}?hostaddr={address}"
        if place.startswith("/"):  # a socket's folder
            return f"postgresql://{f'{user}@' if user else ''}/{name}?host={place}{port and '&port=' + port[1:]}"
        return f"postgresql://{f'{user}@' if user else ''}{place}{port}/{name}"

    def options(self, *, reading: bool = False) -> dict[str, Any]:
        """Keyword arguments of a connection."""
        settings = [
            f"-c search_path={self.schema}",
            "-c timezone=UTC",
            f"-c idle_in_transaction_session_timeout={int(self.patience * 1000)}",
            "-c log_parameter_max_length_on_error=0",
            *_SERVER_LIVELINESS,
        ]
        if reading:
            settings.append("-c default_transaction_read_only=on")
        return {"application_name": self.host, "options": " ".join(settings), "autocommit": True}


def create_connection_settings(
    address: str, *, schema: str, host: str, patience: float = PATIENCE_SECONDS
) -> ConnectionSettings:
    """A checked address.

    Args:
        address: `postgresql://user@host/database?…` or libpq's `key=value` words.
        schema: lower-case letters, digits and _.
        host: up to 63 printable characters, another one on every host.
        patience: seconds that the server waits for the next word inside a transaction.

    Raises:
        StoreError: it can not be read, or leads over a network without TLS.
    """
    try:
        words = conninfo_to_dict(address)
    except psycopg.ProgrammingError:
        raise StoreError("the database's address can not be read", advice="See `svote-helper config init`.") from None
    if "service" in words or "PGSERVICE" in os.environ:
        raise StoreError("the database's address must not be in a service file: where it leads could not be checked")
    if not schema.isidentifier() or not schema.isascii() or schema != schema.lower():
        raise StoreError(f"{schema!r} is no name for a schema: lower-case letters, digits and _")
    if not host.isprintable() or not 0 < len(host.encode()) < 64:
        raise StoreError(f"{host!r} is no name for a host: up to 63 characters")
    _resolve_hosts(words)
    if not all(_is_near(place) for place in _places(words)):
        mode = words.setdefault("sslmode", "verify-full")
        if mode not in _VERIFIED:
            raise StoreError(
                f"the way to the database leads over a network, and sslmode={mode} does not protect it",
                advice="Use sslmode=verify-full, or a database on this host.",
            )
        if mode == "verify-full":
            words.setdefault("sslrootcert", "system")
    for name, value in _LIVELINESS.items():
        words.setdefault(name, str(value))
    return ConnectionSettings(
        make_conninfo("", **{name: str(value) for name, value in words.items() if value is not None}),
        schema,
        host,
        patience,
    )


def _resolve_hosts(words: dict[str, Any]) -> None:
    """Write the hosts that libpq would take from the environment into the address, and check `hostaddr`.

    Raises:
        StoreError: `hostaddr` is given with several hosts.
    """
    for name, variable in (("host", "PGHOST"), ("hostaddr", "PGHOSTADDR")):
        if words.get(name) is None and variable in os.environ:
            words[name] = os.environ[variable]
    if words.get("hostaddr") and ("," in str(words["hostaddr"]) or "," in str(words.get("host") or "")):
        raise StoreError(
            "the database's address must not combine hostaddr with several hosts",
            advice="Give several hosts in host, or one host with its hostaddr.",
        )


def _places(words: dict[str, Any]) -> list[str]:
    """Every host or address that libpq may connect to; an empty one means the socket of this host."""
    return str(words.get("hostaddr") or words.get("host") or "").split(",")


def _is_near(place: str) -> bool:
    """Whether it is a socket or a loopback address."""
    return not place or place.startswith(("/", "@")) or place == "localhost" or is_loopback(place)
