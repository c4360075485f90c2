"""Whether the published voting configuration authenticates a round. Information for people; it never affects shares."""

from __future__ import annotations

from enum import StrEnum


class RoundAuthentication(StrEnum):
    """Result of checking the signatures of a round in the published voting configuration.

    Wallets vote only in rounds that are authenticated.
    """

    AUTHENTICATED = "authenticated"
    """A signature by a trusted key is valid."""
    KEY_MISMATCH = "key_mismatch"
    """A signature is valid, but for another public key of the election authority than the chain's."""
    NO_VALID_SIGNATURE = "no_valid_signature"
    """No signature by a trusted key is valid."""
    UNSUPPORTED_VERSION = "unsupported_version"
    """The entry has an `auth_version` other than 2."""
    NOT_LISTED = "not_listed"
    """The configuration has no entry for the round."""
    UNKNOWN = "unknown"
    """There is no configuration yet, or its trusted keys are not known."""
