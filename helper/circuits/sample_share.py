"""Sample share for the self-test of k10 and k11 at startup.

The self-test checks keys, prover and verifier, and measures the duration of a proof.
"""

from __future__ import annotations

from typing import Any

import proofs

VOTE_DECISION = 1
PROPOSAL_ID = 1
ROUND_ID = (7).to_bytes(32, "little")
TREE_POSITION = 0
SHARE_INDEX = 3


def create_sample_job() -> dict[str, Any]:
    """Return the arguments of `proofs.prove` for a valid share in a tree with one leaf."""
    _, public = proofs.elgamal_keygen(None)
    ciphertexts = [proofs.elgamal_encrypt(public, value) for value in range(16)]
    blinds = [proofs.random_field() for _ in ciphertexts]
    comms = b"".join(
        proofs.share_commitment(blind, c1, c2) for blind, (c1, c2) in zip(blinds, ciphertexts, strict=True)
    )
    tree = proofs.CommitmentTree()
    tree.append(proofs.vote_commitment(ROUND_ID, proofs.shares_hash(comms), PROPOSAL_ID, VOTE_DECISION))
    c1, c2 = ciphertexts[SHARE_INDEX]
    return {
        "path": tree.path(TREE_POSITION),
        "position": TREE_POSITION,
        "share_comms": comms,
        "primary_blind": blinds[SHARE_INDEX],
        "c1": c1,
        "c2": c2,
        "share_index": SHARE_INDEX,
        "proposal_id": PROPOSAL_ID,
        "vote_decision": VOTE_DECISION,
        "round_id": ROUND_ID,
    }


def create_sample_statement(job: dict[str, Any], proved: proofs.Proved) -> proofs.Statement:
    """Return the public inputs of the proof of `create_sample_job`."""
    return proofs.Statement(
        nullifier=proved.nullifier,
        c1=job["c1"],
        c2=job["c2"],
        proposal_id=job["proposal_id"],
        vote_decision=job["vote_decision"],
        root=proved.root,
        round_id=job["round_id"],
    )
