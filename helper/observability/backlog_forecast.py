"""When the waiting shares of each round are revealed at the measured rate of this host's provers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helper.chain.chain_data import Round
from helper.core.load_forecast import DrainResult, ProofRate, forecast_work, simulate_drain
from helper.core.share import ShareState
from helper.observability.service_state import ServiceState
from helper.store.models import DueForecast

Counts = Mapping[bytes, Mapping[ShareState, int]]
"""Shares by round and state."""


def measured_rate(status: ServiceState) -> ProofRate:
    """Return the rate of the provers: the median time of recent proofs, before the first that of the self-test."""
    provers, median_ms = status["provers"], status["proof"]["p50_ms"]
    seconds = provers["self_test_seconds"] if median_ms is None else median_ms / 1000
    return ProofRate(seconds, provers["workers"])


def count_unproven(counts: Mapping[ShareState, int]) -> int:
    """Return the number of shares of a round that wait for a proof or are being proven."""
    return counts.get(ShareState.RECEIVED, 0) + counts.get(ShareState.WITNESSED, 0)


def forecast_rounds(
    rounds: Sequence[Round],
    counts: Counts,
    due_ahead: Mapping[bytes, DueForecast],
    rate: ProofRate,
    now: float,
) -> dict[bytes, DrainResult]:
    """Return the forecast of each round.

    Args:
        rounds: rounds to forecast.
        counts: shares by round and state.
        due_ahead: waiting shares by round and minute.
        rate: of this host. Without a measured proof, only the capacity of blocks limits it.
        now: Unix seconds.
    """
    work = []
    for known in rounds:
        ahead = due_ahead.get(known.round_id, DueForecast((), 0))
        unproven = count_unproven(counts.get(known.round_id, {}))
        work.append(forecast_work(known.vote_end_time, unproven, ahead.minutes, ahead.later, now))
    results = simulate_drain(work, rate.per_second, now)
    return {known.round_id: result for known, result in zip(rounds, results, strict=True)}
