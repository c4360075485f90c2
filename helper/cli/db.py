"""`svote-helper db`: back up, restore, check, migrate, encrypt and copy the queue database."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from helper.cli.confirm import YesOption, confirm_or_exit, require_confirmation
from helper.cli.db_copy import copy
from helper.cli.db_encrypt import decrypt, encrypt
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import ExitCode, emit_json, fail, print_message
from helper.cli.passphrase import (
    PassphraseOption,
    map_file_errors_to_exit_codes,
    read_new_passphrase,
    read_passphrase,
)
from helper.cli.settings import database_encryption, database_file
from helper.clock import SystemClock
from helper.runtime.hardening import harden_process
from helper.runtime.privileges import acting_as_owner

if TYPE_CHECKING:
    from helper.store.sqlite.snapshot import Contents

app = typer.Typer(help="Back up, restore, check, migrate, encrypt and copy the queue database.")

_IDENTITY_PREFIX: Final = "AGE-SECRET-KEY-"

IdentityOption = Annotated[
    Path | None,
    typer.Option("--identity", readable=False, help="File with the age identity of the backup's recipient."),
]


@app.command()
def backup(
    *,
    output: Annotated[Path, typer.Option(help="File to write; must not exist, unless --force is used.")],
    recipient: Annotated[
        list[str] | None,
        typer.Option(help="Encrypt to this age recipient (age1…) instead of a passphrase; may be repeated."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing backup; a file of `queue export` is never replaced.")
    ] = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Write an encrypted backup; the helper may be running. `age -d` can also decrypt it."""
    harden_process()
    database = database_file(config, db)
    if recipient and passphrase_file is not None:
        fail("use --recipient or --passphrase-file, not both", ExitCode.USAGE)
    passphrase = "" if recipient else read_new_passphrase(passphrase_file)
    # imported here, so that the help loads no native code
    from helper.store.backup import encrypt_backup, write_backup  # noqa: PLC0415
    from helper.store.sqlite.snapshot import take_snapshot  # noqa: PLC0415

    with map_file_errors_to_exit_codes():
        encryption = database_encryption(config)
        with acting_as_owner(database):
            snapshot = take_snapshot(database, SystemClock(), encryption)
        # key derivation takes about one second of CPU; only this thread gets a lower priority
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,)) as executor:
            sealed = executor.submit(
                encrypt_backup, snapshot.image, passphrase=passphrase, recipients=recipient or ()
            ).result()
        write_backup(output, sealed, replace=force, passphrase=passphrase)
    result = {
        "output": str(output),
        "bytes": len(sealed),
        "database_bytes": len(snapshot.image),
        "read_seconds": round(snapshot.read_seconds, 3),
        **asdict(snapshot.contents),
    }
    if snapshot.contents.damaged:
        print_message(f"{snapshot.contents.damaged} rows are damaged, in the database and in the backup")
    if json:
        emit_json(result)
    else:
        typer.echo(f"{output}: {_summarize(snapshot.contents)}, {len(sealed)} bytes")


