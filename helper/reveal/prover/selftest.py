"""Sample share for the self-test at start: checks keys, prover and verifier, and measures a proof."""

from __future__ import annotations

from typing import Any

import proofs

DECISION = 1
PROPOSAL = 1
ROUND = (7).to_bytes(32, "little")
POSITION = 0
INDEX = 3


def sample_job() -> dict[str, Any]:
    """Return the arguments of `proofs.prove` for a valid share in a tree with one leaf."""
    _, public = proofs.elgamal_keygen(None)
    ciphertexts = [proofs.elgamal_encrypt(public, value) for value in range(16)]
    blinds = [proofs.random_field() for _ in ciphertexts]
    comms = b"".join(
        proofs.share_commitment(blind, c1, c2) for blind, (c1, c2) in zip(blinds, ciphertexts, strict=True)
    )
    tree = proofs.CommitmentTree()
    tree.append(proofs.vote_commitment(ROUND, proofs.shares_hash(comms), PROPOSAL, DECISION))
    c1, c2 = ciphertexts[INDEX]
    return {
        "path": tree.path(POSITION),
        "position": POSITION,
        "share_comms": comms,
        "primary_blind": blinds[INDEX],
        "c1": c1,
        "c2": c2,
        "share_index": INDEX,
        "proposal_id": PROPOSAL,
        "vote_decision": DECISION,
        "round_id": ROUND,
    }


def sample_statement(job: dict[str, Any], made: proofs.Proved) -> proofs.Statement:
    """Return the public inputs of the proof of `sample_job`."""
    return proofs.Statement(
        nullifier=made.nullifier,
        c1=job["c1"],
        c2=job["c2"],
        proposal_id=job["proposal_id"],
        vote_decision=job["vote_decision"],
        root=made.root,
        round_id=job["round_id"],
    )
