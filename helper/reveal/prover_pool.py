"""Creates proofs in worker processes, which do not block the API and can be killed.

Each worker holds its keys in memory and creates one proof at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import orjson
import structlog

from helper.circuits import get_generation
from helper.clock import Clock
from helper.core.share import Share
from helper.errors import HelperError, ProofFailed, ProofNotNeeded, ProverCrashed, ProverError, ProverTimeout
from helper.reveal.prover_worker import Frame, encode_frame
from proofs import Proved

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = structlog.get_logger("helper.reveal")

MAX_FRAME_BYTES = 1 << 20
"""Maximum size of a reply in bytes; real ones have about 10 kB (a proof)."""
WAIT_SLICE_SECONDS = 1.0
"""Maximum seconds that one wait for a reply counts."""
START_TIMEOUT_SECONDS = 180.0
"""Maximum seconds for a worker to create its keys; about 3 s on an idle machine, much more under load."""
FIRST_WORKER_SECONDS = 10.0
"""Maximum seconds for which the other workers wait at the start until the first one is ready."""
FIRST_PROOF_SECONDS = 1.0
"""Maximum seconds for which they wait then until its first job has ended."""
LOAD_IDLE_SECONDS = 5.0
"""Seconds without a job after which a worker creates the keys of the other circuits, one worker at a time."""
MIN_TIMEOUT_SECONDS = 60.0
"""Minimum timeout of a proof in seconds, even if the self-test was fast."""
TIMEOUT_FACTOR = 50
"""Timeout of a proof as a multiple of the self-test's duration."""
ROOTS_KEPT = 10_000
"""Maximum number of recent proofs whose roots are in memory."""
RESTART_DELAYS_SECONDS = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a start, by the number of consecutive failed starts; the last value repeats."""
_WORKER_COMMAND = (sys.executable, "-m", "helper.reveal.prover_worker")


class WorkerProcess:
    """A running worker process, connected by two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    @classmethod
    async def spawn(cls, *, threads: int, command: Sequence[str] = _WORKER_COMMAND) -> WorkerProcess:
        """Start a worker whose proofs use `threads` threads."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
            limit=MAX_FRAME_BYTES,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait_ended(self) -> int:
        """Wait until the worker exits and return its exit status.

        If a signal killed the worker, this is the negated signal number.
        """
        return await self._process.wait()

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        """Send a request and return the reply.

        The time for which this process was stopped or did not run (SIGSTOP, a suspended machine) does not count: the
        worker usually did not run either.

        Raises:
            ProverTimeout: no reply within `timeout` seconds; the worker must not be used again.
            ProverCrashed: the worker exited, or its reply is invalid.
        """
        reply, waited = asyncio.ensure_future(self._exchange(frame)), 0.0
        try:
            while not reply.done():
                if waited >= timeout:
                    raise ProverTimeout(f"no proof within {timeout:.0f} s")
                slice_seconds = min(WAIT_SLICE_SECONDS, timeout - waited)
                await asyncio.wait((reply,), timeout=slice_seconds)
                waited += slice_seconds  # however long it took
            return await reply
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError) as error:
            raise ProverCrashed(f"worker exited during a proof ({type(error).__name__})") from None
        finally:
            reply.cancel()

    async def _exchange(self, frame: Frame) -> Frame:
        self._input.write(encode_frame(frame))
        await self._input.drain()
        reply = orjson.loads(await self._output.readuntil())
        if not isinstance(reply, dict):
            raise ValueError("the reply is not a JSON object")
        return reply

    async def kill(self) -> None:
        """Kill the worker with SIGKILL and wait until it has exited, even if cancelled."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._input.close()
        ended = asyncio.ensure_future(self.wait_ended())
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await ended
            raise


WorkerSpawner = Callable[..., Awaitable[WorkerProcess]]
"""Starts a worker, as `WorkerProcess.spawn` does."""


@dataclass(slots=True, order=True)
class _Task:
    """A job: those with priority come first, both kinds in the order of their submission."""

    has_no_priority: bool
    number: int
    frame: Frame = field(compare=False)
    future: asyncio.Future[Frame] = field(compare=False)
    begin: Callable[[], Awaitable[bool]] = field(compare=False)

    @property
    def circuit(self) -> str:
        return str(self.frame["circuit"])


async def _begin() -> bool:
    return True


