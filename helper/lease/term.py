"""For how long a lease is certainly ours, by this host's own clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from helper.clock import Clock

SET_BACK: Final = 1.0
"""Seconds by which a wall clock may go back during a term: no more is what keeping the time does to it."""
_OVER: Final = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """When something was asked, by both clocks of a host."""

    wall: float
    monotonic: float


class Term:
    """The time of one lease, reckoned from before it was asked for: the answer may have taken long.

    Both clocks must agree that it is not over. The monotonic one stands still while a machine is suspended, the other
    may be set; either alone could make it last too long.

    Args:
        clock: this host's.
        seconds: for how long a lease holds.
        margin: how long before that it counts as over.

    Raises:
        ValueError: the margin leaves nothing.
    """

    def __init__(self, clock: Clock, *, seconds: float, margin: float) -> None:
        if not 0 <= margin < seconds:
            raise ValueError(f"a lease of {seconds} s less {margin} s is none")
        self._clock = clock
        self._lasts = seconds - margin
        self._until = _OVER

    def ask(self) -> Moment:
        """The moment before a question is sent; hand it to `begin` when the answer is yes."""
        return Moment(self._clock.now(), self._clock.monotonic())

    def begin(self, asked: Moment) -> None:
        """It holds from the moment it was asked for."""
        self._until = (asked.wall + self._lasts, asked.monotonic + self._lasts)

    def end(self) -> None:
        """It is over."""
        self._until = _OVER

    @property
    def running(self) -> bool:
        """Whether it is certainly not over."""
        wall, monotonic = self._until
        # Before the moment of asking, a wall clock was set back since, and says nothing of how long that is ago.
        begun = wall - self._lasts - SET_BACK
        return self._clock.monotonic() < monotonic and begun <= self._clock.now() < wall
