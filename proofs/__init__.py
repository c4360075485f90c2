"""Proofs, hashes, commitment tree and ElGamal of shielded voting: a typed face for the native module. And what the
store has done natively with the rows and pages of its database.

Bytes in, bytes out. Field elements are 32 bytes, little-endian and canonical (below the Pallas base field's
modulus); points are compressed (x with y's parity in the top bit). Whatever is malformed raises an
`EncodingError` that names the field as the wire does, an int out of range included. Hashing, proving and tree
work run without the GIL.

Proving uses a pool of threads inside the process (`RAYON_NUM_THREADS` says how many). Such a pool does not
survive a fork: start worker processes with "spawn" or "forkserver".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from proofs import _native
from proofs._native import (
    LOG_HEADER,
    SUBTREE_LEAVES,
    TREE_DEPTH,
    CommitmentTree,
    check_encoding,
    check_point,
    elgamal_add,
    elgamal_decrypt,
    elgamal_encrypt,
    elgamal_keygen,
    fingerprint,
    page_gap,
    pages_in_log,
    poseidon,
    random_field,
    row_check,
    row_checks,
    share_commitment,
    share_nullifier,
    shares_hash,
    vote_commitment,
    warm,
)
from proofs.errors import CircuitError, EncodingError, ProofsError, ProvingError, ShareRuleError, TreeError

__all__ = [
    "CIRCUITS",
    "EMPTY_ROOT",
    "LOG_HEADER",
    "SUBTREE_LEAVES",
    "TREE_DEPTH",
    "CircuitError",
    "CircuitInfo",
    "CommitmentTree",
    "EncodingError",
    "ProofsError",
    "Proved",
    "ProvingError",
    "ReadShare",
    "ShareCheck",
    "ShareRuleError",
    "Statement",
    "TreeError",
    "check_encoding",
    "check_point",
    "check_share",
    "elgamal_add",
    "elgamal_decrypt",
    "elgamal_encrypt",
    "elgamal_keygen",
    "fingerprint",
    "json_members",
    "page_gap",
    "pages_in_log",
    "poseidon",
    "prove",
    "random_field",
    "read_shares",
    "row_check",
    "row_checks",
    "share_commitment",
    "share_nullifier",
    "shares_hash",
    "verify",
    "vote_commitment",
    "warm",
]


@dataclass(frozen=True, slots=True)
class CircuitInfo:
    """What is fixed about one circuit generation."""

    name: str
    """`k11` or `k10`."""
    k: int
    """log2 of the circuit's rows."""
    proof_bytes: int
    """Length of every proof."""
    fingerprint: str
    """What `fingerprint(name)` must be: 64 hex digits."""
    crate: str
    """Name and version of the published crate."""


CIRCUITS: Mapping[str, CircuitInfo] = MappingProxyType({row[0]: CircuitInfo(*row) for row in _native.circuits()})
"""The circuit generations by name, the older one first."""

EMPTY_ROOT: bytes = _native.empty_root()
"""Root of a tree without leaves."""


@dataclass(frozen=True, slots=True)
class ShareCheck:
    """What follows from a share whose fields belong together."""

    vote_commitment: bytes = field(repr=False)
    """The leaf that must stand at the share's `tree_position`."""
    nullifier: bytes = field(repr=False)
    """What its reveal will publish; not to be logged before."""


@dataclass(frozen=True, slots=True)
class Statement:
    """The public inputs of a reveal: public once it is made, and not to be logged before."""

    nullifier: bytes = field(repr=False)
    c1: bytes = field(repr=False)
    """First half of the ciphertext, compressed."""
    c2: bytes = field(repr=False)
    """Second half of the ciphertext, compressed."""
    proposal_id: int
    vote_decision: int
    root: bytes
    """The commitment tree's root at the anchor height."""
    round_id: bytes


@dataclass(frozen=True, slots=True)
class Proved:
    """A proof, with the public inputs that came out of the witness."""

    proof: bytes = field(repr=False)
    nullifier: bytes = field(repr=False)
    root: bytes
    """The root that the path leads to. A proof is only worth something if this is the chain's."""


