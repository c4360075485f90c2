"""`svote-helper db`: back up, restore, check, upgrade, encrypt and copy the queue database."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Final, Literal

import typer

from helper.cli.command_inputs import (
    PassphraseOption,
    read_new_passphrase,
    read_passphrase,
    read_queue_settings,
    read_settings,
    read_text_file,
)
from helper.cli.conventions import (
    ChangeOptions,
    ConfigOption,
    DryRunOption,
    ExitCode,
    JsonOption,
    QueueOptions,
    YesOption,
    confirm_or_exit,
    emit,
    fail,
    print_message,
    require_confirmation,
)
from helper.cli.operator_api import DATABASE_ADVICE
from helper.clock import SystemClock
from helper.config.sections import Config
from helper.config.settings_file import is_missing
from helper.core.json_records import fact
from helper.errors import NotFound, StoreKeyError
from helper.runtime.process_security import acting_as_owner, harden_process
from helper.store.backup import (
    decrypt_backup,
    encrypt_backup,
    needs_passphrase,
    read_backup,
    restore_database,
    write_backup,
)
from helper.store.db_copy.endpoint import CopyEndpoint
from helper.store.db_copy.factory import create_endpoint, create_endpoints
from helper.store.db_copy.file_encryption import RewriteResult, rewrite_file
from helper.store.db_copy.queue_copy import (
    CopyResult,
    copy_queue,
    erase_source,
    estimate_copy,
    read_moved_mark,
    undo_copy,
)
from helper.store.factory import read_file_encryption
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.file_lock import refuse_locked
from helper.store.sqlite.opening import DATABASE_HEADER, open_database
from helper.store.sqlite.schema import latest_version
from helper.store.sqlite.snapshot import Contents, Snapshot, check_image, read_contents, take_snapshot

_IDENTITY_PREFIX: Final = "AGE-SECRET-KEY-"
_SHARED_ADVICE: Final = (
    "use PostgreSQL's own tools for backups and checks (pg_dump, pg_basebackup, pg_amcheck), or use --db FILE"
)

KeyFileOption = Annotated[
    Path | None, typer.Option("--key-file", readable=False, help="Key file (default: [store] key_file).")
]
IdentityOption = Annotated[
    Path | None,
    typer.Option("--identity", readable=False, help="File with the age identity of the backup's recipient."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupResult(Contents):
    """`db backup`."""

    output: str = fact("Path of the backup.")
    bytes: int = fact("Size of the backup in bytes.")
    database_bytes: int = fact("Size of the database in bytes.")
    read_seconds: float = fact("Duration of the read transaction in seconds.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult(Contents):
    """`db restore`."""

    database: str = fact("Path of the restored database.")
    set_aside: str | None = fact("New path of the previous database; null if there was none.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile(Contents):
    """`db check`."""

    file: str = fact("Path of the checked file.")
    ok: bool = fact("Whether no row is damaged.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeResult(Contents):
    """`db migrate`, with the contents before it."""

    database: str = fact("Path of the database.")
    target: int = fact("Schema version of this release.")
    backup: str | None = fact("Path of the backup made before the schema upgrade; null if none was made.")
    migrated: bool = fact("Whether the schema was upgraded.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenFile:
    """`db encrypt` and `db decrypt`."""

    database: str = fact("Path of the database.")
    was_encrypted: bool = fact("Whether witnesses and messages in the database were encrypted before.")
    encrypted: bool = fact("Whether they are encrypted now.")
    live: int = fact("Number of live shares.")
    confirmed: int = fact("Number of confirmed shares.")
    damaged: int = fact("Number of damaged rows of live shares; the command deletes them, except with --dry-run.")
    erased: bool = fact(
        "Whether the previous rows were erased from the files. If false, the next start of the helper erases them;"
        " always false with --dry-run."
    )


CopyState = Literal["planned", "moved", "undone", "erased"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedQueue:
    """`db copy`."""

    state: CopyState = fact(
        "planned: --dry-run, nothing was changed. moved: the target is in use. undone, erased: result of --undo or"
        " --erase on the source."
    )
    source: str = fact("Source: a file, or a database URL without its password, with the schema.")
    target: str = fact("Target, in the same form as the source.")
    live: int = fact("Number of copied live shares; with --dry-run, according to the source's counters.")
    confirmed: int = fact("Number of confirmed shares, of which only a keyed hash is stored.")
    written: int = fact("Number of rows written to the target.")
    damaged: Sequence[str] = fact(
        "References of shares that were not copied because their rows are damaged; an empty string if the reference is"
        " damaged too."
    )
    uncounted: int = fact("Stored share count of the source minus its actual number of shares.")
    held_seconds: float = fact("Time in seconds during which no helper could use the source.")


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
    options: QueueOptions,
) -> None:
    """Write an encrypted backup; the helper may be running. `age -d` can also decrypt it."""
    _refuse_two_keys(recipient, passphrase_file)
    harden_process()
    database, encryption = _find_database(options)
    passphrase = "" if recipient else read_new_passphrase(passphrase_file)
    with take_snapshot(database, SystemClock(), encryption) as snapshot:
        _write_backup(snapshot, output, passphrase, recipient or [], replace=force)
    result = BackupResult(
        **asdict(snapshot.contents),
        output=str(output),
        bytes=output.stat().st_size,
        database_bytes=snapshot.size,
        read_seconds=round(snapshot.read_seconds, 3),
    )
    if snapshot.contents.damaged:
        print_message(f"{snapshot.contents.damaged} rows are damaged, in the database and in the backup")
    emit(result, f"{output}: {_summarize_contents(snapshot.contents)}, {result.bytes} bytes", json=options.json)


def restore(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", readable=False, help="Backup file.")],
    identity: IdentityOption = None,
    passphrase_file: PassphraseOption = None,
    force: Annotated[bool, typer.Option("--force", help="Rename an existing database instead of failing.")] = False,
    options: QueueOptions,
) -> None:
    """Restore a backup; the helper must not be running."""
    harden_process()
    database, encryption = _find_database(options, must_exist=False)
    image = _open_backup(file, identity, passphrase_file)
    contents = check_image(image, str(file), encryption)
    aside = restore_database(image, database, set_aside=force)
    if encryption.is_encrypted and not contents.encrypted:
        print_message(
            "the restored database is not encrypted: run `svote-helper db encrypt` before you start the helper"
        )
    if contents.moved:
        print_message(
            f"{contents.moved} shares were moved to another machine before this backup, so this helper does not reveal "
            "them. If that machine no longer has them, run `svote-helper queue retry --stage moved`"
        )
    result = RestoreResult(**asdict(contents), database=str(database), set_aside=None if aside is None else str(aside))
    emit(result, f"{database}: {_summarize_contents(contents)}", json=options.json)
    if aside is not None and not options.json:
        print_message(
            f"the previous database was kept as {aside}: it contains witnesses; destroy it when no longer needed"
        )


def check(
    *,
    backup_file: Annotated[
        Path | None, typer.Option("--backup", readable=False, help="Check this backup instead of the database.")
    ] = None,
    identity: IdentityOption = None,
    passphrase_file: PassphraseOption = None,
    options: QueueOptions,
) -> None:
    """Check the complete database, or a backup without restoring it. The helper may be running."""
    harden_process()
    if backup_file is None:
        path, encryption = _find_database(options)
        contents = read_contents(path, SystemClock(), encryption)
    else:
        path, encryption = backup_file, read_file_encryption(read_settings(options.config).config.store.key_file)
        contents = check_image(_open_backup(path, identity, passphrase_file), str(path), encryption)
    result = CheckedFile(**asdict(contents), file=str(path), ok=not contents.damaged)
    emit(result, f"{path}: {_summarize_contents(contents)}, {contents.damaged} damaged", json=options.json)
    if contents.damaged:
        print_message("the helper quarantines damaged rows and continues with the others")
        raise typer.Exit(ExitCode.DEGRADED)


def migrate(
    *,
    backup: Annotated[Path | None, typer.Option("--backup", help="File for the backup that is made first.")] = None,
    recipient: Annotated[
        list[str] | None,
        typer.Option(help="Encrypt the backup to this age recipient (age1…) instead of a passphrase; may be repeated."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    no_backup: Annotated[
        bool, typer.Option("--no-backup", help="Make no backup; the schema upgrade cannot be undone.")
    ] = False,
    yes: YesOption = False,
    options: QueueOptions,
) -> None:
    """Upgrade the schema of an older database. The helper must not be running.

    The next start of the helper does the same, without a backup. The schema upgrade is one transaction: if it
    fails, nothing has changed.
    """
    if (backup is None) != no_backup:
        fail("use --backup FILE or --no-backup", ExitCode.USAGE)
    _refuse_two_keys(recipient, passphrase_file)
    require_confirmation(yes=yes)
    harden_process()
    database, encryption = _find_database(options)
    before, target = read_contents(database, SystemClock(), encryption), latest_version()
    with acting_as_owner(database):
        refuse_locked(database)  # after another program's file was refused
    is_needed = before.schema < target
    result = UpgradeResult(
        **asdict(before),
        database=str(database),
        target=target,
        backup=str(backup) if is_needed and backup is not None else None,
        migrated=is_needed,
    )
    if is_needed:
        confirm_or_exit(f"Upgrade {database} from schema {before.schema} to {target}?", yes=yes)
        if backup is not None:
            passphrase = "" if recipient else read_new_passphrase(passphrase_file)
            with take_snapshot(database, SystemClock(), encryption) as snapshot:
                _write_backup(snapshot, backup, passphrase, recipient or [])
            print_message(f"backed up to {backup}")
        with acting_as_owner(database):
            stored = encryption if before.encrypted else UNENCRYPTED
            open_database(database, SystemClock(), encryption=stored).close()
    change = f"upgraded from schema {before.schema} to {target}" if is_needed else f"schema {target} is up to date"
    emit(result, f"{database}: {change}, {before.live} live shares, {before.confirmed} confirmed", json=options.json)


def _summarize_contents(contents: Contents) -> str:
    moved = f" ({contents.moved} of them moved to another machine)" if contents.moved else ""
    return f"{contents.live} live shares{moved}, {contents.confirmed} confirmed"


def _open_backup(file: Path, identity: Path | None, passphrase_file: Path | None) -> bytes:
    """Decrypt a backup; returns the database image."""
    sealed = read_backup(file)
    if needs_passphrase(sealed):
        image = decrypt_backup(sealed, passphrase=read_passphrase(passphrase_file))
    else:
        if identity is None:
            fail("this backup is encrypted to a recipient: use --identity", ExitCode.USAGE)
        lines = read_text_file(identity).splitlines()
        identities = [line for line in lines if line.startswith(_IDENTITY_PREFIX)]
        image = decrypt_backup(sealed, identities=identities)
    if not image.startswith(DATABASE_HEADER):
        fail(f"{file} is not a backup: import an export of a queue with `svote-helper queue import`")
    return image


def _write_backup(
    snapshot: Snapshot, output: Path, passphrase: str, recipients: Sequence[str], *, replace: bool = False
) -> None:
    write = partial(encrypt_backup, content=snapshot.file, passphrase=passphrase, recipients=recipients)
    # key derivation takes about one second of CPU; only this thread gets a lower priority
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,)) as executor:
        executor.submit(write_backup, output, write, replace=replace, passphrase=passphrase).result()


def _find_database(
    options: QueueOptions, *, key_file: Path | None = None, must_exist: bool = True
) -> tuple[Path, RowEncryption]:
    """Return the path of the queue database and its encryption, from the flags or the settings.

    Ends the command if the file does not exist, or if the queue is in a shared database and no flag specifies a file.
    """
    settings = read_queue_settings(options, key_file)
    if settings.store.url and options.db is None:
        fail(f"the queue is in a shared database ([store] url): {_SHARED_ADVICE}", ExitCode.USAGE)
    if must_exist and is_missing(settings.db_path):
        raise NotFound(f"database {settings.db_path} does not exist", advice=DATABASE_ADVICE)
    return settings.db_path, read_file_encryption(settings.store.key_file)


def _refuse_two_keys(recipient: list[str] | None, passphrase_file: Path | None) -> None:
    if recipient and passphrase_file is not None:
        fail("use --recipient or --passphrase-file, not both", ExitCode.USAGE)


def encrypt(*, key_file: KeyFileOption = None, options: ChangeOptions) -> None:
    """Encrypt witnesses and messages in the database with the first key of the key file.

    The helper must not be running. The previous rows are erased from the file. An encrypted database is encrypted
    again: afterwards, it no longer needs the other keys of the key file. Needs free space of twice the size of the
    database.
    """
    _rewrite(key_file, options, encrypt=True)


def decrypt(*, key_file: KeyFileOption = None, options: ChangeOptions) -> None:
    """Decrypt the database, so that it can be used without a key file. The helper must not be running."""
    _rewrite(key_file, options, encrypt=False)


def _rewrite(key_file: Path | None, options: ChangeOptions, *, encrypt: bool) -> None:
    require_confirmation(yes=options.yes, dry_run=options.dry_run)
    harden_process()
    database, encryption = _find_database(options, key_file=key_file)
    if not encryption.is_encrypted:
        fail("no key file: use --key-file or set [store] key_file", ExitCode.USAGE)
    before = read_contents(database, SystemClock(), encryption)  # refuses another program's file first
    if not options.dry_run:
        with acting_as_owner(database):
            refuse_locked(database)
    if not encrypt and not before.encrypted:
        raise StoreKeyError(f"{database} is not encrypted", advice="Nothing was changed.")
    done = RewriteResult(before.live, before.damaged)  # of --dry-run
    if not options.dry_run:
        verb = "Decrypt" if not encrypt else "Encrypt again" if before.encrypted else "Encrypt"
        lost = f" At least {before.damaged} damaged rows will be deleted." if before.damaged else ""
        confirm_or_exit(f"{verb} {database}?{lost}", yes=options.yes)
        with acting_as_owner(database):
            done = rewrite_file(database, SystemClock(), encryption, encrypt=encrypt)
    result = RewrittenFile(
        database=str(database),
        was_encrypted=before.encrypted,
        encrypted=before.encrypted if options.dry_run else encrypt,
        live=done.live,
        confirmed=before.confirmed,
        damaged=done.damaged,
        erased=done.is_erased,
    )
    change = ("would be " if options.dry_run else "") + ("encrypted" if encrypt else "decrypted")
    emit(
        result,
        f"{database}: {change}, {result.live} live shares, {result.confirmed} confirmed",
        json=options.json,
    )
    if options.dry_run:
        return
    if result.damaged:
        print_message(f"{result.damaged} damaged rows were deleted; the helper would not have used them")
    if not result.erased:
        print_message(
            "another process reads the file, or its disk failed, so the previous rows are not erased yet: "
            "the next start of the helper erases them"
        )
    if result.damaged or not result.erased:
        raise typer.Exit(ExitCode.DEGRADED)


MAX_DAMAGED_LISTED: Final = 20
"""Maximum number of damaged rows listed."""


def copy(
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="Destination: postgresql://…, a file, or `postgresql` or `sqlite` for [store] url or [helper] "
            "db_path.",
        ),
    ] = "",
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="PLACE", help="Source of the queue (default: the one in the settings)."),
    ] = None,
    key_file: KeyFileOption = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Use the source again; changes made since the move are lost.")
    ] = False,
    erase: Annotated[
        bool, typer.Option("--erase", help="Delete the remaining data from the source after a move.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Move the queue to a shared database, or back to a file.

    Stop the helper first, on every host. The command copies and compares every row, and marks the source, which
    helpers then refuse to use. An interrupted command can be repeated.
    """
    if [bool(to), undo, erase].count(True) != 1:
        fail("use exactly one of --to, --undo and --erase", ExitCode.USAGE)
    require_confirmation(yes=yes, dry_run=dry_run)
    harden_process()
    settings = read_queue_settings(QueueOptions(config=config), key_file)
    if to:
        result, text = _move(settings, origin, to, dry_run=dry_run, yes=yes)
    else:
        result, text = _finish_move(settings, origin, is_undo=undo, dry_run=dry_run, yes=yes)
    code = ExitCode.DEGRADED if result.state == "moved" and result.damaged else ExitCode.OK
    emit(result, text, json=json, code=code)


