"""Circuits k11 and k10: a share has one ciphertext, and its reveal publishes the decision. 9 public inputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import proofs
from helper.circuits.generation import CircuitGeneration, Job, RevealFields
from helper.core.share import SHARE_COUNT, SHARE_JSON, Share, share_to_payload

if TYPE_CHECKING:
    from helper.chain.reveal_transaction import RevealMessage


_POINT_BYTES = 32
_COMMON_NAMES = frozenset({"op", "circuit", "proof"})
"""Names in the requests to a prover worker that are not values of a circuit."""


class SingleChoiceGeneration(CircuitGeneration):
    """A circuit of `proofs`."""

    kind = ""
    fields = SHARE_JSON
    enc_share_bytes = 2 * _POINT_BYTES

    def recognizes(self, body: bytes) -> bool:  # noqa: ARG002
        """Every body that no other generation recognizes."""
        return True

    def read_shares(self, bodies: Sequence[bytes]) -> Sequence[proofs.ReadShare | proofs.InvalidShare]:
        """Validate in one native call."""
        return proofs.read_shares(bodies)

    def to_payload(self, share: Share) -> dict[str, Any]:
        """Return the fields of a share as a wallet sends them."""
        return share_to_payload(share)

    def get_vote_commitment(self, share: Share) -> bytes:
        """Return the leaf of a share's vote."""
        return proofs.vote_commitment(share.round_id, share.shares_hash, share.proposal_id, share.vote_decision)

    def get_reveal_fields(self, share: Share) -> RevealFields:
        """Return the ciphertext and the decision."""
        return RevealFields(share.c1 + share.c2, share.vote_decision)

    def create_statement(self, message: RevealMessage, root: bytes) -> proofs.Statement:
        """Return the public inputs."""
        return proofs.Statement(
            nullifier=message.nullifier,
            c1=message.enc_share[:_POINT_BYTES],
            c2=message.enc_share[_POINT_BYTES:],
            proposal_id=message.proposal_id,
            vote_decision=message.vote_decision,
            root=root,
            round_id=message.round_id,
        )

    def create_job(self, share: Share, path: bytes) -> Job:
        """Return the arguments of `proofs.prove`."""
        return {
            "path": path,
            "position": share.tree_position,
            "share_comms": share.share_comms,
            "primary_blind": share.primary_blind,
            "c1": share.c1,
            "c2": share.c2,
            "share_index": share.share_index,
            "proposal_id": share.proposal_id,
            "vote_decision": share.vote_decision,
            "round_id": share.round_id,
        }

    def warm(self) -> str:
        """Create the keys and return their fingerprint."""
        return proofs.warm(self.info.name)

    def self_test(self) -> float:
        """Prove a sample share and verify the proof. Returns the seconds that proving took."""
        share, path = create_sample_share()
        job = self.create_job(share, path)
        started = time.perf_counter()
        proved = proofs.prove(self.info.name, **job)
        seconds = time.perf_counter() - started
        if not proofs.verify(self.info.name, proved.proof, create_sample_statement(share, proved)):
            raise proofs.CircuitError(f"{self.info.name}: the proof of the self-test is not valid")
        return seconds

    def prove(self, job: Job) -> Job:
        """Create a proof."""
        proved = proofs.prove(self.info.name, **_read_values(job))
        return {"proof": proved.proof, "nullifier": proved.nullifier, "root": proved.root}

    def parse_statement(self, job: Job) -> proofs.Statement:
        """Return the public inputs of a request to check a proof."""
        return proofs.Statement(**_read_values(job))

    def verify(self, proof: bytes, statement: proofs.Statement) -> bool:
        """Verify a proof."""
        return proofs.verify(self.info.name, proof, statement)


def _read_values(job: Job) -> dict[str, Any]:
    """Return the values of a request, without those that all circuits have. Each text is the hex of bytes."""
    return {
        name: bytes.fromhex(value) if isinstance(value, str) else value
        for name, value in job.items()
        if name not in _COMMON_NAMES
    }


def create_sample_share() -> tuple[Share, bytes]:
    """Return a valid share for the self-test at start-up, and its path in a tree with one leaf.

    The self-test checks keys, prover and verifier, and measures the duration of a proof.
    """
    _, public = proofs.elgamal_keygen(None)
    ciphertexts = [proofs.elgamal_encrypt(public, value) for value in range(SHARE_COUNT)]
    blinds = [proofs.random_field() for _ in ciphertexts]
    comms = b"".join(
        proofs.share_commitment(blind, c1, c2) for blind, (c1, c2) in zip(blinds, ciphertexts, strict=True)
    )
    index = 3
    c1, c2 = ciphertexts[index]
    share = Share(
        share_index=index,
        c1=c1,
        c2=c2,
        round_id=(7).to_bytes(32, "little"),
        proposal_id=1,
        vote_decision=1,
        tree_position=0,
        submit_at=0,
        shares_hash=proofs.shares_hash(comms),
        share_comms=comms,
        primary_blind=blinds[index],
    )
    tree = proofs.CommitmentTree()
    tree.append(proofs.vote_commitment(share.round_id, share.shares_hash, share.proposal_id, share.vote_decision))
    return share, tree.path(share.tree_position)


def create_sample_statement(share: Share, proved: proofs.Proved) -> proofs.Statement:
    """Return the public inputs of a proof of `create_sample_share`."""
    return proofs.Statement(
        nullifier=proved.nullifier,
        c1=share.c1,
        c2=share.c2,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        root=proved.root,
        round_id=share.round_id,
    )
