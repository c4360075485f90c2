"""Checks whether waiting shares can be revealed before their rounds end. Pure.

Two limits apply: how fast proofs are made here, and how many reveals the chain includes in a block. All rounds share
both, so a round waits for the rounds that end before it. The due times matter as well: shares that are due in the last
minutes of a round must be revealed in those minutes, however long the round still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from helper.core.time_text import format_duration
from helper.doctor.result import CheckResult, fail, ok, warn

REVEALS_A_BLOCK: Final = 256
"""Reveals that newer chains include in one block (protocol)."""
SLOWEST_BLOCKS: Final = 6.0
"""Seconds between two blocks if not measured: the longest interval of the chain."""
TIGHT: Final = 0.8
"""Share of the remaining time above which a round is reported as tight."""
FASTER: Final = (
    "Reduce other load on this machine; if cores are idle, raise [helper] max_concurrent_proofs and restart. Wallets"
    " send each share to several helpers, so another helper may still reveal the rest."
)
_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting shares of one round.

    Attributes:
        round_id: hex.
        end: its vote_end_time, unix seconds.
        left: shares without a proof.
        unconfirmed: shares that were sent and are not confirmed.
        minutes: of `left`, how many become due in each of the next minutes; the first includes overdue shares.
        later: of `left`, how many become due after these minutes.
    """

    round_id: str
    end: float
    left: int
    unconfirmed: int = 0
    minutes: Sequence[int] = ()
    later: int = 0


@dataclass(frozen=True, slots=True)
class ProofRate:
    """Rate at which reveals can be made.

    Attributes:
        seconds_per_proof: of one prover; None if not measured.
        slots: number of provers.
        block_seconds: interval between two blocks.
    """

    seconds_per_proof: float | None
    slots: int
    block_seconds: float = SLOWEST_BLOCKS

    @property
    def per_second(self) -> float:
        """Reveals per second."""
        chain = REVEALS_A_BLOCK / max(self.block_seconds, 0.001)
        if self.seconds_per_proof is None:
            return chain
        return min(chain, max(1, self.slots) / max(self.seconds_per_proof, 0.001))


def judge_backlog(waiting: Sequence[Waiting], pace: ProofRate, now: float) -> list[CheckResult]:
    """Return one result for each round with waiting shares, in the order in which the rounds end."""
    results, before = [], 0
    rounds = [waiting_round for waiting_round in waiting if waiting_round.left or waiting_round.unconfirmed]
    for waiting_round in sorted(rounds, key=lambda waiting_round: waiting_round.end):
        results.append(_judge_round(waiting_round, pace, now, before))
        before += waiting_round.left
    return results or [ok("backlog", "no shares are waiting")]


def _judge_round(waiting: Waiting, pace: ProofRate, now: float, before: int) -> CheckResult:
    """Judge one round; `before` is the number of shares in rounds that end earlier."""
    subject = f"round {waiting.round_id[:8]}"
    rate, seconds_left = pace.per_second, waiting.end - now
    seconds_needed = (before + waiting.left) / rate
    facts: dict[str, Any] = {
        "round": waiting.round_id,
        "shares_left": waiting.left,
        "unconfirmed": waiting.unconfirmed,
        "seconds_needed": round(seconds_needed, 1),
        "seconds_left": round(seconds_left, 1),
        "per_second": round(rate, 3),
    }
    if seconds_left <= 0:
        advice = "Shares not confirmed by the end of a round cannot count. They are reported once the chain closes it."
        return fail(subject, f"{waiting.left + waiting.unconfirmed} shares left after the round ended", advice, **facts)
    text = f"{waiting.left} shares left, {format_duration(seconds_needed)} needed, {format_duration(seconds_left)} left"
    if pace.seconds_per_proof is None:
        text += " (limited by block capacity only: proof time was not measured)"
    if waiting.unconfirmed:
        text += f"; {waiting.unconfirmed} sent and not confirmed"
    if seconds_needed > seconds_left:
        return fail(subject, text, FASTER, **facts)
    excess, minutes = _excess_at_end(waiting, rate, seconds_left)
    if excess:
        text += f"; {excess} shares too many are due in the last {format_duration(minutes * _MINUTE)}"
        return fail(subject, text, FASTER, **facts, too_many_at_the_end=excess)
    if seconds_needed > TIGHT * seconds_left:
        return warn(subject, text, f"Little time is left. {FASTER}", **facts)
    return ok(subject, text, **facts)


def _excess_at_end(waiting: Waiting, rate: float, seconds_left: float) -> tuple[int, float]:
    """How many shares due in the last minutes cannot be proven in that time, and how many minutes these are.

    Returns the worst of all intervals that end with the round. If the round runs longer than the known minutes,
    the result is zero.
    """
    worst, interval, due = 0, 0.0, 0
    if waiting.later:
        return worst, interval
    for minute in range(len(waiting.minutes) - 1, 0, -1):
        seconds = seconds_left - minute * _MINUTE
        due += waiting.minutes[minute]
        missing = int(due - max(0.0, seconds) * rate)
        if missing > worst:
            worst, interval = missing, max(0.0, seconds) / _MINUTE
    return worst, interval
