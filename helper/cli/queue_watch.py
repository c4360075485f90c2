"""`svote-helper queue watch`: the queue as it moves, on a screen, in lines, or as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from helper.cli.options import ConfigOption, DbOption
from helper.cli.output import Exit, fail, json_line, one_line, say
from helper.cli.status_stream import StateEvent, StreamLost, follow, without_time
from helper.cli.target import Target

JsonLinesOption = Annotated[bool, typer.Option("--json", help="A JSON object on a line for each change (NDJSON).")]

_DUMB: Final = frozenset({"", "dumb", "unknown"})


def watch(config: ConfigOption = None, db: DbOption = None, json: JsonLinesOption = False) -> None:
    """Watch the queue until Ctrl-C: rounds, what is due, provers, lateness, nodes, failures. Sums only."""
    socket = Target.of(config, db).socket
    stream = follow(socket)
    try:
        if json:
            _as_json(stream)
        elif sys.stdout.isatty() and os.environ.get("TERM", "") not in _DUMB:
            _on_screen(stream)
        else:
            _in_lines(stream)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.OK) from None
    except PermissionError:
        fail(f"{socket} may not be used by this user", Exit.NOT_AUTHORISED)
    except BrokenPipeError:
        # whoever read has gone; what is still buffered must not be written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.OK) from None


def _changes(stream: Iterator[StateEvent | StreamLost]) -> Iterator[StateEvent | StreamLost]:
    """What is not as it was told last."""
    last: object = None
    for one in stream:
        now: object = without_time(one.state) if isinstance(one, StateEvent) else one
        if now != last:
            last = now
            yield one


def _as_json(stream: Iterator[StateEvent | StreamLost]) -> None:
    for one in _changes(stream):
        told: dict[str, Any] = (
            {"event": "gone", "reason": one.reason} if isinstance(one, StreamLost) else {"event": "state"}
        )
        if isinstance(one, StateEvent):
            told["state"] = one.state
        sys.stdout.write(json_line(told))
        sys.stdout.flush()


def _in_lines(stream: Iterator[StateEvent | StreamLost]) -> None:
    from helper.cli.watch_screen import COLUMNS, cells  # noqa: PLC0415 - rich takes its time to load

    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for one in _changes(stream):
        if isinstance(one, StreamLost):
            say(one.reason)
        else:
            sys.stdout.write("\t".join(one_line(cell) for cell in cells(one.state)) + "\n")
        sys.stdout.flush()


def _on_screen(stream: Iterator[StateEvent | StreamLost]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from helper.cli.watch_screen import Screen  # noqa: PLC0415

    console = Console()
    screen = Screen(None, "waiting for the helper")
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for one in stream:
            screen = Screen(one.state) if isinstance(one, StateEvent) else Screen(screen.state, one.reason)
            live.update(screen, refresh=True)
