"""Durations of recent proofs, and the pace at which this helper works off its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Final

from helper.core.dispatch_order import ProofPace, can_finish_proof

RECENT_PROOFS: Final = 256
"""Number of proofs in memory."""
FASTEST_FRACTION: Final = 0.8
"""Fraction of the fastest recent proof that is assumed for the next one, so that no feasible proof is omitted."""
UNMEASURED_FRACTION: Final = 0.5
"""Fraction of the self-test that is assumed before the first proof. Workers start at the same time, so it is slow."""
UNKNOWN_SECONDS: Final = 1.0
"""Assumed duration of a proof before the first self-test."""
CONFIRMED_WINDOW_SECONDS: Final = 120.0
"""Seconds over which the rate of confirmed shares is measured."""
MIN_WINDOW_SECONDS: Final = 20.0
"""Seconds from which that rate is used."""


class ProofTimes:
    """Measures proofs and confirmations.

    Args:
        provers: number of concurrent proofs of this host.
        get_estimate: the self-test's duration in seconds, None before it.

    Attributes:
        hosts: number of hosts that work on the queue; they are assumed to be equally fast.
    """

    def __init__(self, provers: int, get_estimate: Callable[[], float | None]) -> None:
        self._provers = provers
        self._get_estimate = get_estimate
        self._recent: deque[float] = deque(maxlen=RECENT_PROOFS)
        self._confirmed: deque[tuple[float, int]] = deque()  # monotonic time, total
        self.hosts = 1

    def record(self, seconds: float) -> None:
        """Record the duration of a proof."""
        self._recent.append(seconds)

    def record_confirmed(self, total: int, now: float) -> None:
        """Record the number of shares confirmed so far, also by reveals of other helpers. `now` is monotonic."""
        self._confirmed.append((now, total))
        while now - self._confirmed[0][0] > CONFIRMED_WINDOW_SECONDS:
            self._confirmed.popleft()

    def pace(self) -> ProofPace:
        """Return the measured pace.

        The queue shrinks at the rate of the own proofs, or of the confirmed shares if other helpers reveal more.
        """
        proof_seconds = fmean(self._recent) if self._recent else self._get_estimate() or UNKNOWN_SECONDS
        own_rate = self.hosts * self._provers / max(proof_seconds, 0.001)
        return ProofPace(proof_seconds, self._fastest_seconds(), max(own_rate, self._confirmed_rate()))

    def can_finish_proof(self, end: float, chain_time: float) -> bool:
        """Return whether a proof that begins now can be done before the end of its round.

        Args:
            end: the round's end, in Unix seconds.
            chain_time: time of the newest block, in Unix seconds.
        """
        return can_finish_proof(end, chain_time, self._fastest_seconds())

    def _fastest_seconds(self) -> float:
        if self._recent:
            return FASTEST_FRACTION * min(self._recent)
        return UNMEASURED_FRACTION * (self._get_estimate() or 0.0)

    def _confirmed_rate(self) -> float:
        """Confirmed shares per second in the recent window, 0 if it is too short."""
        if not self._confirmed:
            return 0.0
        (first, before), (last, after) = self._confirmed[0], self._confirmed[-1]
        return (after - before) / (last - first) if last - first >= MIN_WINDOW_SECONDS else 0.0
