"""Prometheus exposition of the service's counters and timings.

A scrape reads `Stats`, the service and its queue. Scrapes within `REUSE_SECONDS` seconds share one reading and its
text. The text fits into the socket's send buffer, so that a scraper that does not read blocks nothing.

All label values are known in advance: outcomes, states, stages, hosts of the configured nodes. There are no labels for
rounds, shares or clients. On a helper with few shares, a counter change can still reveal when a share arrived.
Readers of the metrics are therefore trusted like operators, and the metrics have a separate listener.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from helper.chain.broadcast_outcome import Verdict
from helper.chain.chain_data import RoundStatus
from helper.clock import Clock
from helper.core.load_forecast import ProofRate
from helper.observability.log_config import count_dropped_fields
from helper.observability.queue_snapshot import HelperSnapshot, QueueSnapshot, forecast_rounds, measured_rate
from helper.observability.service_state import ServiceState
from helper.observability.stats import Stats, Timings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


POST_OUTCOMES: Final = (
    "queued",
    "duplicate",
    "refused",
    "unauthorised",
    "too_large",
    "too_slow",
    "come_again",
    "unavailable",
    "broken_off",
    "error",
)
"""Outcomes of `POST /shares`."""
RETRY_STAGES: Final = ("tree", "proof", "prover", "broadcast")
"""Stages of a retry: no root covers the leaf yet, the proof failed, the prover exited, the chain refused or dropped the
reveal."""
LABELLED_STATUSES: Final = (400, 401, 404, 405, 408, 413, 429, 431, 500, 502, 503)
"""Statuses with their own label value; all others are counted as `other`."""

REUSE_SECONDS: Final = 0.5
"""Seconds for which a reading is reused."""


class Metrics(Collector):
    """All metrics and their text form.

    Args:
        refusals: responses of the wallet API with status 400 or above, by status.
    """

    def __init__(
        self,
        stats: Stats,
        read_helper: Callable[[], Awaitable[HelperSnapshot]],
        *,
        refusals: Mapping[int, int],
        clock: Clock,
    ) -> None:
        self._stats = stats
        self._read_helper = read_helper
        self._refusals = refusals
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._texts: dict[bool, bytes] = {}
        self._helper = HelperSnapshot()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        process = ProcessCollector(registry=self._registry)
        # The systemd unit hides /proc/stat, which has the boot time. Without one, nothing of the process is exported.
        process._btime = process._btime or int(clock.now() - clock.monotonic())

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition text and its content type, for the value of an `Accept` header."""
        use_openmetrics = "application/openmetrics-text" in accept
        async with self._lock:
            if self._clock.monotonic() - self._read_at > REUSE_SECONDS:
                self._helper = await self._read_helper()
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
        for fact in fields(ServiceState):
            timings = getattr(self._stats, fact.name, None)
            if isinstance(timings, Timings):
                name, about = fact.metadata["metric"], fact.metadata["description"]
                yield HistogramMetricFamily(name, about, buckets=timings.bucket_counts(), sum_value=timings.total)
        service, queue = self._helper.service, self._helper.queue
        if service is not None:
            yield from _service_metrics(service)
        if queue is not None:
            yield from _queue_metrics(queue, None if service is None else measured_rate(service))

    def _counters(self) -> Iterator[Metric]:
        counts, refusals, service = self._stats.counts, self._refusals, self._helper.service or ServiceState()
        posts = {outcome: counts[f"post_{outcome}"] for outcome in POST_OUTCOMES}
        yield _labelled_counter("helper_share_posts", "Requests to POST /shares by outcome.", "outcome", posts)
        yield _counter("helper_proofs", "Completed proofs.", counts["proven"])
        about = "Proofs that were not begun, because another helper's reveal was in a block."
        yield _counter("helper_proofs_skipped", about, counts["proof_skipped"])
        about = "Completed proofs that were not used, because the share was confirmed or its round was closed."
        yield _counter("helper_proofs_unused", about, counts["proof_unused"])
        yield _counter("helper_reveals", "Reveals broadcast, without resends.", counts["broadcast"])
        about = "Broadcasts of reveals, including resends, by verdict on the node's response."
        verdicts = {verdict.name.lower(): counts[f"answer_{verdict.name.lower()}"] for verdict in Verdict}
        yield _labelled_counter("helper_broadcasts", about, "verdict", verdicts)
        yield _counter("helper_confirmed", "Shares confirmed in a block.", counts["confirmed"])
        retries = {stage: counts[f"retry_{stage}"] for stage in RETRY_STAGES}
        yield _labelled_counter("helper_retries", "Retries of shares by stage.", "stage", retries)
        about = "Shares whose quick retries all failed. They are retried at longer intervals."
        yield _counter("helper_quick_retries_failed", about, counts["quick_retries_failed"])
        yield _counter("helper_failed", "Shares that failed permanently.", counts["failed"])
        yield _counter("helper_expired", "Shares unconfirmed when their round closed.", counts["expired"])
        by_status = {str(status): refusals.get(status, 0) for status in LABELLED_STATUSES}
        by_status["other"] = sum(number for status, number in refusals.items() if status not in LABELLED_STATUSES)
        about = "Responses with status 400 or above on the wallet API."
        yield _labelled_counter("helper_refusals", about, "status", by_status)
        deaths = {reason: service.provers.deaths.get(reason, 0) for reason in ("died", "timeout")}
        about = "Unexpected exits of prover workers by reason."
        yield _labelled_counter("helper_prover_deaths", about, "reason", deaths)
        about = "Log fields dropped because they are not allowed."
        yield _counter("helper_log_fields_dropped", about, sum(count_dropped_fields().values()))
        about = "Time during which at least one proof was running."
        yield _counter("helper_proving_seconds", about, service.proving_seconds)


