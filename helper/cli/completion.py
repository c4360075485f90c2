"""`svote-helper completion`: prints the shell script that completes commands, options and states.

At each TAB the script runs `svote-helper` with the typed text in environment variables, as typer defines it. Only the
module of the typed command is imported, and none for the first argument.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Final

import typer

from helper.cli.command_line import COMPLETION_VARIABLE, create_completing_cli

app = typer.Typer()

PROGRAM: Final = "svote-helper"


class Shell(StrEnum):
    """Supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="Shell to generate the script for.")]) -> None:
    """Print the completion script of a shell, for example: source <(svote-helper completion bash)."""
    os.environ[COMPLETION_VARIABLE] = f"source_{shell}"
    create_completing_cli(os.environ)(args=[], prog_name=PROGRAM)
