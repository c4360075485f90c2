"""Reads the settings and passphrases of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from helper.cli.conventions import ExitCode, QueueOptions, fail
from helper.config.loader import Loaded, load
from helper.config.sections import Config
from helper.config.settings_file import ENV_BACKUP_PASSPHRASE, find_file, is_missing, refuse_planted


def read_settings(config: Path | None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """Read the settings from the file, the environment, and a command's flags (`section.key`).

    Ends the command if this user may not read the file.

    Raises:
        SettingsError: the settings are invalid; the text lists every problem.
        ConfigError: see `refuse_planted`.
    """
    file = find_file(config, os.environ)
    if file is not None and not is_missing(file) and not os.access(file, os.R_OK):
        fail(f"no permission to read {file}", ExitCode.NOT_AUTHORIZED)
    loaded = load(file, os.environ, flags)
    refuse_planted(loaded.config.socket_path)
    refuse_planted(loaded.config.db_path)
    return loaded


def read_queue_settings(options: QueueOptions, key_file: Path | None = None) -> Config:
    """Read the settings, with the database of `--db` and the key file of `--key-file`."""
    flags = {"helper.db_path": options.db, "store.key_file": key_file}
    return read_settings(options.config, {key: str(path) if path else None for key, path in flags.items()}).config


MIN_PASSPHRASE_CHARS: Final = 12
"""Minimum length of a passphrase to encrypt with."""
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        help=f"File with the passphrase on its first line (default: ${ENV_BACKUP_PASSPHRASE}, then a prompt).",
    ),
]


def read_text_file(file: Path) -> str:
    """Read a file of a secret. Ends the command if it is not text, as a backup is."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        fail(f"{file} is not a text file", ExitCode.USAGE)


def read_passphrase(file: Path | None, *, confirm: bool = False) -> str:
    """Read the passphrase from the file, the environment or a prompt, which can ask for it twice."""
    if file is not None:
        return next(iter(read_text_file(file).splitlines()), "")
    from_env = os.environ.get(ENV_BACKUP_PASSPHRASE)
    if from_env is not None:
        return from_env
    if not sys.stdin.isatty():
        fail(f"no passphrase: use --passphrase-file or ${ENV_BACKUP_PASSPHRASE}", ExitCode.USAGE)
    entered: str = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    return entered


def read_new_passphrase(file: Path | None) -> str:
    """Read a passphrase to encrypt with, prompting twice. Ends the command if it is too short."""
    passphrase = read_passphrase(file, confirm=True)
    if len(passphrase) < MIN_PASSPHRASE_CHARS:
        fail(f"the passphrase is shorter than {MIN_PASSPHRASE_CHARS} characters", ExitCode.USAGE)
    return passphrase
