"""`svote-helper db copy`: move the queue to another database, or look after what a move left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from helper.cli.confirm import DryRunOption, YesOption, consent, require_confirmation
from helper.cli.exit_codes import map_errors_to_exit_codes
from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import Exit, emit_json, fail, say
from helper.cli.passphrase import permitted
from helper.cli.settings import read_settings
from helper.clock import SystemClock
from helper.config import Config
from helper.errors import HelperError
from helper.runtime.hardening import harden_process

if TYPE_CHECKING:
    from helper.store.migration.endpoint import MigrationEndpoint
    from helper.store.migration.migration import Migration, MigrationResult

PAUSE: Final = 1.0
"""Seconds between two looks at whether the helper still runs."""
LOOKS: Final = 30
"""Looks after which what it did meanwhile is carried."""
SHOWN: Final = 20


def copy(
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="Where to: postgresql://…, a file, or the word postgresql or sqlite for what [store] url or [helper] "
            "db_path names.",
            show_default=False,
        ),
    ] = "",
    origin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PLACE", help="Where the queue is, instead of what the settings name.", show_default=False
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", readable=False, help="The hosts' keys, instead of [store] key_file.", show_default=False
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow a helper that runs, and end the move once it is stopped.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Serve the queue again where it was moved from: the copy is lost for good.")
    ] = False,
    erase: Annotated[bool, typer.Option("--erase", help="Delete what is left where the queue was moved from.")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Move the queue to a database that hosts share, or back to a file.

    The helper may run: all is copied beside it, and nothing of it waits. Once it is stopped, the same command
    carries what changed since, compares every row, and marks the old place, which no helper serves from then on.
    Cut off anywhere, it goes on when it is given again.
    """
    if [bool(to), undo, erase].count(True) != 1:
        fail("give one of --to, --undo and --erase", Exit.USAGE)
    require_confirmation(yes=yes, dry_run=dry_run)
    harden_process()
    with map_errors_to_exit_codes(), permitted():
        settings = read_settings(config, {"store.key_file": str(key_file) if key_file else None}).config
        if to:
            told, code = _move(settings, origin, to, wait=wait, dry_run=dry_run, yes=yes)
        else:
            told, code = _after(settings, origin, undoing=undo, dry_run=dry_run, yes=yes), Exit.OK
    if json:
        emit_json(told)
    else:
        typer.echo(_line(told, "undo" if undo else "erase" if erase else ""))
    if code:
        raise typer.Exit(code)


# ---------------------------------------------------------------------- moving


def _move(
    settings: Config, origin: str | None, to: str, *, wait: bool, dry_run: bool, yes: bool
) -> tuple[dict[str, Any], Exit]:
    """Move, or tell what would be moved: the answer, and how the command ends."""
    # loaded here, so that the help needs no database
    from helper.store.migration.factory import create_endpoints  # noqa: PLC0415
    from helper.store.migration.migration import Migration  # noqa: PLC0415

    clock = SystemClock()
    source, target = create_endpoints(origin, to, settings, clock)
    with ExitStack() as stack:
        for end in (source, target):
            stack.enter_context(closing(end))
        move = Migration(source, target, clock=clock, say=say)
        if dry_run:
            return _told("planned", source, target.label, move.survey()), Exit.OK
        consent(f"Move the queue of {source.label} to {target.label}?", yes=yes)
        move.begin()
        with _going_on():
            held = move.try_hold()
            if not held:
                move.catch_up()
                held = _wait(move, source) if wait else move.try_hold()
            moved = move.finish() if held else move.told
    if not moved.finished:
        _say_behind(source, target)
        return _told("copied", source, target.label, moved), Exit.DEGRADED
    _say_moved(moved, source, target)
    return _told("moved", source, target.label, moved), Exit.DEGRADED if moved.damaged else Exit.OK


@contextmanager
def _going_on() -> Iterator[None]:
    """Say, whatever cuts a move off, that nothing is lost."""
    try:
        yield
    except (HelperError, KeyboardInterrupt):
        say("the move is not finished: the same command goes on where this one ended")
        raise


def _wait(move: Migration, source: MigrationEndpoint) -> bool:
    """Follow the helper until it is stopped."""
    say(f"waiting until the helper on {source.label} is stopped; Ctrl-C ends this, and loses nothing")
    looks = 0
    while not move.try_hold():
        looks += 1
        if looks % LOOKS == 0:
            move.pass_beside()
        time.sleep(PAUSE)
    return True


