"""`svote-helper queue export` and `import`: transfer shares in a file, encrypted except for svoted's helper."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helper.cli import queue_output, svoted_transfer
from helper.cli.confirm import DryRunOption, YesOption, confirm_or_exit, require_confirmation
from helper.cli.filters import (
    DueBeforeOption,
    RefsArgument,
    RoundOption,
    StageOption,
    StateOption,
    build_filter_query,
)
from helper.cli.operator_api import OperatorApi
from helper.cli.options import ConfigOption, DbOption, JsonOption
from helper.cli.output import ExitCode, emit, fail, map_errors_to_exit_codes, print_message
from helper.cli.passphrase import (
    PassphraseOption,
    map_file_errors_to_exit_codes,
    read_new_passphrase,
    read_passphrase,
)
from helper.cli.settings import database_encryption, database_file
from helper.cli.svoted_transfer import DeleteFileOption, ForSvotedOption, FromSvotedOption, encode_for_svoted
from helper.clock import SystemClock
from helper.runtime.hardening import harden_process
from helper.runtime.privileges import acting_as_owner
from helper.server import operator_parameters

if TYPE_CHECKING:
    from helper.store.row_encryption import RowEncryption
    from helper.store.sqlite.export import ExportSelection


def export(
    *,
    shares: RefsArgument = None,
    output: Annotated[Path, typer.Option(help="File to write; must not exist.")],
    move: Annotated[bool, typer.Option("--move", help="Move the shares: this machine stops processing them.")] = False,
    for_svoted: ForSvotedOption = False,
    round_id: RoundOption = "",
    state: StateOption = "",
    due_before: DueBeforeOption = "",
    stage: StageOption = "",
    passphrase_file: PassphraseOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Export live shares to a passphrase-encrypted file, for `queue import` on another machine.

    The helper may be running. Without --move, the file is a copy, and both machines reveal the shares (the chain
    counts each once). With --move, the shares are marked as failed here, with the stage "moved", before the file
    appears; shares that are being processed are not moved. `queue retry --stage moved` reactivates moved shares.

    With --for-svoted, the file is one of svoted's helper and is not encrypted. Delete it after its import.
    """
    if for_svoted and passphrase_file is not None:
        fail("a file for svoted is not encrypted: omit --passphrase-file", ExitCode.USAGE)
    if move:
        require_confirmation(yes=yes, dry_run=dry_run)
    database_file(config, db, must_exist=False)  # ends the command for a shared database, which cannot be exported
    api, refs = OperatorApi.of(config, db), [ref.lower() for ref in shares or []]
    harden_process()
    with map_errors_to_exit_codes(), map_file_errors_to_exit_codes():
        api.require_database()
        filter_query = build_filter_query(api, round_id, state, due_before, stage)
        selection = _select(api.database, filter_query, refs, database_encryption(config))
    number = len(selection.shares)
    skipped = {why: selection.skipped[why] for why in ("damaged", "closed", "moved")}
    result = {"output": str(output), "shares": number, "left": skipped, "move": move, "dry_run": dry_run}
    _warn_of_partial_files(output.parent)
    if not number:
        queue_output.print_not_exported(skipped)
        fail("no matching share to export", ExitCode.NOT_FOUND)
    if not dry_run:
        if move:
            confirm_or_exit(f"Move {number} shares, so that this machine stops processing them?", yes=yes)
        if for_svoted:
            sealed = encode_for_svoted(selection)
        else:
            sealed = _encrypt_selection(selection, read_new_passphrase(passphrase_file))
        body = {**filter_query, "named": len(refs), "shares": number, **(_marks(selection) if move else {})}
        with map_errors_to_exit_codes(), map_file_errors_to_exit_codes():
            result |= {"bytes": len(sealed), **_write_and_record(api, output, sealed, body, move=move)}
    emit(result, queue_output.print_exported, json=json)


def _select(
    database: Path, options: Mapping[str, str], refs: list[str], encryption: RowEncryption | None
) -> ExportSelection:
    """Select shares from a snapshot of the database."""
    # imported here, so that the help loads no native code
    from helper.store.sqlite.export import select_for_export  # noqa: PLC0415
    from helper.store.sqlite.snapshot import take_snapshot  # noqa: PLC0415

    conditions = operator_parameters.parse_filter(*options.values())
    for ref in refs:
        operator_parameters.parse_ref(ref)
    with acting_as_owner(database):
        snapshot = take_snapshot(database, SystemClock(), encryption)
    return select_for_export(snapshot.image, conditions, refs, encryption)


