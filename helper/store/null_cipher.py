"""The cipher of databases without a key."""

from __future__ import annotations

from typing import Final

TAG_BYTES: Final = 16


class DecryptionError(Exception):
    """A sealed column is damaged."""


class NullCipher:
    """The cipher of a database without a key: stores secrets as they are."""

    def encrypt(self, plain: bytes) -> bytes:
        """Return the plaintext."""
        return plain

    def decrypt(self, sealed: bytes) -> bytes:
        """Return the plaintext."""
        return sealed

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the only possible tag of a nullifier: its first bytes."""
        return [nullifier[:TAG_BYTES]]