def _say_behind(source: MigrationEndpoint, target: MigrationEndpoint) -> None:
    say(
        f"the queue is still that of {source.label}, where a helper runs. Next:\n"
        "  1. stop it (`systemctl stop svote-helper`; where hosts share the queue, on each of them)\n"
        "  2. give the same command again: it carries what changed since, compares all, and ends the move\n"
        f"Until then no helper starts on {target.label}. With --wait the command follows the helper, and ends the move "
        "as soon as it is stopped."
    )


def _say_moved(moved: MigrationResult, source: MigrationEndpoint, target: MigrationEndpoint) -> None:
    for one in moved.damaged[:SHOWN]:
        say(
            f"stays behind, as its row is damaged: {one.ref or '(no name)'}, round {one.round_id.hex()[:6] or '(none)'}"
        )
    if len(moved.damaged) > SHOWN:
        say(f"… and {len(moved.damaged) - SHOWN} more")
    if moved.uncounted:
        say(f"the old place counted {moved.uncounted:+d} shares beside those that are in it: the new one counts anew")
    say(
        f"no helper could run for {moved.held_seconds:.1f} s. Next:\n"
        f"  1. settings: {target.setting}\n"
        "  2. start the helper, and ask `svote-helper doctor`\n"
        f"  3. {source.label} still holds every witness, and no helper serves it. Once the new place is well:\n"
        f"     svote-helper db copy --erase --from {quote(source.word)}\n"
        f"back again, at any time: svote-helper db copy --from {quote(target.word)} --to {quote(source.word)}"
    )


# ---------------------------------------------------------------------- afterwards


def _after(settings: Config, origin: str | None, *, undoing: bool, dry_run: bool, yes: bool) -> dict[str, Any]:
    """Undo a move, or erase what it left."""
    from helper.store.migration import source_cleanup  # noqa: PLC0415
    from helper.store.migration.factory import create_source_endpoint  # noqa: PLC0415
    from helper.store.migration.migration import MigrationResult  # noqa: PLC0415

    with closing(create_source_endpoint(origin, settings, SystemClock())) as source:
        mark = source_cleanup.moved_to(source)
        if dry_run:
            return _told("planned", source, mark.other, MigrationResult())
        if undoing:
            consent(
                f"The queue of {source.label} went to {mark.other}. What was done there since is not here: shares that "
                "it took are lost, and those that it revealed would be tried again. Serve the old one all the same?",
                yes=yes,
            )
            source_cleanup.undo(source)
        else:
            consent(f"Delete all that is left in {source.label} of the queue that {mark.other} has?", yes=yes)
            source_cleanup.erase(source, say=say)
        return _told("undone" if undoing else "erased", source, mark.other, MigrationResult())


# ---------------------------------------------------------------------- telling


def _told(state: str, source: MigrationEndpoint, target: str, moved: MigrationResult) -> dict[str, Any]:
    return {
        "state": state,
        "source": source.label,
        "target": target,
        "live": moved.live,
        "confirmed": moved.confirmed,
        "passes": moved.passes,
        "written": moved.written,
        "damaged": [one.ref for one in moved.damaged],
        "uncounted": moved.uncounted,
        "held_seconds": round(moved.held_seconds, 3),
    }


_LINES: Final = {
    "planned": "{source}: {live} live shares, {confirmed} confirmed would be moved to {target}",
    "copied": "{target}: copied {live} live shares, {confirmed} confirmed; not moved yet",
    "moved": "{target}: {live} live shares, {confirmed} confirmed, compared row by row; the queue is here now",
    "undone": "{source}: the queue is here again, as it was when it went to {target}",
    "erased": "{source}: nothing is left of the queue that {target} has",
}


_PLANS: Final = {
    "undo": "{source}: the queue that went to {target} would be served again here, as it was then",
    "erase": "{source}: all that is left of the queue that {target} has would be deleted",
}
"""What would be done after a move."""


def _line(told: dict[str, Any], after: str) -> str:
    """How it ended, in one line; `after` is `undo`, `erase`, or empty for a move."""
    line = _PLANS[after] if after and told["state"] == "planned" else _LINES[told["state"]]
    return line.format_map(told)
