"""Stream of queue states from the daemon, with reconnection."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, stream_control_socket

SILENCE_TIMEOUT_SECONDS: Final = 10.0
"""Seconds without data after which the daemon is unreachable; it sends a state each second."""
RECONNECT_PAUSE_SECONDS: Final = 1.0
"""Seconds between two connection attempts."""

_DATA_PREFIX: Final = b"data: "


@dataclass(frozen=True, slots=True)
class StateEvent:
    """A queue state: `helper.observability.queue_overview` as JSON."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream is interrupted, and why."""

    reason: str


def stream_states(socket: Path) -> Iterator[StateEvent | StreamLost]:
    """Yield the daemon's states without end. Reconnects whenever the stream is interrupted.

    Raises:
        PermissionError: this user may not use the socket.
    """
    while True:
        try:
            yield from map(
                StateEvent, _parse_states(stream_control_socket(socket, "/events", timeout=SILENCE_TIMEOUT_SECONDS))
            )
            yield StreamLost("the helper ended the stream")
        except (DaemonNotRunningError, DaemonUnresponsiveError) as error:
            yield StreamLost(str(error))
        time.sleep(RECONNECT_PAUSE_SECONDS)


def _parse_states(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Parse states from server-sent events, each on one line."""
    for line in lines:
        if line.startswith(_DATA_PREFIX):
            state = json.loads(line[len(_DATA_PREFIX) :])
            if isinstance(state, dict):
                yield state


def drop_time(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without its time, to compare two states."""
    return {name: value for name, value in state.items() if name != "at"}
