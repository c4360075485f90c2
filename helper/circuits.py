"""Circuit generations: fields of a share, validation, statement, proof, and the chain versions that verify them.

`GENERATIONS` lists all of them. No other module depends on the ciphertexts of a share or on a statement.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import proofs
from helper.core.share import SHARE_COUNT, SHARE_JSON, Share, share_to_payload
from helper.core.share_fields import ObjectField
from proofs import CIRCUITS, CircuitError, CircuitInfo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from helper.chain.reveal_transaction import RevealMessage
    from helper.ingest.validator import Result


Version = tuple[int, int, int]

LATEST_KNOWN_VERSION: Final = "v1.7.0"
"""Newest chain version whose circuit is known to this release. Newer ones are assumed to verify the same circuit."""

# A release tag, its pre-releases (v1.5.0-rc.0), builds after it (v1.3.0-12-gabc), with or without the "v". The number
# of digits is limited because the text comes from a node.
_VERSION: Final = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})(?:[-+][0-9A-Za-z.+-]{1,100})?")


def parse_version(text: str) -> Version | None:
    """Return the release in a node's version; None for development builds, which report none or a branch.

    A pre-release counts as its release, because it already contains the release's changes.
    """
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def is_newer_than_known(text: str) -> bool:
    """Whether a node's version is newer than all versions that this release knows."""
    version, known = parse_version(text), parse_version(LATEST_KNOWN_VERSION)
    return version is not None and known is not None and version > known


Job = dict[str, Any]
"""Arguments for a prover worker, as JSON values; bytes values are hex-encoded when they are sent."""


class RevealFields(NamedTuple):
    """The fields of a reveal message that depend on the kind of the share.

    Attributes:
        enc_share: the ciphertexts, encoded by the generation.
        vote_decision: the option voted for; 0 if the share hides it.
    """

    enc_share: bytes
    vote_decision: int


class CircuitGeneration(ABC):
    """One circuit, with the shares that it reveals.

    Generations with the same `kind` have the same fields, validation and statement, and prove the same shares.

    Args:
        info: the circuit's name, rows, proof length, fingerprint of the verifying key, and crate.
        first_version: first chain version that verifies it; None if no version implies it.
        proof_cost: time of a proof relative to k10's.
    """

    kind: ClassVar[str]
    """Stored with each share. At most 16 characters; "" for shares of k10 and k11."""
    fields: ClassVar[ObjectField]
    """The fields of a posted share."""
    enc_share_bytes: ClassVar[int]
    """Length of `enc_share` in a reveal message."""

    def __init__(self, info: CircuitInfo, *, first_version: Version | None, proof_cost: float) -> None:
        self.info = info
        self.first_version = first_version
        self.proof_cost = proof_cost

    # ------------------------------------------------------------------ shares

    @abstractmethod
    def recognizes(self, body: bytes, /) -> bool:
        """Whether a posted body, which may be invalid, is meant as a share of this kind."""

    @abstractmethod
    def read_shares(self, bodies: Sequence[bytes]) -> Sequence[Result]:
        """Parse posted bodies; check encodings and hashes. Runs in a thread, without access to the event loop."""

    @abstractmethod
    def to_payload(self, share: Share) -> dict[str, Any]:
        """Return the fields of a share as a wallet sends them."""

    @abstractmethod
    def get_vote_commitment(self, share: Share) -> bytes:
        """Return the leaf of a share's vote."""

    # ------------------------------------------------------------------ reveals

    @abstractmethod
    def get_reveal_fields(self, share: Share) -> RevealFields:
        """Return the ciphertexts and the decision that the reveal publishes."""

    @abstractmethod
    def create_statement(self, message: RevealMessage, root: bytes) -> DataclassInstance:
        """Return the public inputs of a reveal's proof: a flat dataclass of bytes and integers.

        Args:
            message: the reveal; its `enc_share` has `enc_share_bytes` bytes.
            root: the tree's root at its anchor height, 32 bytes.
        """

    @abstractmethod
    def create_job(self, share: Share, path: bytes) -> Job:
        """Return the witness of a proof. `path` has the 24 siblings of the share's leaf, leaf level first."""

    # ------------------------------------------------------------------ in a prover worker

    @abstractmethod
    def warm(self) -> str:
        """Create the keys and return their fingerprint.

        Raises:
            CircuitError: it is not `info.fingerprint`.
        """

    @abstractmethod
    def self_test(self) -> float:
        """Prove a sample share and verify the proof. Returns the seconds that proving took.

        Raises:
            CircuitError: the proof is not valid.
        """

    @abstractmethod
    def prove(self, job: Job) -> Job:
        """Prove the witness of `create_job`. Returns `proof`, `nullifier` and `root`, as bytes.

        Raises:
            ProofsError: the witness is invalid, or proving failed.
        """

    @abstractmethod
    def parse_statement(self, job: Job) -> DataclassInstance:
        """Return the statement of a job with the fields of `create_statement`."""

    @abstractmethod
    def verify(self, proof: bytes, statement: Any) -> bool:
        """Whether a proof is valid for a statement of this generation.

        Raises:
            EncodingError: the statement is malformed.
            CircuitError: the verifying key does not have the expected fingerprint.
        """


