"""Votes as a wallet makes them, for the tests of the proofs package."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import proofs

MODULUS = 0x40000000000000000000000000000000224698FC094CF91B992D30ED00000001
"""Modulus of the Pallas base field."""


def encode_element(number: int) -> bytes:
    """Encode a number as a field element, canonical or not."""
    return number.to_bytes(32, "little")


def seeded_element(seed: str) -> bytes:
    """A canonical element derived from a text."""
    return encode_element(int.from_bytes(hashlib.sha512(seed.encode()).digest(), "little") % MODULUS)


def off_curve_point() -> bytes:
    """A canonical x-coordinate of no point on the curve."""
    number = 1
    while pow(number**3 + 5, (MODULUS - 1) // 2, MODULUS) == 1:
        number += 1
    return encode_element(number)


@dataclass(frozen=True)
class Vote:
    """One vote, split and encrypted."""

    round_id: bytes
    proposal_id: int
    vote_decision: int
    values: tuple[int, ...]
    blinds: tuple[bytes, ...]
    ciphertexts: tuple[tuple[bytes, bytes], ...]
    share_comms: bytes
    shares_hash: bytes

    @property
    def commitment(self) -> bytes:
        return proofs.vote_commitment(self.round_id, self.shares_hash, self.proposal_id, self.vote_decision)

    def witness(self, share_index: int) -> dict[str, Any]:
        c1, c2 = self.ciphertexts[share_index]
        return {
            "round_id": self.round_id,
            "share_comms": self.share_comms,
            "share_index": share_index,
            "proposal_id": self.proposal_id,
            "vote_decision": self.vote_decision,
            "primary_blind": self.blinds[share_index],
            "c1": c1,
            "c2": c2,
        }


def create_vote(public: bytes, seed: str = "vote", proposal_id: int = 3, vote_decision: int = 1) -> Vote:
    rng = random.Random(seed)
    values = tuple(rng.randrange(1000) for _ in range(16))
    blinds = tuple(seeded_element(f"{seed} blind {i}") for i in range(16))
    ciphertexts = tuple(
        proofs.elgamal_encrypt(public, value, seeded_element(f"{seed} r {i}")) for i, value in enumerate(values)
    )
    comms = b"".join(
        proofs.share_commitment(blind, *ciphertext) for blind, ciphertext in zip(blinds, ciphertexts, strict=True)
    )
    return Vote(
        round_id=seeded_element("round"),
        proposal_id=proposal_id,
        vote_decision=vote_decision,
        values=values,
        blinds=blinds,
        ciphertexts=ciphertexts,
        share_comms=comms,
        shares_hash=proofs.shares_hash(comms),
    )
