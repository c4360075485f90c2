"""The form of a sealed column, and the cipher of databases without a key."""

from __future__ import annotations

from typing import Final

TAG_BYTES: Final = 16
KEY_ID_BYTES: Final = 4
NONCE_BYTES: Final = 24
AUTHENTICATOR_BYTES: Final = 16
HEADER_BYTES: Final = KEY_ID_BYTES + NONCE_BYTES + AUTHENTICATOR_BYTES
"""A sealed column begins with the identifier of its key, a nonce, and the authenticator."""


class DecryptionError(Exception):
    """A sealed column is damaged."""


class NullCipher:
    """The cipher of a database without a key: stores secrets as they are, behind a header of zeros (key id 0).

    The header says nothing, so its damage changes nothing. The row check covers what follows it.
    """

    _HEADER: Final = bytes(HEADER_BYTES)

    def encrypt(self, plain: bytes) -> bytes:
        """Return the header and the plaintext."""
        return self._HEADER + plain

    def decrypt(self, sealed: bytes) -> bytes:
        """Return the plaintext."""
        return sealed[HEADER_BYTES:]

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the only possible tag of a nullifier: its first bytes."""
        return [nullifier[:TAG_BYTES]]
