"""Which settings file is read, and a first look into it that costs no time: only the standard library is loaded."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ENV_PREFIX: Final = "SVOTE_HELPER_"
ENV_FILE: Final = "SVOTE_HELPER_CONFIG"
ENV_BACKUP_PASSPHRASE: Final = "SVOTE_HELPER_BACKUP_PASSPHRASE"  # noqa: S105  a name
NOT_SETTINGS: Final = frozenset({ENV_FILE, ENV_BACKUP_PASSPHRASE})
"""Variables that no setting is taken from."""
CREDENTIALS: Final = {
    ("helper", "api_token"): "api-token",
    ("operator", "token"): "operator-token",
    ("store", "url"): "store-url",
}
"""Settings that are secrets, and the names of credentials that they are taken from; a setting of the same key with
`_file` behind it names another file."""
DEFAULT_FILES: Final = (Path("helper.toml"), Path("/etc/svote-helper/helper.toml"))
DEFAULT_DATABASE: Final = "svote-helper.db"
ADMIN_DATABASE: Final = "svote-admin.db"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8090
SOCKET_NAME: Final = "helper.sock"


def find_file(explicit: Path | None, env: Mapping[str, str], candidates: Sequence[Path] = DEFAULT_FILES) -> Path | None:
    """The file to read: the one named, `$SVOTE_HELPER_CONFIG`, the first candidate that is there, or none.

    A file that was named is returned also when it is not there, so that reading it says so.
    """
    if explicit is not None:
        return explicit
    if env.get(ENV_FILE):
        return Path(env[ENV_FILE])
    return next((path for path in candidates if path.is_file()), None)


def variable_of(section: str, key: str) -> str:
    """The environment variable of a setting."""
    return f"{ENV_PREFIX}{section}_{key}".upper()


def peek_database_path(path: Path | None, env: Mapping[str, str]) -> Path | None:
    """The database that a service with this file and environment will most likely open, before they are checked.

    None when there may be none: the helper is disabled, or something is wrong, which reading the settings tells.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8")).get("helper", {}) if path is not None else {}
        if table.get("disable") or env.get(variable_of("helper", "disable")):
            return None
        return Path(env.get(variable_of("helper", "db_path")) or table.get("db_path", DEFAULT_DATABASE))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    """Where a helper answers: its control socket, and the wallets' address."""

    socket: Path
    host: str
    port: int


def peek_listen_addresses(path: Path | None, env: Mapping[str, str]) -> ListenAddresses:
    """Where a helper with this file and environment most likely answers, before they are checked.

    What is wrong counts as not set: reading the settings tells it.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text("utf-8")) if path is not None else {}
    except (OSError, ValueError):
        tables = {}

    def value(section: str, key: str, default: str) -> str:
        table = tables.get(section)
        told = table.get(key) if isinstance(table, dict) else None
        return str(env.get(variable_of(section, key)) or told or default)

    socket = Path(value("helper", "db_path", DEFAULT_DATABASE)).parent / SOCKET_NAME
    port = value("helper", "port", str(DEFAULT_PORT))
    return ListenAddresses(
        socket=Path(value("operator", "socket", str(socket))),
        host=value("helper", "host", DEFAULT_HOST),
        port=int(port) if port.isdecimal() else DEFAULT_PORT,
    )
