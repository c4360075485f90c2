"""Event log of a seed, for debugging failures and comparing runs."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

from tests.simulation.virtual_loop import SimLoop


class EventLog:
    """Ordered events and the promises that were broken."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._events: list[tuple[float, str, tuple[object, ...]]] = []
        self.violations: list[str] = []
        self.broken: Counter[str] = Counter()

    def record(self, event: str, *details: object) -> None:
        """Record an event; bytes are formatted as the hex of their first four."""
        self._events.append((self._loop.time(), event, details))

    def record_violation(self, promise: str, *details: object) -> None:
        self.record(f"BROKEN: {promise}", *details)
        self.broken[promise] += 1
        text = " ".join([promise, *map(_format_value, details)])
        self.violations.append(f"{self._loop.time():.3f} {text}")

    def format_lines(self) -> list[str]:
        return [
            f"{at:10.3f}  {what} {' '.join(map(_format_value, details))}".rstrip() for at, what, details in self._events
        ]

    @property
    def digest(self) -> str:
        return sha256("\n".join(self.format_lines()).encode()).hexdigest()


def _format_value(value: object) -> str:
    return value[:4].hex() if isinstance(value, bytes) else str(value)
