"""The states of the queue as the daemon tells them, second by second, and its going away and coming back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, follow_control

SILENCE: Final = 10.0
"""Seconds without a word after which the daemon counts as gone: it tells a state each second."""
PAUSE: Final = 1.0
"""Seconds between two tries to reach it."""

_DATA: Final = b"data: "


@dataclass(frozen=True, slots=True)
class StateEvent:
    """A state: `helper.observability.queue_overview` as JSON."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """Nobody tells states now, and why."""

    reason: str


def follow(socket: Path) -> Iterator[StateEvent | StreamLost]:
    """What the daemon on a control socket tells, for ever; it is looked for again whenever it goes away.

    Raises:
        PermissionError: this user may not use the socket.
    """
    while True:
        try:
            yield from map(StateEvent, _states(follow_control(socket, "/events", timeout=SILENCE)))
            yield StreamLost("the helper ended the stream")
        except (DaemonNotRunningError, DaemonUnresponsiveError) as error:
            yield StreamLost(str(error))
        time.sleep(PAUSE)


def _states(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The states in a stream of server-sent events, each on one line."""
    for line in lines:
        if line.startswith(_DATA):
            state = json.loads(line[len(_DATA) :])
            if isinstance(state, dict):
                yield state


def without_time(state: dict[str, Any]) -> dict[str, Any]:
    """A state without the moment that it is of: two that are alike are no change."""
    return {name: value for name, value in state.items() if name != "at"}
