"""Whether what changes something is really meant: `--dry-run`, `--yes`, or a question on a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from helper.cli.output import Exit, fail

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; needed where nobody can be asked.")]


def require_confirmation(*, yes: bool, dry_run: bool) -> None:
    """Refuse an act, before anything is looked at, that nobody can agree to."""
    if not yes and not dry_run and not sys.stdin.isatty():
        fail("this changes something, and there is no terminal to ask on: give --yes, or --dry-run to see", Exit.USAGE)


def consent(question: str, *, yes: bool) -> None:
    """Ask, unless `--yes` was given; a no ends the command."""
    if not yes and not typer.confirm(question, err=True):
        fail("nothing was changed")
