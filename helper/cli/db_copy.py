"""`svote-helper db copy`: moves the queue to another database, undoes a move, or cleans up."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from helper.cli.confirm import DryRunOption, YesOption, confirm_or_exit, require_confirmation
from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import ExitCode, emit_json, fail, map_errors_to_exit_codes, print_message
from helper.cli.passphrase import map_file_errors_to_exit_codes
from helper.cli.settings import read_settings
from helper.clock import SystemClock
from helper.config.sections import Config
from helper.errors import HelperError
from helper.runtime.process_security import harden_process

if TYPE_CHECKING:
    from helper.store.db_copy.endpoint import CopyEndpoint
    from helper.store.db_copy.queue_copy import CopyResult

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
            show_default=False,
        ),
    ] = "",
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="Source of the queue (default: the one in the settings).",
            show_default=False,
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            readable=False,
            help="Key file that encrypts witnesses (default: [store] key_file).",
            show_default=False,
        ),
    ] = None,
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
    with map_errors_to_exit_codes(), map_file_errors_to_exit_codes():
        settings = read_settings(config, {"store.key_file": str(key_file) if key_file else None}).config
        if to:
            result, code = _move(settings, origin, to, dry_run=dry_run, yes=yes)
        else:
            result, code = _finish_move(settings, origin, is_undo=undo, dry_run=dry_run, yes=yes), ExitCode.OK
    if json:
        emit_json(result)
    else:
        typer.echo(_summarize(result, "undo" if undo else "erase" if erase else ""))
    if code:
        raise typer.Exit(code)


# ---------------------------------------------------------------------- moving


def _move(
    settings: Config, origin: str | None, to: str, *, dry_run: bool, yes: bool
) -> tuple[dict[str, Any], ExitCode]:
    """Move the queue, or show the effect with --dry-run. Returns the result and the exit code."""
    # imported here, so that the help loads no database driver
    from helper.store.db_copy.factory import create_endpoints  # noqa: PLC0415
    from helper.store.db_copy.queue_copy import QueueCopy  # noqa: PLC0415

    clock = SystemClock()
    source, target = create_endpoints(origin, to, settings, clock)
    with closing(source), closing(target):
        queue_copy = QueueCopy(source, target, clock=clock, on_progress=print_message)
        if dry_run:
            return _copy_json("planned", source, target.label, queue_copy.estimate()), ExitCode.OK
        confirm_or_exit(f"Move the queue of {source.label} to {target.label}?", yes=yes)
        try:
            result = queue_copy.run()
        except (HelperError, KeyboardInterrupt):
            if queue_copy.has_begun:
                print_message("the move is not finished: run the same command again")
            raise
    _print_moved(result, source, target)
    return _copy_json("moved", source, target.label, result), ExitCode.DEGRADED if result.damaged else ExitCode.OK


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


def _finish_move(settings: Config, origin: str | None, *, is_undo: bool, dry_run: bool, yes: bool) -> dict[str, Any]:
    """Undo a move, or erase the data that remains in its source."""
    from helper.store.db_copy.factory import create_source_endpoint  # noqa: PLC0415
    from helper.store.db_copy.queue_copy import CopyResult, erase_source, read_moved_mark, undo_copy  # noqa: PLC0415

    with closing(create_source_endpoint(origin, settings, SystemClock())) as source:
        mark = read_moved_mark(source)
        if dry_run:
            return _copy_json("planned", source, mark.other, CopyResult())
        if is_undo:
            confirm_or_exit(
                f"The queue of {source.label} was moved to {mark.other}. Changes made there are missing here: new "
                "shares are lost, and revealed shares would be retried. Use the old queue anyway?",
                yes=yes,
            )
            undo_copy(source)
        else:
            confirm_or_exit(
                f"Delete the data remaining in {source.label} of the queue that was moved to {mark.other}?", yes=yes
            )
            erase_source(source)
        return _copy_json("undone" if is_undo else "erased", source, mark.other, CopyResult())


# ---------------------------------------------------------------------- output


def _copy_json(state: str, source: CopyEndpoint, target: str, result: CopyResult) -> dict[str, Any]:
    return {
        "state": state,
        "source": source.label,
        "target": target,
        "live": result.live,
        "confirmed": result.confirmed,
        "written": result.written,
        "damaged": [share.ref for share in result.damaged],
        "uncounted": result.uncounted,
        "held_seconds": round(result.locked_seconds, 3),
    }


_SUMMARIES: Final = {
    "planned": "{source}: {live} live shares, {confirmed} confirmed would be moved to {target}",
    "moved": "{target}: {live} live shares, {confirmed} confirmed, compared row by row; the move is finished",
    "undone": "{source}: in use again, as it was when moved to {target}",
    "erased": "{source}: all data of the queue moved to {target} was deleted",
}


_PLANS: Final = {
    "undo": "{source}: would be used again, as it was when moved to {target}",
    "erase": "{source}: the remaining data of the queue moved to {target} would be deleted",
}
"""Summaries of --dry-run for --undo and --erase."""


def _summarize(result: dict[str, Any], cleanup: str) -> str:
    """Return the result in one line. `cleanup` is `undo`, `erase`, or empty for a move."""
    summary = _PLANS[cleanup] if cleanup and result["state"] == "planned" else _SUMMARIES[result["state"]]
    return summary.format_map(result)
