"""Prometheus exposition of the service's counters and timings.

A scrape reads `Stats` and the figures of the queue. Scrapes within `REUSE_SECONDS` seconds share one reading and its
text. The text fits into the socket's send buffer, so that a scraper that does not read blocks nothing.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from helper.chain.chain_data import Round, RoundStatus
from helper.clock import Clock
from helper.core.share import ShareState
from helper.observability.backlog_forecast import Counts, count_unproven, forecast_rounds, measured_rate
from helper.observability.log_config import count_dropped_fields
from helper.observability.metric_definitions import COUNTERS, HISTOGRAMS, LABELLED_STATUSES
from helper.observability.queue_observer import QueueFigures
from helper.observability.service_state import ServiceState
from helper.observability.stats import Stats, Timings
from helper.store.models import DueForecast

REUSE_SECONDS: Final = 0.5
"""Seconds for which a reading is reused."""


class Metrics(Collector):
    """All metrics and their text form.

    Args:
        stats: counters and timings of the service.
        read_figures: reads all other figures.
        clock: the time.
    """

    def __init__(self, stats: Stats, read_figures: Callable[[], Awaitable[QueueFigures]], *, clock: Clock) -> None:
        self._stats = stats
        self._read_figures = read_figures
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._texts: dict[bool, bytes] = {}
        self._figures = QueueFigures(now=0.0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition text and its content type, for the value of an `Accept` header."""
        use_openmetrics = "application/openmetrics-text" in accept
        async with self._lock:
            if self._clock.monotonic() - self._read_at > REUSE_SECONDS:
                self._figures = await self._read_figures()
                self._read_at = self._clock.monotonic()
                self._texts = {}
            if use_openmetrics not in self._texts:
                generate = openmetrics.generate_latest if use_openmetrics else generate_latest
                self._texts[use_openmetrics] = generate(self._registry)
            content_type = openmetrics.CONTENT_TYPE_LATEST if use_openmetrics else CONTENT_TYPE_PLAIN_0_0_4
            return self._texts[use_openmetrics], content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, from the latest reading. The registry calls this."""
        labels = {"version": metadata.version("svote-helper"), "python": platform.python_version()}
        build = GaugeMetricFamily("helper_build_info", "Version information.", labels=list(labels))
        build.add_metric(list(labels.values()), 1)
        yield build
        yield from self._counters()
        for histogram in HISTOGRAMS:
            yield _histogram(histogram.name, histogram.help_text, getattr(self._stats, histogram.stats_attribute))
        if self._figures.service_status is not None:
            yield from _service_metrics(self._figures.service_status)
            yield from _lease_and_archive_metrics(self._figures.service_status)
            yield from _node_metrics(self._figures.service_status)
        yield from _queue_metrics(self._figures)

    def _counters(self) -> Iterator[Metric]:
        for counter in COUNTERS:
            counts = {value: self._stats.counts[source] for value, source in counter.sources.items()}
            yield _counter(counter.name, counter.help_text, counter.label, counts)
        refusals = self._figures.refusals
        by_status = {str(status): refusals.get(status, 0) for status in LABELLED_STATUSES}
        by_status["other"] = sum(number for status, number in refusals.items() if status not in LABELLED_STATUSES)
        yield _counter("helper_refusals", "Responses with status 400 or above on the wallet API.", "status", by_status)
        facts = self._figures.service_status
        deaths = facts["provers"]["deaths"] if facts is not None else {}
        counts = {reason: deaths.get(reason, 0) for reason in ("died", "timeout")}
        yield _counter("helper_prover_deaths", "Unexpected exits of prover workers by reason.", "reason", counts)
        dropped = {"": sum(count_dropped_fields().values())}
        yield _counter("helper_log_fields_dropped", "Log fields dropped because they are not allowed.", "", dropped)
        yield _counter(
            "helper_proving_seconds",
            "Time during which at least one proof was running.",
            "",
            {"": facts["proving_seconds"] if facts is not None else 0.0},
        )


def _service_metrics(status: ServiceState) -> Iterator[Metric]:
    """Readiness, provers, clock and chain height."""
    checks = {check["name"]: check["problem"] is None for check in status["checks"]}
    yield _gauge("helper_ready", "Whether the service is ready.", all(checks.values()))
    yield _labelled_gauge("helper_check", "Whether a readiness check passes.", "check", checks)
    paused = {"intake": status["intake_paused"] is not None, "dispatch": status["paused"] is not None}
    yield _labelled_gauge("helper_paused", "Whether intake or dispatch of shares is paused.", "what", paused)
    provers = status["provers"]
    yield _gauge("helper_prover_slots", "Maximum number of concurrent proofs.", provers["workers"])
    yield _gauge("helper_provers_running", "Running prover workers.", len(provers["pids"]))
    yield _gauge("helper_shares_in_hand", "Claimed shares: being proven or waiting for a prover.", status["in_hand"])
    for name, about, value in (
        ("helper_block_height", "Height of the newest processed block.", status["height"]),
        ("helper_block_age_seconds", "Local clock minus the time of the newest block.", status["block_age"]),
        ("helper_clock_skew_seconds", "Local clock minus a block's time on arrival.", status["clock_skew"]),
        ("helper_tree_lag_blocks", "Blocks that the commitment trees are behind the newest block.", status["tree_lag"]),
    ):
        if value is not None:
            yield _gauge(name, about, value)


def _lease_and_archive_metrics(status: ServiceState) -> Iterator[Metric]:
    """Sender lease in a cluster, and progress of the archive; each only if it is configured."""
    if "sends" in status:
        yield _gauge("helper_sends", "Whether this host holds the sender lease.", status["sends"])
    archive = status.get("archive")
    if archive is not None:
        yield _gauge("helper_archive_fails", "Whether the last archive write failed.", bool(archive["problem"]))
        if archive["behind"] is not None:
            yield _gauge("helper_archive_height", "Height of the newest archived block.", archive["through"])
            yield _gauge("helper_archive_lag_blocks", "Blocks not yet archived.", archive["behind"])


def _node_metrics(status: ServiceState) -> Iterator[Metric]:
    """State of the nodes, labelled with their configured hosts."""
    nodes = {node["name"]: node for node in status["endpoints"]}
    fresh = {name: node["reason"] is None for name, node in nodes.items()}
    yield _labelled_gauge("helper_endpoint_fresh", "Whether a node is usable.", "endpoint", fresh)
    ages = {name: node["block_age"] for name, node in nodes.items() if node["block_age"] is not None}
    yield _labelled_gauge("helper_endpoint_block_age_seconds", "Age of a node's newest block.", "endpoint", ages)
    heights = {name: node["height"] for name, node in nodes.items()}
    yield _labelled_gauge("helper_endpoint_height", "Height of a node's newest block.", "endpoint", heights)


def _queue_metrics(figures: QueueFigures) -> Iterator[Metric]:
    """Figures of the queue; none if the store could not be read."""
    if figures.counts is None:
        return
    totals = {
        state.name.lower(): sum(states.get(state, 0) for states in figures.counts.values()) for state in ShareState
    }
    yield _labelled_gauge("helper_shares", "Shares by state, in all stored rounds.", "state", totals)
    yield _gauge("helper_damaged_rows", "Damaged database rows that were quarantined.", figures.damaged)
    yield _gauge("helper_wal_bytes", "Size of the write-ahead log of the database file.", figures.wal_bytes)
    about = "Time for which deleted witnesses have not been erased from the database file."
    yield _gauge("helper_erasure_pending_seconds", about, figures.erasure_pending_seconds)
    active = [known for known in figures.rounds if known.status is RoundStatus.ACTIVE]
    yield _gauge("helper_rounds_active", "Rounds with status ACTIVE.", len(active))
    due_ms = figures.oldest_due_ms
    overdue = 0.0 if due_ms is None else max(0.0, figures.now - due_ms / 1000)
    yield _gauge("helper_oldest_due_seconds", "Time since the due time of the oldest due share.", overdue)
    yield from _forecast_metrics(figures, figures.counts, active)


def _forecast_metrics(figures: QueueFigures, counts: Counts, active: Sequence[Round]) -> Iterator[Metric]:
    """Whether rounds will be finished at the measured rate; absent before the first proof."""
    rate = None if figures.service_status is None else measured_rate(figures.service_status)
    if rate is None or rate.seconds_per_proof is None:
        return
    rounds = [known for known in active if count_unproven(counts.get(known.round_id, {}))]
    due = 0
    for known in rounds:
        ahead = figures.due_ahead.get(known.round_id, DueForecast((), 0))
        due += count_unproven(counts[known.round_id]) - sum(ahead.minutes[1:]) - ahead.later
    about = "Time to prove the shares that are due by the end of this minute, at the measured rate."
    yield _gauge("helper_backlog_drain_seconds", about, max(0, due) / rate.per_second)
    if not rounds:
        return
    forecasts = forecast_rounds(rounds, counts, figures.due_ahead, rate, figures.now)
    about = "Minimum over rounds of time left minus proving time needed; absent if no share is waiting."
    left = [known.vote_end_time - figures.now - forecasts[known.round_id].work_seconds for known in rounds]
    yield _gauge("helper_backlog_slack_seconds", about, min(left))
    about = (
        "Minimum over rounds of the longest pause after which all shares are still revealed in time, with their due"
        " times; below 0, a round will not be finished at the measured rate; absent if no share is waiting."
    )
    tightest = min(rounds, key=lambda known: forecasts[known.round_id].slack_seconds)
    yield _gauge("helper_round_slack_seconds", about, forecasts[tightest.round_id].slack_seconds)
    about = "Time until the end of the round with that slack."
    yield _gauge("helper_round_left_seconds", about, max(0.0, tightest.vote_end_time - figures.now))


def _counter(name: str, about: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label] if label else [])
    for value, number in counts.items():
        family.add_metric([value] if label else [], number)
    return family


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _labelled_gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], float(number))
    return family


def _histogram(name: str, about: str, timings: Timings) -> Metric:
    return HistogramMetricFamily(name, about, buckets=timings.labelled_counts(), sum_value=timings.total)
