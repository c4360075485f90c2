"""Finds the settings file and the lines of its keys; names and defaults of settings. Standard library only.

`healthcheck` runs every few seconds and needs no validated settings, whose import takes 0.3 s.

The standard parser does not report the lines of keys. Their search is not a second parser: it only tells where a name
of an accepted file is probably written, for the operator who has to change it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from helper.errors import ConfigError

ENV_PREFIX: Final = "SVOTE_HELPER_"
ENV_FILE: Final = "SVOTE_HELPER_CONFIG"
ENV_BACKUP_PASSPHRASE: Final = "SVOTE_HELPER_BACKUP_PASSPHRASE"  # noqa: S105  a variable name
NON_SETTING_VARIABLES: Final = frozenset({ENV_FILE, ENV_BACKUP_PASSPHRASE})
"""Variables with the prefix that are not settings."""
CREDENTIALS_DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
"""Environment variable: the directory of the credentials that a service manager passes (systemd.exec(5))."""
CREDENTIALS: Final = {"helper.api_token": "api-token", "operator.token": "operator-token", "store.url": "store-url"}
"""Secret settings and the names of their systemd credentials. The setting `<key>_file` names another file."""
FILE_CREDENTIALS: Final = {"store.key_file": "store-key", "s3.credentials_file": "s3-credentials"}
"""Settings that name a secret file, and the systemd credentials that are this file."""
SECRET_SETTINGS: Final = frozenset({*CREDENTIALS, "helper.sentry_dsn"})
"""Settings whose values are never shown."""
DEFAULT_FILES: Final = (Path("helper.toml"), Path("/etc/svote-helper/helper.toml"))
DEFAULT_DATABASE: Final = "svote-helper.db"
ADMIN_DATABASE: Final = "svote-admin.db"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8090
SOCKET_NAME: Final = "helper.sock"


def find_file(explicit: Path | None, env: Mapping[str, str]) -> Path | None:
    """Return the file to read: `explicit`, `$SVOTE_HELPER_CONFIG`, the first of `DEFAULT_FILES` that exists, or None.

    An explicitly named file is returned even if it does not exist, so that loading it reports the error. So is a
    default file in a directory that this user may not access.

    Raises:
        ConfigError: see `refuse_planted`.
    """
    if explicit is not None:
        return explicit
    if env.get(ENV_FILE):
        return Path(env[ENV_FILE])
    found = next((path for path in DEFAULT_FILES if not is_missing(path)), None)
    if found is not None:
        refuse_planted(found)
    return found


def refuse_planted(path: Path) -> None:
    """Refuse a relative path at which another user may have put a file, because any user may write to the directory.

    Otherwise `queue import` in /tmp could send the shares to a socket or database of that user.

    Raises:
        ConfigError: it is such a path.
    """
    with suppress(OSError):  # missing, or not accessible: opening it fails later
        owner, directory = path.lstat().st_uid, path.absolute().parent
        if not path.is_absolute() and owner not in {0, os.geteuid()} and directory.stat().st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"{path.absolute()} belongs to user {owner}, and any user may write to that directory",
                advice="Use another working directory, or absolute paths of settings and database.",
            )


def is_missing(path: Path) -> bool:
    """Return whether a path does not exist; False if this user may not know."""
    try:
        return not path.exists()
    except PermissionError:
        return False


def variable_name(setting: str) -> str:
    """Return the environment variable of a setting, `section.key`."""
    return ENV_PREFIX + setting.replace(".", "_").upper()


_HEADER: Final = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]")
_KEY: Final = re.compile(r"\s*([\"']?)([\w.-]+)\1\s*=")
_SYNTAX: Final = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")


def find_key_lines(text: str) -> dict[str, int]:
    """Return the first line (from 1) of each section and key, by its name: `helper`, `helper.port`."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        name = ""
        if header := _HEADER.match(line):
            name = section = header[1]
        elif entry := _KEY.match(line):
            name = f"{section}.{entry[2]}" if section else entry[2]
        while name:
            lines.setdefault(name, number)
            name = name.rpartition(".")[0]
    return lines


def parse_syntax_error(message: str, text: str) -> tuple[int, str]:
    """Split an error message of the standard TOML parser into line and text."""
    match = _SYNTAX.search(message)
    line = int(match[1]) if match and match[1] else max(1, len(text.splitlines()))
    return line, _SYNTAX.sub("", message).strip()
