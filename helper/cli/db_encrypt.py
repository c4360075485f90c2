"""`svote-helper db encrypt` and `db decrypt`: encrypt witnesses and messages in a database file, or decrypt them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from helper.cli.confirm import DryRunOption, YesOption, confirm_or_exit, require_confirmation
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import ExitCode, emit_json, fail, print_message
from helper.cli.passphrase import map_file_errors_to_exit_codes
from helper.cli.settings import database_file, read_settings
from helper.clock import SystemClock
from helper.errors import StoreKeyError
from helper.runtime.hardening import harden_process
from helper.runtime.privileges import acting_as_owner

KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", readable=False, help="Key file (default: [store] key_file).", show_default=False),
]


def encrypt(
    *,
    key_file: KeyFileOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Encrypt witnesses and messages in the database with the first key of the key file.

    The helper must not be running. The previous rows are erased from the file. An encrypted database is encrypted
    again: afterwards, it no longer needs the other keys of the key file. Needs free space of twice the size of the
    database.
    """
    _rewrite(key_file, config, db, encrypt=True, dry_run=dry_run, yes=yes, json=json)


def decrypt(
    *,
    key_file: KeyFileOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Decrypt the database, so that it can be used without a key file. The helper must not be running."""
    _rewrite(key_file, config, db, encrypt=False, dry_run=dry_run, yes=yes, json=json)


def _rewrite(
    key_file: Path | None, config: Path | None, db: Path | None, *, encrypt: bool, dry_run: bool, yes: bool, json: bool
) -> None:
    require_confirmation(yes=yes, dry_run=dry_run)
    harden_process()
    database = database_file(config, db)
    keys = str(key_file) if key_file else read_settings(config).config.store.key_file
    if not keys:
        fail("no key file: use --key-file or set [store] key_file", ExitCode.USAGE)
    # imported here, so that the help loads no native code
    from helper.store.db_copy.file_encryption import rewrite_file  # noqa: PLC0415
    from helper.store.factory import read_file_encryption  # noqa: PLC0415
    from helper.store.sqlite.file_lock import refuse_locked  # noqa: PLC0415
    from helper.store.sqlite.snapshot import take_snapshot  # noqa: PLC0415

    with map_file_errors_to_exit_codes():
        encryption = read_file_encryption(keys)
        with acting_as_owner(database):
            before = take_snapshot(database, SystemClock(), encryption).contents  # refuses another program's file first
            if not dry_run:
                refuse_locked(database)
        if not encrypt and not before.encrypted:
            raise StoreKeyError(f"{database} is not encrypted", advice="Nothing was changed.")
        result: dict[str, Any] = {
            "database": str(database),
            "was_encrypted": before.encrypted,
            "encrypted": before.encrypted,
            "live": before.live,
            "confirmed": before.confirmed,
            "damaged": before.damaged,
            "erased": False,
        }
        if not dry_run:
            verb = "Decrypt" if not encrypt else "Encrypt again" if before.encrypted else "Encrypt"
            lost = f" At least {before.damaged} damaged rows will be deleted." if before.damaged else ""
            confirm_or_exit(f"{verb} {database}?{lost}", yes=yes)
            with acting_as_owner(database):
                done = rewrite_file(database, SystemClock(), encryption, encrypt=encrypt)
            result |= {"encrypted": encrypt, "live": done.live, "damaged": len(done.damaged), "erased": done.is_erased}
    _report(result, encrypt=encrypt, dry_run=dry_run, json=json)


def _report(result: dict[str, Any], *, encrypt: bool, dry_run: bool, json: bool) -> None:
    if json:
        emit_json(result)
    else:
        change = "encrypted" if encrypt else "decrypted"
        text = f"would be {change}" if dry_run else change
        typer.echo(f"{result['database']}: {text}, {result['live']} live shares, {result['confirmed']} confirmed")
    if dry_run:
        return
    if result["damaged"]:
        print_message(f"{result['damaged']} damaged rows were deleted; the helper would not have used them")
    if not result["erased"]:
        print_message(
            "another process reads the file, or its disk failed, so the previous rows are not erased yet: "
            "the next start of the helper erases them"
        )
    if result["damaged"] or not result["erased"]:
        raise typer.Exit(ExitCode.DEGRADED)
