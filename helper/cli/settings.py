"""Reads the settings for commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helper.cli.output import ExitCode, fail
from helper.config import Loaded, find_file, is_missing, load_traced

if TYPE_CHECKING:
    from helper.store.row_encryption import RowEncryption

SHARED_ADVICE: Final = (
    "use PostgreSQL's own tools for backups and checks (pg_dump, pg_basebackup, pg_amcheck), or use --db FILE"
)


def database_file(config: Path | None, db: Path | None, *, must_exist: bool = True) -> Path:
    """Return the path of the queue database, from the flag or the settings.

    Ends the command if the file does not exist, or if the queue is in a shared database and no flag specifies a file.
    """
    settings = read_settings(config, {"helper.db_path": str(db) if db else None}).config
    if settings.store.url and db is None:
        fail(f"the queue is in a shared database ([store] url): {SHARED_ADVICE}", ExitCode.USAGE)
    if must_exist and is_missing(settings.db_path):
        fail(f"database {settings.db_path} does not exist", ExitCode.NOT_FOUND)
    return settings.db_path


def database_encryption(config: Path | None) -> RowEncryption:
    """Return the encryption with the keys in [store] key_file; `UNENCRYPTED` if it is not set.

    Raises:
        StoreError: the key file cannot be used.
    """
    from helper.store.factory import read_file_encryption  # noqa: PLC0415 - loads the database drivers

    return read_file_encryption(read_settings(config).config.store.key_file)


def read_settings(config: Path | None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """Read the settings from the file, the environment, and a command's flags (`section.key`).

    Ends the command if this user may not read the file.

    Raises:
        SettingsError: the settings are invalid; the text lists every problem.
    """
    file = find_file(config, os.environ)
    if file is not None and not is_missing(file) and not os.access(file, os.R_OK):
        fail(f"no permission to read {file}", ExitCode.NOT_AUTHORISED)
    return load_traced(file, os.environ, flags)
