"""What `proofs` raises.

    ProofsError
    ├── EncodingError    a field is not a well-formed encoding
    ├── ShareRuleError   the fields of a share do not belong together
    ├── CircuitError     unknown circuit, or not the keys that the protocol names
    ├── ProvingError     no proof came out
    └── TreeError        no such position or size, or data that cannot be a tree

No message quotes a value: most values here are secrets. All of them survive pickling.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal["length", "non-canonical", "off-curve", "identity", "range"]
Rule = Literal["shares_hash", "share_comm"]


class ProofsError(Exception):
    """Root of all errors of this package."""


class EncodingError(ProofsError):
    """A field is malformed: `field` is its name on the wire, `reason` what is wrong with it."""

    def __init__(self, field: str, reason: Reason) -> None:
        super().__init__(field, reason)
        self.field: str = field
        self.reason: Reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class ShareRuleError(ProofsError):
    """A hash between the fields of a share does not hold; `rule` says which."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.rule: Rule = rule

    def __str__(self) -> str:
        return f"{self.rule} does not hold"


class CircuitError(ProofsError):
    """The circuit is unknown, its keys could not be made, or their fingerprint is not the protocol's."""


class ProvingError(ProofsError):
    """The prover could not make a proof; also what a panic in native code becomes."""


class TreeError(ProofsError):
    """A position or size that the tree does not have, a full tree, or data that cannot be a tree."""
