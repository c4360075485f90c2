"""Worker processes around the prover: each keeps its keys warm and proves one share at a time."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import structlog

import proofs
from helper.clock import Clock
from helper.errors import ProofFailed, ProverDied, ProverError, ProverTimeout
from helper.reveal.circuit_selector import COST
from helper.reveal.prover.frames import Frame
from helper.reveal.prover.job import Proof, ProofJob
from helper.reveal.prover.process import Spawn, Worker, WorkerCommand, WorkerProcess

log = structlog.get_logger("helper.prover")

START_TIMEOUT = 180.0
"""Seconds that a worker may take to make its keys; about 3 s on an idle machine, far more on a loaded one."""
TIMEOUT_FLOOR = 60.0
"""Seconds; no proof is given up sooner, however fast the self-test was."""
TIMEOUT_FACTOR = 50
"""A proof may take this many times as long as the self-test at start says of its circuit."""
RESTART_DELAYS = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the n-th start in a row that did not end in a working prover."""

DEFAULT_COMMAND: WorkerCommand = (sys.executable, "-m", "helper.reveal.prover.worker")


@dataclass(slots=True)
class _Task:
    frame: Frame
    future: asyncio.Future[Frame]
    started: Callable[[], None]


class ProverPool:
    """A fixed number of workers and one queue in front of them.

    Args:
        workers: how many proofs are made at once.
        circuits: the generations whose keys every worker keeps; the first is proven with at start.
        clock: measures how long proofs take.
        nice: what is added to the niceness of a worker (0 to 19): answers to wallets come first.
        timeout: seconds after which a proof is given up and its worker killed; 0 takes
            max(60, 50 × the slowest self-test).
        command: what starts a worker.
        spawn: starts it.

    Attributes:
        fingerprints: of the circuits whose keys are warm.
        deaths: how often a worker ended without being told to, `died` by itself or by a `timeout` of its proof.
    """

    def __init__(
        self,
        *,
        workers: int,
        circuits: Sequence[str],
        clock: Clock,
        nice: int = 10,
        timeout: float = 0.0,
        command: WorkerCommand = DEFAULT_COMMAND,
        spawn: Spawn = WorkerProcess.spawn,
    ) -> None:
        self._workers = workers
        self._circuits = tuple(circuits)
        self._clock = clock
        self._nice = nice
        self._timeout = timeout
        self._command = tuple(command)
        self._spawn = spawn
        self._queue: asyncio.Queue[_Task] = asyncio.Queue()
        self._warm: set[int] = set()
        self._self_tests: dict[int, float] = {}
        self._first_warm = asyncio.Event()
        self._fatal: asyncio.Future[None] | None = None
        self._pids: dict[int, int] = {}
        self.fingerprints: dict[str, str] = {}
        self.deaths: Counter[str] = Counter()

    @property
    def workers(self) -> int:
        """How many proofs can be made at once."""
        return self._workers

    @property
    def ready(self) -> bool:
        """Whether at least one worker has its keys warm and checked."""
        return bool(self._warm)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return sorted(self._pids.values())

    def seconds_each(self, circuit: str) -> float | None:
        """How long one proof of this circuit takes by the self-tests at start (median over the workers); None before
        the first. A worker tests one circuit; the other's time is told by what they cost.
        """
        return median(self._self_tests.values()) * self._factor(circuit) if self._self_tests else None

    def _factor(self, circuit: str) -> float:
        """What a proof of this circuit costs, in those of the self-test."""
        return COST[circuit] / COST[self._circuits[0]]

    def timeout(self, circuit: str) -> float:
        """Seconds that a proof of this circuit may take."""
        if self._timeout > 0:
            return self._timeout
        slowest = max(self._self_tests.values(), default=0.0) * self._factor(circuit)
        return max(TIMEOUT_FLOOR, TIMEOUT_FACTOR * slowest)

    async def wait_ready(self) -> None:
        """Wait until a worker is warm: its keys are made and checked.

        Raises:
            ProverError: the keys are not those of the chain's circuits; the service must not start.
        """
        assert self._fatal is not None, "run() starts the workers"
        warm = asyncio.ensure_future(self._first_warm.wait())
        either: set[asyncio.Future[Any]] = {warm, self._fatal}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done():
                self._fatal.result()
        finally:
            warm.cancel()

    async def run(self) -> None:
        """Keep the workers running until cancelled; then kill them all.

        Raises:
            ProverError: a circuit's keys do not match their fingerprint.
        """
        self._fatal = asyncio.get_running_loop().create_future()
        keepers = [asyncio.create_task(self._keep(slot)) for slot in range(self._workers)]
        try:
            await self._fatal
        finally:
            for keeper in keepers:
                keeper.cancel()
            await _all_ended(keepers)
            self._fail_waiting()

    async def prove(self, job: ProofJob, *, started: Callable[[], None] = lambda: None) -> Proof:
        """Make one proof.

        Args:
            job: the witness and what is to be proven.
            started: called when a worker takes the job up (not when it is queued).

        Raises:
            ProverTimeout: it took longer than `timeout`; the worker was killed.
            ProverDied: the worker ended by itself.
            ProofFailed: the prover refused the witness.
        """
        begun = self._clock.monotonic()

        def on_start() -> None:
            nonlocal begun
            begun = self._clock.monotonic()
            started()

        reply = await self._ask(job.frame(), on_start)
        return Proof(
            proof=bytes.fromhex(reply["proof"]),
            nullifier=bytes.fromhex(reply["nullifier"]),
            root=bytes.fromhex(reply["root"]),
            seconds=self._clock.monotonic() - begun,
        )

    async def verify(self, circuit: str, proof: bytes, statement: proofs.Statement) -> bool:
        """Whether our own verifier accepts this proof for these public inputs (raises as `prove`)."""
        asked = {"op": "verify", "circuit": circuit, "proof": proof, **asdict(statement)}
        reply = await self._ask(asked, lambda: None)
        return bool(reply["ok"])

    async def _ask(self, frame: Frame, started: Callable[[], None]) -> Frame:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Task(frame, future, started))
        reply = await future
        if "error" in reply:
            raise ProofFailed(f"{reply['error']}: {reply['message']}")
        return reply

    async def _keep(self, slot: int) -> None:
        """One worker after another in this slot, for ever."""
        assert self._fatal is not None
        failures = 0
        while not self._fatal.done():
            await self._clock.sleep(RESTART_DELAYS[min(failures, len(RESTART_DELAYS) - 1)])
            served = await self._one_life(slot)
            failures = 0 if served else failures + 1

    async def _one_life(self, slot: int) -> bool:
        """Start a worker and feed it until it ends, however it ends; True when it became ready."""
        ready = False
        try:
            process = await self._spawn(self._command, threads=self._threads())
        except OSError as error:
            log.error("no prover worker could be started", slot=slot, reason=str(error))
            return ready
        self._pids[slot] = process.pid
        try:
            ready = await self._start(slot, process)
            while ready:
                await self._serve_one(process)
        except ProverError as error:
            self.deaths["timeout" if isinstance(error, ProverTimeout) else "died"] += 1
            log.warning("prover worker ended", slot=slot, reason=str(error))
        except Exception:
            log.exception("prover worker given up", slot=slot)
        finally:
            self._warm.discard(slot)
            self._pids.pop(slot, None)
            await process.kill()
        return ready

    def _threads(self) -> int:
        """Threads of one proof: one, unless there are more cores than workers."""
        return max(1, (os.cpu_count() or 1) // self._workers)

    async def _start(self, slot: int, process: Worker) -> bool:
        request = {"op": "start", "circuits": list(self._circuits), "nice": self._nice}
        reply = await process.exchange(request, START_TIMEOUT)
        if reply.get("error") == "circuit":
            assert self._fatal is not None
            if not self._fatal.done():
                self._fatal.set_exception(
                    ProverError(
                        str(reply["message"]),
                        advice="This build's circuits are not those of the chain: install a release build.",
                    )
                )
            return False
        if "error" in reply:
            raise ProverDied(f"could not start: {reply['message']}")
        self.fingerprints = dict(reply["fingerprints"])
        self._self_tests[slot] = float(reply["self_test_seconds"])
        self._warm.add(slot)
        self._first_warm.set()
        log.info("prover worker ready", slot=slot, seconds=round(self._self_tests[slot], 3))
        return True

    async def _serve_one(self, process: Worker) -> None:
        task = await self._next_task(process)
        if task.future.cancelled():
            return
        try:
            task.started()
            reply = await process.exchange(task.frame, self.timeout(task.frame["circuit"]))
        except ProverError as error:
            if not task.future.done():
                task.future.set_exception(error)
            raise
        except BaseException:
            task.future.cancel()
            raise
        if not task.future.done():
            task.future.set_result(reply)

    async def _next_task(self, process: Worker) -> _Task:
        """The next job, or ProverDied when the idle worker ends first."""
        getter = asyncio.ensure_future(self._queue.get())
        ended = asyncio.ensure_future(process.ended())
        try:
            await asyncio.wait({getter, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                if getter.done() and not getter.cancelled():
                    self._queue.put_nowait(getter.result())
                raise ProverDied(f"a worker ended while idle (status {ended.result()})")
            return getter.result()
        finally:
            getter.cancel()
            ended.cancel()

    def _fail_waiting(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait().future.cancel()


async def _all_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for cancelled tasks to end, also when the waiter is cancelled again: no worker is left behind."""
    again = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            again = True
    if again:
        raise asyncio.CancelledError
