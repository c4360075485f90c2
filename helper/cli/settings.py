"""The settings, as every command reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import Exit, fail
from helper.config import Loaded, find_file, load_traced

__all__ = ["ConfigOption", "JsonOption", "database_file", "read_settings"]

SHARED_ADVICE: Final = (
    "its backups and checks are PostgreSQL's own (pg_dump, pg_basebackup, pg_amcheck); --db FILE names a file instead"
)


def database_file(config: Path | None, db: Path | None) -> Path:
    """The file that holds the queue, as a flag or the settings say.

    Ends the command when the settings name a database that hosts share, and no flag names a file.
    """
    settings = read_settings(config, {"helper.db_path": str(db) if db else None}).config
    if settings.store.url and db is None:
        fail(f"the queue is in a database that hosts share ([store] url): {SHARED_ADVICE}", Exit.USAGE)
    return settings.db_path


def read_settings(config: Path | None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """The settings from the file that is found, the environment, and a command's flags (`section.key`).

    Ends the command when this user may not read the file.

    Raises:
        SettingsError: with every problem.
    """
    file = find_file(config, os.environ)
    if file is not None and file.exists() and not os.access(file, os.R_OK):
        fail(f"{file} may not be read by this user", Exit.NOT_AUTHORISED)
    return load_traced(file, os.environ, flags)