def check_share(
    *,
    round_id: bytes,
    shares_hash: bytes,
    share_comms: bytes,
    share_index: int,
    proposal_id: int,
    vote_decision: int,
    primary_blind: bytes,
    c1: bytes,
    c2: bytes,
) -> ShareCheck:
    """Checks a share's encodings, then its hashes, in a third of a millisecond.

    `share_comms` is the 16 commitments one behind the other (512 bytes). Raises `EncodingError`
    (vote_round_id, shares_hash, share_comms or share_comms[i], enc_share.share_index, proposal_id,
    vote_decision, primary_blind, enc_share.c1, enc_share.c2), then `ShareRuleError` where `shares_hash` is
    not the hash of `share_comms`, or `share_comms[share_index]` not the commitment to blind and ciphertext.
    """
    return ShareCheck(
        *_native.check_share(
            round_id=round_id,
            shares_hash=shares_hash,
            share_comms=share_comms,
            share_index=share_index,
            proposal_id=proposal_id,
            vote_decision=vote_decision,
            primary_blind=primary_blind,
            c1=c1,
            c2=c2,
        )
    )


class ReadShare(NamedTuple):
    """A posted share whose encodings and hashes are right, and what follows from it; its repr shows nothing."""

    round_id: bytes
    share_index: int
    proposal_id: int
    vote_decision: int
    tree_position: int
    submit_at: int
    """Unix second, 0 for at once."""
    shares_hash: bytes
    share_comms: bytes
    """The 16 commitments one behind the other, 512 bytes."""
    primary_blind: bytes
    c1: bytes
    c2: bytes
    vote_commitment: bytes
    """The leaf that must stand at the share's `tree_position`."""
    nullifier: bytes
    """What its reveal will publish; not to be logged before."""

    def __repr__(self) -> str:
        return "ReadShare(…)"


def json_members(body: bytes, names: Iterable[str]) -> bytes | int:
    """Reduces a JSON object to its members with these names, each as it is written; of a repeated name the last counts.

    A document that is not an object becomes `null`. Returns the offset, in bytes, of the first error in a body that is
    not UTF-8 or not JSON. Takes some 2 ms a MiB, without the GIL, however the body is nested.

    Args:
        body: a JSON document.
        names: of the members, without characters that JSON escapes.
    """
    return _native.json_members(body, list(names))


def read_shares(bodies: Sequence[bytes]) -> list[ReadShare | None]:
    """Reads the JSON bodies that wallets post and checks each share, as `check_share` does, in a quarter of a
    millisecond; that the hash of a vote's commitments is right is remembered.

    None stands for a body that is not plainly right: wrong, or only written in an unusual way.
    """
    return [None if row is None else ReadShare._make(row) for row in _native.read_shares(list(bodies))]


def prove(
    circuit: str,
    *,
    path: bytes,
    position: int,
    share_comms: bytes,
    primary_blind: bytes,
    c1: bytes,
    c2: bytes,
    share_index: int,
    proposal_id: int,
    vote_decision: int,
    round_id: bytes,
) -> Proved:
    """Proves that the share belongs to the vote commitment at `position`; takes 0.1 to 1 s of all cores.

    `path` is the 24 siblings, leaf level first (`CommitmentTree.path`). Raises `EncodingError` as
    `check_share` does (and path[i], tree_position), `ShareRuleError` where the share's commitment does not
    hold, `CircuitError`, and `ProvingError` when no proof came out.
    """
    return Proved(
        *_native.prove(
            circuit,
            path=path,
            position=position,
            share_comms=share_comms,
            primary_blind=primary_blind,
            c1=c1,
            c2=c2,
            share_index=share_index,
            proposal_id=proposal_id,
            vote_decision=vote_decision,
            round_id=round_id,
        )
    )


def verify(circuit: str, proof: bytes, statement: Statement) -> bool:
    """Whether these very bytes prove the statement.

    Any malformed proof does not, longer and shorter ones included. Raises `EncodingError` for a malformed
    statement, and `CircuitError`.
    """
    return _native.verify(
        circuit,
        proof,
        nullifier=statement.nullifier,
        c1=statement.c1,
        c2=statement.c2,
        proposal_id=statement.proposal_id,
        vote_decision=statement.vote_decision,
        root=statement.root,
        round_id=statement.round_id,
    )
