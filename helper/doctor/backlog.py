"""Checks whether waiting shares can be revealed before their rounds end, by `helper.core.load_forecast`. Pure.

Shares that wait for a retry are work, but not late: the time of each retry is chosen, and the last one is near the end
of the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from helper.core.load_forecast import DrainResult, ProofRate, RoundWork, find_slots, forecast_work, simulate_drain
from helper.core.text_forms import format_duration
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.observability.queue_snapshot import QueueSnapshot, RetryingShares, RoundSnapshot

TIGHT_FRACTION: Final = 0.8
"""Fraction of the remaining time above which a round is reported as tight."""
_OTHER_HELPERS: Final = "Wallets send each share to several helpers, so another helper may still reveal the rest."


def evaluate_backlog(queue: QueueSnapshot, proof_rate: ProofRate, now: float) -> list[CheckResult]:
    """Return one result for each round with waiting shares, in the order in which the rounds end.

    Args:
        queue: the queue, with its retries.
        proof_rate: rate at which shares can be revealed.
        now: Unix seconds.
    """
    rounds = [row for row in reversed(queue.known_rounds) if row.counts.unproven or row.counts.broadcast]
    groups = [[group for group in queue.retries if group.round == row.round_id] for row in rounds]
    work = [_forecast_without_retries(row, own, now) for row, own in zip(rounds, groups, strict=True)]
    drained = simulate_drain(work, proof_rate.per_second, now)
    results = []
    for number, (row, result) in enumerate(zip(rounds, drained, strict=True)):
        advice = _speed_advice(row.round_id, work[: number + 1], proof_rate, now)
        results.append(_evaluate_round(row, result, proof_rate, now, speed_advice=advice, retries=groups[number]))
    return results or [ok("backlog", "no shares are waiting")]


def _speed_advice(round_id: str, work: Sequence[RoundWork], proof_rate: ProofRate, now: float) -> str:
    """Return what to do so that the last of these rounds is finished in time."""
    needed = find_slots(work, proof_rate, now)
    if needed is None:
        more = "Reduce other load on this machine. More provers than the chain's 256 reveals per block do not help."
        return f"{more} {_OTHER_HELPERS}"
    slots = proof_rate.slots
    state = f"{needed} provers are needed, {slots} run." if needed > slots else f"{slots} provers are just enough."
    return (
        f"{state} Reduce other load on this machine. If it has cores for more provers, set [helper]"
        f" max_concurrent_proofs = {max(needed, slots + 1)} and restart. Otherwise give a second host a copy:"
        f" `svote-helper queue export --round {round_id} --output FILE`, and there `svote-helper queue import FILE`."
        f" {_OTHER_HELPERS}"
    )


def _evaluate_round(
    row: RoundSnapshot,
    drained: DrainResult,
    proof_rate: ProofRate,
    now: float,
    *,
    speed_advice: str,
    retries: Sequence[RetryingShares],
) -> CheckResult:
    subject, unproven, unconfirmed = f"round {row.round_id[:8]}", row.counts.unproven, row.counts.broadcast
    seconds_left, seconds_needed = row.vote_end_time - now, drained.work_seconds
    facts: dict[str, Any] = {
        "round": row.round_id,
        "shares_left": unproven,
        "unconfirmed": unconfirmed,
        "seconds_needed": round(seconds_needed, 1),
        "seconds_left": round(seconds_left, 1),
        "slack_seconds": round(drained.slack_seconds, 1),
        "per_second": round(proof_rate.per_second, 3),
    }
    if seconds_left <= 0:
        advice = (
            "Shares not confirmed by the end of a round are not counted. They are reported once the chain closes it."
        )
        return fail(subject, f"{unproven + unconfirmed} shares left after the round ended", advice, **facts)
    needed, left = format_duration(seconds_needed), format_duration(seconds_left)
    text = f"{unproven} shares left, {needed} needed, {left} left"
    if proof_rate.seconds_per_proof is None:
        text += " (limited by block capacity only: proof time was not measured)"
    if unconfirmed:
        text += f"; {unconfirmed} sent and not confirmed"
    if retries:
        facts["retrying"] = sum(group.count for group in retries)
        text += f"; {_describe_retries(retries, now)}"
    excess = math.ceil(drained.unfinished)
    if excess and seconds_needed <= seconds_left:
        text += f"; {excess} shares more than can be processed are due shortly before the end"
        return fail(subject, text, speed_advice, **facts, too_many_at_the_end=excess)
    if drained.slack_seconds < 0:
        return fail(subject, f"{text}; about {excess} will not be revealed", speed_advice, **facts)
    if seconds_needed > TIGHT_FRACTION * seconds_left:
        return warn(subject, text, f"The round ends soon. {speed_advice}", **facts)
    return ok(subject, text, **facts)


def _describe_retries(retries: Sequence[RetryingShares], now: float) -> str:
    """Describe how many shares wait for a retry, until when, and after which failure."""
    first = min(retries, key=lambda group: group.next)
    others = len({(group.stage, group.reason) for group in retries}) - 1
    more = f" and {others} other failure{'s' if others > 1 else ''}" if others else ""
    next_in = format_duration(max(0.0, first.next - now))
    number = sum(group.count for group in retries)
    return f"{number} of them waiting for a retry, the next in {next_in} (after {first.stage}: {first.reason}{more})"


def _forecast_without_retries(row: RoundSnapshot, retries: Sequence[RetryingShares], now: float) -> RoundWork:
    """Return the work of a round. Shares that wait for a retry count as due now, an upper limit of the work."""
    minutes, later = list(row.due_per_minute), row.later
    for group in retries:
        if group.minute < len(minutes):
            minutes[group.minute] = max(0, minutes[group.minute] - group.count)
        else:
            later = max(0, later - group.count)
    return forecast_work(row.vote_end_time, row.counts.unproven, minutes, later, now)
