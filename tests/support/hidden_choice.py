"""A made-up circuit generation whose shares hide the decision: 8 ciphertexts a share, 37 public inputs.

Hashes and proofs are SHA-256 of their inputs. As a program it is a prover worker: `python -m
tests.support.hidden_choice`.
"""

from __future__ import annotations

import json
import random
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from helper.chain.reveal_transaction import RevealMessage
from helper.circuits import GENERATIONS, CircuitGeneration, Job, RevealFields
from helper.core.share import Share
from helper.core.share_fields import ArrayField, Base64Field, HexField, IntegerField, ObjectField
from helper.errors import ShareRefused
from helper.ingest.validator import CheckedShare, Result
from helper.reveal.prover_worker import main
from proofs import CircuitInfo

NAME = "x37"
OPTIONS = 8
PROOF_BYTES = 6176
FINGERPRINT = "37" * 32
_HASH = Base64Field("32 bytes.")


def digest(label: str, *parts: bytes) -> bytes:
    return sha256(label.encode() + b"".join(parts)).digest()


def vote_commitment(round_id: bytes, shares_hash: bytes, proposal_id: int, option_count: int) -> bytes:
    """Return the leaf of a vote. It covers the number of options, not the decision."""
    return digest("vote", round_id, shares_hash, bytes((proposal_id, option_count)))


def share_nullifier(commitment: bytes, share_index: int, blind: bytes) -> bytes:
    return digest("nullifier", commitment, bytes((share_index,)), blind)


def tree_root(leaf: bytes, path: bytes) -> bytes:
    return digest("root", leaf, path)


class HiddenShare(Share):
    __slots__ = ()

    def find_choice_error(self, options: Sequence[int]) -> ShareRefused | None:
        if self.extra[0] == len(options):
            return None
        return ShareRefused(400, "is not the number of the proposal's options", field="option_count")


@dataclass(frozen=True, slots=True)
class HiddenStatement:
    nullifier: bytes
    coordinates: bytes
    proposal_id: int
    root: bytes
    round_id: bytes
    option_count: int

    def public_inputs(self) -> list[bytes]:
        points = [self.coordinates[start : start + 32] for start in range(0, len(self.coordinates), 32)]
        numbers = [number.to_bytes(32, "little") for number in (self.proposal_id, self.option_count)]
        return [self.nullifier, *points, numbers[0], self.root, self.round_id, numbers[1]]