@app.command()
def restore(
    *,
    file: Annotated[Path, typer.Argument(readable=False, help="Backup file.")],
    identity: IdentityOption = None,
    passphrase_file: PassphraseOption = None,
    force: Annotated[bool, typer.Option("--force", help="Rename an existing database instead of failing.")] = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Restore a backup; the helper must not be running."""
    harden_process()
    database = database_file(config, db, must_exist=False)
    from helper.store import backup as backups  # noqa: PLC0415
    from helper.store.sqlite.snapshot import check_image  # noqa: PLC0415

    with map_file_errors_to_exit_codes():
        encryption = database_encryption(config)
        image = _open_backup(file, identity, passphrase_file)
        contents = check_image(image, str(file), encryption)
        aside = backups.restore_database(image, database, set_aside=force)
    if encryption.is_encrypted and not contents.encrypted:
        print_message(
            "the restored database is not encrypted: run `svote-helper db encrypt` before you start the helper"
        )
    if contents.moved:
        print_message(
            f"{contents.moved} shares were moved to another machine before this backup, so this helper does not reveal "
            "them. If that machine no longer has them, run `svote-helper queue retry --stage moved`"
        )
    if json:
        set_aside = None if aside is None else str(aside)
        emit_json({"database": str(database), "set_aside": set_aside, **asdict(contents)})
        return
    typer.echo(f"{database}: {_summarize(contents)}")
    if aside is not None:
        print_message(
            f"the previous database was kept as {aside}: it contains witnesses; destroy it when no longer needed"
        )


@app.command()
def check(
    *,
    backup_file: Annotated[
        Path | None,
        typer.Option("--backup", readable=False, help="Check this backup instead of the database.", show_default=False),
    ] = None,
    identity: IdentityOption = None,
    passphrase_file: PassphraseOption = None,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Check the complete database, or a backup without restoring it. The helper may be running."""
    from helper.store.sqlite.snapshot import check_image, take_snapshot  # noqa: PLC0415

    harden_process()
    with map_file_errors_to_exit_codes():
        encryption = database_encryption(config)
        if backup_file is None:
            path = database_file(config, db)
            with acting_as_owner(path):
                contents = take_snapshot(path, SystemClock(), encryption).contents
        else:
            path = backup_file
            contents = check_image(_open_backup(path, identity, passphrase_file), str(path), encryption)
    if json:
        emit_json({"file": str(path), "ok": not contents.damaged, **asdict(contents)})
    else:
        typer.echo(f"{path}: {_summarize(contents)}, {contents.damaged} damaged")
    if contents.damaged:
        print_message("the helper quarantines damaged rows and continues with the others")
        raise typer.Exit(ExitCode.DEGRADED)


@app.command()
def migrate(
    *,
    backup: Annotated[
        Path | None, typer.Option("--backup", help="File for the backup that is made first.", show_default=False)
    ] = None,
    recipient: Annotated[
        list[str] | None,
        typer.Option(help="Encrypt the backup to this age recipient (age1…) instead of a passphrase; may be repeated."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    no_backup: Annotated[
        bool, typer.Option("--no-backup", help="Make no backup; the migration cannot be undone.")
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Upgrade the schema of an older database. The helper must not be running.

    The next start of the helper does the same, without a backup. The migration is one transaction: if it fails,
    nothing has changed.
    """
    if (backup is None) != no_backup:
        fail("use --backup FILE or --no-backup", ExitCode.USAGE)
    require_confirmation(yes=yes)
    harden_process()
    database = database_file(config, db)
    # imported here, so that the help loads no native code
    from helper.store.sqlite.file_lock import refuse_locked  # noqa: PLC0415
    from helper.store.sqlite.opening import open_database  # noqa: PLC0415
    from helper.store.sqlite.schema import latest_version  # noqa: PLC0415
    from helper.store.sqlite.snapshot import take_snapshot  # noqa: PLC0415

    with map_file_errors_to_exit_codes():
        encryption = database_encryption(config)
        with acting_as_owner(database):
            snapshot = take_snapshot(database, SystemClock(), encryption)  # refuses another program's file first
            refuse_locked(database)
        before, target = snapshot.contents, latest_version()
        is_needed = before.schema < target
        result: dict[str, Any] = {
            "database": str(database),
            "schema": before.schema,
            "target": target,
            "live": before.live,
            "confirmed": before.confirmed,
            "damaged": before.damaged,
            "backup": None,
            "migrated": False,
        }
        if is_needed:
            confirm_or_exit(f"Migrate {database} from schema {before.schema} to {target}?", yes=yes)
            if backup is not None:
                _back_up(snapshot.image, backup, recipient or [], passphrase_file)
                result["backup"] = str(backup)
            with acting_as_owner(database):
                open_database(database, SystemClock(), encryption=encryption, allow_unencrypted=True).close()
            result["migrated"] = True
    if json:
        emit_json(result)
    else:
        counts = f"{before.live} live shares, {before.confirmed} confirmed"
        change = f"migrated from schema {before.schema} to {target}" if is_needed else f"schema {target} is up to date"
        typer.echo(f"{database}: {change}, {counts}")


app.command()(encrypt)
app.command()(decrypt)
app.command()(copy)


def _summarize(contents: Contents) -> str:
    moved = f" ({contents.moved} of them moved to another machine)" if contents.moved else ""
    return f"{contents.live} live shares{moved}, {contents.confirmed} confirmed"


def _open_backup(file: Path, identity: Path | None, passphrase_file: Path | None) -> bytes:
    """Decrypt a backup; returns the database image."""
    from helper.store import backup as backups  # noqa: PLC0415

    sealed = file.read_bytes()
    backups.require_backup_header(sealed, str(file))
    if backups.needs_passphrase(sealed):
        image = backups.decrypt_backup(sealed, passphrase=read_passphrase(passphrase_file))
    else:
        if identity is None:
            fail("this backup is encrypted to a recipient: use --identity", ExitCode.USAGE)
        lines = identity.read_text("utf-8").splitlines()
        identities = [line for line in lines if line.startswith(_IDENTITY_PREFIX)]
        image = backups.decrypt_backup(sealed, identities=identities)
    if not image.startswith(backups.DATABASE_HEADER):
        fail(f"{file} is not a backup: import an export of a queue with `svote-helper queue import`")
    return image


def _back_up(image: bytes, output: Path, recipients: list[str], passphrase_file: Path | None) -> None:
    from helper.store.backup import encrypt_backup, write_backup  # noqa: PLC0415

    passphrase = "" if recipients else read_new_passphrase(passphrase_file)
    write_backup(output, encrypt_backup(image, passphrase=passphrase, recipients=recipients))
    print_message(f"backed up to {output}")
