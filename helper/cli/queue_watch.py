"""`svote-helper queue watch`: live view of the queue, as a screen, lines or JSON.

Follows the stream of queue states from the service, and reconnects whenever it is interrupted.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from helper.cli.operator_api import OperatorApi
from helper.cli.options import ConfigOption, DbOption
from helper.cli.output import ExitCode, discard_output, encode_json_line, fail, format_one_line, print_message
from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, stream_control_socket

JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line for each change (NDJSON).")
]

SILENCE_TIMEOUT_SECONDS: Final = 10.0
"""Seconds without data after which the service is unreachable; it sends a state every second."""
RECONNECT_PAUSE_SECONDS: Final = 1.0
"""Seconds between two connection attempts."""

_DATA_PREFIX: Final = b"data: "
_DUMB_TERMINALS: Final = frozenset({"", "dumb", "unknown"})


def watch(config: ConfigOption = None, db: DbOption = None, json: JsonLinesOption = False) -> None:
    """Watch the queue until Ctrl-C: rounds, due shares, provers, lateness, nodes, failures. Shows only totals."""
    api = OperatorApi.of(config, db)
    stream = stream_states(api)
    try:
        if json:
            _print_json_lines(stream)
        elif sys.stdout.isatty() and os.environ.get("TERM", "") not in _DUMB_TERMINALS:
            _show_screen(stream)
        else:
            _print_text_lines(stream)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None
    except PermissionError:
        fail(f"no permission to use {api.socket}", ExitCode.NOT_AUTHORISED)
    except BrokenPipeError:
        discard_output()
        raise typer.Exit(ExitCode.OK) from None


# ---------------------------------------------------------------- the stream


@dataclass(frozen=True, slots=True)
class StateEvent:
    """A queue state: `helper.observability.queue_snapshot.Overview` as JSON."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream is interrupted, and why."""

    reason: str


def stream_states(api: OperatorApi) -> Iterator[StateEvent | StreamLost]:
    """Yield the states of the service endlessly. Reconnects whenever the stream is interrupted.

    Raises:
        PermissionError: no permission to access the socket.
    """
    while True:
        try:
            if not api.may_use_socket:
                raise DaemonNotRunningError(f"no helper is running on {api.database}")
            lines = stream_control_socket(api.socket, "/events", timeout=SILENCE_TIMEOUT_SECONDS)
            yield from map(StateEvent, _parse_states(lines))
            yield StreamLost("the helper ended the stream")
        except (DaemonNotRunningError, DaemonUnresponsiveError) as error:
            yield StreamLost(str(error))
        time.sleep(RECONNECT_PAUSE_SECONDS)


def _parse_states(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Parse states from server-sent events, each on one line."""
    for line in lines:
        if line.startswith(_DATA_PREFIX):
            state = jsonlib.loads(line[len(_DATA_PREFIX) :])
            if isinstance(state, dict):
                yield state


def _filter_changes(stream: Iterator[StateEvent | StreamLost]) -> Iterator[StateEvent | StreamLost]:
    """Yield events that differ from the previous one."""
    previous: object = None
    for event in stream:
        # each state has another time
        current: object = {**event.state, "at": None} if isinstance(event, StateEvent) else event
        if current != previous:
            previous = current
            yield event


# ---------------------------------------------------------------- output


def _print_json_lines(stream: Iterator[StateEvent | StreamLost]) -> None:
    for event in _filter_changes(stream):
        if isinstance(event, StreamLost):
            record: dict[str, Any] = {"event": "gone", "reason": event.reason}
        else:
            record = {"event": "state", "state": event.state}
        sys.stdout.write(encode_json_line(record))
        sys.stdout.flush()


def _print_text_lines(stream: Iterator[StateEvent | StreamLost]) -> None:
    from helper.cli.watch_screen import PIPE_COLUMNS, parse_state, pipe_cells  # noqa: PLC0415 - rich is slow to import

    sys.stdout.write("\t".join(PIPE_COLUMNS) + "\n")
    for event in _filter_changes(stream):
        if isinstance(event, StreamLost):
            print_message(event.reason)
        else:
            cells = pipe_cells(parse_state(event.state))
            sys.stdout.write("\t".join(map(format_one_line, cells)) + "\n")
        sys.stdout.flush()


def _show_screen(stream: Iterator[StateEvent | StreamLost]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from helper.cli.watch_screen import Screen, parse_state  # noqa: PLC0415

    console = Console()
    screen = Screen(None, "waiting for the helper")
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for event in stream:
            screen = (
                Screen(parse_state(event.state))
                if isinstance(event, StateEvent)
                else Screen(screen.state, event.reason)
            )
            live.update(screen, refresh=True)
