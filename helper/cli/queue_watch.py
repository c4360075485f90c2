"""`svote-helper queue watch`: live view of the queue, as a screen, lines or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from helper.cli.operator_api import OperatorApi
from helper.cli.options import ConfigOption, DbOption
from helper.cli.output import Exit, fail, json_line, one_line, say
from helper.cli.status_stream import StateEvent, StreamLost, follow, without_time

JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line for each change (NDJSON).")
]

_DUMB: Final = frozenset({"", "dumb", "unknown"})


def watch(config: ConfigOption = None, db: DbOption = None, json: JsonLinesOption = False) -> None:
    """Watch the queue until Ctrl-C: rounds, due shares, provers, lateness, nodes, failures. Totals only."""
    socket = OperatorApi.of(config, db).socket
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
        fail(f"no permission to use {socket}", Exit.NOT_AUTHORISED)
    except BrokenPipeError:
        # the reader closed the pipe; buffered output must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.OK) from None


def _changes(stream: Iterator[StateEvent | StreamLost]) -> Iterator[StateEvent | StreamLost]:
    """Yield events that differ from the previous one."""
    previous: object = None
    for event in stream:
        current: object = without_time(event.state) if isinstance(event, StateEvent) else event
        if current != previous:
            previous = current
            yield event


def _as_json(stream: Iterator[StateEvent | StreamLost]) -> None:
    for event in _changes(stream):
        record: dict[str, Any] = (
            {"event": "gone", "reason": event.reason} if isinstance(event, StreamLost) else {"event": "state"}
        )
        if isinstance(event, StateEvent):
            record["state"] = event.state
        sys.stdout.write(json_line(record))
        sys.stdout.flush()


def _in_lines(stream: Iterator[StateEvent | StreamLost]) -> None:
    from helper.cli.watch_screen import COLUMNS, cells  # noqa: PLC0415 - rich is slow to import

    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for event in _changes(stream):
        if isinstance(event, StreamLost):
            say(event.reason)
        else:
            sys.stdout.write("\t".join(one_line(cell) for cell in cells(event.state)) + "\n")
        sys.stdout.flush()


def _on_screen(stream: Iterator[StateEvent | StreamLost]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from helper.cli.watch_screen import Screen  # noqa: PLC0415

    console = Console()
    screen = Screen(None, "waiting for the helper")
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for event in stream:
            screen = Screen(event.state) if isinstance(event, StateEvent) else Screen(screen.state, event.reason)
            live.update(screen, refresh=True)
