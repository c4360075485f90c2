"""What happened, in order: for the reader of a failing seed, and to tell two runs apart."""

from __future__ import annotations

from hashlib import sha256

from tests.simulation.virtual_loop import SimLoop


class EventLog:
    """Lines of what happened, and the promises that were broken.

    Attributes:
        violations: each promise that was broken, with the time.
    """

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._events: list[tuple[float, str, tuple[object, ...]]] = []
        self.violations: list[str] = []

    def record(self, event: str, *details: object) -> None:
        """Note something; bytes are shown by their first four."""
        self._events.append((self._loop.time(), event, details))

    def record_violation(self, promise: str, *details: object) -> None:
        """A promise is broken."""
        self.record(f"BROKEN: {promise}", *details)
        text = " ".join([promise, *map(_format_value, details)])
        self.violations.append(f"{self._loop.time():.3f} {text}")

    def format_lines(self) -> list[str]:
        """The story as text."""
        return [
            f"{at:10.3f}  {what} {' '.join(map(_format_value, details))}".rstrip() for at, what, details in self._events
        ]

    @property
    def digest(self) -> str:
        """A hash of every line."""
        return sha256("\n".join(self.format_lines()).encode()).hexdigest()


def _format_value(value: object) -> str:
    return value[:4].hex() if isinstance(value, bytes) else str(value)