def _gauges(state: DataclassInstance) -> Iterator[Metric]:
    """The facts that have a gauge and are known. That of a sequence is its length."""
    for fact in fields(state):
        value = getattr(state, fact.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _gauges(value)
        elif value is not None and (name := fact.metadata.get("metric")):
            yield _gauge(name, fact.metadata["description"], len(value) if isinstance(value, Sequence) else value)


def _service_metrics(service: ServiceState) -> Iterator[Metric]:
    """Readiness, nodes and archive."""
    yield from _gauges(service)
    checks = {check.name: check.has_passed for check in service.checks}
    yield _gauge("helper_ready", "Whether the service is ready.", all(checks.values()))
    yield _labelled_gauge("helper_check", "Whether a readiness check passes.", "check", checks)
    paused = {"intake": service.intake_paused is not None, "dispatch": service.paused is not None}
    yield _labelled_gauge("helper_paused", "Whether intake or dispatch of shares is paused.", "what", paused)
    nodes = {node.name: node for node in service.endpoints}
    fresh = {name: node.reason is None for name, node in nodes.items()}
    yield _labelled_gauge("helper_endpoint_fresh", "Whether a node is usable.", "endpoint", fresh)
    ages = {name: node.block_age for name, node in nodes.items() if node.block_age is not None}
    yield _labelled_gauge("helper_endpoint_block_age_seconds", "Age of a node's newest block.", "endpoint", ages)
    heights = {name: node.height for name, node in nodes.items()}
    yield _labelled_gauge("helper_endpoint_height", "Height of a node's newest block.", "endpoint", heights)
    archive = service.archive
    if archive is not None:
        yield _gauge("helper_archive_fails", "Whether the last archive write failed.", bool(archive.problem))
        if archive.behind is not None:
            yield _gauge("helper_archive_height", "Height of the newest archived block.", archive.through)
            yield _gauge("helper_archive_lag_blocks", "Blocks not yet archived.", archive.behind)


def _queue_metrics(queue: QueueSnapshot, rate: ProofRate | None) -> Iterator[Metric]:
    """Figures of the queue, and whether rounds will be finished at the measured rate, once there is one."""
    yield from _gauges(queue)
    yield _labelled_gauge("helper_shares", "Shares by state, in all stored rounds.", "state", queue.total.by_state())
    active = [row for row in queue.rounds if row.status == RoundStatus.ACTIVE]
    yield _gauge("helper_rounds_active", "Rounds with status ACTIVE.", len(active))
    if rate is None or rate.seconds_per_proof is None:
        return
    rounds = [row for row in active if row.counts.unproven]
    due = sum(row.counts.unproven - sum(row.due_per_minute[1:]) - row.later for row in rounds)
    about = "Time to prove the shares that are due by the end of this minute, at the measured rate."
    yield _gauge("helper_backlog_drain_seconds", about, max(0, due) / rate.per_second)
    if not rounds:
        return
    forecasts = forecast_rounds(rounds, rate, queue.at)
    about = "Minimum over rounds of time left minus proving time needed; absent if no share is waiting."
    left = [row.vote_end_time - queue.at - forecasts[row.round_id].work_seconds for row in rounds]
    yield _gauge("helper_backlog_slack_seconds", about, min(left))
    about = (
        "Minimum over rounds of the longest pause after which all shares are still revealed in time, with their due"
        " times; below 0, a round will not be finished at the measured rate; absent if no share is waiting."
    )
    tightest = min(rounds, key=lambda row: forecasts[row.round_id].slack_seconds)
    yield _gauge("helper_round_slack_seconds", about, forecasts[tightest.round_id].slack_seconds)
    about = "Time until the end of the round with that slack."
    yield _gauge("helper_round_left_seconds", about, max(0.0, tightest.vote_end_time - queue.at))


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def _labelled_counter(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _labelled_gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], float(number))
    return family
