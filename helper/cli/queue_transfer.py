"""`svote-helper queue export` and `import`: transfer shares in a file, encrypted except for svoted's helper."""

from __future__ import annotations

import os
import stat
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NoReturn

import typer

from helper.cli.command_inputs import PassphraseOption, read_new_passphrase, read_passphrase
from helper.cli.conventions import (
    ChangeOptions,
    ExitCode,
    confirm_or_exit,
    emit,
    fail,
    print_message,
    require_confirmation,
)
from helper.cli.operator_api import OperatorApi, RefsArgument, Selection
from helper.cli.queue import MOVED_TEXT, ROUND_CHARS
from helper.clock import SystemClock
from helper.core.json_records import fact
from helper.observability.queue_snapshot import SOURCE, Source
from helper.operations.export_format import MAX_SHARES, ExportHeader, encode_header, encode_share_line
from helper.operations.svoted_format import MAX_FILE_BYTES, SvotedExport, encode_svoted_export, read_svoted_export
from helper.runtime.process_security import acting_as_owner, harden_process
from helper.server import operator_parameters
from helper.server.operator_routes import MARK_STRUCT, ExportRecord
from helper.store.backup import (
    EncryptedWriter,
    decrypt_backup,
    needs_passphrase,
    read_backup,
    write_backup,
    write_unencrypted_file,
)
from helper.store.db_copy.export import ExportedQueue
from helper.store.db_copy.factory import SQLITE_ENGINE, create_endpoint
from helper.store.exported_shares import ExportedShare
from helper.store.sqlite.opening import DATABASE_HEADER

STDIN: Final = Path("-")


def _read_svoted_file(file: Path) -> SvotedExport:
    """Read and convert a file. Ends the command if other users can read it."""
    if file == STDIN:
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                fail(
                    f"other users can access {file} (mode {mode:o}), which contains the witnesses of shares\n"
                    f"Run `chmod 600 {file}`, and find out who could have read it.",
                    ExitCode.NOT_AUTHORIZED,
                )
            data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        fail(f"{file} is larger than {MAX_FILE_BYTES} bytes")
    return read_svoted_export(data)


def _number_rows(response: dict[str, Any], export: SvotedExport) -> dict[str, Any]:
    """Return the result of an import with the positions of the file's rows, and the rows that were not sent."""
    left = [{**row, "number": export.numbers[row["number"] - 1]} for row in response["left"]]
    return {**response, "left": left, "submitted": export.submitted}


def _delete_imported(file: Path, response: Mapping[str, Any], *, requested: bool | None, yes: bool) -> bool:
    """Delete an imported file if that was requested and no share depends on it. Returns whether it was deleted."""
    if file == STDIN or response["dry_run"]:
        return False
    if any(response[reason] for reason in ("failed", "damaged", "conflict", "closed", "unknown", "invalid")):
        print_message(f"{file} is kept: not all of its shares were imported. It contains witnesses: protect it.")
        return False
    if requested is None and not yes:
        requested = typer.confirm(f"All shares of {file} are here or revealed. Delete it?", err=True)
    if not requested:
        print_message(f"{file} is kept. It contains witnesses: delete it as soon as possible.")
        return False
    with acting_as_owner(file) as real:
        real.unlink()
    return True


def _encode_for_svoted(shares: Sequence[ExportedShare], round_ends: Mapping[bytes, int]) -> bytes:
    """Encode shares. Ends the command unless all of them belong to one round whose end is known."""
    rounds = {exported.share.round_id for exported in shares}
    if len(rounds) > 1:
        fail(
            "the shares belong to several rounds, but a file for svoted contains only one: use --round", ExitCode.USAGE
        )
    (round_id,) = rounds
    end = round_ends.get(round_id)
    if end is None:
        fail("the end of the round is not known yet: wait until the helper has read the chain")
    places = {(each.share.proposal_id, each.share.tree_position, each.share.share_index) for each in shares}
    if len(places) < len(shares):
        fail("svoted refuses two shares of one position, of which one is of a false tree: name the shares to export")
    return encode_svoted_export(shares, vote_end_time=end, exported_at=int(SystemClock().now()))


