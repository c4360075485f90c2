"""What happened, in order: for the reader of a failing seed, and to tell two runs apart."""

from __future__ import annotations

from hashlib import sha256

from tests.simulation.virtual_loop import SimLoop


class Story:
    """Lines of what happened, and the promises that were broken.

    Attributes:
        broken: each promise that was broken, with the time.
    """

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []
        self.broken: list[str] = []

    def tell(self, what: str, *details: object) -> None:
        """Note something; bytes are shown by their first four."""
        self._lines.append((self._loop.time(), what, details))

    def fail(self, promise: str, *details: object) -> None:
        """A promise is broken."""
        self.tell(f"BROKEN: {promise}", *details)
        text = " ".join([promise, *map(_shown, details)])
        self.broken.append(f"{self._loop.time():.3f} {text}")

    def lines(self) -> list[str]:
        """The story as text."""
        return [f"{at:10.3f}  {what} {' '.join(map(_shown, details))}".rstrip() for at, what, details in self._lines]

    @property
    def digest(self) -> str:
        """A hash of every line."""
        return sha256("\n".join(self.lines()).encode()).hexdigest()


def _shown(value: object) -> str:
    return value[:4].hex() if isinstance(value, bytes) else str(value)
