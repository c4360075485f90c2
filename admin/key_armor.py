"""Private keys as the chain's key tool exports them: OpenPGP armour around a key that a passphrase seals. Pure.

Two seals are in use. Newer key tools (cosmos-sdk since 0.50, `kdf: argon2`) derive a key with Argon2id and seal with
ChaCha20-Poly1305, with a nonce of zeros as the salt is new each time; older ones (`kdf: bcrypt`) derive it with bcrypt
and seal with NaCl's secret box. Sealed is the key's amino encoding.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

_BLOCK: Final = re.compile(
    r"-----BEGIN TENDERMINT PRIVATE KEY-----\s*\n(?P<headers>(?:[^\n:]+:[^\n]*\n)*)\s*\n"
    r"(?P<body>[A-Za-z0-9+/=\s]*?)(?:\n=[A-Za-z0-9+/]{4}\s*)?\n-----END TENDERMINT PRIVATE KEY-----"
)
_SECP256K1: Final = bytes.fromhex("e1b0f79b20")
"""What amino writes before the 32 bytes of a secp256k1 key."""
# cosmos-sdk, crypto/armor.go
_PASSES: Final = 1
_KIBIBYTES: Final = 64 * 1024
_LANES: Final = 4


class KeyArmorError(ValueError):
    """It is no exported key that can be used here; the text says why."""


class PassphraseError(KeyArmorError):
    """The passphrase is not the one that it was exported with, or the text was damaged."""

    def __init__(self) -> None:
        super().__init__("the key could not be opened: is the passphrase right, and the text whole?")


def open_key_armor(text: str, passphrase: str) -> bytes:
    """The private key (32 bytes) of an export.

    Raises:
        PassphraseError: the passphrase does not open it.
        ArmourError: it is no export, or not of a secp256k1 key.
    """
    found = _BLOCK.search(text.replace("\r\n", "\n"))
    if found is None:
        raise KeyArmorError("this is no private key as the chain's key tool exports it")
    headers = dict(line.split(":", 1) for line in found["headers"].splitlines())
    about = {name.strip().lower(): value.strip() for name, value in headers.items()}
    if about.get("type", "secp256k1") != "secp256k1":
        raise KeyArmorError(f"the exported key is one of {about['type']}, not of secp256k1")
    match about.get("kdf"):
        case "argon2":
            return _open_argon2(about.get("salt", ""), found["body"], passphrase)
        case "bcrypt":
            return _open_bcrypt(found[0], passphrase)
        case kdf:
            raise KeyArmorError(f"the exported key is sealed in a way that is not known here: kdf {kdf}")


def _open_argon2(salt: str, body: str, passphrase: str) -> bytes:
    # loaded by who has such a key: they cost every other command's start
    from argon2.low_level import Type, hash_secret_raw  # noqa: PLC0415
    from nacl.bindings import crypto_aead_chacha20poly1305_ietf_decrypt as decrypt  # noqa: PLC0415
    from nacl.exceptions import CryptoError  # noqa: PLC0415

    try:
        sealed, salted = base64.b64decode("".join(body.split()), validate=True), bytes.fromhex(salt)
    except (binascii.Error, ValueError):
        raise KeyArmorError("the exported key is damaged: its salt is not hex, or its text not base64") from None
    if len(salted) < 8:
        raise KeyArmorError("the exported key is damaged: its salt is too short")
    key = hash_secret_raw(passphrase.encode(), salted, _PASSES, _KIBIBYTES, _LANES, 32, Type.ID)
    try:
        amino = decrypt(sealed, None, bytes(12), key)
    except CryptoError:
        raise PassphraseError from None
    if len(amino) != len(_SECP256K1) + 32 or not amino.startswith(_SECP256K1):
        raise KeyArmorError("the exported key is not one of secp256k1")
    return amino[len(_SECP256K1) :]


def _open_bcrypt(block: str, passphrase: str) -> bytes:
    # The function behind `PrivateKey.from_bcrypt_key`, which also derives the public key with the `ecdsa` package.
    from cosmpy.crypto.keypairs import import_cosmos_bcrypt_armored_privkey  # noqa: PLC0415

    try:
        key, algorithm = import_cosmos_bcrypt_armored_privkey(block, passphrase=passphrase)
    except Exception:  # the library has no common error class
        raise PassphraseError from None
    if algorithm.lower() != "secp256k1":
        raise KeyArmorError("the exported key is not one of secp256k1")
    return bytes(key)
