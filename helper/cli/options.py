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
        help="Settings file (else $SVOTE_HELPER_CONFIG, ./helper.toml, /etc/svote-helper/helper.toml).",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")]
DbOption = Annotated[
    Path | None,
    typer.Option("--db", readable=False, help="Database file, instead of [helper] db_path.", show_default=False),
]

RoundOption = Annotated[
    str,
    typer.Option("--round", help="Only this round (hex, or a prefix of at least 6 characters).", show_default=False),
]
StateOption = Annotated[
    str,
    typer.Option(
        "--state",
        help="Only this state: received, witnessed, broadcast or failed.",
        autocompletion=lambda: ["received", "witnessed", "broadcast", "failed"],
        show_default=False,
    ),
]
DueBeforeOption = Annotated[
    str,
    typer.Option(
        "--due-before",
        help="Only shares due before this time: unix seconds, UTC as in the list, or +10min.",
        show_default=False,
    ),
]
StageOption = Annotated[
    str, typer.Option("--stage", help="Only shares whose last event was in this stage.", show_default=False)
]
