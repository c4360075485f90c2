"""Typed interface of the native module.

Provides the proofs, hashes, commitment tree, ElGamal encryption and tally checks of shielded voting, and the native
parts of the store: row checks, and the scan for stale bytes in database pages.

All values are bytes. Field elements are 32 bytes, little-endian and canonical (below the modulus of the Pallas base
field); points are compressed (x with y's parity in the top bit). A malformed value, or an int out of range, raises an
`EncodingError` with the field's name on the wire. Hashing, proving and tree operations release the GIL.

Proving uses a thread pool in the process, with `RAYON_NUM_THREADS` threads. The pool does not survive a fork; start
worker processes with "spawn" or "forkserver".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from proofs import _native
from proofs._native import (
    LOG_HEADER,
    SUBTREE_LEAVES,
    TREE_DEPTH,
    CommitmentTree,
    check_encoding,
    check_point,
    decrypt_partially,
    elgamal_add,
    elgamal_decrypt,
    elgamal_encrypt,
    elgamal_keygen,
    elgamal_sum,
    fingerprint,
    multiply_generator,
    page_gap,
    pages_in_log,
    poseidon,
    random_field,
    row_check,
    row_checks,
    share_commitment,
    share_nullifier,
    shares_hash,
    sum_points,
    verify_decryption,
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
    "InvalidReason",
    "InvalidShare",
    "Partial",
    "ProofsError",
    "Proved",
    "ProvingError",
    "ReadShare",
    "ShareRuleError",
    "Statement",
    "TallyCheck",
    "TreeError",
    "check_encoding",
    "check_point",
    "check_tally",
    "decrypt_partially",
    "elgamal_add",
    "elgamal_decrypt",
    "elgamal_encrypt",
    "elgamal_keygen",
    "elgamal_sum",
    "fingerprint",
    "multiply_generator",
    "native_module_path",
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
    "sum_points",
    "verify",
    "verify_decryption",
    "verify_each",
    "vote_commitment",
    "warm",
]


@dataclass(frozen=True, slots=True)
class CircuitInfo:
    """The constants of one circuit generation."""

    name: str
    """`k11` or `k10`."""
    k: int
    """log2 of the circuit's rows."""
    proof_bytes: int
    """Length of every proof."""
    fingerprint: str
    """Expected value of `fingerprint(name)`, 64 hex digits."""
    crate: str
    """Name and version of the published crate."""


CIRCUITS: Mapping[str, CircuitInfo] = MappingProxyType({row[0]: CircuitInfo(*row) for row in _native.circuits()})
"""The circuit generations by name, oldest first."""

EMPTY_ROOT: bytes = _native.empty_root()
"""Root of a tree without leaves."""


@dataclass(frozen=True, slots=True)
class Statement:
    """The public inputs of a reveal. Must not be logged before the reveal."""

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
    """A proof, with the public inputs derived from the witness."""

    proof: bytes = field(repr=False)
    nullifier: bytes = field(repr=False)
    root: bytes
    """The root computed from the path. The proof is useful only if this is the chain's root."""


class ReadShare(NamedTuple):
    """A posted share with valid encodings and hashes, and its derived values. The repr contains none of them."""

    posted: tuple[Any, ...]
    """The fields as posted, in the order of `helper.core.share.Share`; the commitments are concatenated."""
    vote_commitment: bytes
    """The expected leaf at the share's tree position."""
    nullifier: bytes
    """The nullifier. Must not be logged before the reveal."""

    def __repr__(self) -> str:
        return "ReadShare(…)"


InvalidReason = Literal[
    "not-utf8",
    "not-json",
    "too-large",
    "missing",
    "type",
    "count",
    "not-hex",
    "not-base64",
    "length",
    "range",
    "non-canonical",
    "off-curve",
    "identity",
    "shares_hash",
    "share_comm",
]
"""Why a posted share is invalid. The last two are hashes that do not match, as in `ShareRuleError`."""


class InvalidShare(NamedTuple):
    """The first invalid field of a posted body. Contains no value of the body."""

    field: str
    """Its name on the wire (`enc_share.c1`, `share_comms[3]`), or `body`."""
    reason: InvalidReason
    actual: int | None = None
    """The actual number of entries (`count`) or bytes (`length`)."""


def native_module_path() -> Path:
    """Return the file from which this process loaded the native module."""
    return Path(_native.__file__)


def read_shares(bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
    """Parse and validate posted JSON bodies. Takes 0.1 ms per share, or 0.02 ms if several are validated in parallel.

    That needs 8 shares and a processor with AVX-512 IFMA.

    The checks are made in this order: UTF-8, JSON, fields in the order of `helper.core.share.Share`, field elements
    and points, `shares_hash`, the share's commitment. Results for the commitments of a vote are cached.
    """
    return [
        ReadShare._make(fields) if valid else InvalidShare._make(fields)
        for valid, fields in _native.read_shares(list(bodies))
    ]


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
    """Prove that the share belongs to the vote commitment at `position`. Takes 0.1 to 1 s on all cores.

    `path` is the 24 siblings, leaf level first (`CommitmentTree.path`). Raises `EncodingError` for a malformed field,
    `ShareRuleError` if the share's commitment does not match, `CircuitError`, and `ProvingError` if proving fails.
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
    """Return whether the proof is valid for the statement.

    A malformed proof, or one of another length, is not valid. Raises `EncodingError` for a malformed statement, and
    `CircuitError`.
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


def verify_each(circuit: str, items: Sequence[tuple[bytes, Statement]]) -> list[str | None]:
    """Verify many proofs on all cores. Returns for each why it is not valid, or None if it is.

    One equation covers all valid proofs, so this is several times faster than `verify`. An invalid proof costs about
    2·log2(n) additional equations. A malformed proof or statement is not valid. Raises `CircuitError`.
    """
    return _native.verify_each(
        circuit,
        [
            (
                proof,
                statement.nullifier,
                statement.c1,
                statement.c2,
                statement.proposal_id,
                statement.vote_decision,
                statement.root,
                statement.round_id,
            )
            for proof, statement in items
        ],
    )


class Partial(NamedTuple):
    """A validator's partial decryption of one sum."""

    validator_index: int
    """The validator's index in the key ceremony, from 1."""
    point: bytes
    proof: bytes
    """The DLEQ proof: challenge and response, 64 bytes."""


class TallyCheck(NamedTuple):
    """Result of `check_tally`."""

    reasons: list[str | None]
    """Why each partial decryption is not valid, None if it is."""
    total: Literal["matches", "differs", "too_few"]
    """Whether the valid ones decrypt the sum to the total; `too_few` if they are fewer than the threshold."""


def check_tally(
    *, ciphertext: bytes, commitments: Sequence[bytes], threshold: int, partials: Sequence[Partial], total: int
) -> TallyCheck:
    """Check the partial decryptions of one sum and its published total, without a discrete logarithm.

    Args:
        ciphertext: the sum, 64 bytes. Use a sum computed from the reveals: the proofs do not bind the round.
        commitments: the combined Feldman commitments C_0 … C_(t-1) of the key ceremony.
        threshold: t; the number of commitments.
        partials: all published partial decryptions of this sum. Of two with the same index, the second is not valid.
        total: the published total, in ballots.

    Raises:
        EncodingError: the sum or a commitment is malformed, or the number of commitments is not the threshold.
    """
    fields = [(partial.validator_index, partial.point, partial.proof) for partial in partials]
    return TallyCheck(*_native.check_tally(ciphertext, list(commitments), threshold, fields, total))
