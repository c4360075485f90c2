"""Where a command takes a passphrase from, and the exit codes of files and keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from helper.cli.output import Exit, fail
from helper.config.discovery import ENV_BACKUP_PASSPHRASE
from helper.errors import BackupKeyError

PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        help=f"File whose first line is the passphrase (else ${ENV_BACKUP_PASSPHRASE}, else asked for).",
        show_default=False,
    ),
]


def read_passphrase(file: Path | None, *, new: bool) -> str:
    """The passphrase from where it is told; asked for on a terminal, twice when it is a new one."""
    if file is not None:
        with permitted():
            return next(iter(file.read_text("utf-8").splitlines()), "")
    told = os.environ.get(ENV_BACKUP_PASSPHRASE)
    if told is not None:
        return told
    if not sys.stdin.isatty():
        fail(f"no passphrase: give --passphrase-file or ${ENV_BACKUP_PASSPHRASE}", Exit.USAGE)
    asked: str = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=new, err=True)
    return asked


@contextmanager
def permitted() -> Iterator[None]:
    """Give what concerns files and keys the exit code that fits."""
    try:
        yield
    except FileNotFoundError as error:
        fail(f"there is no {error.filename}", Exit.NOT_FOUND)
    except PermissionError as error:
        fail(f"{error.filename} may not be used by this user" if error.filename else str(error), Exit.NOT_AUTHORISED)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"a file could not be read: {error}")
    except BackupKeyError as error:
        fail(f"{error}\n{error.advice}", Exit.NOT_AUTHORISED)
