"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        readable=False,  # `read_settings` checks the file and maps errors to exit codes
        help="Settings file (default: $SVOTE_HELPER_CONFIG, ./helper.toml, /etc/svote-helper/helper.toml).",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")]
DbOption = Annotated[
    Path | None,
    typer.Option("--db", readable=False, help="Database file (default: [helper] db_path).", show_default=False),
]
