"""Validity of a held lease by this host's own clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from helper.clock import Clock

MAX_SET_BACK_SECONDS: Final = 1.0
"""Seconds by which the wall clock may go back during a term; time synchronization moves it by less."""
_EXPIRED: Final = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """The time of a request by both clocks of a host."""

    wall: float
    monotonic: float


class Term:
    """Validity of a lease, measured from before the request, because the response may have been slow.

    The term ends when the first of the two clocks reaches its end. The monotonic clock stops while the machine is
    suspended, and the wall clock can be set, so either clock alone could extend the term.

    Args:
        clock: this host's clock.
        seconds: validity of a lease.
        margin: seconds before its end at which it is considered expired.

    Raises:
        ValueError: the margin is negative or not below `seconds`.
    """

    def __init__(self, clock: Clock, *, seconds: float, margin: float) -> None:
        if not 0 <= margin < seconds:
            raise ValueError(f"a lease of {seconds} s has no time left after a margin of {margin} s")
        self._clock = clock
        self._length = seconds - margin
        self._until = _EXPIRED

    def read_clocks(self) -> Moment:
        """Return the current moment. Call this before a request, and pass it to `start` if the request succeeds."""
        return Moment(self._clock.now(), self._clock.monotonic())

    def start(self, requested_at: Moment) -> None:
        """Start the term at the moment of the request."""
        self._until = (requested_at.wall + self._length, requested_at.monotonic + self._length)

    def end(self) -> None:
        """End the term."""
        self._until = _EXPIRED

    @property
    def is_running(self) -> bool:
        """Whether the term has not expired, by both clocks."""
        wall, monotonic = self._until
        # A wall clock before the moment of the request was set back, and can no longer measure the term.
        begun = wall - self._length - MAX_SET_BACK_SECONDS
        return self._clock.monotonic() < monotonic and begun <= self._clock.now() < wall
