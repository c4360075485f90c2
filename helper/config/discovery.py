"""Finds the settings file; names and defaults that fast commands need without the model.

Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

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
