"""Prometheus metrics: every counter once, nothing that identifies a share, robust to errors."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from helper.chain.chain_data import Round, RoundStatus
from helper.chain.round_registry import RoundRegistry
from helper.core.share import ShareState
from helper.errors import StoreError
from helper.observability.metrics import POST_OUTCOMES, REUSE_SECONDS, Metrics
from helper.observability.queue_snapshot import HelperSnapshot, QueueObserver, QueueSnapshot
from helper.observability.service_state import Check
from helper.observability.stats import BUCKET_BOUNDS_SECONDS, Stats
from helper.server import wallet_routes
from helper.server.edge import Edge
from helper.server.health_routes import METRICS_LIMITS, create_metrics_app
from helper.server.listening import Server, bind_tcp
from helper.store.models import DamagedShare, DueForecast, FailedShares
from tests.support.clock import FakeClock
from tests.support.partial_store import PartialStore
from tests.support.service_state import partial_state, snapshot_of

pytestmark = pytest.mark.anyio

RECORDING_RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "original_names.yaml"
ROUND, LATER_ROUND = b"\x01" * 32, b"\x02" * 32
FACTS: dict[str, Any] = {
    "ready": True,
    "intake_paused": None,
    "paused": "no chain node is in sync",
    "checks": [{"name": "store", "problem": None}, {"name": "chain", "problem": "no node"}],
    "provers": {"workers": 2, "pids": [1, 2], "deaths": {"died": 3}, "self_test_seconds": 1.0},
    "proof": {"p50_ms": 500.0},
    "in_hand": 3,
    "height": 40,
    "block_age": 1.5,
    "clock_skew": -0.25,
    "tree_lag": 0,
    "proving_seconds": 12.5,
    "endpoints": [
        {"name": "a:80", "reason": None, "height": 40, "block_age": 1.5},
        {"name": "b:80", "reason": "stale", "height": 0, "block_age": None},
        {"name": "b:80", "reason": "twice in the settings", "height": 0, "block_age": None},
    ],
}
parse_open: Callable[[str], Iterable[Metric]] = openmetrics.text_string_to_metric_families
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_samples(text: str) -> Samples:
    samples: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"reported twice: {key}"
            samples[key] = sample.value
    return samples


COUNTS = {ROUND: {ShareState.WAITING: 10, ShareState.PROVING: 2, ShareState.CONFIRMED: 5}}
ROUNDS = (Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1), Round(LATER_ROUND, RoundStatus.TALLYING, 900, (), 2))


def create_metrics(
    helper: HelperSnapshot | None = None, stats: Stats | None = None, refusals: Mapping[int, int] | None = None
) -> Metrics:
    async def read() -> HelperSnapshot:
        return helper or HelperSnapshot()

    return Metrics(stats or Stats(), read, refusals=refusals or {}, clock=FakeClock())


async def scrape(
    service: dict[str, Any] | None = None,
    queue: QueueSnapshot | None = None,
    *,
    stats: Stats | None = None,
    refusals: Mapping[int, int] | None = None,
) -> Samples:
    """Scrape a helper in this state, by default with the usual queue."""
    helper = HelperSnapshot(
        service=partial_state(**(service or FACTS)), queue=queue or await snapshot_of(ROUNDS, COUNTS)
    )
    text, _ = await create_metrics(helper, stats, refusals).render("")
    return parse_samples(text.decode())


async def test_metrics_export_service_counters() -> None:
    stats = Stats()
    for name, number in (("post_queued", 5), ("answer_accepted", 4), ("retry_proof", 2), ("proven", 7), ("strange", 1)):
        stats.count(name, number)
    stats.lateness_start.add_sample(0.02)
    stats.lateness_start.add_sample(7200)
    samples = await scrape(stats=stats, refusals={400: 3, 418: 2, 451: 1})
    assert samples["helper_share_posts_total", (("outcome", "queued"),)] == 5
    assert samples["helper_share_posts_total", (("outcome", "error"),)] == 0
    assert samples["helper_broadcasts_total", (("verdict", "accepted"),)] == 4
    assert samples["helper_retries_total", (("stage", "proof"),)] == 2
    assert samples["helper_proofs_total", ()] == 7
    assert samples["helper_refusals_total", (("status", "400"),)] == 3
    assert samples["helper_refusals_total", (("status", "other"),)] == 3
    assert samples["helper_prover_deaths_total", (("reason", "died"),)] == 3
    assert samples["helper_proving_seconds_total", ()] == 12.5
    assert samples["helper_start_lateness_seconds_bucket", (("le", "0.01"),)] == 0
    assert samples["helper_start_lateness_seconds_bucket", (("le", "0.025"),)] == 1
    assert samples["helper_start_lateness_seconds_bucket", (("le", "3600"),)] == 1
    assert samples["helper_start_lateness_seconds_bucket", (("le", "+Inf"),)] == 2
    assert samples["helper_start_lateness_seconds_sum", ()] == 7200.02
    assert "strange" not in repr(samples)


async def test_metrics_export_current_state() -> None:
    queue = replace(
        await snapshot_of(ROUNDS, COUNTS), wal_bytes=8192, erasure_pending_seconds=31.5, oldest_due_seconds=30.0
    )
    samples = await scrape(queue=queue)
    assert samples["helper_wal_bytes", ()] == 8192
    assert samples["helper_erasure_pending_seconds", ()] == 31.5
    assert samples["helper_ready", ()] == 0, "a check of /readyz fails"
    assert samples["helper_check", (("check", "store"),)] == 1
    assert samples["helper_paused", (("what", "dispatch"),)] == 1
    assert samples["helper_paused", (("what", "intake"),)] == 0
    assert samples["helper_shares", (("state", "received"),)] == 10
    assert samples["helper_rounds_active", ()] == 1
    assert samples["helper_oldest_due_seconds", ()] == 30
    assert samples["helper_endpoint_fresh", (("endpoint", "a:80"),)] == 1
    assert samples["helper_endpoint_fresh", (("endpoint", "b:80"),)] == 0
    assert ("helper_endpoint_block_age_seconds", (("endpoint", "b:80"),)) not in samples
    assert samples["helper_clock_skew_seconds", ()] == -0.25
    assert samples["helper_backlog_slack_seconds", ()] == 1000 - 12 * 0.5 / 2
    assert samples["process_resident_memory_bytes", ()] > 0


async def test_metrics_export_sender_and_archive_where_configured() -> None:
    alone = await scrape()
    assert not [name for name, _ in alone if name in {"helper_sends", "helper_archive_fails", "helper_archive_height"}]
    archive = {"through": 0, "behind": None, "problem": "the store is away"}
    samples = await scrape({**FACTS, "sends": True, "archive": archive})
    assert (samples["helper_sends", ()], samples["helper_archive_fails", ()]) == (1, 1)
    assert ("helper_archive_height", ()) not in samples
    archive = {"through": 399, "behind": 1, "problem": None}
    samples = await scrape({**FACTS, "sends": False, "archive": archive})
    assert (samples["helper_sends", ()], samples["helper_archive_fails", ()]) == (0, 0)
    assert (samples["helper_archive_height", ()], samples["helper_archive_lag_blocks", ()]) == (399, 1)


async def test_metrics_export_time_to_drain_the_due_shares() -> None:
    ahead = {ROUND: DueForecast((4, 1, *[0] * 58), 5)}
    queue = await snapshot_of(ROUNDS, COUNTS, ahead)
    samples = await scrape(queue=queue)
    assert samples["helper_backlog_drain_seconds", ()] == (4 + 2) * 0.5 / 2, "2 are being proven"
    assert samples["helper_round_slack_seconds", ()] == samples["helper_backlog_slack_seconds", ()] == 997
    facts = {**FACTS, "proof": {"p50_ms": None}, "provers": {**FACTS["provers"], "self_test_seconds": None}}
    samples = await scrape(facts, queue)
    assert not {name for name, _ in samples} & {"helper_backlog_drain_seconds", "helper_round_slack_seconds"}


async def test_round_slack_is_negative_45_minutes_ahead_of_a_flood_at_the_end() -> None:
    """10,700 shares are due in the last 44 minutes, at 4 per second: 10,560 can be proven then."""
    rounds = [Round(ROUND, RoundStatus.ACTIVE, 3700, (), 1)]
    counts = {ROUND: {ShareState.WAITING: 10_700}}
    ahead = {ROUND: DueForecast((0, 10_700, *[0] * 58), 0)}
    samples = await scrape(queue=await snapshot_of(rounds, counts, ahead))
    assert samples["helper_round_slack_seconds", ()] == -(10_700 - 2640 * 4) / 4
    assert samples["helper_round_left_seconds", ()] == 2700
    assert samples["helper_backlog_slack_seconds", ()] == 2700 - 10_700 / 4
    assert samples["helper_backlog_drain_seconds", ()] == 0


async def test_metrics_export_least_slack_across_rounds() -> None:
    rounds = [Round(ROUND, RoundStatus.ACTIVE, 1100, (), 1), Round(LATER_ROUND, RoundStatus.ACTIVE, 1101, (), 2)]
    counts = {ROUND: {ShareState.WAITING: 40}, LATER_ROUND: {ShareState.WAITING: 400}}
    samples = await scrape(queue=await snapshot_of(rounds, counts))
    assert samples["helper_backlog_slack_seconds", ()] == 101 - 440 * 0.25
    assert samples["helper_round_slack_seconds", ()] == 101 - 440 * 0.25
    assert samples["helper_round_left_seconds", ()] == 101, "of the round with the least slack"
    facts = {**FACTS, "proof": {"p50_ms": None}}
    assert (await scrape(facts))["helper_backlog_slack_seconds", ()] == 1000 - 12 * 1.0 / 2
    samples = await scrape(queue=await snapshot_of(ROUNDS))
    assert ("helper_backlog_slack_seconds", ()) not in samples
    assert ("helper_round_slack_seconds", ()) not in samples
    assert samples["helper_backlog_drain_seconds", ()] == 0
    assert samples["helper_oldest_due_seconds", ()] == 0


async def test_metrics_of_the_process_need_no_hidden_boot_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit has `ProcSubset=pid`, which hides /proc/stat."""

    def hide(_collector: ProcessCollector) -> NoReturn:
        raise FileNotFoundError

    monkeypatch.setattr(ProcessCollector, "_boot_time", hide)
    names = {name for name, _ in await scrape()}
    assert {"process_open_fds", "process_max_fds", "process_start_time_seconds"} <= names