# ---------------------------------------------------------------------- moving


def _move(settings: Config, origin: str | None, to: str, *, dry_run: bool, yes: bool) -> tuple[MovedQueue, str]:
    """Move the queue, or show the effect with --dry-run. Returns the result and a summary."""
    clock = SystemClock()
    source, target = create_endpoints(origin, to, settings, clock)
    with closing(source), closing(target):
        if dry_run:
            plan = estimate_copy(source, target)
            text = f"{plan.live} live shares, {plan.confirmed} confirmed would be moved to {target.label}"
            return _describe_copy("planned", source, target.label, plan), f"{source.label}: {text}"
        confirm_or_exit(f"Move the queue of {source.label} to {target.label}?", yes=yes)
        result = copy_queue(source, target, clock=clock, on_progress=print_message)
    _print_moved(result, source, target)
    text = f"{result.live} live shares, {result.confirmed} confirmed, compared row by row; the move is finished"
    return _describe_copy("moved", source, target.label, result), f"{target.label}: {text}"


def _print_moved(result: CopyResult, source: CopyEndpoint, target: CopyEndpoint) -> None:
    for share in result.damaged[:MAX_DAMAGED_LISTED]:
        print_message(
            f"not moved because the row is damaged: {share.ref or '(no reference)'}, "
            f"round {share.round_id.hex()[:6] or '(none)'}"
        )
    if len(result.damaged) > MAX_DAMAGED_LISTED:
        print_message(f"… and {len(result.damaged) - MAX_DAMAGED_LISTED} more")
    if result.uncounted:
        print_message(
            f"the share counters of the source were off by {result.uncounted:+d}; they were recomputed for the target"
        )
    print_message(
        f"the queue was locked for {result.locked_seconds:.1f} s. Next:\n"
        f"  1. settings: {target.config_text}\n"
        "  2. start the helper, and run `svote-helper doctor`\n"
        f"  3. {source.label} still contains all witnesses, and helpers refuse to use it. When the target works:\n"
        f"     svote-helper db copy --erase --from {quote(source.cli_value)}\n"
        "To move back at any time: "
        f"svote-helper db copy --from {quote(target.cli_value)} --to {quote(source.cli_value)}"
    )


