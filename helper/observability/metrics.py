"""What Prometheus scrapes: the service's own counters and timings as they stand, in a registry of their own.

Nothing is counted here. A scrape reads what the service counts anyway; scrapes that come together share one reading,
and the text is made once for all of them. The text fits into what the kernel keeps for a connection, so a scraper that
does not read holds nobody up.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from helper.clock import Clock
from helper.core.share import ShareState
from helper.observability.log_config import dropped_fields
from helper.observability.metric_definitions import COUNTERS, HISTOGRAMS, REFUSALS
from helper.observability.queue_observer import Figures
from helper.observability.queue_overview import KnownRound
from helper.observability.stats import Stats, Timings

FRESH: Final = 0.5
"""Seconds for which one reading serves all scrapes."""
_ACTIVE: Final = 1


class Metrics:
    """The registry and the text that is made of it.

    Args:
        stats: the service's counters and timings.
        read: reads everything else.
        clock: tells when a reading is old.
    """

    def __init__(self, stats: Stats, read: Callable[[], Awaitable[Figures]], *, clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._texts: dict[bool, bytes] = {}
        self._collector = _Figures(stats)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The text for who accepts these kinds of content, and what kind it is."""
        openly = "application/openmetrics-text" in accept
        async with self._lock:
            if self._clock.monotonic() - self._read_at > FRESH:
                self._collector.figures = await self._read()
                self._read_at = self._clock.monotonic()
                self._texts = {}
            if openly not in self._texts:
                make = openmetrics.generate_latest if openly else generate_latest
                self._texts[openly] = make(self._registry)
            return self._texts[openly], openmetrics.CONTENT_TYPE_LATEST if openly else CONTENT_TYPE_PLAIN_0_0_4