async def test_metrics_without_store_or_queue_export_remaining_series() -> None:
    text, _ = await create_metrics(HelperSnapshot(service=partial_state(**FACTS))).render("")
    samples = parse_samples(text.decode())
    assert not [name for name, _ in samples if name in {"helper_shares", "helper_wal_bytes", "helper_rounds_active"}]
    assert samples["helper_ready", ()] == 0
    text, _ = await create_metrics(refusals={404: 1}).render("")
    bare = parse_samples(text.decode())
    assert ("helper_ready", ()) not in bare
    assert bare["helper_refusals_total", (("status", "404"),)] == 1


@pytest.mark.rule("N28")
async def test_metric_labels_name_no_round_share_or_client() -> None:
    samples = await scrape()
    labels = {name for _, pairs in samples for name, _ in pairs}
    known = {"le", "outcome", "verdict", "stage", "status", "reason", "check", "what", "endpoint", "state"}
    assert labels == known | {"version", "python"}
    assert ROUND.hex() not in repr(samples)
    assert len(samples) < 300


async def test_metric_names_follow_conventions() -> None:
    for name, _ in await scrape():
        assert re.fullmatch(r"(helper|process)_[a-z_]+", name)
    for family in create_metrics().collect():
        assert family.name.startswith("helper_")
        assert family.documentation.endswith(".")
    assert tuple(sorted(BUCKET_BOUNDS_SECONDS)) == BUCKET_BOUNDS_SECONDS


