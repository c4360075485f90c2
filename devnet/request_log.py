"""Log of all requests to the chain, on every node and both ports: everything that a node operator could learn.

`time` is the arrival of a request (Unix seconds, clock of the dev chain's host), `ms` its duration, `height` the newest
block of the node at that time. Control routes under `/devnet/` are not logged. Tests use the log to check that a helper
requests nothing too early.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from devnet.gojson import dumps

_MAX_ENTRIES = 200_000
_LONG_RUN = re.compile(r"[0-9A-Za-z+/=_-]{1025,}")
_RUN_PREFIX_LENGTH = 1024


def readable_body(body: bytes) -> str:
    """Convert a body for the log, one character per byte. Runs of characters (proofs) are cut after 1,024 characters.

    The nullifier at the beginning of a transaction is not cut.
    """
    return _LONG_RUN.sub(lambda run: run.group()[:_RUN_PREFIX_LENGTH] + "...", body.decode("latin-1"))


class RequestLog:
    """Log entries in memory and, if a file is given, as JSON lines that are flushed immediately."""

    def __init__(self, path: Path | None = None) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=_MAX_ENTRIES)
        self._file: TextIO | None = path.open("a", buffering=1, encoding="utf-8") if path else None
        self._next_seq = 1

    def add(self, entry: dict[str, Any]) -> None:
        """Add a completed or aborted request with the next `seq`."""
        entry = {"seq": self._next_seq, **entry}
        self._next_seq += 1
        self._entries.append(entry)
        if self._file is not None:
            self._file.write(dumps(entry).decode() + "\n")

    def entries_after(self, seq: int, limit: int = 10_000) -> list[dict[str, Any]]:
        """Return the oldest entries after `seq`."""
        entries: list[dict[str, Any]] = []
        for entry in self._entries:
            if entry["seq"] > seq:
                entries.append(entry)
                if len(entries) == limit:
                    break
        return entries

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
