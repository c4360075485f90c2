"""What goes to a prover and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from helper.reveal.prover.frames import Frame


@dataclass(frozen=True, slots=True)
class ProofJob:
    """What a worker needs for one proof; lengths in bytes as in `proofs.prove`."""

    circuit: str
    path: bytes = field(repr=False)
    position: int = field(repr=False)
    share_comms: bytes = field(repr=False)
    primary_blind: bytes = field(repr=False)
    c1: bytes = field(repr=False)
    c2: bytes = field(repr=False)
    share_index: int
    proposal_id: int
    vote_decision: int
    round_id: bytes

    def frame(self) -> Frame:
        """The frame that asks a worker for this proof."""
        return {"op": "prove", **{one.name: getattr(self, one.name) for one in fields(self)}}


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof and the two public inputs that the prover computed itself."""

    proof: bytes
    nullifier: bytes
    root: bytes
    seconds: float
