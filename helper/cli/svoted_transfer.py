"""Reads and writes the unencrypted queue exports of svoted's helper for `queue import` and `queue export`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from helper.cli.output import ExitCode, fail, print_message
from helper.cli.passphrase import map_file_errors_to_exit_codes
from helper.clock import SystemClock
from helper.runtime.process_security import acting_as_owner

if TYPE_CHECKING:
    from helper.operations.svoted_format import SvotedExport
    from helper.store.sqlite.export import ExportSelection

STDIN: Final = Path("-")

FromSvotedOption = Annotated[
    Path | None,
    typer.Option(
        "--from-svoted",
        readable=False,
        help="Import this file of `svoted helper export-queue` instead (- for standard input). It is not encrypted, so "
        "its mode must be 600.",
        show_default=False,
    ),
]
DeleteFileOption = Annotated[
    bool | None,
    typer.Option(
        "--delete-file/--keep-file",
        help="Whether the file of --from-svoted is deleted once all its shares are here or revealed (default: ask on a "
        "terminal, otherwise keep it).",
        show_default=False,
    ),
]
ForSvotedOption = Annotated[
    bool,
    typer.Option(
        "--for-svoted",
        help="Write a file for `svoted helper import-queue`, of one round. It is not encrypted; its mode is 600.",
    ),
]


def read_svoted_file(file: Path) -> SvotedExport:
    """Read and convert a file. Ends the command if other users can read it."""
    from helper.operations.svoted_format import MAX_FILE_BYTES, read_svoted_export  # noqa: PLC0415

    with map_file_errors_to_exit_codes():
        if file == STDIN:
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with file.open("rb") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                if mode & 0o077:
                    fail(
                        f"other users can access {file} (mode {mode:o}), which contains the witnesses of shares\n"
                        f"Run `chmod 600 {file}`, and find out who could have read it.",
                        ExitCode.NOT_AUTHORISED,
                    )
                data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        fail(f"{file} is larger than {MAX_FILE_BYTES} bytes")
    return read_svoted_export(data)


def number_rows(response: dict[str, Any], export: SvotedExport) -> dict[str, Any]:
    """Return the result of an import with the positions of the file's rows, and the rows that were not sent."""
    left = [{**row, "number": export.numbers[row["number"] - 1]} for row in response["left"]]
    return {**response, "left": left, "submitted": export.submitted}


def delete_file(file: Path, response: Mapping[str, Any], *, requested: bool | None, yes: bool) -> bool:
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
    with map_file_errors_to_exit_codes(), acting_as_owner(file) as real:
        real.unlink()
    return True


def encode_for_svoted(selection: ExportSelection) -> bytes:
    """Encode a selection. Ends the command unless all its shares belong to one round whose end is known."""
    from helper.operations.svoted_format import encode_svoted_export  # noqa: PLC0415

    rounds = {exported.share.round_id for exported in selection.shares}
    if len(rounds) > 1:
        fail(
            "the shares belong to several rounds, but a file for svoted contains only one: use --round", ExitCode.USAGE
        )
    (round_id,) = rounds
    end = selection.round_ends.get(round_id)
    if end is None:
        fail("the end of the round is not known yet: wait until the helper has read the chain")
    return encode_svoted_export(selection.shares, vote_end_time=end, exported_at=int(SystemClock().now()))
