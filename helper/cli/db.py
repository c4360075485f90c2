"""`svote-helper db`: encrypted backups of a running helper's database, and the way back."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from helper.cli.db_copy import copy
from helper.cli.db_migrate import migrate
from helper.cli.output import Exit, emit_json, fail, say
from helper.cli.passphrase import PassphraseOption, permitted, read_passphrase
from helper.cli.settings import ConfigOption, JsonOption, database_file
from helper.clock import SystemClock
from helper.runtime.hardening import harden_process
from helper.runtime.privileges import acting_as_owner

app = typer.Typer(
    help="The database: encrypted backups, restoring them, checks, an older version's schema, moving to another."
)

_IDENTITY: Final = "AGE-SECRET-KEY-"

DbOption = Annotated[
    Path | None, typer.Option("--db", readable=False, help="Database, instead of [helper] db_path.", show_default=False)
]
IdentityOption = Annotated[
    Path | None, typer.Option("--identity", readable=False, help="File with the age identity that the backup is for.")
]


@app.command()
def backup(
    *,
    output: Annotated[Path, typer.Option(help="Where to write it; an older backup of this name is replaced.")],
    recipient: Annotated[
        list[str] | None,
        typer.Option(help="Encrypt to this age recipient (age1…) instead of a passphrase; may be repeated."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Write an encrypted backup, whether the helper runs or not. `age -d` opens it, too."""
    database = _database(config, db, must_exist=True)
    if recipient and passphrase_file is not None:
        fail("either --recipient or --passphrase-file, not both", Exit.USAGE)
    passphrase = "" if recipient else read_passphrase(passphrase_file, new=True)
    # loaded here, so that the help needs no native code
    from helper.store.backup import MIN_PASSPHRASE, seal, write_backup  # noqa: PLC0415
    from helper.store.sqlite.snapshot import take_snapshot  # noqa: PLC0415

    if not recipient and len(passphrase) < MIN_PASSPHRASE:
        fail(f"the passphrase is shorter than {MIN_PASSPHRASE} characters", Exit.USAGE)
    with permitted():
        with acting_as_owner(database):
            snapshot = take_snapshot(database, SystemClock())
        # the passphrase costs a second of a core, which the helper's wallets may want: a thread can step back alone
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,)) as patient:
            sealed = patient.submit(seal, snapshot.image, passphrase=passphrase, recipients=recipient or ()).result()
        write_backup(output, sealed)
    facts = {
        "output": str(output),
        "bytes": len(sealed),
        "database_bytes": len(snapshot.image),
        "read_seconds": round(snapshot.read_seconds, 3),
        **asdict(snapshot.contents),
    }
    if snapshot.contents.damaged:
        say(f"{snapshot.contents.damaged} rows are damaged, in the database and so in the backup")
    if json:
        emit_json(facts)
    else:
        typer.echo(f"{output}: {facts['live']} live shares, {facts['confirmed']} confirmed, {len(sealed)} bytes")


@app.command()
def restore(
    *,
    file: Annotated[Path, typer.Argument(readable=False, help="The backup.")],
    identity: IdentityOption = None,
    passphrase_file: PassphraseOption = None,
    force: Annotated[bool, typer.Option("--force", help="Keep a database that is there aside, and go on.")] = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Put a backup in the database's place; the helper must not run."""
    database = _database(config, db, must_exist=False)
    from helper.store import backup as backups  # noqa: PLC0415
    from helper.store.sqlite.snapshot import examine  # noqa: PLC0415

    with permitted():
        image = _open_backup(file, identity, passphrase_file)
        contents = examine(image, str(file))
        aside = backups.restore(image, database, set_aside=force)
    if json:
        kept = None if aside is None else str(aside)
        emit_json({"database": str(database), "set_aside": kept, **asdict(contents)})
        return
    typer.echo(f"{database}: {contents.live} live shares, {contents.confirmed} confirmed")
    if aside is not None:
        say(f"the database that was there is kept as {aside}: it holds witnesses; destroy it when it is of no more use")


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
    """Look the whole database through, whether the helper runs or not; or a backup, without restoring it."""
    from helper.store.sqlite.snapshot import examine, take_snapshot  # noqa: PLC0415

    with permitted():
        if backup_file is None:
            what = _database(config, db, must_exist=True)
            with acting_as_owner(what):
                contents = take_snapshot(what, SystemClock()).contents
        else:
            harden_process()
            what = backup_file
            contents = examine(_open_backup(what, identity, passphrase_file), str(what))
    if json:
        emit_json({"file": str(what), "ok": not contents.damaged, **asdict(contents)})
    else:
        typer.echo(f"{what}: {contents.live} live shares, {contents.confirmed} confirmed, {contents.damaged} damaged")
    if contents.damaged:
        say("damaged rows are set aside by the helper; the rest goes on")
        raise typer.Exit(Exit.DEGRADED)


app.command()(migrate)
app.command()(copy)


def _database(config: Path | None, db: Path | None, *, must_exist: bool) -> Path:
    """The database's path; from here on the process is one that holds witnesses."""
    harden_process()
    database = database_file(config, db)
    if must_exist and not database.exists():
        fail(f"there is no database {database}", Exit.NOT_FOUND)
    return database


def _open_backup(file: Path, identity: Path | None, passphrase_file: Path | None) -> bytes:
    """The database's bytes in a backup."""
    from helper.store.backup import needs_passphrase, refuse_other, unseal  # noqa: PLC0415

    sealed = file.read_bytes()
    refuse_other(sealed, str(file))
    if needs_passphrase(sealed):
        return unseal(sealed, passphrase=read_passphrase(passphrase_file, new=False))
    if identity is None:
        fail("this backup was made to a recipient: give its --identity", Exit.USAGE)
    return unseal(sealed, identities=[line for line in _lines(identity) if line.startswith(_IDENTITY)])


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines()
