"""`svote-helper completion`: the script that completes commands, options and states in a shell.

At each TAB the script runs the command with what was typed in its environment (typer's own way); only the command that
is being typed is loaded then, and for the first word none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

import typer

from helper.cli.main import COMPLETING, create_completing_cli

app = typer.Typer()

PROGRAM: Final = "svote-helper"


class Shell(StrEnum):
    """The shells that there is a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="Whose script to print.")]) -> None:
    """Print the script that completes commands in a shell, for example: source <(svote-helper completion bash)."""
    os.environ[COMPLETING] = f"source_{shell}"
    create_completing_cli(os.environ)(args=[], prog_name=PROGRAM)


def typed_words(env: Mapping[str, str]) -> list[str] | None:
    """The words before the one that is being completed, the program's name left out; None where nothing is."""
    if COMPLETING not in env:
        return None
    if "COMP_WORDS" in env:
        words, cursor = env["COMP_WORDS"].split(), env.get("COMP_CWORD", "")
        return words[1 : int(cursor)] if cursor.isdecimal() else words[1:]
    line = env.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]
