"""Input and output of one proof."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from helper.reveal.prover.frames import Frame


@dataclass(frozen=True, slots=True)
class ProofJob:
    """Input of one proof; byte lengths as in `proofs.prove`."""

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

    def to_frame(self) -> Frame:
        """Return the frame that requests this proof from a worker."""
        return {"op": "prove", **{entry.name: getattr(self, entry.name) for entry in fields(self)}}


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof and the two public inputs that the prover computed."""

    proof: bytes
    nullifier: bytes
    root: bytes
    seconds: float
