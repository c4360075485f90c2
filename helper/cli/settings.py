"""The settings, as every command reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from helper.config import Loaded, find_file, load_traced

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Settings file (else $SVOTE_HELPER_CONFIG, ./helper.toml, /etc/svote-helper/helper.toml).",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on one line.")]


def read_settings(config: Path | None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """The settings from the file that is found, the environment, and a command's flags (`section.key`).

    Raises:
        SettingsError: with every problem.
    """
    return load_traced(find_file(config, os.environ), os.environ, flags)
