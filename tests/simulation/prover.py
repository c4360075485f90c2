"""Simulated prover workers that prove, delay, crash, hang and refuse."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from enum import Enum

import proofs
from helper.errors import ProverCrashed, ProverTimeout
from helper.reveal.prover_pool import WorkerProcess
from helper.reveal.prover_worker import Frame
from tests.simulation.fakes import commitment, is_valid_proof, nullifier, prove, shares_hash


class ProverFault(Enum):
    WORKER_DIES = "workers die"
    WORKER_HANGS = "workers hang"
    WORKER_REFUSES = "workers reject jobs"
    INVALID_PROOF = "proofs are invalid"
    SLOW_PROOF = "proofs are slow"
    NO_START = "no worker starts"


class SimProvers:
    """The machine's provers, shared by all service runs.

    Attributes:
        spread: minimum and maximum of a proof's duration, as multiples of `proof_seconds`.
        starts_at: loop second before which no worker has started.
        on_fault: called with (nullifier, fault) when a proof fails.
    """

    def __init__(self, rng: random.Random, seconds: float) -> None:
        self.rng = rng
        self.proof_seconds = seconds
        self.spread = (0.8, 1.5)
        self.starts_at = 0.0
        self.fault: ProverFault | None = None
        self.on_proof_started: Callable[[], None] = lambda: None
        self.on_fault: Callable[[bytes, ProverFault], None] = lambda nullifier, fault: None
        self._pids = iter(range(100, 1 << 30))

    async def spawn(self, *, threads: int) -> SimWorker:
        await asyncio.sleep(0)
        if self.fault is ProverFault.NO_START and self.rng.random() < 0.7:
            raise OSError("cannot allocate memory")
        return SimWorker(self, next(self._pids))


class SimWorker(WorkerProcess):
    def __init__(self, provers: SimProvers, pid: int) -> None:
        self._provers = provers
        self._pid = pid
        self._exit_status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._pid

    async def wait_ended(self) -> int:
        return await asyncio.shield(self._exit_status)

    async def kill(self) -> None:
        self._end()
        await asyncio.sleep(0)

    def _end(self) -> None:
        if not self._exit_status.done():
            self._exit_status.set_result(-9)

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        provers = self._provers
        if frame["op"] == "start":
            start_seconds = provers.rng.uniform(0.5, 3)
            await asyncio.sleep(max(start_seconds, provers.starts_at - asyncio.get_running_loop().time()))
            return {"self_test_seconds": provers.proof_seconds}
        if frame["op"] == "load":
            await asyncio.sleep(provers.proof_seconds)
            return {}
        if frame["op"] == "verify":
            return await self._verify(frame)
        return await self._prove(frame, timeout)

    async def _verify(self, frame: Frame) -> Frame:
        await asyncio.sleep(0.02)
        if self._provers.fault is ProverFault.WORKER_DIES and self._provers.rng.random() < 0.3:
            self._end()
            raise ProverCrashed("worker exited during a proof")
        statement = _statement_of(frame, frame["nullifier"], frame["root"])
        return {"ok": is_valid_proof(frame["circuit"], frame["proof"], statement)}

    async def _prove(self, frame: Frame, timeout: float) -> Frame:
        provers, rng = self._provers, self._provers.rng
        root, leaf = frame["path"][:32], frame["path"][32:64]
        vote = commitment(
            frame["round_id"], shares_hash(frame["share_comms"]), frame["proposal_id"], frame["vote_decision"]
        )
        share_nullifier = nullifier(vote, frame["share_index"], frame["primary_blind"])
        fault = provers.fault if rng.random() < 0.6 else None
        provers.on_proof_started()
        seconds = (
            provers.proof_seconds
            * rng.uniform(*provers.spread)
            * (rng.uniform(5, 30) if fault is ProverFault.SLOW_PROOF else 1)
        )
        if fault is ProverFault.WORKER_HANGS or seconds >= timeout:
            provers.on_fault(share_nullifier, ProverFault.WORKER_HANGS)
            await asyncio.sleep(timeout)
            raise ProverTimeout(f"no proof within {timeout:.0f} s")
        if fault is ProverFault.WORKER_DIES:
            provers.on_fault(share_nullifier, fault)
            await asyncio.sleep(seconds * rng.random())
            self._end()
            raise ProverCrashed("worker exited during a proof (IncompleteReadError)")
        await asyncio.sleep(seconds)
        if fault is ProverFault.WORKER_REFUSES or leaf != vote:
            provers.on_fault(share_nullifier, ProverFault.WORKER_REFUSES)
            return {"error": "ProvingError", "message": "the constraints do not hold"}
        proof = prove(frame["circuit"], _statement_of(frame, share_nullifier, root))
        if fault is ProverFault.INVALID_PROOF:
            provers.on_fault(share_nullifier, fault)
            proof = bytes(32)
        return {"proof": proof.hex(), "nullifier": share_nullifier.hex(), "root": root.hex()}


def _statement_of(frame: Frame, share_nullifier: bytes, root: bytes) -> proofs.Statement:
    names = ("c1", "c2", "proposal_id", "vote_decision", "round_id")
    return proofs.Statement(nullifier=share_nullifier, root=root, **{name: frame[name] for name in names})
