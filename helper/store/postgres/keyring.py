"""What PostgreSQL is never shown: witnesses and messages leave a host sealed, under a key that is not in the database.

A database of several hosts writes a log, has replicas and backups, and keeps what is deleted until it is overwritten.
None of that can be erased from here within seconds, as SQLite's file is. So what must not stay is not there in the
first place.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from nacl.exceptions import CryptoError
from nacl.secret import SecretBox

from helper.errors import StoreError

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
NAME_BYTES: Final = 4


class DecryptionError(Exception):
    """A sealed text is not as it was written."""


class Keyring:
    """The keys that the hosts of one database share.

    Args:
        keys: 32 bytes each; the first seals, all open.

    Raises:
        StoreError: there is none, or one of another length.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise StoreError(
                "the key file holds no usable key",
                advice="It holds lines of 64 hex characters, the same on every host: `openssl rand -hex 32` makes one.",
            )
        self._boxes = {_name(key): SecretBox(_derive(key, b"seal")) for key in keys}
        self._tag_keys = [_derive(key, b"tag") for key in keys]
        self._first = _name(keys[0])

    @property
    def names(self) -> list[bytes]:
        """The keys' names (4 bytes each), in their order; what a key sealed begins with its name."""
        return list(self._boxes)

    def seal(self, plain: bytes) -> bytes:
        """The bytes, sealed: the name of the key (4), a random nonce (24), the ciphertext with its tag (16 more)."""
        return self._first + self._boxes[self._first].encrypt(plain)

    def open(self, sealed: bytes) -> bytes:
        """What was sealed.

        Raises:
            UnsealedError: it is damaged.
            StoreError: it was sealed with a key that this host does not have.
        """
        box = self._boxes.get(sealed[:NAME_BYTES])
        if box is None:
            raise StoreError(
                "the database holds shares that are sealed with a key that this host does not have",
                advice="Give every host the same key file. An older key stays in it until its rounds are purged.",
            )
        try:
            return box.decrypt(sealed[NAME_BYTES:])
        except (CryptoError, ValueError) as error:
            raise DecryptionError from error

    def tags(self, nullifier: bytes) -> list[bytes]:
        """What a share's row may have for its nullifier, one for each key; new rows have the first."""
        return [hmac.digest(key, nullifier, "sha256")[:TAG_BYTES] for key in self._tag_keys]


def _derive(key: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, key=key, digest_size=KEY_BYTES, person=b"svote-store").digest()


def _name(key: bytes) -> bytes:
    return blake2b(b"name", key=key, digest_size=NAME_BYTES, person=b"svote-store").digest()
