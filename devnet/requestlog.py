"""The log of every request to the chain, on every node and both ports: what a curious node would know.

`time` is when a request came (unix seconds by the dev chain's machine), `ms` how long it took, `height` the newest
block that the node had then. The control routes under `/devnet/` are not in it. Tests read from it that a helper asked
nothing too early.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from devnet.gojson import dumps

_KEPT = 200_000
_RUN = re.compile(r"[0-9A-Za-z+/=_-]{1025,}")
_RUN_KEPT = 1024


def readable(body: bytes) -> str:
    """A request's body for the log, one character a byte; of longer runs (proofs) the first 1,024 characters.

    A transaction has its nullifier at its front, so that it is found also where a whole one was sent.
    """
    return _RUN.sub(lambda run: run.group()[:_RUN_KEPT] + "...", body.decode("latin-1"))


class RequestLog:
    """Entries in memory and, if a file is given, one JSON line each, flushed line by line."""

    def __init__(self, path: Path | None = None) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._file: TextIO | None = path.open("a", buffering=1, encoding="utf-8") if path else None
        self._next = 1

    def add(self, entry: dict[str, Any]) -> None:
        """Write down an answered (or dropped) request; it gets the next `seq`."""
        entry = {"seq": self._next, **entry}
        self._next += 1
        self._entries.append(entry)
        if self._file is not None:
            self._file.write(dumps(entry).decode() + "\n")

    def after(self, seq: int, limit: int = 10_000) -> list[dict[str, Any]]:
        """The oldest entries whose `seq` is above the one given."""
        found: list[dict[str, Any]] = []
        for entry in self._entries:
            if entry["seq"] > seq:
                found.append(entry)
                if len(found) == limit:
                    break
        return found

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
