"""The settings, as every command reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helper.cli.options import ConfigOption, JsonOption
from helper.config import Loaded, find_file, load_traced

__all__ = ["ConfigOption", "JsonOption", "read_settings"]


def read_settings(config: Path | None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """The settings from the file that is found, the environment, and a command's flags (`section.key`).

    Raises:
        SettingsError: with every problem.
    """
    return load_traced(find_file(config, os.environ), os.environ, flags)
