"""Confirmation of changes: `--dry-run`, `--yes`, or a prompt on a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from helper.cli.output import ExitCode, fail

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation; required without a terminal.")]


def require_confirmation(*, yes: bool, dry_run: bool | None = None) -> None:
    """End the command if it changes something and cannot be confirmed. `dry_run` is None if it has no preview."""
    if not yes and not dry_run and not sys.stdin.isatty():
        preview = "" if dry_run is None else ", or --dry-run for a preview"
        fail(f"not a terminal, cannot ask for confirmation: use --yes{preview}", ExitCode.USAGE)


def confirm_or_exit(question: str, *, yes: bool) -> None:
    """Ask for confirmation unless `--yes` was given. "No" ends the command."""
    if not yes and not typer.confirm(question, err=True):
        fail("nothing was changed")
