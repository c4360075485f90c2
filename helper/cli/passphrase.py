"""Reads passphrases, and maps file and key errors to exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from helper.cli.output import ExitCode, fail
from helper.config.settings_file import ENV_BACKUP_PASSPHRASE
from helper.errors import BackupKeyError

PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        help=f"File with the passphrase on its first line (default: ${ENV_BACKUP_PASSPHRASE}, then a prompt).",
        show_default=False,
    ),
]


def read_new_passphrase(file: Path | None) -> str:
    """Read a passphrase to encrypt with, prompting twice. Ends the command if it is too short."""
    from helper.store.backup import MIN_PASSPHRASE_CHARS  # noqa: PLC0415 - loads native code

    passphrase = read_passphrase(file, confirm=True)
    if len(passphrase) < MIN_PASSPHRASE_CHARS:
        fail(f"the passphrase is shorter than {MIN_PASSPHRASE_CHARS} characters", ExitCode.USAGE)
    return passphrase


def read_passphrase(file: Path | None, *, confirm: bool = False) -> str:
    """Read the passphrase from the file, the environment or a prompt, which can ask for it twice."""
    if file is not None:
        with map_file_errors_to_exit_codes():
            return next(iter(file.read_text("utf-8").splitlines()), "")
    from_env = os.environ.get(ENV_BACKUP_PASSPHRASE)
    if from_env is not None:
        return from_env
    if not sys.stdin.isatty():
        fail(f"no passphrase: use --passphrase-file or ${ENV_BACKUP_PASSPHRASE}", ExitCode.USAGE)
    entered: str = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    return entered


@contextmanager
def map_file_errors_to_exit_codes() -> Iterator[None]:
    """End the command with the exit code of a file or key error."""
    try:
        yield
    except FileNotFoundError as error:
        fail(f"{error.filename} does not exist", ExitCode.NOT_FOUND)
    except PermissionError as error:
        fail(f"no permission to use {error.filename}" if error.filename else str(error), ExitCode.NOT_AUTHORISED)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read file: {error}")
    except BackupKeyError as error:
        fail(f"{error}\n{error.advice}", ExitCode.NOT_AUTHORISED)
