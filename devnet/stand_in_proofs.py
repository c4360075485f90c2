"""Stand-in proofs, for tests of everything but proofs: `STAND_IN` and a BLAKE2b-256 digest of the public inputs.

They are accepted only by a chain that was started to accept them. Tests' provers import this and no more of the chain.
"""

from __future__ import annotations

import hashlib

import proofs

STAND_IN = b"STANDIN"


def stand_in_proof(statement: proofs.Statement) -> bytes:
    """A test proof of that statement, for chains started with `--stand-in-proofs`."""
    inputs = (
        statement.nullifier,
        statement.c1,
        statement.c2,
        statement.proposal_id.to_bytes(4, "little"),
        statement.vote_decision.to_bytes(4, "little"),
        statement.root,
        statement.round_id,
    )
    return STAND_IN + hashlib.blake2b(b"".join(inputs), digest_size=32).digest()
