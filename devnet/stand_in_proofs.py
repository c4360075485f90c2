"""Fake proofs for fast tests: `STAND_IN_PREFIX` and a BLAKE2b-256 digest of the public inputs.

Only a chain started with `--stand-in-proofs` accepts them. Test provers import this module and nothing else of the
chain.
"""

from __future__ import annotations

import hashlib

import proofs

STAND_IN_PREFIX = b"STANDIN"


def create_stand_in_proof(statement: proofs.Statement) -> bytes:
    """Create the fake proof of a statement."""
    inputs = (
        statement.nullifier,
        statement.c1,
        statement.c2,
        statement.proposal_id.to_bytes(4, "little"),
        statement.vote_decision.to_bytes(4, "little"),
        statement.root,
        statement.round_id,
    )
    return STAND_IN_PREFIX + hashlib.blake2b(b"".join(inputs), digest_size=32).digest()