@pytest.mark.rule("N28")
async def test_recording_rules_read_every_source_once_under_the_original_names() -> None:
    samples = await scrape()
    assert not [name for name, _ in samples if name.startswith("svote_")], "only the rules give these names"
    reads: dict[tuple[str, ...], set[str]] = {}
    sources: Counter[str] = Counter()
    for rule in yaml.safe_load(RECORDING_RULES.read_text())["groups"][0]["rules"]:
        expression: Any = promql_parser.parse(rule["expr"])
        selector = getattr(expression, "expr", expression)
        read = {
            " ".join((name, *dict(labels).values())) for name, labels in samples if _selects(selector, name, labels)
        }
        is_sum = selector is not expression and expression.prettify().startswith("sum without")
        assert len(read) == 1 or is_sum or rule["record"].endswith("_bucket"), rule
        reads[rule["record"], *rule.get("labels", {}).values()] = read
        sources.update(read)
    assert set(sources.values()) == {1}
    counted = {"posts", "retries", "confirmed", "failed", "expired"}
    for name, labels in samples:
        if name.removeprefix("helper_share_").removeprefix("helper_").removesuffix("_total") in counted:
            assert sources[" ".join((name, *dict(labels).values()))] == 1
    posts, attempts = "svote_helper_share_submission_requests_total", "svote_helper_share_processing_attempts_total"
    of_posts = {f"helper_share_posts_total {outcome}" for outcome in ("too_large", "broken_off")}
    assert reads[posts, "rejected", "invalid_json"] == of_posts
    assert reads[attempts, "retry", "proof_generation"] == {f"helper_retries_total {x}" for x in ("proof", "prover")}
    assert reads["svote_helper_share_processing_in_flight",] == {"helper_shares_in_hand"}


