"""The settings, as every command reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import Exit, fail
from helper.config import Loaded, find_file, load_traced

__all__ = ["ConfigOption", "JsonOption", "read_settings"]


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
