"""Hash-based fakes for share validation, trees and proofs, with the real bindings."""

from __future__ import annotations

import marshal
import random
from collections.abc import Sequence
from hashlib import sha256

import proofs
from helper.core.share import Share
from proofs import InvalidShare, ReadShare, TreeError
from tests.support.payloads import as_read_share, decode_share

PATH_BYTES = 24 * 32


def hash_parts(kind: bytes, *parts: bytes | int) -> bytes:
    """Hash the parts unambiguously, separated by kind."""
    # Version 2: later versions encode equal objects differently depending on their identity.
    return sha256(marshal.dumps((kind, *parts), 2)).digest()


def commitment(round_id: bytes, shares_hash: bytes, proposal_id: int, vote_decision: int) -> bytes:
    return hash_parts(b"commitment", round_id, shares_hash, proposal_id, vote_decision)


def nullifier(vote_commitment: bytes, share_index: int, blind: bytes) -> bytes:
    return hash_parts(b"nullifier", vote_commitment, share_index, blind)


def shares_hash(share_comms: bytes) -> bytes:
    """Return the hash of all share commitments of a vote."""
    return hash_parts(b"shares", share_comms)


def share_commitment(blind: bytes, c1: bytes, c2: bytes) -> bytes:
    return hash_parts(b"share", blind, c1, c2)


class SimShareValidator:
    """`proofs.read_shares` with fake hashes, for bodies whose fields are valid."""

    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
        return [_read(body) for body in bodies]


def _read(body: bytes) -> ReadShare | InvalidShare:
    share = decode_share(body)
    if share.shares_hash != hash_parts(b"shares", share.share_comms):
        return InvalidShare("shares_hash", "shares_hash")
    start = share.share_index * 32
    if share.share_comms[start : start + 32] != share_commitment(share.primary_blind, share.c1, share.c2):
        return InvalidShare(f"share_comms[{share.share_index}]", "share_comm")
    vote = commitment(share.round_id, share.shares_hash, share.proposal_id, share.vote_decision)
    spent = nullifier(vote, share.share_index, share.primary_blind)
    return as_read_share(share, vote_commitment=vote, nullifier=spent)


class SimTree:
    """Fake `proofs.CommitmentTree`. A root binds the preceding leaves; a path binds its root and leaf."""

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._roots: list[bytes] = [hash_parts(b"empty")]

    def append(self, leaves: bytes) -> None:
        for start in range(0, len(leaves), 32):
            leaf = leaves[start : start + 32]
            self._leaves.append(leaf)
            self._roots.append(hash_parts(b"node", self._roots[-1], leaf))

    def __len__(self) -> int:
        return len(self._leaves)

    def leaf(self, position: int) -> bytes:
        return self._leaves[position]

    def root(self, size: int | None = None) -> bytes:
        if size is not None and size > len(self._leaves):
            raise TreeError(f"{size} leaves")
        return self._roots[len(self._leaves) if size is None else size]

    def path(self, position: int, size: int | None = None) -> bytes:
        if position >= (len(self._leaves) if size is None else size):
            raise TreeError(f"position {position}")
        return (self.root(size) + self._leaves[position]).ljust(PATH_BYTES, b"\0")

    def subtree(self, index: int) -> bytes:
        """Return bytes of the length of a stored subtree; `restore` does not need them."""
        return self.root((index + 1) * proofs.SUBTREE_LEAVES) * (proofs.SUBTREE_LEAVES - 1)

    @classmethod
    def restore(cls, leaves: bytes, subtrees: bytes) -> SimTree:
        tree = cls()
        tree.append(leaves)
        return tree


def prove(circuit: str, statement: proofs.Statement) -> bytes:
    return hash_parts(
        b"proof " + circuit.encode(),
        statement.nullifier,
        statement.c1,
        statement.c2,
        statement.proposal_id,
        statement.vote_decision,
        statement.root,
        statement.round_id,
    )


def is_valid_proof(circuit: str, proof: bytes, statement: proofs.Statement) -> bool:
    """Return whether a proof is valid for this statement.

    Bytes after the first 32 only distinguish several proofs of the same statement.
    """
    return proof[:32] == prove(circuit, statement)


class Ballot:
    def __init__(self, rng: random.Random, round_id: bytes, proposal_id: int, vote_decision: int) -> None:
        self.round_id = round_id
        self._proposal, self._decision = proposal_id, vote_decision
        self._parts = [(rng.randbytes(32), rng.randbytes(32), rng.randbytes(32)) for _ in range(16)]
        self._comms = b"".join(share_commitment(*part) for part in self._parts)
        self._hash = shares_hash(self._comms)
        self.commitment = commitment(round_id, self._hash, proposal_id, vote_decision)

    def share(self, index: int, position: int, submit_at: int) -> Share:
        blind, c1, c2 = self._parts[index]
        return Share(
            round_id=self.round_id,
            share_index=index,
            proposal_id=self._proposal,
            vote_decision=self._decision,
            tree_position=position,
            submit_at=submit_at,
            shares_hash=self._hash,
            share_comms=self._comms,
            primary_blind=blind,
            c1=c1,
            c2=c2,
        )

    def nullifier(self, index: int) -> bytes:
        return nullifier(self.commitment, index, self._parts[index][0])
