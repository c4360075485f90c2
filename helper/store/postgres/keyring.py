"""Encryption of witnesses and messages, with keys that are never stored in the database.

A PostgreSQL server has logs, replicas and backups, and deleted rows remain on disk until they are overwritten. The
helper cannot erase them, unlike deleted rows in a SQLite file. Therefore secret columns are stored only encrypted.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from nacl.exceptions import CryptoError
from nacl.secret import SecretBox

from helper.errors import StoreError

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
KEY_ID_BYTES: Final = 4
_FILE_ADVICE: Final = (
    "It has one key of 64 hex digits per line, the same on every host. Create it with "
    "`(umask 077; openssl rand -hex 32 > FILE)`."
)


class DecryptionError(Exception):
    """A ciphertext is damaged."""


class Keyring:
    """The encryption keys that the hosts of one database share.

    Args:
        keys: 32 bytes each; the first encrypts, all decrypt.

    Raises:
        StoreError: there is no key, or a key has the wrong length.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise StoreError("the key file has no usable key", advice=_FILE_ADVICE)
        self._boxes = {_key_id(key): SecretBox(_derive_key(key, b"seal")) for key in keys}
        self._tag_keys = [_derive_key(key, b"tag") for key in keys]
        self._first = _key_id(keys[0])

    @property
    def key_ids(self) -> list[bytes]:
        """Identifiers of the keys (4 bytes each), in order; each ciphertext begins with the identifier of its key."""
        return list(self._boxes)

    def encrypt(self, plain: bytes) -> bytes:
        """Encrypt: key identifier (4 bytes), random nonce (24), ciphertext with its authentication tag (16 more)."""
        return self._first + self._boxes[self._first].encrypt(plain)

    def decrypt(self, sealed: bytes) -> bytes:
        """Decrypt.

        Raises:
            DecryptionError: the ciphertext is damaged.
            StoreError: it was encrypted with a key that this host does not have.
        """
        box = self._boxes.get(sealed[:KEY_ID_BYTES])
        if box is None:
            raise StoreError(
                "the database has shares that are encrypted with a key that this host does not have",
                advice="Install the same key file on every host; remove an old key only once its rounds are purged.",
            )
        try:
            return box.decrypt(sealed[KEY_ID_BYTES:])
        except (CryptoError, ValueError) as error:
            raise DecryptionError from error

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the possible keyed hashes of a nullifier, one for each key; new rows have the first."""
        return [hmac.digest(key, nullifier, "sha256")[:TAG_BYTES] for key in self._tag_keys]


def read_keyring(file: Path) -> Keyring:
    """Read a key file: one key per line, the first one encrypts. Empty lines and lines that begin with # are ignored.

    Raises:
        StoreError: the file cannot be read, is accessible to users other than its owner, or contains a line that is
            not a key. The message never quotes a line.
    """
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read().decode("ascii")
    except PermissionError as error:
        advice = (
            f"Its owner must be the user of the helper, who needs access to its directory too: `chown USER {file}`."
        )
        raise StoreError(f"the key file {file} cannot be read: {error.strerror}", advice=advice) from None
    except OSError as error:
        raise StoreError(f"the key file {file} cannot be read: {error.strerror}", advice=_FILE_ADVICE) from None
    except UnicodeDecodeError:
        raise StoreError(f"the key file {file} is not text", advice=_FILE_ADVICE) from None
    if mode & 0o077:
        raise StoreError(
            f"users other than its owner may access the key file {file} (mode {mode:04o})",
            advice=f"`chmod 600 {file}`.",
        )
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            keys.append(_parse_key(entry, f"{file}:{number}"))
    if not keys:
        raise StoreError(f"the key file {file} has no key", advice=_FILE_ADVICE)
    return Keyring(keys)


def _parse_key(entry: str, place: str) -> bytes:
    try:
        key = bytes.fromhex(entry)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(entry) != 2 * KEY_BYTES:
        raise StoreError(f"{place} is not a key", advice=_FILE_ADVICE)
    return key


def _derive_key(key: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, key=key, digest_size=KEY_BYTES, person=b"svote-store").digest()


def _key_id(key: bytes) -> bytes:
    return blake2b(b"name", key=key, digest_size=KEY_ID_BYTES, person=b"svote-store").digest()