@dataclass(frozen=True, slots=True)
class UnexportedShares:
    """Live shares that were not exported, by reason."""

    damaged: int = fact("Shares whose rows are damaged.")
    closed: int = fact("Shares whose round the chain has closed.")
    moved: int = fact("Shares that an earlier export moved.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult(ExportRecord):
    """`queue export`."""

    source: Source | None = fact(SOURCE, optional=True)  # type: ignore[assignment] # absent from a dry run
    output: str = fact("Path of the export file.")
    shares: int = fact("Number of exported shares.")
    left: UnexportedShares = fact("Number of live shares that were not exported, by reason.")
    move: bool = fact("Whether the shares were moved (--move).")
    bytes: int | None = fact("Size of the file in bytes.", optional=True)


_NOT_EXPORTED_REASONS = {"damaged": "rows damaged", "closed": "round closed", "moved": MOVED_TEXT}
_NOT_IMPORTED_REASONS = {
    "queued": "already queued here",
    "failed": "failed here (`queue retry` retries them)",
    "damaged": "rows damaged here",
    "conflict": "queued here with other content",
    "spent": "confirmed on the chain",
    "closed": "round closed",
    "unknown": "round unknown here: wait until the helper has read the chain, then import again",
    "invalid": "invalid",
}
_MAX_SKIPPED_LISTED = 20
_CHUNK_BYTES: Final = 64 * 1024


def export(
    *,
    shares: RefsArgument = None,
    output: Annotated[Path, typer.Option(help="File to write; must not exist.")],
    move: Annotated[bool, typer.Option("--move", help="Move the shares: this machine stops processing them.")] = False,
    for_svoted: Annotated[
        bool,
        typer.Option(
            "--for-svoted",
            help="Write a file for `svoted helper import-queue`, of one round. It is not encrypted; its mode is 600.",
        ),
    ] = False,
    selection: Selection,
    passphrase_file: PassphraseOption = None,
    options: ChangeOptions,
) -> None:
    """Export live shares to a passphrase-encrypted file, for `queue import` on another machine.

    The helper may be running. Without --move, the file is a copy, and both machines reveal the shares (the chain
    counts each once). With --move, the shares are marked as failed here, with the stage "moved", once the file is
    complete; shares that are being processed are not moved. `queue retry --stage moved` reactivates moved shares.

    With --for-svoted, the file is one of svoted's helper and is not encrypted. Delete it after its import.
    """
    if for_svoted and passphrase_file is not None:
        fail("a file for svoted is not encrypted: omit --passphrase-file", ExitCode.USAGE)
    if move:
        require_confirmation(yes=options.yes, dry_run=options.dry_run)
    api, refs = OperatorApi.of(options), [operator_parameters.parse_ref(ref) for ref in shares or []]
    harden_process()
    filter_query = selection.to_query(api)
    if api.is_shared:
        api.get("/rounds")  # only a running helper can record the export
    with closing(create_endpoint(SQLITE_ENGINE if options.db else None, api.settings, SystemClock())) as source:
        source.connect_read_only()
        queue = ExportedQueue(source, operator_parameters.parse_filter(filter_query), refs)
        number = sum(1 for _ in queue.read())
        written: dict[str, Any] = {}
        if not number:
            _fail_without_shares(queue)
        if not options.dry_run:
            if move:
                confirm_or_exit(f"Move {number} shares, so that this machine stops processing them?", yes=options.yes)
            passphrase = "" if for_svoted else read_new_passphrase(passphrase_file)
            body = {**filter_query, "named": len(refs)}
            written = _write_and_record(api, output, queue, passphrase, body, move=move)
    result = ExportResult(
        **{"dry_run": options.dry_run, "source": None, "shares": number, **written},
        output=str(output),
        left=UnexportedShares(**_count_skipped(queue)),
        move=move,
    )
    emit(result, _print_exported, json=options.json)


def _count_skipped(queue: ExportedQueue) -> dict[str, int]:
    return {why: queue.skipped[why] for why in _NOT_EXPORTED_REASONS}


def _fail_without_shares(queue: ExportedQueue) -> NoReturn:
    _print_not_exported(_count_skipped(queue))
    fail("no matching share to export", ExitCode.NOT_FOUND)


def _write_shares(file: BinaryIO, shares: Iterable[ExportedShare], chain_id: str | None, passphrase: str) -> None:
    """Write an encrypted export. The number of shares in its header is known only at the end."""
    # key derivation takes about one second of CPU; a running helper has priority
    os.nice(10)
    header = ExportHeader(chain_id=chain_id, made_at=int(SystemClock().now()), shares=MAX_SHARES)
    line_bytes = len(encode_header(header))
    writer, number = EncryptedWriter(file, passphrase, head_bytes=line_bytes), 0
    for exported in shares:
        writer.write(encode_share_line(exported))
        number += 1
    header = ExportHeader(chain_id=chain_id, made_at=header.made_at, shares=number)
    writer.finish(encode_header(header, line_bytes=line_bytes))


def _write_and_record(
    api: OperatorApi, output: Path, queue: ExportedQueue, passphrase: str, body: Mapping[str, Any], *, move: bool
) -> dict[str, Any]:
    """Write the shares, for svoted without a passphrase, and record the export.

    The file has its name before shares are marked as moved: if the command is killed in between, both helpers reveal
    them, which does no harm.
    """
    marks = bytearray()

    def read_shares() -> Iterator[ExportedShare]:
        for exported, version in queue.read():
            marks.extend(MARK_STRUCT.pack(*version))
            yield exported
        if not marks:  # all of them have changed since they were counted
            _fail_without_shares(queue)

    def write(file: BinaryIO) -> None:
        if passphrase:
            _write_shares(file, read_shares(), queue.chain_id, passphrase)
        else:
            file.write(_encode_for_svoted(list(read_shares()), queue.round_ends))

    (write_backup if passphrase else write_unencrypted_file)(output, write)
    queue.source.close()  # without a running helper, this process opens the file for writing
    try:
        exported: dict[str, Any] = {"shares": len(marks) // MARK_STRUCT.size}
        more = {"marks": b64encode(marks).decode()} if move else {}
        response = api.post("/queue/export", {**body, **exported, **more})
        return {"bytes": output.stat().st_size, **exported, **response}
    except BaseException:
        if move:
            print_message(f"shares may have been moved to {output}: keep this file")
        else:
            with acting_as_owner(output) as real:
                real.unlink()
        raise


def import_(
    *,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", readable=False, help="File written by `queue export`.")
    ] = None,
    from_svoted: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="Import this file of `svoted helper export-queue` instead (- for standard input). It is not "
            "encrypted, so its mode must be 600.",
        ),
    ] = None,
    delete_file: Annotated[
        bool | None,
        typer.Option(
            "--delete-file/--keep-file",
            help="Whether the file of --from-svoted is deleted once all its shares are here or revealed (default: ask "
            "on a terminal, otherwise keep it).",
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    options: ChangeOptions,
) -> None:
    """Import shares from another machine's export, with their states and due times.

    Shares that were moved from here with `queue export --move` are reactivated, and their attempts start again at 0.
    Shares that are not imported are listed with the reason, and the exit code is then 3. An import can be repeated:
    shares already queued here or confirmed are skipped. Uses the running helper, or the database if no helper is
    running. The rounds must be known here: on a new machine, start the helper and wait until it is ready first. If a
    share is queued here with other content, the exit code is 1, and the stored share is not changed.
    """
    if (file is None) == (from_svoted is None):
        fail("specify either a file of `queue export` or --from-svoted FILE", ExitCode.USAGE)
    if from_svoted is None and delete_file is not None:
        fail("--delete-file and --keep-file require --from-svoted", ExitCode.USAGE)
    if from_svoted == STDIN and not options.yes and not options.dry_run:
        fail("standard input has the shares, so it cannot confirm: use --yes, or --dry-run", ExitCode.USAGE)
    require_confirmation(yes=options.yes, dry_run=options.dry_run)
    api = OperatorApi.of(options)
    harden_process()
    svoted = None if from_svoted is None else _read_svoted_file(from_svoted)
    if svoted is not None:
        content = b"".join(svoted.lines)
    else:
        assert file is not None
        content = _decrypt_export(file, passphrase_file)

    def perform(*, preview: bool) -> dict[str, Any]:
        chunks = (content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES))
        response = api.post("/queue/import", chunks, {"dry_run": "1"} if preview else {})
        return response if svoted is None else _number_rows(response, svoted)

    if not options.yes and not options.dry_run:
        _print_imported(perform(preview=True))
        confirm_or_exit("Import these shares?", yes=options.yes)
    response = perform(preview=options.dry_run)
    if from_svoted is not None:
        response["deleted"] = _delete_imported(from_svoted, response, requested=delete_file, yes=options.yes)
    code = ExitCode.FAILURE if response["conflict"] else ExitCode.DEGRADED if response["left"] else ExitCode.OK
    emit(response, _print_imported, json=options.json, code=code)


