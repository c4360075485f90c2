"""Prover workers without processes: they prove, take their time, die, hang and refuse."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from enum import Enum

import proofs
from helper.errors import ProverDied, ProverTimeout
from helper.reveal.prover.frames import Frame
from tests.simulation.fakes import commitment, nullifier, prove, shares_hash, verifies


class Ill(Enum):
    """What may be wrong with the provers."""

    DIES = "workers die"
    HANGS = "workers hang"
    REFUSES = "workers refuse"
    GARBAGE = "proofs are no proofs"
    SLOW = "proofs take long"
    NO_START = "no worker starts"


class Provers:
    """The machine's provers, through all lives of the service.

    Attributes:
        ill: what is wrong now.
        seconds: how long a proof takes.
        on_begin: told when a proof begins.
        on_sin: told when a proof goes wrong: (nullifier, what).
    """

    def __init__(self, dice: random.Random, seconds: float) -> None:
        self.dice = dice
        self.seconds = seconds
        self.ill: Ill | None = None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_sin: Callable[[bytes, Ill], None] = lambda nullifier, ill: None
        self._pids = iter(range(100, 1 << 30))

    async def spawn(self, command: Sequence[str], *, threads: int) -> SimWorker:
        """Start a worker."""
        await asyncio.sleep(0)
        if self.ill is Ill.NO_START and self.dice.random() < 0.7:
            raise OSError("cannot allocate memory")
        return SimWorker(self, next(self._pids))


class SimWorker:
    """One worker."""

    def __init__(self, provers: Provers, pid: int) -> None:
        self._provers = provers
        self._pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._pid

    async def ended(self) -> int:
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        self._end(-9)
        await asyncio.sleep(0)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        provers = self._provers
        if frame["op"] == "start":
            await asyncio.sleep(provers.dice.uniform(0.5, 3))
            return {"fingerprints": {}, "self_test_seconds": provers.seconds}
        if frame["op"] == "verify":
            return await self._verify(frame)
        return await self._prove(frame, timeout)

    async def _verify(self, frame: Frame) -> Frame:
        await asyncio.sleep(0.02)
        if self._provers.ill is Ill.DIES and self._provers.dice.random() < 0.3:
            self._end(-9)
            raise ProverDied("worker exited during a proof")
        names = ("nullifier", "c1", "c2", "proposal_id", "vote_decision", "root", "round_id")
        statement = proofs.Statement(**{name: frame[name] for name in names})
        return {"ok": verifies(frame["circuit"], frame["proof"], statement)}

    async def _prove(self, frame: Frame, timeout: float) -> Frame:
        provers, dice = self._provers, self._provers.dice
        root, leaf = frame["path"][:32], frame["path"][32:64]
        vote = commitment(
            frame["round_id"], shares_hash(frame["share_comms"]), frame["proposal_id"], frame["vote_decision"]
        )
        spent = nullifier(vote, frame["share_index"], frame["primary_blind"])
        ill = provers.ill if dice.random() < 0.6 else None
        provers.on_begin()
        seconds = provers.seconds * dice.uniform(0.8, 1.5) * (dice.uniform(5, 30) if ill is Ill.SLOW else 1)
        if ill is Ill.HANGS or seconds >= timeout:
            provers.on_sin(spent, Ill.HANGS)
            await asyncio.sleep(timeout)
            raise ProverTimeout(f"no proof within {timeout:.0f} s")
        if ill is Ill.DIES:
            provers.on_sin(spent, ill)
            await asyncio.sleep(seconds * dice.random())
            self._end(-9)
            raise ProverDied("worker exited during a proof (IncompleteReadError)")
        await asyncio.sleep(seconds)
        if ill is Ill.REFUSES or leaf != vote:
            provers.on_sin(spent, Ill.REFUSES)
            return {"error": "ProvingError", "message": "the constraints do not hold"}
        statement = proofs.Statement(
            nullifier=spent,
            c1=frame["c1"],
            c2=frame["c2"],
            proposal_id=frame["proposal_id"],
            vote_decision=frame["vote_decision"],
            root=root,
            round_id=frame["round_id"],
        )
        proof = prove(frame["circuit"], statement)
        if ill is Ill.GARBAGE:
            provers.on_sin(spent, ill)
            proof = bytes(32)
        return {"proof": proof.hex(), "nullifier": spent.hex(), "root": root.hex()}
