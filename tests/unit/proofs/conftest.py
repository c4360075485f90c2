"""Fixtures: a vote in a small tree."""

from __future__ import annotations

import pytest

import proofs
from tests.unit.proofs.votes import Vote, create_vote, seeded_element

VOTE_POSITION = 5


@pytest.fixture(scope="session")
def keypair() -> tuple[bytes, bytes]:
    return proofs.elgamal_keygen(b"an election authority")


@pytest.fixture(scope="session")
def vote(keypair: tuple[bytes, bytes]) -> Vote:
    return create_vote(keypair[1])


@pytest.fixture(scope="session")
def tree(vote: Vote) -> proofs.CommitmentTree:
    """Nine leaves, with the vote's commitment at `VOTE_POSITION`."""
    leaves = [seeded_element(f"leaf {i}") for i in range(9)]
    leaves[VOTE_POSITION] = vote.commitment
    tree = proofs.CommitmentTree()
    tree.append(b"".join(leaves))
    return tree