@dataclass(eq=False, repr=False, kw_only=True)
class ProverPool:
    """A fixed number of workers that share one job queue.

    Args:
        circuits: generations that workers use; may be replaced before `run`. A worker is ready with the keys of the
            first, which its self-test uses.
        nice: added to the niceness of a worker (0 to 19), so that the API has priority.
        timeout: seconds after which a proof is cancelled and its worker killed; 0 means
            max(60, 50 × the slowest self-test).
        check_start: called in a thread before each start of a worker; raises HelperError to prevent it. None for no
            check.

    Attributes:
        unexpected_exits: number of unexpected worker exits: `died` (exited) and `timeout` (killed after a timeout).
    """

    workers: int
    circuits: Sequence[str]
    clock: Clock
    nice: int
    timeout: float = 0.0
    spawn: WorkerSpawner = WorkerProcess.spawn
    check_start: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._queue: asyncio.PriorityQueue[_Task] = asyncio.PriorityQueue()
        self._numbers = count()
        self._ready_slots: set[int] = set()
        self._self_tests: dict[int, float] = {}
        self._first_ready = asyncio.Event()
        self._first_ended = asyncio.Event()
        self._load_lock = asyncio.Lock()
        self._pids: dict[int, int] = {}
        self._roots: dict[bytes, bytes] = {}  # by the hash of the proof
        self.unexpected_exits: Counter[str] = Counter()

    @property
    def is_ready(self) -> bool:
        """Whether at least one worker has loaded and checked its keys."""
        return bool(self._ready_slots)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return sorted(self._pids.values())

    def estimated_seconds(self, circuit: str) -> float | None:
        """Estimated duration of a proof of this circuit, in seconds.

        None before the first self-test. It is the median over the workers. A self-test uses one circuit; the other one
        is estimated by relative cost.
        """
        return median(self._self_tests.values()) * self._relative_cost(circuit) if self._self_tests else None

    def _relative_cost(self, circuit: str) -> float:
        """Cost of a proof of this circuit relative to that of the self-test."""
        return get_generation(circuit).proof_cost / get_generation(self.circuits[0]).proof_cost

    def proof_timeout(self, circuit: str) -> float:
        """Timeout of a proof of this circuit, in seconds."""
        if self.timeout > 0:
            return self.timeout
        slowest = max(self._self_tests.values(), default=0.0) * self._relative_cost(circuit)
        return max(MIN_TIMEOUT_SECONDS, TIMEOUT_FACTOR * slowest)

    async def wait_ready(self) -> None:
        """Wait until a worker has loaded and checked its keys."""
        await self._first_ready.wait()

    async def run(self) -> None:
        """Run the workers, and restart them when they exit, until cancelled; then kill them.

        Raises:
            ProverError: a circuit's keys do not match their fingerprint; the service must not start.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for slot in range(self.workers):
                    group.create_task(self._run_slot(slot))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            while not self._queue.empty():
                self._queue.get_nowait().future.cancel()

    async def prove(
        self,
        circuit: str,
        share: Share,
        path: bytes,
        *,
        begin: Callable[[], Awaitable[bool]] = _begin,
        has_priority: bool = True,
    ) -> Proved:
        """Create one proof.

        Args:
            path: the 24 siblings of the share's leaf, leaf level first.
            begin: called when a worker is free, immediately before it starts the job; returns whether it is needed.
            has_priority: whether the job precedes queued jobs that do not have priority.

        Raises:
            ProofNotNeeded: `begin` returned False; no proof was begun.
            ProverTimeout: it took longer than `timeout`; the worker was killed.
            ProverCrashed: the worker exited unexpectedly.
            ProofFailed: the prover rejected the witness.
        """
        request = {"op": "prove", "circuit": circuit, **get_generation(circuit).create_job(share, path)}
        reply = await self._request(request, begin, has_priority=has_priority)
        proof, root = bytes.fromhex(reply["proof"]), bytes.fromhex(reply["root"])
        self._roots[sha256(proof).digest()] = root
        if len(self._roots) > ROOTS_KEPT:
            del self._roots[next(iter(self._roots))]
        return Proved(proof, bytes.fromhex(reply["nullifier"]), root)

    def root_of(self, proof: bytes) -> bytes | None:
        """The root that a recent proof was made for, None if this process did not make it.

        A height does not tell it: nodes may have different roots there.
        """
        return self._roots.get(sha256(proof).digest())

    async def verify(self, circuit: str, proof: bytes, statement: DataclassInstance) -> bool:
        """Check a proof for these public inputs; raises the errors of `prove`."""
        request = {"op": "verify", "circuit": circuit, "proof": proof, **asdict(statement)}
        return bool((await self._request(request))["ok"])

    async def _request(
        self, frame: Frame, begin: Callable[[], Awaitable[bool]] = _begin, *, has_priority: bool = True
    ) -> Frame:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Task(not has_priority, next(self._numbers), frame, future, begin))
        reply = await future
        if "error" in reply:
            raise ProofFailed(f"{reply['error']}: {reply['message']}")
        return reply

    async def _run_slot(self, slot: int) -> None:
        failures = 0
        if slot > 0:
            # Due shares wait for the keys of one worker only. It creates them, and the first proof, with all cores.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_WORKER_SECONDS):
                    await self._first_ready.wait()
                async with asyncio.timeout(FIRST_PROOF_SECONDS):
                    await self._first_ended.wait()
        while True:
            await self.clock.sleep(RESTART_DELAYS_SECONDS[min(failures, len(RESTART_DELAYS_SECONDS) - 1)])
            was_ready = await self._run_worker(slot)
            failures = 0 if was_ready else failures + 1

    async def _run_worker(self, slot: int) -> bool:
        """Start a worker and pass it jobs until it ends.

        Returns whether it became ready.
        """
        is_ready = False
        try:
            if self.check_start is not None:
                await asyncio.to_thread(self.check_start)
            process = await self.spawn(threads=self._threads())
        except (OSError, HelperError) as error:
            advice = error.advice if isinstance(error, HelperError) else "Check memory and limits of this machine."
            log.error("prover_start_failed", slot=slot, reason=str(error), advice=advice)
            return is_ready
        self._pids[slot] = process.pid
        try:
            await self._start_worker(slot, process)
            is_ready = True
            circuits = {self.circuits[0]}  # those whose keys this worker has
            while True:
                missing = [circuit for circuit in self.circuits if circuit not in circuits]
                task = await self._next_task(process, LOAD_IDLE_SECONDS if missing else None)
                if task is None:
                    circuits.update(await self._load_when_idle(process, missing))
                elif task.circuit in circuits:
                    await self._run_task(process, task)
                else:
                    # The job waits in the queue, so that neither the time nor a failure of this counts for its share.
                    self._queue.put_nowait(task)
                    is_ready = False  # a worker that fails here is restarted after a delay
                    await self._create_keys(process, {"op": "load", "circuits": [task.circuit]})
                    is_ready = True
                    circuits.add(task.circuit)
        except (ProverCrashed, ProverTimeout) as error:
            self.unexpected_exits["timeout" if isinstance(error, ProverTimeout) else "died"] += 1
            log.warning("prover_exited", slot=slot, reason=str(error))
        except ProverError:  # no worker can create the keys
            raise
        except Exception:
            log.exception("prover_failed", slot=slot)
        finally:
            self._ready_slots.discard(slot)
            self._pids.pop(slot, None)
            await process.kill()
        return is_ready

    def _threads(self) -> int:
        """Threads of a proof: one, unless there are more cores than workers."""
        return max(1, (os.cpu_count() or 1) // self.workers)

    async def _start_worker(self, slot: int, process: WorkerProcess) -> None:
        reply = await self._create_keys(process, {"op": "start", "circuits": self.circuits[:1], "nice": self.nice})
        self._self_tests[slot] = float(reply["self_test_seconds"])
        self._ready_slots.add(slot)
        self._first_ready.set()
        log.info("prover_ready", slot=slot, seconds=round(self._self_tests[slot], 3))

    async def _load_when_idle(self, process: WorkerProcess, circuits: list[str]) -> list[str]:
        """Create the keys of these circuits in an idle worker. Returns the circuits whose keys it has then."""
        if self._load_lock.locked():
            return []  # another worker is busy with its keys; this one remains available
        async with self._load_lock:
            await self._create_keys(process, {"op": "load", "circuits": circuits})
        return circuits

    async def _create_keys(self, process: WorkerProcess, request: Frame) -> Frame:
        """Have a worker create keys. Raises a ProverError that is fatal if they do not match their fingerprint."""
        reply = await process.exchange(request, START_TIMEOUT_SECONDS)
        if reply.get("error") == "circuit":
            raise ProverError(
                str(reply["message"]),
                advice="The circuits of this build differ from the chain's; install a release build.",
            )
        if "error" in reply:
            raise ProverCrashed(f"could not create keys: {reply['message']}")
        return reply

    async def _run_task(self, process: WorkerProcess, task: _Task) -> None:
        if task.future.cancelled():
            return
        has_begun = False
        try:
            if not await task.begin():
                raise ProofNotNeeded("the proof is no longer needed")
            has_begun = True
            reply = await process.exchange(task.frame, self.proof_timeout(task.circuit))
        except Exception as error:
            if not task.future.done():
                task.future.set_exception(error)
            if has_begun:
                raise
            return  # an error of this job, not of the worker
        except BaseException:
            task.future.cancel()
            raise
        finally:
            self._first_ended.set()
        if not task.future.done():
            task.future.set_result(reply)

    async def _next_task(self, process: WorkerProcess, timeout: float | None) -> _Task | None:
        """Wait for the next job, None after `timeout` seconds; raise ProverCrashed if the idle worker exits first."""
        getter = asyncio.ensure_future(self._queue.get())
        ended = asyncio.ensure_future(process.wait_ended())
        try:
            await asyncio.wait({getter, ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                if getter.done() and not getter.cancelled():
                    self._queue.put_nowait(getter.result())
                raise ProverCrashed(f"worker exited while idle (status {ended.result()})")
            return getter.result() if getter.done() else None
        finally:
            getter.cancel()
            ended.cancel()
