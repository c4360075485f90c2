"""Exceptions of `proofs`.

    ProofsError
    ├── EncodingError    a field is malformed
    ├── ShareRuleError   the fields of a share do not match
    ├── CircuitError     unknown circuit, or wrong verifying key
    ├── ProvingError     proving failed
    └── TreeError        invalid position or size, or invalid tree data

Messages never quote a value, because most values are secret. All exceptions can be pickled.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal["length", "non-canonical", "off-curve", "identity", "range"]
Rule = Literal["shares_hash", "share_comm"]


class ProofsError(Exception):
    """Base class of all errors of this package."""


class EncodingError(ProofsError):
    """A field is malformed. `field` is its name on the wire."""

    def __init__(self, field: str, reason: Reason) -> None:
        super().__init__(field, reason)
        self.field: str = field
        self.reason: Reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class ShareRuleError(ProofsError):
    """A hash over the fields of a share does not match. `rule` states which."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.rule: Rule = rule

    def __str__(self) -> str:
        return f"{self.rule} does not match"


class CircuitError(ProofsError):
    """The circuit is unknown, key generation failed, or the fingerprint is not the protocol's."""


class ProvingError(ProofsError):
    """Proving failed, or native code panicked."""


class TreeError(ProofsError):
    """Invalid position or size, full tree, or invalid tree data."""
