"""Whether the shares that wait can be revealed before their rounds end. Pure.

Two things bound the pace: how fast proofs are made here, and how many reveals the chain takes into a block. All rounds
share both, so a round has to wait for those that end before it. When shares are due counts as well: what is due in a
round's last minutes must be revealed within them, however long the round still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from helper.doctor.result import CheckResult, fail, ok, warn

REVEALS_A_BLOCK: Final = 256
"""What newer chains take into one block (protocol)."""
SLOWEST_BLOCKS: Final = 6.0
"""Seconds between two blocks where it was not measured: the longest of the chain's."""
TIGHT: Final = 0.8
"""The part of the time left from which on it is tight."""
_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits of one round.

    Attributes:
        round_id: hex.
        end: its vote_end_time, unix seconds.
        left: shares that are not proven yet.
        unconfirmed: shares that were sent and are not counted yet.
        minutes: of `left`, how many become due in each of the next minutes; the first has those that are due already.
        later: and how many after these.
    """

    round_id: str
    end: float
    left: int
    unconfirmed: int = 0
    minutes: Sequence[int] = ()
    later: int = 0


@dataclass(frozen=True, slots=True)
class ProofRate:
    """How fast reveals can be made.

    Attributes:
        seconds_per_proof: of one prover; None where it was not measured.
        slots: provers.
        block_seconds: between two blocks.
    """

    seconds_per_proof: float | None
    slots: int
    block_seconds: float = SLOWEST_BLOCKS

    @property
    def per_second(self) -> float:
        """Reveals a second."""
        chain = REVEALS_A_BLOCK / max(self.block_seconds, 0.001)
        if self.seconds_per_proof is None:
            return chain
        return min(chain, max(1, self.slots) / max(self.seconds_per_proof, 0.001))


def judge_backlog(waiting: Sequence[Waiting], pace: ProofRate, now: float) -> list[CheckResult]:
    """A line for each round with shares left, in the order in which they end; one line where there is none."""
    found, before = [], 0
    for one in sorted((one for one in waiting if one.left or one.unconfirmed), key=lambda one: one.end):
        found.append(_round(one, pace, now, before))
        before += one.left
    return found or [ok("backlog", "no share waits")]


def _round(one: Waiting, pace: ProofRate, now: float, before: int) -> CheckResult:
    subject = f"round {one.round_id[:8]}"
    rate, left_seconds = pace.per_second, one.end - now
    need = (before + one.left) / rate
    facts: dict[str, Any] = {
        "round": one.round_id,
        "shares_left": one.left,
        "unconfirmed": one.unconfirmed,
        "seconds_needed": round(need, 1),
        "seconds_left": round(left_seconds, 1),
        "per_second": round(rate, 3),
    }
    text = f"{one.left} shares left, {_span(need)} needed, {_span(left_seconds)} left"
    if pace.seconds_per_proof is None:
        text += " (by the chain's blocks alone: proving was not measured)"
    if one.unconfirmed:
        text += f"; {one.unconfirmed} sent and not counted yet"
    if left_seconds <= 0:
        advice = "What is not counted by its end cannot be; it is reported once the chain has closed the round."
        return fail(subject, f"{one.left + one.unconfirmed} shares left, and its time is over", advice, **facts)
    if need > left_seconds:
        return fail(subject, text, FASTER, **facts)
    late, minutes = _crowded(one, rate, left_seconds)
    if late:
        text += f"; {late} of those due in its last {_span(minutes * _MINUTE)} are more than can be proven then"
        return fail(subject, text, FASTER, **facts, too_many_at_the_end=late)
    if need > TIGHT * left_seconds:
        return warn(subject, text, f"It is tight. {FASTER}", **facts)
    return ok(subject, text, **facts)


FASTER: Final = (
    "Take other work off this machine; with idle cores raise [helper] max_concurrent_proofs and restart. Shares go to"
    " several helpers: what does not get through here may through another."
)


def _crowded(one: Waiting, rate: float, left_seconds: float) -> tuple[int, float]:
    """How many of the shares due in the round's last minutes cannot be proven within them, and how many minutes these
    are: the worst of all spans that end with the round. Of one that goes on beyond the minutes the end is not known.
    """
    worst, span, due = 0, 0.0, 0
    if one.later:
        return worst, span
    for minute in range(len(one.minutes) - 1, 0, -1):
        seconds = left_seconds - minute * _MINUTE
        due += one.minutes[minute]
        missing = int(due - max(0.0, seconds) * rate)
        if missing > worst:
            worst, span = missing, max(0.0, seconds) / _MINUTE
    return worst, span


def _span(seconds: float) -> str:
    """A length of time for people: `45 s`, `38 min`, `5.2 h`, `3.0 days`."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if abs(seconds) < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h" if abs(seconds) < 48 * 3600 else f"{seconds / 86400:.1f} days"