def _decrypt_export(file: Path, passphrase_file: Path | None) -> bytes:
    sealed = read_backup(file)
    if not needs_passphrase(sealed):
        fail(f"{file} is not an export of a queue: it is not encrypted with a passphrase")
    content = decrypt_backup(sealed, passphrase=read_passphrase(passphrase_file))
    if content.startswith(DATABASE_HEADER):
        fail(f"{file} is a backup, not an export of a queue: restore it with `svote-helper db restore`")
    return content


def _print_exported(response: Mapping[str, Any]) -> None:
    would = "would be written" if response["dry_run"] else "written"
    typer.echo(f"{response['output']}: {response['shares']} shares {would}")
    if "moved" in response:
        typer.echo(f"{response['moved']} are no longer processed here")
        if response["stayed"]:
            print_message(f"{response['stayed']} are in the file but not moved: being processed, or changed meanwhile")
    _print_not_exported(response["left"])


def _print_not_exported(left: Mapping[str, int]) -> None:
    for reason, number in left.items():
        if number:
            print_message(f"{number} not exported: {_NOT_EXPORTED_REASONS[reason]}")


def _print_imported(response: Mapping[str, Any]) -> None:
    would = "would be" if response["dry_run"] else "are"
    typer.echo(f"{response['taken']} shares {would} imported")
    if response["revived"]:
        typer.echo(f"{response['revived']} of them had been moved from here and {would} reactivated")
    if response.get("submitted"):
        typer.echo(f"already revealed, without a witness in the file: {response['submitted']}")
    for reason, text in _NOT_IMPORTED_REASONS.items():
        if response[reason]:
            print_message(f"{response[reason]} not imported: {text}")
    for row in response["left"][:_MAX_SKIPPED_LISTED]:
        share = f"share {row['ref']}" if row["ref"] else "share"
        round_ = f" of round {row['round'][:ROUND_CHARS]}" if row["round"] else ""
        print_message(f"  {share}{round_} (number {row['number']} in the file): {row['reason']}")
    if len(response["left"]) > _MAX_SKIPPED_LISTED:
        print_message(f"  … --json lists all {len(response['left'])}")