_POINT_BYTES = 32
_COMMON_NAMES = frozenset({"op", "circuit", "proof"})
"""Names in the requests to a prover worker that are not values of a circuit."""


class SingleChoiceGeneration(CircuitGeneration):
    """A circuit of `proofs`."""

    kind = ""
    fields = SHARE_JSON
    enc_share_bytes = 2 * _POINT_BYTES

    def recognizes(self, _body: bytes, /) -> bool:
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


GENERATIONS: Final[dict[str, CircuitGeneration]] = {
    generation.info.name: generation
    for generation in (
        SingleChoiceGeneration(CIRCUITS["k11"], first_version=(0, 0, 0), proof_cost=6.0),
        SingleChoiceGeneration(CIRCUITS["k10"], first_version=(1, 3, 0), proof_cost=1.0),
    )
}
"""The generations by name, oldest first. Costs were measured with one prover: 0.29 s for k10, 1.85 s for k11."""


def get_generation(name: str) -> CircuitGeneration:
    """Return a generation by name. Raises `proofs.CircuitError` if there is none."""
    generation = GENERATIONS.get(name)
    if generation is None:
        raise CircuitError("unknown circuit")
    return generation


def circuit_of_proof(proof: bytes) -> CircuitInfo | None:
    """Return the constants of the generation whose proofs have this length; None if there is none."""
    infos = (generation.info for generation in GENERATIONS.values())
    return next((info for info in infos if info.proof_bytes == len(proof)), None)


def share_body_schema() -> Mapping[str, Any]:
    """Return the JSON schema of a posted share, of any kind if there are several."""
    kinds = {generation.kind: generation.fields.schema() for generation in GENERATIONS.values()}
    return {"anyOf": list(kinds.values())} if len(kinds) > 1 else next(iter(kinds.values()))


def circuits_of_kind(kind: str) -> tuple[str, ...]:
    """Return the names of the generations that prove shares of this kind, newest first; empty if there are none."""
    return tuple(name for name, generation in reversed(GENERATIONS.items()) if generation.kind == kind)


def generation_of_kind(kind: str) -> CircuitGeneration:
    """Return the newest generation of a kind of shares. Raises `proofs.CircuitError` if there is none."""
    return get_generation(next(iter(circuits_of_kind(kind)), ""))


def circuit_for_version(version: str) -> str | None:
    """Return the generation that a node of this version verifies.

    None if the version cannot be parsed.
    """
    parsed = parse_version(version)
    if parsed is None:
        return None
    return next(
        name
        for name, generation in reversed(GENERATIONS.items())
        if generation.first_version is not None and generation.first_version <= parsed
    )


def default_circuit() -> str:
    """Return the generation that is tried first if the chain's version is unknown: that of the newest version."""
    return next(name for name, each in reversed(GENERATIONS.items()) if each.first_version is not None)


def read_shares(bodies: Sequence[bytes]) -> Sequence[Result]:
    """Parse and validate posted bodies, each by the newest generation that recognizes it, else as a share of k10."""
    kinds = {generation.kind: generation for generation in GENERATIONS.values()}
    if len(kinds) == 1:
        return kinds[SingleChoiceGeneration.kind].read_shares(bodies)
    newest_first = list(reversed(kinds.values()))
    selected = [
        next((generation for generation in newest_first if generation.recognizes(body)), newest_first[-1])
        for body in bodies
    ]
    results: dict[int, Result] = {}
    for generation in newest_first:
        indices = [index for index, choice in enumerate(selected) if choice is generation]
        if indices:
            results |= zip(indices, generation.read_shares([bodies[index] for index in indices]), strict=True)
    return [results[index] for index in range(len(bodies))]
