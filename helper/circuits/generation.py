"""Interface of a circuit generation, and versions of the vote chain as nodes report them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from helper.core.share import Share
from helper.core.share_fields import ObjectField
from proofs import CircuitInfo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from helper.chain.reveal_transaction import RevealMessage
    from helper.ingest.validator import Result


Version = tuple[int, int, int]

LATEST_KNOWN_VERSION: Final[Version] = (1, 7, 0)
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
    version = parse_version(text)
    return version is not None and version > LATEST_KNOWN_VERSION


def format_version(version: Version) -> str:
    """Return a version as release tags spell it."""
    return f"v{'.'.join(map(str, version))}"


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
    def recognizes(self, body: bytes) -> bool:
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
