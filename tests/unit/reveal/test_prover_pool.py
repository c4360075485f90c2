"""Prover workers: real processes, fake proofs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import proofs
from devnet.stand_in_proofs import STAND_IN_PREFIX
from helper.clock import SystemClock
from helper.errors import (
    ProofFailed,
    ProofNotNeeded,
    ProverCrashed,
    ProverError,
    ProverTimeout,
    ReleaseError,
    StoreError,
)
from helper.reveal import prover_pool as pool_module
from helper.reveal.prover_pool import ProverPool, WorkerProcess
from helper.reveal.prover_worker import Frame
from tests.support import prover_worker
from tests.support.fakes import create_provable_share, wait_until
from tests.support.tasks import running

COMMAND = (sys.executable, "-m", "tests.support.prover_worker")
spawn_stand_in = partial(WorkerProcess.spawn, command=COMMAND)


async def make_proof(pool: ProverPool, proposal_id: int = 1) -> proofs.Proved:
    """Prove a valid share of this proposal."""
    return await pool.prove("k10", *create_provable_share(proposal_id))


def create_pool(**settings: Any) -> ProverPool:
    usual: dict[str, Any] = {"workers": 1, "circuits": ("k10", "k11"), "clock": SystemClock(), "nice": 10}
    return ProverPool(**{**usual, "spawn": spawn_stand_in, **settings})


async def wait_ready(pool: ProverPool) -> None:
    async with asyncio.timeout(60):
        await pool.wait_ready()


@asynccontextmanager
async def run_until_cancelled(pool: ProverPool) -> AsyncIterator[None]:
    async with running(pool.run()):
        await asyncio.sleep(0)
        yield


@asynccontextmanager
async def run_pool(*, is_warm: bool = True, **settings: Any) -> AsyncIterator[ProverPool]:
    """A pool of workers with fake proofs, by default one of both circuits; all warm unless the test waits for them."""
    pool = create_pool(**settings)
    async with run_until_cancelled(pool):
        if is_warm:
            await wait_ready(pool)
        yield pool


async def wait_until_exited(pid: int) -> None:
    """Return once no process has this id (the time limit of the test ends the wait)."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0)


async def test_reply_longer_than_the_limit_is_refused() -> None:
    worker = await WorkerProcess.spawn(threads=1, command=("cat", "/dev/zero"))
    try:
        with pytest.raises(ProverCrashed, match="LimitOverrunError"):
            await worker.exchange({"op": "prove"}, 60.0)
    finally:
        await worker.kill()


async def test_prove_returns_statement_of_witness() -> None:
    async with run_pool() as pool:
        share, path = create_provable_share()
        proof = await pool.prove("k10", share, path)
        assert proof.root == prover_worker.compute_root(
            proofs.vote_commitment(share.round_id, proofs.shares_hash(share.share_comms), 1, 1), 0, path
        )

        async def accepted(decision: int) -> bool:
            statement = proofs.Statement(
                nullifier=proof.nullifier,
                c1=share.c1,
                c2=share.c2,
                proposal_id=1,
                vote_decision=decision,
                root=proof.root,
                round_id=share.round_id,
            )
            return await pool.verify("k10", proof.proof, statement)

        assert await accepted(1)
        assert not await accepted(0)
        assert (pool.root_of(proof.proof), pool.root_of(b"another")) == (proof.root, None)


