"""`svote-helper db migrate`: upgrades the schema of an older database, with a backup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from helper.cli.confirm import DryRunOption, YesOption, confirm_or_exit, require_confirmation
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import ExitCode, emit_json, fail, print_message
from helper.cli.passphrase import PassphraseOption, map_file_errors_to_exit_codes, read_new_passphrase
from helper.cli.settings import database_file
from helper.clock import SystemClock
from helper.runtime.hardening import harden_process
from helper.runtime.privileges import acting_as_owner


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
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Upgrade the schema of an older database; the helper must not be running.

    The next start of the helper does the same, without a backup. The migration is tried on a copy in memory first;
    --dry-run shows the result of that and changes nothing.
    """
    if not dry_run and (backup is None) != no_backup:
        fail("give --backup FILE or --no-backup, or --dry-run to preview", ExitCode.USAGE)
    require_confirmation(yes=yes, dry_run=dry_run)
    harden_process()
    database = database_file(config, db)
    # imported here, so that the help loads no native code
    from helper.store.sqlite import schema_upgrade  # noqa: PLC0415

    with map_file_errors_to_exit_codes():
        with acting_as_owner(database):
            if not dry_run:
                schema_upgrade.refuse_running(database)
            trial = schema_upgrade.try_migration(database, SystemClock())
        result: dict[str, Any] = {
            "database": str(database),
            "schema": trial.before.schema,
            "target": trial.target,
            "live": trial.before.live,
            "confirmed": trial.before.confirmed,
            "damaged": trial.before.damaged,
            "backup": None,
            "migrated": False,
        }
        if trial.is_needed and not dry_run:
            confirm_or_exit(f"Migrate {database} from schema {trial.before.schema} to {trial.target}?", yes=yes)
            if backup is not None:
                _back_up(trial.image, backup, recipient or [], passphrase_file)
                result["backup"] = str(backup)
            with acting_as_owner(database):
                schema_upgrade.upgrade_file(database, SystemClock())
            result["migrated"] = True
    if json:
        emit_json(result)
    else:
        typer.echo(_summarize(result, needed=trial.is_needed))


def _back_up(image: bytes, output: Path, recipients: list[str], passphrase_file: Path | None) -> None:
    from helper.store.backup import encrypt_backup, write_backup  # noqa: PLC0415

    passphrase = "" if recipients else read_new_passphrase(passphrase_file)
    write_backup(output, encrypt_backup(image, passphrase=passphrase, recipients=recipients))
    print_message(f"backed up to {output}")


def _summarize(result: dict[str, Any], *, needed: bool) -> str:
    counts = f"{result['live']} live shares, {result['confirmed']} confirmed"
    if not needed:
        return f"{result['database']}: schema {result['schema']} is up to date, {counts}"
    change = "migrated from" if result["migrated"] else "would be migrated from"
    return f"{result['database']}: {change} schema {result['schema']} to {result['target']}, {counts}"
