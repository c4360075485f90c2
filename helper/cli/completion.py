"""`svote-helper completion`: prints the shell script that completes commands, options and states.

At each TAB the script runs `svote-helper` with the typed text in environment variables, as typer defines it. Only the
module of the typed command is imported, and none for the first argument.
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
    """Supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion script of a shell, for example: source <(svote-helper completion bash)."""
    os.environ[COMPLETING] = f"source_{shell}"
    create_completing_cli(os.environ)(args=[], prog_name=PROGRAM)


def typed_words(env: Mapping[str, str]) -> list[str] | None:
    """Return the arguments before the one being completed, or None if this is no completion."""
    if COMPLETING not in env:
        return None
    if "COMP_WORDS" in env:
        words, cursor = env["COMP_WORDS"].split(), env.get("COMP_CWORD", "")
        return words[1 : int(cursor)] if cursor.isdecimal() else words[1:]
    line = env.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]
