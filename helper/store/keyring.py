"""Encryption of witnesses and messages, with keys that are never stored in the database.

A PostgreSQL server has logs, replicas and backups, and deleted rows remain on disk until they are overwritten. The
helper cannot erase them, unlike deleted rows in a SQLite file. Therefore secret columns are always encrypted there. In
a SQLite file they are encrypted if a key file is configured, which protects copies of the file.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from nacl.bindings import crypto_secretbox, crypto_secretbox_open
from nacl.exceptions import CryptoError

from helper.config.settings_file import CREDENTIALS_DIRECTORY
from helper.errors import StoreCorrupt, StoreError, StoreKeyError
from helper.store.null_cipher import TAG_BYTES, DecryptionError

KEY_BYTES: Final = 32
_KEY_ID_BYTES: Final = 4
_NONCE_BYTES: Final = 24
_NONCE: Final = slice(_KEY_ID_BYTES, _KEY_ID_BYTES + _NONCE_BYTES)
_FILE_ADVICE: Final = (
    "It has one key of 64 hex digits per line, the same on every host. Create it with "
    "`(umask 077; openssl rand -hex 32 > FILE)`."
)
_PROBE_TEXT: Final = b"svote-helper"
"""Plaintext of the key check value."""


class Keyring:
    """The encryption keys that the hosts of one database share.

    Args:
        keys: 32 bytes each, at least one; the first encrypts, all decrypt.

    Attributes:
        missing_keys: identifiers of keys that rows may need and that the key file lacks. Decrypting such a row is an
            error; a row with any other unknown key identifier is damaged.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = {_key_id(key): _derive_key(key, b"seal") for key in keys}
        # The key is set up once, because this takes most of the time of a hash of 32 bytes.
        self._tags = [hmac.new(_derive_key(key, b"tag"), digestmod="sha256") for key in keys]
        self._first = _key_id(keys[0])
        self.missing_keys: frozenset[bytes] = frozenset()

    @property
    def key_ids(self) -> list[bytes]:
        """Identifiers of the keys (4 bytes each), in order; each ciphertext begins with the identifier of its key."""
        return list(self._keys)

    def encrypt(self, plain: bytes) -> bytes:
        """Encrypt (XSalsa20-Poly1305).

        Returns:
            Key identifier (4 bytes), random nonce (24), ciphertext with its authentication tag (16 more).
        """
        nonce = os.urandom(_NONCE_BYTES)
        # Not with `SecretBox`, which takes 1.5 times as long for a witness.
        return b"".join((self._first, nonce, crypto_secretbox(plain, nonce, self._keys[self._first])))

    def decrypt(self, sealed: bytes) -> bytes:
        """Decrypt.

        Raises:
            DecryptionError: the ciphertext is damaged.
            StoreKeyError: it was encrypted with one of `missing_keys`.
        """
        key_id = sealed[:_KEY_ID_BYTES]
        if key_id in self.missing_keys:
            raise missing_key_error()
        key = self._keys.get(key_id)
        if key is None:
            raise DecryptionError
        try:
            return crypto_secretbox_open(sealed[_NONCE.stop :], sealed[_NONCE], key)
        except (CryptoError, ValueError) as error:
            raise DecryptionError from error

    def make_probe(self) -> str:
        """Return a key check value in hex: a known text, encrypted with the first key. It is stored in the database."""
        return self.encrypt(_PROBE_TEXT).hex()

    def check_probe(self, probe: str | None) -> bytes:
        """Check that these keys can decrypt a key check value; None for a damaged one.

        Returns:
            Identifier of its key.

        Raises:
            StoreKeyError: it was encrypted with a key that is not one of these.
            StoreCorrupt: it is damaged.
        """
        with suppress(DecryptionError, ValueError):
            sealed = bytes.fromhex(probe or "")
            key_id = sealed[:_KEY_ID_BYTES]
            if sealed and key_id not in self._keys:
                raise missing_key_error()
            if self.decrypt(sealed) == _PROBE_TEXT:
                return key_id
        raise StoreCorrupt("the database is damaged: its key check value failed")

    def nullifier_tags(self, nullifier: bytes) -> list[bytes]:
        """Return the possible keyed hashes of a nullifier, one for each key; new rows have the first."""
        return [_finish(keyed, nullifier) for keyed in self._tags]


def missing_key_error() -> StoreKeyError:
    """Return the error for a row whose key is not in the key file."""
    return StoreKeyError("the database has shares that are encrypted with a key that this host does not have")


def _finish(keyed: hmac.HMAC, nullifier: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(nullifier)
    return mac.digest()[:TAG_BYTES]


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
    if mode & 0o077 and not _is_credential(file):
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


def _is_credential(file: Path) -> bool:
    """Return whether a service manager passes this file. Its mode may contain the mask of an access control list."""
    directory = os.environ.get(CREDENTIALS_DIRECTORY)
    return directory is not None and file.parent == Path(directory)


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
    return blake2b(b"name", key=key, digest_size=_KEY_ID_BYTES, person=b"svote-store").digest()
