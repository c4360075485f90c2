"""Prover worker with fake proofs: fast, with failures on request. For tests of everything except the proof.

The dev chain accepts these proofs only with `--stand-in-proofs`. The proposal id of a share selects what happens,
so that a test can request a crash of the worker over the public API. `STANDIN_SECONDS` is the duration of each
proof. At the start of each proof a byte is appended to the file `STANDIN_TALLY`. With `STANDIN_KILL_AT_KEYS`, the
service is killed when it requests the keys of a second circuit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import proofs
from devnet.stand_in_proofs import create_stand_in_proof
from helper.circuits import GENERATIONS, Job, SingleChoiceGeneration
from helper.reveal.prover_worker import main

PROPOSAL_CRASHES, PROPOSAL_HANGS, PROPOSAL_REFUSED = 41, 42, 43
"""Proposal ids that make the worker crash, hang, or refuse the witness."""


requested_keys: list[str] = []
proof_seconds = float(os.environ.get("STANDIN_SECONDS", "0"))


class StandInGeneration(SingleChoiceGeneration):
    """Computes the real statement (hashes and tree); only the proof is fake."""

    def warm(self) -> str:
        """Create no keys."""
        if os.environ.get("STANDIN_BAD_KEYS"):
            raise proofs.CircuitError("k10: the fingerprint is not the chain's")
        requested_keys.append(self.info.name)
        if os.environ.get("STANDIN_KILL_AT_KEYS") and len(requested_keys) > 1:
            os.kill(os.getppid(), signal.SIGKILL)
        return self.info.fingerprint

    def self_test(self) -> float:
        """Return the duration of a self-test: slightly above that of a proof."""
        return proof_seconds + 0.001

    def prove(self, job: Job) -> Job:
        """Create a fake proof for the statement of the job's witness."""
        if tally_path := os.environ.get("STANDIN_TALLY"):
            with Path(tally_path).open("ab", buffering=0) as tally:
                tally.write(b".")
        match job["proposal_id"]:
            case proposal if proposal == PROPOSAL_CRASHES:
                os._exit(9)
            case proposal if proposal == PROPOSAL_HANGS:
                threading.Event().wait()
            case proposal if proposal == PROPOSAL_REFUSED:
                raise proofs.ProvingError("failure requested")
        if proof_seconds:
            time.sleep(proof_seconds)
        round_id, comms = bytes.fromhex(job["round_id"]), bytes.fromhex(job["share_comms"])
        c1, c2, blind = (bytes.fromhex(job[name]) for name in ("c1", "c2", "primary_blind"))
        commitment = proofs.vote_commitment(
            round_id, proofs.shares_hash(comms), job["proposal_id"], job["vote_decision"]
        )
        nullifier = proofs.share_nullifier(commitment, job["share_index"], blind)
        root = compute_root(commitment, job["position"], bytes.fromhex(job["path"]))
        statement = proofs.Statement(
            nullifier=nullifier,
            c1=c1,
            c2=c2,
            proposal_id=job["proposal_id"],
            vote_decision=job["vote_decision"],
            root=root,
            round_id=round_id,
        )
        return {"proof": create_stand_in_proof(statement), "nullifier": nullifier, "root": root}

    def verify(self, proof: bytes, statement: proofs.Statement) -> bool:
        """Return whether the fake proof belongs to this statement."""
        return proof == create_stand_in_proof(statement)


def compute_root(leaf: bytes, position: int, path: bytes) -> bytes:
    node = leaf
    for level in range(proofs.TREE_DEPTH):
        sibling = path[32 * level : 32 * (level + 1)]
        node = proofs.poseidon(sibling, node) if position >> level & 1 else proofs.poseidon(node, sibling)
    return node


if __name__ == "__main__":
    for name, info in proofs.CIRCUITS.items():
        GENERATIONS[name] = StandInGeneration(info, first_version=None, proof_cost=1.0)
    main()
