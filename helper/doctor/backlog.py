"""Checks whether waiting shares can be revealed before their rounds end. Pure.

Two limits apply: the rate of the provers, and the number of reveals that the chain includes in a block. All rounds
share both, so a round waits for the rounds that end before it. Due times matter as well: shares that are due in the
last minutes of a round can only be revealed in those minutes, even if the end of the round is hours ahead. Shares that
wait for a retry are not a backlog: the time of each retry is chosen, and the last one is near the end of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from helper.core.time_text import format_duration
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.store.models import RetryGroup

MAX_REVEALS_PER_BLOCK: Final = 256
"""Reveals that newer chains include in one block (protocol)."""
MAX_BLOCK_SECONDS: Final = 6.0
"""Seconds between two blocks if not measured: the longest interval of the chain."""
TIGHT_FRACTION: Final = 0.8
"""Fraction of the remaining time above which a round is reported as tight."""
SPEED_ADVICE: Final = (
    "Reduce other load on this machine; if cores are idle, raise [helper] max_concurrent_proofs and restart. Wallets"
    " send each share to several helpers, so another helper may still reveal the rest."
)
_MINUTE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class WaitingShares:
    """Waiting shares of one round.

    Attributes:
        round_id: hex.
        end: its vote_end_time, Unix seconds.
        unproven: shares without a proof.
        unconfirmed: shares that were sent and are not confirmed.
        minutes: of `unproven`, the number due in each of the next minutes; the first includes overdue shares.
        later: of `unproven`, the number due after these minutes.
    """

    round_id: str
    end: float
    unproven: int
    unconfirmed: int = 0
    minutes: Sequence[int] = ()
    later: int = 0


@dataclass(frozen=True, slots=True)
class ProofRate:
    """Rate at which shares can be revealed.

    Attributes:
        seconds_per_proof: of one prover; None if not measured.
        slots: number of provers.
        block_seconds: interval between two blocks.
    """

    seconds_per_proof: float | None
    slots: int
    block_seconds: float = MAX_BLOCK_SECONDS

    @property
    def per_second(self) -> float:
        """Reveals per second."""
        chain = MAX_REVEALS_PER_BLOCK / max(self.block_seconds, 0.001)
        if self.seconds_per_proof is None:
            return chain
        return min(chain, max(1, self.slots) / max(self.seconds_per_proof, 0.001))


def evaluate_backlog(
    waiting: Sequence[WaitingShares], proof_rate: ProofRate, now: float, retries: Sequence[RetryGroup] = ()
) -> list[CheckResult]:
    """Return one result for each round with waiting shares, in the order in which the rounds end.

    Args:
        waiting: the rounds.
        proof_rate: rate at which shares can be revealed.
        now: Unix seconds.
        retries: shares of `waiting` that wait for a retry.
    """
    results, earlier_shares = [], 0
    rounds = [waiting_round for waiting_round in waiting if waiting_round.unproven or waiting_round.unconfirmed]
    for waiting_round in sorted(rounds, key=lambda waiting_round: waiting_round.end):
        groups = [group for group in retries if group.round_id.hex() == waiting_round.round_id]
        results.append(_evaluate_round(waiting_round, proof_rate, now, earlier_shares, groups))
        earlier_shares += waiting_round.unproven
    return results or [ok("backlog", "no shares are waiting")]


def _evaluate_round(
    waiting: WaitingShares, proof_rate: ProofRate, now: float, earlier_shares: int, retries: Sequence[RetryGroup]
) -> CheckResult:
    """Evaluate one round. `earlier_shares` is the number of shares in rounds that end earlier."""
    subject = f"round {waiting.round_id[:8]}"
    rate, seconds_left = proof_rate.per_second, waiting.end - now
    seconds_needed = (earlier_shares + waiting.unproven) / rate
    facts: dict[str, Any] = {
        "round": waiting.round_id,
        "shares_left": waiting.unproven,
        "unconfirmed": waiting.unconfirmed,
        "seconds_needed": round(seconds_needed, 1),
        "seconds_left": round(seconds_left, 1),
        "per_second": round(rate, 3),
    }
    if seconds_left <= 0:
        advice = (
            "Shares not confirmed by the end of a round are not counted. They are reported once the chain closes it."
        )
        return fail(
            subject, f"{waiting.unproven + waiting.unconfirmed} shares left after the round ended", advice, **facts
        )
    needed, left = format_duration(seconds_needed), format_duration(seconds_left)
    text = f"{waiting.unproven} shares left, {needed} needed, {left} left"
    if proof_rate.seconds_per_proof is None:
        text += " (limited by block capacity only: proof time was not measured)"
    if waiting.unconfirmed:
        text += f"; {waiting.unconfirmed} sent and not confirmed"
    if retries:
        facts["retrying"] = sum(group.count for group in retries)
        text += f"; {_describe_retries(retries, now)}"
    if seconds_needed > seconds_left:
        return fail(subject, text, SPEED_ADVICE, **facts)
    excess, minutes = _excess_at_end(_without_retries(waiting, retries), rate, seconds_left)
    if excess:
        interval = format_duration(minutes * _MINUTE_SECONDS)
        text += f"; {excess} shares more than can be processed are due in the last {interval}"
        return fail(subject, text, SPEED_ADVICE, **facts, too_many_at_the_end=excess)
    if seconds_needed > TIGHT_FRACTION * seconds_left:
        return warn(subject, text, f"The round ends soon. {SPEED_ADVICE}", **facts)
    return ok(subject, text, **facts)


def _describe_retries(retries: Sequence[RetryGroup], now: float) -> str:
    """Describe how many shares wait for a retry, until when, and after which failure."""
    first = min(retries, key=lambda group: group.next_ms)
    others = len({(group.stage, group.note) for group in retries}) - 1
    more = f" and {others} other failure{'s' if others > 1 else ''}" if others else ""
    next_in = format_duration(max(0.0, first.next_ms / 1000 - now))
    number = sum(group.count for group in retries)
    return f"{number} of them waiting for a retry, the next in {next_in} (after {first.stage}: {first.note}{more})"


def _without_retries(waiting: WaitingShares, retries: Sequence[RetryGroup]) -> WaitingShares:
    """Return the round without the due times of shares that wait for a retry."""
    minutes, later = list(waiting.minutes), waiting.later
    for group in retries:
        if group.minute < len(minutes):
            minutes[group.minute] = max(0, minutes[group.minute] - group.count)
        else:
            later = max(0, later - group.count)
    return replace(waiting, minutes=minutes, later=later)


def _excess_at_end(waiting: WaitingShares, rate: float, seconds_left: float) -> tuple[int, float]:
    """Number of shares due in the last minutes that cannot be proven in time.

    Returns the worst of all intervals that end with the round: the number of shares, and the length of the interval in
    minutes. If the round ends after the known minutes, the result is zero.
    """
    worst, interval, due = 0, 0.0, 0
    if waiting.later:
        return worst, interval
    for minute in range(len(waiting.minutes) - 1, 0, -1):
        seconds = seconds_left - minute * _MINUTE_SECONDS
        due += waiting.minutes[minute]
        missing = int(due - max(0.0, seconds) * rate)
        if missing > worst:
            worst, interval = missing, max(0.0, seconds) / _MINUTE_SECONDS
    return worst, interval