@pytest.mark.parametrize("wait_seconds", [600.0, 0.0])
async def test_other_workers_start_once_the_first_has_made_a_proof(
    monkeypatch: pytest.MonkeyPatch, wait_seconds: float
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_WORKER_SECONDS", wait_seconds)
    monkeypatch.setattr(pool_module, "FIRST_PROOF_SECONDS", wait_seconds)
    may_start, starts = asyncio.Event(), asyncio.Queue[int]()

    async def spawn(*, threads: int) -> WorkerProcess:
        starts.put_nowait(threads)
        await may_start.wait()
        return await spawn_stand_in(threads=threads)

    async with run_pool(is_warm=False, workers=2, circuits=("k10",), spawn=spawn) as pool:
        await starts.get()
        if wait_seconds == 0.0:
            await starts.get()  # although the first one is not ready
        assert (pool.is_ready, starts.qsize()) == (False, 0)
        may_start.set()
        await pool.wait_ready()
        if wait_seconds > 0.0:
            await make_proof(pool)
            assert starts.qsize() == 0
            await starts.get()


class WorkerAtStart:
    """A worker that is ready when the test says so."""

    pid = 1

    def __init__(self, has_begun: asyncio.Event, is_ready: asyncio.Event) -> None:
        self._has_begun, self._is_ready = has_begun, is_ready

    async def exchange(self, _frame: Frame, _timeout: float) -> Frame:
        self._has_begun.set()
        await self._is_ready.wait()
        return {"self_test_seconds": 0.1}

    async def wait_ended(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def kill(self) -> None:
        pass


@pytest.mark.parametrize("passes", range(12))
async def test_pool_ends_if_it_is_cancelled_as_its_first_worker_becomes_ready(passes: int) -> None:
    has_begun, is_ready = asyncio.Event(), asyncio.Event()

    async def spawn(**_options: object) -> WorkerAtStart:
        return WorkerAtStart(has_begun, is_ready)

    pool = asyncio.create_task(create_pool(workers=3, spawn=spawn).run())
    await has_begun.wait()
    is_ready.set()
    for _ in range(passes):  # each is another moment of the stop
        await asyncio.sleep(0)
    pool.cancel()
    assert await asyncio.wait({pool}, timeout=5) == ({pool}, set())
    assert pool.cancelled()


async def test_prove_is_not_begun_when_no_longer_needed() -> None:
    async def refuse() -> bool:
        return False

    async def fail() -> bool:
        raise StoreError("unreadable")

    async with run_pool() as pool:
        pids = pool.pids
        share, path = create_provable_share()
        with pytest.raises(ProofNotNeeded):
            await pool.prove("k10", share, path, begin=refuse)
        with pytest.raises(StoreError, match="unreadable"):
            await pool.prove("k10", share, path, begin=fail)
        await make_proof(pool)
        assert pool.pids == pids, "the worker goes on"


async def test_jobs_that_go_first_precede_queued_ones() -> None:
    started: list[int] = []
    is_waiting, may_go_on = asyncio.Event(), asyncio.Event()

    async with run_pool() as pool:
        share, path = create_provable_share()

        async def prove(number: int, *, has_priority: bool) -> None:
            async def begin() -> bool:
                is_waiting.set()
                await may_go_on.wait()
                started.append(number)
                return True

            await pool.prove("k10", share, path, begin=begin, has_priority=has_priority)

        proving = [asyncio.create_task(prove(0, has_priority=False))]
        await is_waiting.wait()
        proving += [asyncio.create_task(prove(number, has_priority=number > 2)) for number in (1, 2, 3, 4)]
        await wait_until(lambda: pool._queue.qsize() == 4)
        may_go_on.set()
        await asyncio.gather(*proving)

    assert started == [0, 3, 4, 1, 2]


async def test_time_for_which_the_service_was_stopped_is_not_time_of_the_prover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = await WorkerProcess.spawn(threads=1, command=("cat",))  # replies with the request
    try:
        os.kill(worker.pid, signal.SIGSTOP)
        exchange = asyncio.create_task(worker.exchange({"op": "prove"}, 60.0))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda loop_time=loop.time: loop_time() + 63.0)
        await asyncio.wait((exchange,), timeout=0.0)
        await asyncio.sleep(0.01)  # a timer that expires after those of the time that was skipped
        os.kill(worker.pid, signal.SIGCONT)
        assert await exchange == {"op": "prove"}
    finally:
        await worker.kill()


async def test_hanging_worker_is_killed_and_replaced() -> None:
    async with run_pool(timeout=0.2) as pool:
        (pid,) = pool.pids
        with pytest.raises(ProverTimeout):
            await make_proof(pool, prover_worker.PROPOSAL_HANGS)
        await wait_until_exited(pid)
        pool.timeout = 60.0
        assert (await make_proof(pool)).proof.startswith(STAND_IN_PREFIX)


async def test_crashing_worker_fails_only_its_job() -> None:
    async with run_pool(workers=2) as pool:
        results = await asyncio.gather(
            make_proof(pool, prover_worker.PROPOSAL_CRASHES),
            make_proof(pool),
            make_proof(pool),
            return_exceptions=True,
        )
        assert [type(result).__name__ for result in results] == ["ProverCrashed", "Proved", "Proved"]


async def test_killed_idle_worker_is_replaced_transparently() -> None:
    async with run_pool() as pool:
        (idle,) = pool.pids
        os.kill(idle, signal.SIGKILL)
        await wait_until_exited(idle)
        proof = None
        while proof is None:
            try:
                proof = await make_proof(pool)
            except ProverCrashed:  # the job reached the exiting worker; the dispatcher would handle the error
                continue
        assert pool.pids != [idle]


async def test_refused_witness_keeps_worker_alive() -> None:
    async with run_pool() as pool:
        before = pool.pids
        with pytest.raises(ProofFailed, match="failure requested"):
            await make_proof(pool, prover_worker.PROPOSAL_REFUSED)
        await make_proof(pool)
        assert pool.pids == before


async def test_start_with_other_key_fingerprint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_BAD_KEYS", "1")
    pool = create_pool(workers=2)
    with pytest.raises(ProverError, match="fingerprint"):
        await pool.run()
    assert (pool.is_ready, pool.pids) == (False, [])


async def test_worker_start_is_retried_after_failure(tmp_path: Path) -> None:
    program = tmp_path / "worker"
    spawn = partial(WorkerProcess.spawn, command=(str(program),))
    async with run_pool(is_warm=False, circuits=("k10",), spawn=spawn) as pool:
        with capture_logs() as logs:
            await wait_until(lambda: any(entry["event"] == "prover_start_failed" for entry in logs))
        unfinished = tmp_path / "unfinished"
        unfinished.write_text(f"#!/bin/sh\nexec {sys.executable} -m tests.support.prover_worker\n")
        unfinished.chmod(0o755)
        unfinished.replace(program)
        await wait_ready(pool)
        assert (await make_proof(pool)).proof.startswith(STAND_IN_PREFIX)


async def test_proof_timeout_is_a_minute_or_fifty_self_tests() -> None:
    async with run_pool() as pool:
        assert pool.proof_timeout("k11") == 60.0
    async with run_pool(timeout=7.5) as pool:
        assert pool.proof_timeout("k11") == 7.5


class SlowSelfTestWorker(WorkerProcess):
    """A worker whose self-test took two seconds. It records the requests, and `key_errors` are those for more keys."""

    pid = 1

    def __init__(self) -> None:
        """Start no process."""
        self.requests: asyncio.Queue[tuple[str, list[str]]] = asyncio.Queue()
        self.key_errors: list[Exception] = []

    async def spawn_instead(self, *, threads: int) -> SlowSelfTestWorker:
        """Return this worker in place of a process."""
        return self

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        self.requests.put_nowait((frame["op"], list(frame.get("circuits", ()))))
        if frame["op"] == "load" and self.key_errors:
            raise self.key_errors.pop()
        proof = {"proof": "", "nullifier": "", "root": ""} if frame["op"] == "prove" else {}
        return {"self_test_seconds": 2.0, **proof}

    async def wait_ended(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("circuits", "k10", "limits"), [(("k10", "k11"), 2.0, (100, 600)), (("k11", "k10"), 1 / 3, (60, 100))]
)
async def test_self_test_of_one_circuit_estimates_the_other(
    circuits: tuple[str, ...], k10: float, limits: tuple[float, float]
) -> None:
    async with run_pool(is_warm=False, circuits=circuits, spawn=SlowSelfTestWorker().spawn_instead) as pool:
        assert pool.estimated_seconds("k10") is None
        await wait_ready(pool)
        assert pool.estimated_seconds("k10") == pytest.approx(k10)
        assert pool.estimated_seconds("k11") == pytest.approx(6 * k10)
        assert (pool.proof_timeout("k10"), pool.proof_timeout("k11")) == pytest.approx(limits)


async def test_worker_is_ready_with_one_circuit_and_creates_other_keys_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = SlowSelfTestWorker()
    monkeypatch.setattr(pool_module, "LOAD_IDLE_SECONDS", 0.01)
    pool = create_pool(spawn=worker.spawn_instead)
    pool.circuits = ("k11", "k10")
    async with asyncio.timeout(60), run_until_cancelled(pool):
        assert await worker.requests.get() == ("start", ["k11"])
        await pool.wait_ready()
        assert await worker.requests.get() == ("load", ["k10"])
        assert worker.requests.empty()


@pytest.mark.parametrize("errors", [[], [ProverTimeout("no reply"), ProverCrashed("killed")]], ids=["loads", "fails"])
async def test_job_of_other_circuit_begins_once_its_keys_are_loaded(errors: list[Exception]) -> None:
    worker = SlowSelfTestWorker()
    worker.key_errors = list(errors)
    requests: list[tuple[str, list[str]]] = []

    async def begin() -> bool:
        while not worker.requests.empty():
            requests.append(worker.requests.get_nowait())
        return True

    settings: dict[str, Any] = {"circuits": ("k11", "k10"), "spawn": worker.spawn_instead}
    async with asyncio.timeout(60), run_pool(is_warm=False, **settings) as pool:
        await pool.prove("k10", *create_provable_share(), begin=begin)
        starts = 1 + len(errors)
        assert requests == [("start", ["k11"]), ("load", ["k10"])] * starts
        assert pool.unexpected_exits.total() == len(errors)


async def test_worker_whose_native_module_is_not_verified_is_not_started() -> None:
    spawned: list[int] = []
    checks = iter([ReleaseError("does not match the signed release"), None])
    refused = asyncio.Event()

    def check() -> None:
        problem = next(checks)
        if problem is not None:
            assert not spawned
            loop.call_soon_threadsafe(refused.set)
            raise problem

    async def spawn(*, threads: int) -> SlowSelfTestWorker:
        assert refused.is_set()
        spawned.append(threads)
        return SlowSelfTestWorker()

    loop = asyncio.get_running_loop()
    with capture_logs() as logs:
        async with run_pool(circuits=("k10",), spawn=spawn, check_start=check):
            assert len(spawned) == 1
    assert [log["reason"] for log in logs if log["event"] == "prover_start_failed"] == [
        "does not match the signed release"
    ]


SERVICE_SCRIPT = """
import asyncio, sys
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from tests.unit.reveal.test_prover_pool import create_pool
async def main():
    pool = create_pool(workers=2, circuits=("k10",))
    runner = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    while len(pool.pids) < 2:
        await asyncio.sleep(0)
    await pool.wait_ready()
    print(*pool.pids, flush=True)
    await runner
asyncio.run(main())
"""


async def test_workers_end_when_service_is_killed() -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE_SCRIPT], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        pids = [int(pid) for pid in service.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        service.kill()
        service.communicate()
    for pid in pids:
        await wait_until_exited(pid)