def create_proof(statement: HiddenStatement) -> bytes:
    seed = digest("proof", *statement.public_inputs())
    return (seed * (PROOF_BYTES // 32 + 1))[:PROOF_BYTES]


def create_payload(round_id: bytes, *, position: int, option_count: int, share_index: int = 3) -> dict[str, Any]:
    rng = random.Random(position)
    ciphertexts = [(rng.randbytes(32), rng.randbytes(32)) for _ in range(OPTIONS)]
    blind = rng.randbytes(32)
    comms = [rng.randbytes(32) for _ in range(16)]
    comms[share_index] = digest("share", blind, *(c1 + c2 for c1, c2 in ciphertexts))
    return {
        "vote_round_id": round_id.hex(),
        "proposal_id": 1,
        "option_count": option_count,
        "share_index": share_index,
        "tree_position": position,
        "submit_at": 0,
        "enc_shares": [_encode(c1 + c2) for c1, c2 in ciphertexts],
        "share_comms": [_encode(comm) for comm in comms],
        "shares_hash": _encode(digest("shares", *comms)),
        "primary_blind": _encode(blind),
    }


def _encode(value: bytes) -> str:
    return b64encode(value).decode()


class HiddenChoiceGeneration(CircuitGeneration):
    kind = "hidden-choice"
    enc_share_bytes = 1 + 64 * OPTIONS
    fields = ObjectField(
        "One share of a vote.",
        {
            "vote_round_id": HexField("The round."),
            "proposal_id": IntegerField("The proposal.", 1, 50),
            "option_count": IntegerField("The number of options.", 2, OPTIONS),
            "share_index": IntegerField("The share.", 0, 15),
            "tree_position": IntegerField("The leaf.", 0, 2**24 - 1),
            "submit_at": IntegerField("The time.", 0, 2**63 - 1),
            "enc_shares": ArrayField("The ciphertexts.", OPTIONS, _HASH),
            "share_comms": ArrayField("The commitments.", 16, _HASH),
            "shares_hash": _HASH,
            "primary_blind": _HASH,
        },
    )

    def __init__(self) -> None:
        info = CircuitInfo(NAME, 10, PROOF_BYTES, FINGERPRINT, "made-up 0.0.0")
        super().__init__(info, first_version=None, proof_cost=1.5)

    def recognizes(self, body: bytes, /) -> bool:
        return b'"enc_shares"' in body

    def read_shares(self, bodies: Sequence[bytes]) -> Sequence[Result]:
        return [self._read(body) for body in bodies]

    def _read(self, body: bytes) -> Result:
        posted = json.loads(body)
        if not 2 <= posted["option_count"] <= OPTIONS:
            return ShareRefused(400, f"must be from 2 to {OPTIONS}", field="option_count")
        ciphertexts = [b64decode(value) for value in posted["enc_shares"]]
        blind, comms = b64decode(posted["primary_blind"]), [b64decode(value) for value in posted["share_comms"]]
        if comms[posted["share_index"]] != digest("share", blind, *ciphertexts):
            return ShareRefused(400, "do not match their commitment", field="enc_shares")
        if b64decode(posted["shares_hash"]) != digest("shares", *comms):
            return ShareRefused(400, "is not the hash of share_comms", field="shares_hash")
        share = HiddenShare(
            round_id=bytes.fromhex(posted["vote_round_id"]),
            share_index=posted["share_index"],
            proposal_id=posted["proposal_id"],
            vote_decision=0,
            tree_position=posted["tree_position"],
            submit_at=posted["submit_at"],
            shares_hash=digest("shares", *comms),
            share_comms=b"".join(comms),
            primary_blind=blind,
            c1=ciphertexts[0][:32],
            c2=ciphertexts[0][32:],
            kind=self.kind,
            extra=bytes((posted["option_count"],)) + b"".join(ciphertexts[1:]),
        )
        leaf = self.get_vote_commitment(share)
        return CheckedShare(share, leaf, share_nullifier(leaf, share.share_index, blind))

    def to_payload(self, share: Share) -> dict[str, Any]:
        ciphertexts = self.get_reveal_fields(share).enc_share[1:]
        return {
            "vote_round_id": share.round_id.hex(),
            "proposal_id": share.proposal_id,
            "option_count": share.extra[0],
            "share_index": share.share_index,
            "tree_position": share.tree_position,
            "submit_at": share.submit_at,
            "enc_shares": [_encode(ciphertexts[start : start + 64]) for start in range(0, 64 * OPTIONS, 64)],
            "share_comms": [_encode(share.share_comms[start : start + 32]) for start in range(0, 512, 32)],
            "shares_hash": _encode(share.shares_hash),
            "primary_blind": _encode(share.primary_blind),
        }

    def get_vote_commitment(self, share: Share) -> bytes:
        return vote_commitment(share.round_id, share.shares_hash, share.proposal_id, share.extra[0])

    def get_reveal_fields(self, share: Share) -> RevealFields:
        return RevealFields(share.extra[:1] + share.c1 + share.c2 + share.extra[1:], 0)

    def create_statement(self, message: RevealMessage, root: bytes) -> HiddenStatement:
        return _statement(message.enc_share, message.nullifier, message.proposal_id, root, message.round_id)

    def create_job(self, share: Share, path: bytes) -> Job:
        return {
            "path": path,
            "enc_share": self.get_reveal_fields(share).enc_share,
            "share_index": share.share_index,
            "shares_hash": share.shares_hash,
            "primary_blind": share.primary_blind,
            "proposal_id": share.proposal_id,
            "round_id": share.round_id,
        }

    def warm(self) -> str:
        return FINGERPRINT

    def self_test(self) -> float:
        return 0.001

    def prove(self, job: Job) -> Job:
        enc_share, round_id = bytes.fromhex(job["enc_share"]), bytes.fromhex(job["round_id"])
        leaf = vote_commitment(round_id, bytes.fromhex(job["shares_hash"]), job["proposal_id"], enc_share[0])
        nullifier = share_nullifier(leaf, job["share_index"], bytes.fromhex(job["primary_blind"]))
        root = tree_root(leaf, bytes.fromhex(job["path"]))
        statement = _statement(enc_share, nullifier, job["proposal_id"], root, round_id)
        return {"proof": create_proof(statement), "nullifier": nullifier, "root": root}

    def parse_statement(self, job: Job) -> HiddenStatement:
        names = ("nullifier", "coordinates", "root", "round_id")
        values = {name: bytes.fromhex(job[name]) for name in names}
        return HiddenStatement(**values, proposal_id=job["proposal_id"], option_count=job["option_count"])

    def verify(self, proof: bytes, statement: HiddenStatement) -> bool:
        return proof == create_proof(statement)


def _statement(enc_share: bytes, nullifier: bytes, proposal_id: int, root: bytes, round_id: bytes) -> HiddenStatement:
    points = [enc_share[start : start + 32] for start in range(1, len(enc_share), 32)]
    coordinates = b"".join(point + digest("y", point) for point in points)
    return HiddenStatement(nullifier, coordinates, proposal_id, root, round_id, enc_share[0])


if __name__ == "__main__":
    GENERATIONS[NAME] = HiddenChoiceGeneration()
    main()
