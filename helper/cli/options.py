"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        readable=False,  # looked at by `read_settings`, which has an exit code for it
        help="Settings file (else $SVOTE_HELPER_CONFIG, ./helper.toml, /etc/svote-helper/helper.toml).",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on one line.")]
DbOption = Annotated[
    Path | None, typer.Option("--db", readable=False, help="Database, instead of [helper] db_path.", show_default=False)
]

RoundOption = Annotated[
    str, typer.Option("--round", help="Of this round only (hex, or its first 6 characters).", show_default=False)
]
StateOption = Annotated[
    str,
    typer.Option(
        "--state",
        help="In this state only: received, witnessed, broadcast or failed.",
        autocompletion=lambda: ["received", "witnessed", "broadcast", "failed"],
        show_default=False,
    ),
]
DueBeforeOption = Annotated[
    str,
    typer.Option(
        "--due-before",
        help="Due before this time only: unix seconds, UTC as in the list, or +10min.",
        show_default=False,
    ),
]
StageOption = Annotated[
    str, typer.Option("--stage", help="Whose latest note is of this stage only.", show_default=False)
]
