"""Finds the settings file and reads single values without validation.

Imports only the standard library, so that fast commands need not load the model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ENV_PREFIX: Final = "SVOTE_HELPER_"
ENV_FILE: Final = "SVOTE_HELPER_CONFIG"
ENV_BACKUP_PASSPHRASE: Final = "SVOTE_HELPER_BACKUP_PASSPHRASE"  # noqa: S105  a variable name
NON_SETTING_VARIABLES: Final = frozenset({ENV_FILE, ENV_BACKUP_PASSPHRASE})
"""Variables with the prefix that are not settings."""
CREDENTIALS: Final = {
    ("helper", "api_token"): "api-token",
    ("operator", "token"): "operator-token",
    ("store", "url"): "store-url",
}
"""Secret settings and the names of their systemd credentials. The setting `<key>_file` names another file."""
FILE_CREDENTIALS: Final = {("store", "key_file"): "store-key"}
"""Settings that name a secret file, and the systemd credentials that are this file."""
DEFAULT_FILES: Final = (Path("helper.toml"), Path("/etc/svote-helper/helper.toml"))
DEFAULT_DATABASE: Final = "svote-helper.db"
ADMIN_DATABASE: Final = "svote-admin.db"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8090
SOCKET_NAME: Final = "helper.sock"
TRUE_TEXTS: Final = frozenset({"true", "1", "yes", "on"})
"""Values of an environment variable that mean true, in lower case."""


def find_file(explicit: Path | None, env: Mapping[str, str], candidates: Sequence[Path] = DEFAULT_FILES) -> Path | None:
    """Return the file to read: `explicit`, `$SVOTE_HELPER_CONFIG`, the first candidate that exists, or None.

    An explicitly named file is returned even if it does not exist, so that loading it reports the error. So is a
    candidate in a directory that this user may not access.
    """
    if explicit is not None:
        return explicit
    if env.get(ENV_FILE):
        return Path(env[ENV_FILE])
    return next((path for path in candidates if not is_missing(path)), None)


def is_missing(path: Path) -> bool:
    """Return whether a path does not exist; False if this user may not know."""
    try:
        return not path.exists()
    except PermissionError:
        return False


def variable_name(section: str, key: str) -> str:
    """Return the environment variable of a setting."""
    return f"{ENV_PREFIX}{section}_{key}".upper()


def peek_database_path(path: Path | None, env: Mapping[str, str]) -> Path | None:
    """Return the database path that a service with these settings most likely uses, without validation.

    None if the helper is disabled, or the settings are invalid; loading them reports the error.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8")).get("helper", {}) if path is not None else {}
        disable = env.get(variable_name("helper", "disable"))
        if table.get("disable") if disable is None else disable.strip().lower() in TRUE_TEXTS:
            return None
        return Path(env.get(variable_name("helper", "db_path")) or table.get("db_path", DEFAULT_DATABASE))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    """Listen addresses of a helper.

    Attributes:
        socket: the control socket.
        wallets_socket: the unix socket of the wallet API, if it does not listen on `host` and `port`.
        host: address of the wallet API.
        port: port of the wallet API.
    """

    socket: Path
    wallets_socket: Path | None
    host: str
    port: int


def peek_listen_addresses(path: Path | None, env: Mapping[str, str]) -> ListenAddresses:
    """Return the addresses where a helper with these settings most likely listens, without validation.

    Invalid settings count as not set; loading them reports the error.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text("utf-8")) if path is not None else {}
    except (OSError, ValueError):
        tables = {}

    def read_value(section: str, key: str, default: str) -> str:
        table = tables.get(section)
        file_value = table.get(key) if isinstance(table, dict) else None
        return str(env.get(variable_name(section, key)) or file_value or default)

    socket = Path(read_value("helper", "db_path", DEFAULT_DATABASE)).parent / SOCKET_NAME
    wallets_socket = read_value("server", "unix_socket", "")
    port = read_value("helper", "port", str(DEFAULT_PORT))
    return ListenAddresses(
        socket=Path(read_value("operator", "socket", str(socket))),
        wallets_socket=Path(wallets_socket) if wallets_socket else None,
        host=read_value("helper", "host", DEFAULT_HOST),
        port=int(port) if port.isdecimal() else DEFAULT_PORT,
    )