class _Figures(Collector):
    """Makes the series from the newest reading."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.figures = Figures(now=0.0)

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        about = {"version": metadata.version("svote-helper"), "python": platform.python_version()}
        build = GaugeMetricFamily("helper_build_info", "What runs here.", labels=list(about))
        build.add_metric(list(about.values()), 1)
        yield build
        yield from self._counters()
        for one in HISTOGRAMS:
            yield _histogram(one.name, one.about, getattr(self._stats, one.source))
        if self.figures.facts:
            yield from _service(self.figures.facts)
            yield from _others(self.figures.facts)
            yield from _nodes(self.figures.facts)
        yield from _queue(self.figures)

    def _counters(self) -> Iterator[Metric]:
        for one in COUNTERS:
            counts = {value: self._stats.counts[source] for value, source in one.sources.items()}
            yield _counter(one.name, one.about, one.label, counts)
        refusals = self.figures.refusals
        told = {str(status): refusals.get(status, 0) for status in REFUSALS}
        told["other"] = sum(number for status, number in refusals.items() if status not in REFUSALS)
        yield _counter("helper_refusals", "Answers to requests on the wallets' port from 400 on.", "status", told)
        deaths = (self.figures.facts.get("provers") or {}).get("deaths") or {}
        counts = {reason: deaths.get(reason, 0) for reason in ("died", "timeout")}
        yield _counter("helper_prover_deaths", "Prover workers that ended without being told to.", "reason", counts)
        dropped = {"": sum(dropped_fields().values())}
        yield _counter("helper_log_fields_dropped", "Fields kept out of the log: not on its list.", "", dropped)
        yield _counter(
            "helper_proving_seconds",
            "Time in which at least one proof was under way.",
            "",
            {"": self.figures.facts.get("proving_seconds", 0.0)},
        )


def _service(facts: Mapping[str, Any]) -> Iterator[Metric]:
    """How the service is."""
    yield _gauge("helper_ready", "Whether shares are taken and revealed.", all(_well(facts).values()))
    yield _gauges("helper_check", "Whether each of the checks of /readyz passes.", "check", _well(facts))
    paused = {"intake": facts["intake_paused"] is not None, "dispatch": facts["paused"] is not None}
    yield _gauges("helper_paused", "Whether shares are not taken, or not revealed, now.", "what", paused)
    provers = facts["provers"]
    yield _gauge("helper_prover_slots", "Proofs that can be made at once.", provers["workers"])
    yield _gauge("helper_provers_running", "Prover workers that run.", len(provers["pids"]))
    yield _gauge("helper_shares_in_hand", "Shares that are proven, or wait for a prover in memory.", facts["in_hand"])
    for name, about, key in (
        ("helper_block_height", "Newest block that was read.", "height"),
        ("helper_block_age_seconds", "Our clock minus the newest block's time.", "block_age"),
        ("helper_clock_skew_seconds", "Our clock minus a block's time when it was first seen.", "clock_skew"),
        ("helper_tree_lag_blocks", "Blocks by which the trees are behind the newest one.", "tree_lag"),
    ):
        if facts.get(key) is not None:
            yield _gauge(name, about, facts[key])


def _others(facts: Mapping[str, Any]) -> Iterator[Metric]:
    """Whether it is this host that sends, where there are several; how far the archive is, where it writes one."""
    if "sends" in facts:
        yield _gauge("helper_sends", "Whether this host has the right to send reveals now.", facts["sends"])
    archive = facts.get("archive")
    if archive is not None:
        yield _gauge("helper_archive_fails", "Whether the last look at the archive failed.", bool(archive["problem"]))
        if archive["behind"] is not None:
            yield _gauge("helper_archive_height", "Newest block that is archived.", archive["through"])
            yield _gauge("helper_archive_lag_blocks", "Blocks that are not archived yet.", archive["behind"])


def _well(facts: Mapping[str, Any]) -> dict[str, bool]:
    return {check["name"]: check["problem"] is None for check in facts["checks"]}


def _nodes(facts: Mapping[str, Any]) -> Iterator[Metric]:
    """How the nodes are, each by the host that it is configured with."""
    nodes = {node["name"]: node for node in facts["endpoints"]}
    fresh = {name: node["reason"] is None for name, node in nodes.items()}
    yield _gauges("helper_endpoint_fresh", "Whether a node is of use now.", "endpoint", fresh)
    ages = {name: node["block_age"] for name, node in nodes.items() if node["block_age"] is not None}
    yield _gauges("helper_endpoint_block_age_seconds", "Age of a node's newest block.", "endpoint", ages)
    heights = {name: node["height"] for name, node in nodes.items()}
    yield _gauges("helper_endpoint_height", "Height of a node's newest block.", "endpoint", heights)


def _queue(figures: Figures) -> Iterator[Metric]:
    """What waits; nothing where the store could not be asked."""
    if figures.counts is None:
        return
    totals = {
        state.name.lower(): sum(states.get(state, 0) for states in figures.counts.values()) for state in ShareState
    }
    yield _gauges("helper_shares", "Shares by state, in all rounds that are kept.", "state", totals)
    yield _gauge("helper_damaged_rows", "Rows of the database that were set aside.", figures.damaged)
    active = [known for known in figures.rounds if int(known.status) == _ACTIVE]
    yield _gauge("helper_rounds_active", "Rounds that take votes.", len(active))
    due_ms = figures.oldest_due_ms
    overdue = 0.0 if due_ms is None else max(0.0, figures.now - due_ms / 1000)
    yield _gauge("helper_oldest_due_seconds", "How long the share that was due first waits beyond its time.", overdue)
    slack = _slack(figures, active)
    if slack is not None:
        about = "Time left beyond what is needed, in the round where that is least; only while shares wait."
        yield _gauge("helper_backlog_slack_seconds", about, slack)


def _slack(figures: Figures, active: Iterable[KnownRound]) -> float | None:
    """The least of the rounds' time left minus the time needed; rounds that end earlier are proven first."""
    proof = (figures.facts.get("proof") or {}).get("p50_ms")
    provers = figures.facts.get("provers") or {}
    each = provers.get("self_test_seconds") if proof is None else proof / 1000
    slacks, before = [], 0
    for known in sorted(active, key=lambda known: known.vote_end_time):
        states = (figures.counts or {}).get(known.round_id, {})
        left = states.get(ShareState.RECEIVED, 0) + states.get(ShareState.WITNESSED, 0)
        before += left
        if left and each is not None:
            slacks.append(known.vote_end_time - figures.now - before * each / max(1, provers.get("workers", 1)))
    return min(slacks, default=None)


def _counter(name: str, about: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label] if label else [])
    for value, number in counts.items():
        family.add_metric([value] if label else [], number)
    return family


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], float(number))
    return family


def _histogram(name: str, about: str, timings: Timings) -> Metric:
    buckets = [(f"{bound:g}" if bound != float("inf") else "+Inf", count) for bound, count in timings.up_to()]
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=timings.total)
