"""The service: when it accepts shares, and its failure when a component fails."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

import proofs
from helper.app.service import Service
from helper.chain.node_pool import create_nodes
from helper.config.sections import Config
from helper.core.text_forms import format_time
from helper.errors import HelperError, ReleaseError, StoreDisplaced
from helper.observability.service_state import Check
from helper.reveal.prover_pool import ProverPool, WorkerProcess
from helper.runtime.supervisor import FIRST_RESTART_SECONDS
from helper.server.wallet_routes import create_wallet_edge
from helper.store import blocks
from helper.store.ledger import LEDGER_KEY, BlockRange, Ledger, format_ledger
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.support.edge_client import create_edge_client
from tests.support.fakes import wait_until
from tests.support.postgres import find_binaries
from tests.support.release import create_signed_release, sign_sums, write_sums
from tests.support.shared_queue import create_key_file
from tests.unit.chain.fakes import FakeNetwork, FakeNode
from tests.unit.store.conformance.backends import PostgresBackend
from tests.unit.store.fixtures import claim_all_due, enqueue_shares
from tests.unit.store.test_damage import damage_index

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 20.0
STATUS_PATH = "/shielded-vote/v1/status"
no_worker = partial(WorkerProcess.spawn, command=("false",))


class ServiceHarness:
    """A service with one node; the service does not run, its store is open."""

    def __init__(self, directory: Path, *others: str, **sections: Any) -> None:
        self.clock = FakeClock()
        self.node = FakeNode(self.clock, height=100)
        self.network = FakeNetwork(node=self.node)
        config = Config.model_validate({"helper": {"db_path": str(directory / "q.db"), "port": 0}, **sections})
        nodes = create_nodes([(f"http://{name}:1317", "") for name in ("node", *others)], transport=self.network)
        self.service = Service(config, clock=self.clock, nodes=nodes, spawn_worker=no_worker)

    async def poll(self, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        await self.service.node_pool.probe_all()
        await self.service.chain_sync.sync_once()

    def find_check(self, name: str) -> Check:
        """The check of `/readyz` with this name."""
        return next(check for check in self.service.health.run_checks() if check.name == name)

    async def status(self) -> httpx.Response:
        async with create_edge_client(create_wallet_edge(self.service.wallet_api)) as client:
            return await client.get(STATUS_PATH)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    harness = ServiceHarness(tmp_path)
    await harness.service.store.open()
    yield harness
    await harness.service.store.close()


async def test_new_database_is_announced_until_it_knows_its_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for is_new in (True, False):
        harness = ServiceHarness(Path())
        with capture_logs() as entries:
            async with harness.service.open_queue():
                await harness.poll()
        announced = [entry["path"] for entry in entries if entry["event"] == "database_created"]
        assert announced == ([str(tmp_path / "q.db")] if is_new else [])
        assert harness.service.new_database == (str(tmp_path / "q.db") if is_new else None)


async def test_intake_is_open_until_newest_block_is_too_old(harness: ServiceHarness) -> None:
    paused = harness.service.gates.intake_pause_reason
    assert "starting" in str(paused())
    await harness.poll()
    assert paused() is None
    del harness.network.nodes["node"]
    await harness.poll(30)
    assert not harness.service.node_pool.has_usable_node
    assert paused() is None, "a node is unreachable for a moment"
    await harness.poll(59)
    assert paused() is None
    await harness.poll(2)
    assert str(paused()) == "no chain node is in sync"
    harness.network.nodes["node"] = harness.node
    await harness.poll(0)
    assert paused() is None


async def test_stalled_node_or_node_of_other_chain_pauses_intake(harness: ServiceHarness) -> None:
    await harness.poll()
    harness.node.chain_id = "other-1"
    await harness.poll()
    assert harness.service.gates.intake_pause_reason() is not None, "the node responds but is not usable"
    harness.node.chain_id = "svote-1"
    await harness.poll()
    assert harness.service.gates.intake_pause_reason() is None
    harness.node.age = 91
    await harness.poll()
    assert harness.service.gates.intake_pause_reason() is not None


async def test_status_is_ok_only_while_shares_are_accepted(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused() -> str:
        response = await harness.status()
        assert response.status_code == 503
        assert response.json()["status"] == "error"
        return str(response.json()["error"])

    assert "starting" in await refused()
    await harness.poll()
    assert await refused() == "starting", "no prover is ready yet"
    monkeypatch.setattr(type(harness.service.prover_pool), "is_ready", property(lambda _: True))
    monkeypatch.setattr(harness.service.gates, "is_dispatching", True)
    assert (await harness.status()).json()["status"] == "ok"
    del harness.network.nodes["node"]
    await harness.poll(91)
    assert "no chain node" in await refused()
    assert not harness.service.health.is_ready


async def test_readiness_names_the_route_that_no_node_answers(harness: ServiceHarness) -> None:
    await harness.poll()
    node = harness.network.nodes["node"]
    node.faults["/rounds"] = lambda _: httpx.Response(500, content=b"<html>")
    node.height += 1
    for _ in range(31):
        assert harness.find_check("chain").problem is None
        await harness.poll()
    assert "`rounds`" in str(harness.find_check("chain").problem)
    node.faults.clear()
    await harness.poll()
    assert harness.find_check("chain").problem is None


async def test_readiness_fails_while_dispatch_is_paused_for_long(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = harness.service.gates
    monkeypatch.setattr(type(harness.service.block_follower), "is_ready", property(lambda _: True))

    def dispatch() -> str | None:
        return harness.find_check("dispatch").problem

    await harness.poll()
    assert (gates.get_dispatch_gate().pause_reason, dispatch()) == (None, None)
    del harness.network.nodes["node"]
    await harness.poll()
    assert str(gates.get_dispatch_gate().pause_reason) == "no chain node is in sync"
    await harness.poll(29)
    assert dispatch() is None, "a node restarts"
    await harness.poll(1)
    assert dispatch() == "no chain node is in sync"
    assert gates.intake_pause_reason() is None, "shares are still accepted"
    harness.network.nodes["node"] = harness.node
    await harness.poll()
    assert dispatch() is None
    del harness.network.nodes["node"]
    await harness.poll(29)
    assert dispatch() is None, "the pause before it has ended"


async def test_readiness_fails_while_dispatch_raises_errors(harness: ServiceHarness) -> None:
    health, stats, clock = harness.service.health, harness.service.stats, harness.clock

    def dispatch() -> str | None:
        return {check.name: check.problem for check in health.collect_status().checks}["dispatch"]

    stats.note_attempt("claiming due shares", KeyError("x"), clock.monotonic())
    clock.advance(29)
    stats.note_attempt("claiming due shares", KeyError("y"), clock.monotonic())
    assert dispatch() is None, "single errors are no problem"
    clock.advance(1)
    assert dispatch() == "dispatch fails, see the log: claiming due shares"
    stats.note_attempt("claiming due shares", None, clock.monotonic())
    assert dispatch() is None


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (100, "no block above 100 since {} UTC (5 min): the chain has stopped"),
        (50, "two nodes have not agreed on a block above 50 since {} UTC (5 min), but one reports 100"),
        (None, None),  # it does not respond: see the check of unread blocks
    ],
)
async def test_readiness_fails_while_nodes_respond_and_agree_on_no_new_block(
    tmp_path: Path, second: int | None, problem: str | None
) -> None:
    harness = ServiceHarness(tmp_path, "second")
    other = FakeNode(harness.clock, height=100 if second is None else second)
    harness.network.nodes["second"] = other
    async with harness.service.open_queue():

        def chain() -> str | None:
            return harness.find_check("chain").problem

        await harness.poll()
        since = format_time(harness.clock.now())
        if second is None:
            del harness.network.nodes["second"]
        await harness.poll(299)
        assert chain() is None
        await harness.poll()
        assert str(chain()).startswith(problem.format(since)) if problem else chain() is None
        harness.network.nodes["second"] = other  # also after a long outage, before it has caught up
        if second is None:
            await harness.poll()
            assert chain() is None
        harness.node.height = other.height = 101
        await harness.poll()
        assert chain() is None


async def test_readiness_fails_while_a_node_moves_the_agreed_height_up_and_down(tmp_path: Path) -> None:
    harness = ServiceHarness(tmp_path, "second")
    other = harness.network.nodes["second"] = FakeNode(harness.clock, height=99)
    async with harness.service.open_queue():
        for number in range(12):
            harness.node.height += 10
            other.height = 98 + number % 2
            await harness.poll(30)
        assert "have not agreed on a block above 99" in str(harness.find_check("chain").problem)


async def test_readiness_fails_while_blocks_stay_unread(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = harness.service.block_follower
    monkeypatch.setattr(type(follower), "is_ready", property(lambda _: True))

    def problem() -> str | None:
        return harness.find_check("blocks").problem

    async def show(ranges: list[BlockRange], *, height: int = 100) -> None:
        text = format_ledger(Ledger(1, height, tuple(ranges)))
        await harness.service.store.run(blocks.set_meta, LEDGER_KEY, text)
        await follower._load_ledger()
        await harness.poll()

    await show([])
    for ranges, height, count in (([(41, 43)], 100, 3), ([(42, 43)], 100, 2), ([], 89, 11)):
        await show([])
        await show(ranges, height=height)  # a node lacks them, or the follower fails
        since = format_time(harness.clock.now())
        await harness.poll(599)
        assert problem() is None
        await harness.poll()
        assert str(problem()).startswith(f"{count} blocks unread since {since} UTC: the node does not return them")
        await show([*ranges, (60, 60)], height=height)
        assert problem(), "new unread blocks are no progress"
    for last in range(99, 79, -1):
        await show([(1, last)])
        assert problem() is None, "they are being read"
        await harness.poll(599)


async def test_disputed_chain_id_is_a_note_without_names(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.poll()
    assert harness.find_check("chain").note is None
    dispute = property(lambda _: "a:1317 is on chain x-1, b:1317 is on chain y-1")
    monkeypatch.setattr(type(harness.service.node_pool), "chain_id_dispute", dispute)
    assert harness.find_check("chain").note == "the entries of [chain] endpoints are of different chains, see the log"


async def test_doubted_round_is_dispatched_with_an_end_of_infinity(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(harness.service.block_follower), "is_ready", property(lambda _: True))
    await harness.poll()
    gates, registry = harness.service.gates, harness.service.gates.round_registry
    ends = gates.get_dispatch_gate().ends
    assert ends == {known.round_id: known.vote_end_time for known in registry.active_rounds()}
    assert ends
    monkeypatch.setattr(registry, "is_doubted", lambda _: True)
    assert gates.get_dispatch_gate().ends == dict.fromkeys(ends, math.inf), "its end is the word of one node"


async def test_failing_route_of_only_node_does_not_pause_dispatch(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(harness.service.block_follower), "is_ready", property(lambda _: True))
    await harness.poll()
    harness.node.faults["/rounds"] = lambda _: httpx.Response(500)
    for _ in range(60):
        harness.node.height += 1
        await harness.poll()
        assert harness.service.gates.get_dispatch_gate().pause_reason is None


async def test_provers_start_with_the_circuit_that_the_chain_accepted_last(tmp_path: Path) -> None:
    first = ServiceHarness(tmp_path)
    async with first.service.open_queue():
        assert first.service.prover_pool.circuits[0] == "k10"
        await first.poll()
        first.service.circuit_choice.select_initial("svote-1", "", None)
        await first.service.circuit_choice.record_counted("k11", 1)
    restarted = ServiceHarness(tmp_path)
    async with restarted.service.open_queue():
        assert restarted.service.prover_pool.circuits == ("k11", "k10")


async def test_error_while_reconciling_reveals_does_not_stop_service(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: asyncio.Queue[int] = asyncio.Queue()

    async def reconcile() -> None:
        calls.put_nowait(1)
        if calls.qsize() == 1:
            raise ValueError("a mistake of ours")

    await harness.poll()
    monkeypatch.setattr(harness.service.gates, "is_dispatching", True)
    for name in ("is_caught_up", "is_ready"):
        monkeypatch.setattr(type(harness.service.block_follower), name, property(lambda _: True))
    monkeypatch.setattr(harness.service.sender, "reconcile", reconcile)
    task = asyncio.create_task(harness.service._reconcile_after_blocks())
    async with asyncio.timeout(PATIENCE_SECONDS):
        for number in (1, 2):
            harness.service._on_block(100 + number)
            while calls.qsize() < number:
                await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


@pytest.mark.parametrize("part", ["prover_pool", "block_follower", "chain_sync"])
@pytest.mark.parametrize("error", [None, ValueError("a mistake of ours")])
async def test_ended_component_ends_service_with_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception | None
) -> None:
    harness = ServiceHarness(tmp_path)

    async def end_component() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(getattr(harness.service, part), "run", end_component)
    monkeypatch.setattr(harness.service.prover_pool, "wait_ready", wait_forever)
    if part != "prover_pool":
        monkeypatch.setattr(harness.service.prover_pool, "run", wait_forever)
    expected: Any = HelperError if error is None else ValueError
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(expected, match=f"{part} ended unexpectedly" if error is None else "mistake"):
            await harness.service.run()
    assert not harness.service.config.socket_path.exists()


async def test_stop_ends_service_without_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ServiceHarness(tmp_path)
    monkeypatch.setattr(harness.service.prover_pool, "run", wait_forever)
    monkeypatch.setattr(harness.service.prover_pool, "wait_ready", wait_forever)
    waits_ended = asyncio.Event()
    monkeypatch.setattr(harness.service.admission, "stop_waits", waits_ended.set)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await harness.service.run(on_started=lambda _url: harness.service.stop())
    assert waits_ended.is_set(), "a share that waits for the chain does not delay the stop"


async def test_failed_comparison_of_node_ids_is_reported_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = ServiceHarness(tmp_path)
    calls = 0

    async def compare() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("a mistake of ours")
        harness.service.stop()

    monkeypatch.setattr(harness.service.node_pool, "compare_node_ids", compare)
    for name in ("run", "wait_ready"):
        monkeypatch.setattr(harness.service.prover_pool, name, wait_forever)
    with capture_logs() as entries:
        async with asyncio.timeout(PATIENCE_SECONDS):
            running = asyncio.create_task(harness.service.run())
            while not running.done():
                harness.clock.advance(FIRST_RESTART_SECONDS if calls else 0)
                await asyncio.sleep(0)
            await running
    assert [entry["components"] for entry in entries if entry["event"] == "component_failed"] == [["node ids"]]


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def test_status_reports_unwritable_queue(harness: ServiceHarness) -> None:
    await harness.poll()
    assert isinstance(harness.service.store, SqliteStore)
    harness.service.store._writer.disk_health.record_failure(sqlite3.OperationalError("disk I/O error"))
    assert str(harness.service.gates.intake_pause_reason()) == "the queue cannot be written"
    response = await harness.status()
    assert (response.status_code, "cannot be written" in response.text) == (503, True)


async def test_service_frozen_round_with_waiting_shares_fails_readiness(
    harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.poll()
    service = harness.service
    monkeypatch.setattr(service.round_registry, "frozen_shares", lambda: {b"\x07" * 32: 2})
    assert harness.find_check("rounds").problem == "round 07070707 is frozen and has waiting shares"
    assert service.gates.intake_pause_reason() is None, "other rounds continue"


async def test_service_with_displaced_database_pauses_until_it_is_back(harness: ServiceHarness, tmp_path: Path) -> None:
    await harness.poll()
    service, reason = harness.service, "the database file is no longer at its path"
    (tmp_path / "q.db").rename(tmp_path / "aside.db")
    with pytest.raises(StoreDisplaced):
        await service.store.run(blocks.set_meta, "test", "value")

    assert str(service.gates.intake_pause_reason()) == reason
    assert harness.find_check("store").problem == reason
    assert str(service.gates.get_dispatch_gate().pause_reason) == reason
    response = await harness.status()
    assert (response.status_code, reason in response.text) == (503, True)

    (tmp_path / "aside.db").rename(tmp_path / "q.db")
    await wait_until(lambda: service.gates.intake_pause_reason() is None)
    await service.store.run(blocks.set_meta, "test", "value")


async def test_service_with_require_verified_starts_only_with_the_native_module_of_the_release(tmp_path: Path) -> None:
    native = proofs.native_module_path()
    release = create_signed_release(tmp_path, native.parents[1], [f"proofs/{native.name}"])
    prover = {
        "require_verified": True,
        "release_manifest": str(release.manifest),
        "allowed_signers": str(release.signers),
    }
    config = Config.model_validate(
        {"helper": {"db_path": str(tmp_path / "q.db")}, "chain": {"endpoints": ["http://node:1"]}, "prover": prover}
    )
    Service(config, spawn_worker=no_worker)

    release.manifest.write_text(release.manifest.read_text().replace(native.name, "_native.other.so"))
    write_sums(release.manifest.parent)
    with pytest.raises(ReleaseError, match="not a signature"):
        Service(config, spawn_worker=no_worker)
    sign_sums(release.manifest.parent, release.key)
    with pytest.raises(ReleaseError, match=r"_native.*does not match the signed release"):
        Service(config, spawn_worker=no_worker)


async def test_sender_that_has_no_usable_node_or_does_not_dispatch_cannot_reveal(tmp_path: Path) -> None:
    harness = ServiceHarness(tmp_path, sender={"lease": "s3://votes/sender.json"})
    cluster, gates = harness.service.cluster, harness.service.gates
    assert cluster is not None
    await harness.service.node_pool.probe_all()
    assert not cluster._can_reveal(), "no prover is ready"
    gates.is_dispatching = True
    assert cluster._can_reveal()
    harness.node.age = 91
    await harness.service.node_pool.probe_all()
    assert not cluster._can_reveal()


@pytest.mark.parametrize("database", ["cluster"] if find_binaries() is not None else [])
async def test_host_renews_its_claims_only_while_a_prover_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, database: str
) -> None:
    is_ready = [True]
    monkeypatch.setattr(ProverPool, "is_ready", property(lambda _: is_ready[0]))
    backend = PostgresBackend(request.getfixturevalue(database).url, f"test_{token_hex(6)}")
    store = {"url": backend.address, "schema_name": backend.schema, "lease_seconds": 1}
    service = ServiceHarness(tmp_path, store={**store, "key_file": create_key_file(tmp_path)}).service
    await service.store.open()
    try:
        await enqueue_shares(service.store, 1)
        await claim_all_due(service.store)
        ((first,),) = backend.query_rows("SELECT until FROM claims")
        await wait_until(lambda: backend.query_rows("SELECT until FROM claims")[0][0] > first)
        is_ready[0] = False
        await wait_until(lambda: backend.query_rows("SELECT 1 FROM claims WHERE until < clock_timestamp()"))
    finally:
        await service.store.close()


async def test_damaged_index_is_reported_until_the_next_start(harness: ServiceHarness, tmp_path: Path) -> None:
    store = harness.service.store
    assert isinstance(store, SqliteStore)
    await enqueue_shares(store, *range(30))
    await damage_index(store, tmp_path / "q.db", "shares_due")
    await store.open()
    check = harness.find_check("store")
    assert (check.problem, check.note) == (None, None)

    await store.verify()

    assert await store.verify() == [], "the index was rebuilt"
    check = harness.find_check("store")
    assert (check.problem, check.note) == (None, "the database was damaged: see the log")