# ---------------------------------------------------------------------- after a move


def _finish_move(
    settings: Config, origin: str | None, *, is_undo: bool, dry_run: bool, yes: bool
) -> tuple[MovedQueue, str]:
    """Undo a move, or erase the data that remains in its source. Returns the result and a summary."""
    with closing(create_endpoint(origin, settings, SystemClock())) as source:
        old, new = source.label, read_moved_mark(source, to_undo=is_undo).other
        if is_undo:
            text = f"{old}: {'would be used' if dry_run else 'in use'} again, as it was when moved to {new}"
        elif dry_run:
            text = f"{old}: the remaining data of the queue moved to {new} would be deleted"
        else:
            text = f"{old}: all data of the queue moved to {new} was deleted"
        if dry_run:
            return _describe_copy("planned", source, new, CopyResult()), text
        if is_undo:
            confirm_or_exit(
                f"The queue of {old} was moved to {new}. Changes made there are missing here: new shares are lost, and "
                "revealed shares would be retried. Use the old queue anyway?",
                yes=yes,
            )
            undo_copy(source)
        else:
            confirm_or_exit(f"Delete the data remaining in {old} of the queue that was moved to {new}?", yes=yes)
            erase_source(source)
        return _describe_copy("undone" if is_undo else "erased", source, new, CopyResult()), text


# ---------------------------------------------------------------------- output


def _describe_copy(state: CopyState, source: CopyEndpoint, target: str, result: CopyResult) -> MovedQueue:
    return MovedQueue(
        state=state,
        source=source.label,
        target=target,
        live=result.live,
        confirmed=result.confirmed,
        written=result.written,
        damaged=[share.ref for share in result.damaged],
        uncounted=result.uncounted,
        held_seconds=round(result.locked_seconds, 3),
    )
