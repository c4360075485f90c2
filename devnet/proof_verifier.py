"""Proof verification of CheckTx: in threads, once per transaction, cached by its hash."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import proofs
from devnet import tx as txs
from devnet.stand_in_proofs import STAND_IN_PREFIX, create_stand_in_proof

_CACHE_SIZE = 20_000
_VERIFICATION_FAILED = (
    "invalid zero-knowledge proof: vote share: share reveal halo2: proof verification failed: "
    "share_reveal: verify_proof failed: ConstraintSystemFailure"
)


def statement_of(reveal: txs.Reveal, root: bytes) -> proofs.Statement:
    """The public inputs of a reveal against a root."""
    return proofs.Statement(
        nullifier=reveal.nullifier,
        c1=reveal.enc_share[:32],
        c2=reveal.enc_share[32:],
        proposal_id=reveal.proposal_id,
        vote_decision=reveal.vote_decision,
        root=root,
        round_id=reveal.round_id,
    )


class ProofVerifier:
    """Verifies the proofs of reveals. `circuit` can be changed at run time, like in a chain upgrade."""

    def __init__(self, circuit: str, *, accepts_stand_ins: bool = False, threads: int = 2) -> None:
        self.circuit = circuit
        self.accepts_stand_ins = accepts_stand_ins
        self.checked_count = 0
        self.cpu_seconds = 0.0
        self.wall_seconds = 0.0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="verify")
        self._verdicts: OrderedDict[tuple[str, bytes], asyncio.Future[str | None]] = OrderedDict()

    async def warm(self) -> None:
        """Generate the verifying key before the first proof arrives."""
        await asyncio.get_running_loop().run_in_executor(self._threads, proofs.warm, self.circuit)

    async def check(self, digest: bytes, reveal: txs.Reveal, root: bytes) -> str | None:
        """Return None if the proof is valid, else the chain's error text."""
        key = (self.circuit, digest)
        known = self._verdicts.get(key)
        if known is None:
            loop = asyncio.get_running_loop()
            known = asyncio.ensure_future(loop.run_in_executor(self._threads, self._verify, self.circuit, reveal, root))
            self._verdicts[key] = known
            while len(self._verdicts) > _CACHE_SIZE:
                self._verdicts.popitem(last=False)
        return await asyncio.shield(known)

    def close(self) -> None:
        """Stop the threads and cancel waiting verifications."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _verify(self, circuit: str, reveal: txs.Reveal, root: bytes) -> str | None:
        """Verify one proof, in a worker thread."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            statement = statement_of(reveal, root)
            if reveal.proof.startswith(STAND_IN_PREFIX):
                good = self.accepts_stand_ins and reveal.proof == create_stand_in_proof(statement)
            else:
                good = proofs.verify(circuit, reveal.proof, statement)
            return None if good else _VERIFICATION_FAILED
        except proofs.ProofsError as error:
            return f"invalid zero-knowledge proof: vote share: share reveal halo2: invalid input: {error}"
        finally:
            self.checked_count += 1
            self.wall_seconds += time.perf_counter() - wall
            self.cpu_seconds += time.thread_time() - cpu
