"""Creates ballots like a wallet: a vote split into 16 encrypted shares under one vote commitment. No I/O.

The cryptography is real: the parts are random and add up to the voting power, each is encrypted under the round's key
and committed to with its own blind, and the commitments hash to the leaf that is appended on chain.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import proofs
from devnet.gojson import b64

SHARE_COUNT = 16


@dataclass(frozen=True, slots=True)
class BallotShare:
    """One share: its part of the voting power, ciphertext, blind and nullifier."""

    index: int
    value: int
    c1: bytes
    c2: bytes
    blind: bytes = field(repr=False)
    nullifier: bytes


@dataclass(frozen=True, slots=True)
class Ballot:
    """One vote, ready to be cast and posted."""

    round_id: bytes
    proposal_id: int
    vote_decision: int
    weight: int
    commitment: bytes
    shares_hash: bytes
    share_comms: tuple[bytes, ...]
    shares: tuple[BallotShare, ...]


def split_weight(weight: int, rng: random.Random) -> list[int]:
    """Split the weight into 16 random non-negative parts."""
    cuts = sorted(rng.randint(0, weight) for _ in range(SHARE_COUNT - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, weight], strict=True)]


def seal_ballot(
    *,
    round_id: bytes,
    ea_pk: bytes,
    proposal_id: int,
    vote_decision: int,
    weight: int,
    rng: random.Random,
) -> Ballot:
    """Encrypt a vote; takes tens of milliseconds. `rng` only splits; keys and blinds use the system's randomness."""
    parts = split_weight(weight, rng)
    ciphertexts = [proofs.elgamal_encrypt(ea_pk, part) for part in parts]
    blinds = [proofs.random_field() for _ in parts]
    comms = tuple(proofs.share_commitment(blind, c1, c2) for blind, (c1, c2) in zip(blinds, ciphertexts, strict=True))
    digest = proofs.shares_hash(b"".join(comms))
    commitment = proofs.vote_commitment(round_id, digest, proposal_id, vote_decision)
    shares = tuple(
        BallotShare(
            index=index,
            value=part,
            c1=c1,
            c2=c2,
            blind=blind,
            nullifier=proofs.share_nullifier(commitment, index, blind),
        )
        for index, (part, (c1, c2), blind) in enumerate(zip(parts, ciphertexts, blinds, strict=True))
    )
    return Ballot(round_id, proposal_id, vote_decision, weight, commitment, digest, comms, shares)


def post_body(ballot: Ballot, share: BallotShare, position: int, submit_at: int) -> dict[str, Any]:
    """Build the body of `POST /shielded-vote/v1/shares` like a wallet; `submit_at` 0 is omitted."""
    sealed = [_ciphertext(each) for each in ballot.shares]
    body: dict[str, Any] = {
        "all_enc_shares": sealed,
        "enc_share": sealed[share.index],
        "primary_blind": b64(share.blind),
        "proposal_id": ballot.proposal_id,
        "share_comms": [b64(comm) for comm in ballot.share_comms],
        "shares_hash": b64(ballot.shares_hash),
        "tree_position": position,
        "vote_decision": ballot.vote_decision,
        "vote_round_id": ballot.round_id.hex(),
    }
    if submit_at:
        body["submit_at"] = submit_at
    return body


def immediate_times() -> list[int]:
    """Times for revealing every share immediately."""
    return [0] * SHARE_COUNT


def same_second_times(due_time: int) -> list[int]:
    """Times for revealing every share in the same Unix second."""
    return [due_time] * SHARE_COUNT


def spread_times(start: float, seconds: float, rng: random.Random) -> list[int]:
    """A random second of the window for every share."""
    return [int(start + rng.uniform(0, seconds)) for _ in range(SHARE_COUNT)]


def _ciphertext(share: BallotShare) -> dict[str, Any]:
    """A share's ciphertext in a request body."""
    return {"c1": b64(share.c1), "c2": b64(share.c2), "share_index": share.index}
