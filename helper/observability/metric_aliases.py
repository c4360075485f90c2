"""Metrics under the names of the original helper, so that existing dashboards keep working.

Only figures that this helper measures are exported; `Metrics` has all of them under their own names. No label names a
round, a share or a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from helper.observability.stats import Stats

SUBMISSIONS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("accepted", "queued"): ("post_queued",),
    ("duplicate", "exact"): ("post_duplicate",),
    ("rejected", "unauthorized"): ("post_unauthorised",),
    ("rejected", "invalid_json"): ("post_too_large", "post_broken_off"),
    ("rejected", "body_timeout"): ("post_too_slow",),
    ("rejected", "invalid_fields"): ("post_refused",),
    ("unavailable", "ingress_disabled"): ("post_unavailable",),
    ("unavailable", "commitment_validator"): ("post_come_again",),
    ("failed", "panic_or_unclassified"): ("post_error",),
}
"""Counters of `Stats` by outcome and reason of a posted share."""
ATTEMPTS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("confirmed", "chain_broadcast"): ("confirmed",),
    ("waiting_for_readiness", "tree_status"): ("retry_tree",),
    ("retry", "proof_generation"): ("retry_proof", "retry_prover"),
    ("retry", "chain_broadcast"): ("retry_broadcast",),
    ("failed", "chain_broadcast"): ("failed",),
    ("inactive", "round_status"): ("expired",),
}
"""Counters of `Stats` by outcome and stage of an attempt to reveal a share."""


def collect_aliases(stats: Stats, in_hand: int | None) -> Iterator[Metric]:
    """Yield the metric families.

    Args:
        stats: counters and timings of the service.
        in_hand: number of claimed shares, None without a running queue.
    """
    about = "Alias: requests to POST /shares by outcome and reason, see helper_share_posts_total."
    yield _counter("svote_helper_share_submission_requests", about, ("outcome", "reason"), SUBMISSIONS, stats)
    about = "Alias: attempts to reveal a share by outcome and stage, see helper_retries_total."
    yield _counter("svote_helper_share_processing_attempts", about, ("outcome", "stage"), ATTEMPTS, stats)
    if in_hand is not None:
        about = "Alias of helper_shares_in_hand."
        yield GaugeMetricFamily("svote_helper_share_processing_in_flight", about, value=float(in_hand))
    durations = HistogramMetricFamily(
        "svote_helper_share_processing_stage_duration_seconds",
        "Alias of helper_proof_seconds.",
        labels=["stage", "result"],
    )
    durations.add_metric(
        ["proof_generation", "success"], stats.proof_seconds.labelled_counts(), stats.proof_seconds.total
    )
    yield durations


def _counter(
    name: str, about: str, labels: tuple[str, str], sources: Mapping[tuple[str, str], tuple[str, ...]], stats: Stats
) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for values, counters in sources.items():
        family.add_metric(values, sum(stats.counts[counter] for counter in counters))
    return family