def _selects(selector: Any, name: str, labels: tuple[tuple[str, str], ...]) -> bool:
    matchers = selector.matchers.matchers
    return name == selector.name and all(re.fullmatch(each.value, dict(labels)[each.name]) for each in matchers)


def test_metrics_count_every_post_outcome() -> None:
    assert set(wallet_routes._OUTCOMES_BY_STATUS.values()) | {"queued", "duplicate", "broken_off", "error"} == set(
        POST_OUTCOMES
    )


async def test_concurrent_scrapes_share_one_reading() -> None:
    clock, reads = FakeClock(), 0

    async def read() -> HelperSnapshot:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        return HelperSnapshot(service=partial_state(**FACTS))

    stats = Stats()
    metrics = Metrics(stats, read, refusals={}, clock=clock)
    app = create_metrics_app(metrics, lambda: [Check("store", "full")])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://helper") as client:
        plain = {"accept": "text/plain;version=0.0.4"}
        responses = await asyncio.gather(*(client.get("/metrics", headers=plain) for _ in range(20)))
        assert reads == 1
        assert len({response.content for response in responses}) == 1
        assert responses[0].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        openmetrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,*/*"})
        assert reads == 1
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        names = {family.name for family in parse_open(openmetrics.text)}
        assert {"helper_proofs", "helper_proof_seconds", "helper_ready"} <= names
        stats.count("proven")
        clock.advance(REUSE_SECONDS + 0.1)
        assert parse_samples((await client.get("/metrics")).text)["helper_proofs_total", ()] == 1
        assert reads == 2
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/")).status_code == 404


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("127.0.0.1", "attacker.example:9464", 421),
        ("127.0.0.1", "127.0.0.1.attacker.example", 421),
        ("127.0.0.1", "", 421),
        ("[::1]", "attacker.example", 421),
        ("127.0.0.1", "127.0.0.1:9464", 200),
        ("127.0.0.1", "LOCALHOST:9464", 200),
        ("[::1]", "[::1]:9464", 200),
        ("192.0.2.1", "helper.internal:9464", 200),
    ],
)
async def test_metrics_on_loopback_foreign_host_is_refused(address: str, host: str, status: int) -> None:
    app = create_metrics_app(create_metrics(), list)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{address}") as client:
        for path in ("/metrics", "/livez"):
            assert (await client.get(path, headers={"Host": host})).status_code == status


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "::1"),
        ("::", "::1"),
        ("::", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
async def test_metrics_reached_over_loopback_foreign_host_is_refused(host: str, reached: str) -> None:
    server = Server(Edge(create_metrics_app(create_metrics(), list)), METRICS_LIMITS)
    listener = bind_tcp(host, 0, section="metrics")
    port = listener.getsockname()[1]
    url = f"http://[{reached}]:{port}/metrics" if ":" in reached else f"http://{reached}:{port}/metrics"
    async with asyncio.timeout(30):
        serving = asyncio.create_task(server.serve([listener]))
        async with httpx.AsyncClient(trust_env=False) as client:
            statuses = {
                name: (await client.get(url, headers={"Host": name})).status_code
                for name in ("attacker.example", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}")
            }
        server.stop()
        await serving
    assert list(statuses.values()) == [421, 200, 200, 200]


@pytest.mark.parametrize("begin", [b"", b"GET /metrics HTTP/1.1\r\n"])
async def test_metrics_held_connections_do_not_lock_out_a_scraper(
    begin: bytes,
) -> None:
    server = Server(Edge(create_metrics_app(create_metrics(), list)), replace(METRICS_LIMITS, eviction_seconds=0))
    listener = bind_tcp("127.0.0.1", 0, section="metrics")
    address = listener.getsockname()
    with contextlib.ExitStack() as held:
        async with asyncio.timeout(30):
            serving = asyncio.create_task(server.serve([listener]))
            for _ in range(METRICS_LIMITS.max_connections):
                held.enter_context(socket.create_connection(address)).sendall(begin)
            async with httpx.AsyncClient(trust_env=False) as client:
                statuses = [(await client.get(f"http://127.0.0.1:{address[1]}/metrics")).status_code for _ in range(3)]
    server.stop()
    await serving
    assert statuses == [200] * 3


class FakeStore(PartialStore):
    """A store with one waiting share that can fail or hang."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_hanging = False

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return {ROUND: {ShareState.WAITING: 1}}

    async def next_due_ms(self, rounds: Any) -> int | None:
        assert list(rounds) == [ROUND]
        return 5000

    async def list_damaged(self) -> list[DamagedShare]:
        return [DamagedShare("ab", ROUND, 0)]

    async def count_due_ahead(self, *, now: float) -> dict[bytes, DueForecast]:
        return {ROUND: DueForecast((1, *[0] * 59), 0)}


class FakeRounds:
    def all_rounds(self) -> list[Round]:
        return [Round(ROUND, RoundStatus.ACTIVE, 2000, (), 1)]


async def test_overview_reads_only_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_failures(*_: object, **__: object) -> list[FailedShares]:
        return [FailedShares("proof", "timed out", 2, 5.0)]

    async def refuse(*_: object) -> NoReturn:
        raise AssertionError("not part of the overview")

    monkeypatch.setattr(FakeStore, "list_matching_failures", list_failures)
    for name in ("next_due_ms", "list_damaged", "list_purged_failures"):
        monkeypatch.setattr(FakeStore, name, refuse)
    rounds = cast(RoundRegistry, FakeRounds())
    overview = await QueueObserver(FakeStore(), rounds, partial_state, clock=FakeClock(now=8.0)).read_overview()
    assert [group.reason for group in overview.failures] == ["timed out"]
    assert overview.rounds[0].due_per_minute == (1, *[0] * 59)


async def test_scrape_with_failing_or_hanging_store_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    observer = QueueObserver(
        store, cast(RoundRegistry, FakeRounds()), lambda: partial_state(**FACTS), clock=FakeClock(now=8.0)
    )
    queue = (await observer.read_for_scrape()).queue
    assert queue is not None
    assert (queue.total.received, queue.oldest_due_seconds, len(queue.damaged)) == (1, 3.0, 1)
    assert queue.rounds[0].due_per_minute == (1, *[0] * 59)
    store.error = StoreError("the disk is gone")
    helper = await observer.read_for_scrape()
    assert (helper.queue, helper.service and helper.service.ready) == (None, True)
    monkeypatch.setattr("helper.observability.queue_snapshot.STORE_TIMEOUT_SECONDS", 0.01)
    store.is_hanging = True
    assert (await observer.read_for_scrape()).queue is None