def _encrypt_selection(selection: ExportSelection, passphrase: str) -> bytes:
    from helper.operations.export_format import ExportHeader, encode_header, encode_share_line  # noqa: PLC0415
    from helper.store.backup import encrypt_backup  # noqa: PLC0415

    # key derivation takes about one second of CPU; a running helper has priority
    os.nice(10)
    made_at = int(SystemClock().now())
    head = ExportHeader(chain_id=selection.chain_id, made_at=made_at, shares=len(selection.shares))
    return encrypt_backup(
        b"".join([encode_header(head), *map(encode_share_line, selection.shares)]), passphrase=passphrase
    )


def _write_and_record(
    api: OperatorApi, output: Path, sealed: bytes, body: Mapping[str, Any], *, move: bool
) -> dict[str, Any]:
    """Record the export, and mark moved shares, after writing the file and before renaming it to `output`."""
    from helper.store.backup import create_file  # noqa: PLC0415

    with create_file(output, sealed) as export_file:
        try:
            return api.post("/queue/export", body)
        except BaseException:
            if move:
                print_message(f"shares may have been moved to {export_file}: keep this file")
            else:
                with acting_as_owner(export_file):
                    export_file.unlink()
            raise


def _warn_of_partial_files(directory: Path) -> None:
    for partial_file in sorted(directory.glob(".*.partial")):
        print_message(
            f"{partial_file} remains from an interrupted export or backup. After an interrupted --move it may be the "
            "only copy of its shares: import it with `svote-helper queue import` before you delete it."
        )


def _marks(selection: ExportSelection) -> dict[str, str]:
    """Return the selected rows as `marks` of the request."""
    from helper.server.routes.operator_actions import MARK_STRUCT  # noqa: PLC0415

    marks = b"".join(MARK_STRUCT.pack(number, check) for number, check in selection.versions)
    return {"marks": b64encode(marks).decode()}


def import_(
    *,
    file: Annotated[Path | None, typer.Argument(readable=False, help="File written by `queue export`.")] = None,
    from_svoted: FromSvotedOption = None,
    delete_file: DeleteFileOption = None,
    passphrase_file: PassphraseOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Import shares from another machine's export, with their states and due times.

    Shares that were moved from here with `queue export --move` are reactivated with a full attempt budget. Shares that
    are not imported are listed with the reason, and the exit code is then 3. An import can be repeated: shares already
    queued here or confirmed are skipped. Uses the running helper, or the database if no helper is running. The rounds
    must be known here: on a new machine, start the helper and wait until it is ready first. If a share is queued here
    with other content, the exit code is 1, and the stored share is not changed.
    """
    if (file is None) == (from_svoted is None):
        fail("specify either a file of `queue export` or --from-svoted FILE", ExitCode.USAGE)
    if from_svoted is None and delete_file is not None:
        fail("--delete-file and --keep-file require --from-svoted", ExitCode.USAGE)
    if from_svoted == svoted_transfer.STDIN and not yes and not dry_run:
        fail("standard input has the shares, so it cannot confirm: use --yes, or --dry-run", ExitCode.USAGE)
    require_confirmation(yes=yes, dry_run=dry_run)
    api = OperatorApi.of(config, db)
    harden_process()
    svoted = None if from_svoted is None else svoted_transfer.read_svoted_file(from_svoted)
    if svoted is not None:
        lines: Sequence[bytes] = svoted.lines
    else:
        assert file is not None
        lines = _decrypt_export(file, passphrase_file)

    def perform(*, preview: bool) -> dict[str, Any]:
        response = api.post("/queue/import", lines, {"dry_run": "1"} if preview else {})
        return response if svoted is None else svoted_transfer.number_rows(response, svoted)

    with map_errors_to_exit_codes():
        if not yes and not dry_run:
            queue_output.print_imported(perform(preview=True))
            confirm_or_exit("Import these shares?", yes=yes)
        response = perform(preview=dry_run)
    if from_svoted is not None:
        response["deleted"] = svoted_transfer.delete_file(from_svoted, response, requested=delete_file, yes=yes)
    emit(response, queue_output.print_imported, json=json)
    if response["conflict"]:
        raise typer.Exit(ExitCode.FAILURE)
    if response["left"]:
        raise typer.Exit(ExitCode.DEGRADED)


def _decrypt_export(file: Path, passphrase_file: Path | None) -> list[bytes]:
    """Decrypt an export; returns its lines, with their line ends."""
    from helper.store.backup import (  # noqa: PLC0415
        DATABASE_HEADER,
        decrypt_backup,
        needs_passphrase,
        require_backup_header,
    )

    with map_file_errors_to_exit_codes():
        sealed = file.read_bytes()
        require_backup_header(sealed, str(file))
        if not needs_passphrase(sealed):
            fail(f"{file} is not an export of a queue: it is not encrypted with a passphrase")
        content = decrypt_backup(sealed, passphrase=read_passphrase(passphrase_file))
    if content.startswith(DATABASE_HEADER):
        fail(f"{file} is a backup, not an export of a queue: restore it with `svote-helper db restore`")
    return [line + b"\n" for line in content.splitlines()]
