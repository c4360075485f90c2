"""Decrypts private keys exported by the chain's key tool (OpenPGP armor, passphrase). Pure.

Newer key tools (cosmos-sdk since 0.50, `kdf: argon2`) derive a key with Argon2id and encrypt with ChaCha20-Poly1305;
the nonce is zero because each export has a new salt. Older ones (`kdf: bcrypt`) derive it with bcrypt and encrypt with
NaCl's secret box. The plaintext is the private key in amino encoding.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

_ARMOR_BLOCK: Final = re.compile(
    r"-----BEGIN TENDERMINT PRIVATE KEY-----\s*\n(?P<headers>(?:[^\n:]+:[^\n]*\n)*)\s*\n"
    r"(?P<body>[A-Za-z0-9+/=\s]*?)(?:\n=[A-Za-z0-9+/]{4}\s*)?\n-----END TENDERMINT PRIVATE KEY-----"
)
_SECP256K1_PREFIX: Final = bytes.fromhex("e1b0f79b20")
"""Amino prefix of a secp256k1 private key of 32 bytes."""
# cosmos-sdk, crypto/armor.go
_ARGON2_PASSES: Final = 1
_ARGON2_KIBIBYTES: Final = 64 * 1024
_ARGON2_LANES: Final = 4


class KeyArmorError(ValueError):
    """The text is not a usable exported key. The message states the reason."""


class PassphraseError(KeyArmorError):
    """The passphrase is wrong, or the exported text is damaged."""

    def __init__(self) -> None:
        super().__init__("the key cannot be decrypted: wrong passphrase or damaged text")


def open_key_armor(text: str, passphrase: str) -> bytes:
    """Decrypt an exported key. Returns the private key, 32 bytes.

    Raises:
        PassphraseError: the passphrase is wrong.
        KeyArmorError: not an exported key, or not a secp256k1 key.
    """
    block = _ARMOR_BLOCK.search(text.replace("\r\n", "\n"))
    if block is None:
        raise KeyArmorError("not a private key exported by the chain's key tool")
    lines = dict(line.split(":", 1) for line in block["headers"].splitlines())
    headers = {name.strip().lower(): value.strip() for name, value in lines.items()}
    if headers.get("type", "secp256k1") != "secp256k1":
        raise KeyArmorError(f"the exported key is of type {headers['type']}, expected secp256k1")
    match headers.get("kdf"):
        case "argon2":
            return _open_argon2(headers.get("salt", ""), block["body"], passphrase)
        case "bcrypt":
            return _open_bcrypt(block[0], passphrase)
        case kdf:
            raise KeyArmorError(f"the exported key has an unsupported key derivation function: {kdf}")


def _open_argon2(salt: str, body: str, passphrase: str) -> bytes:
    # Imported on first use, so that other commands start faster.
    from argon2.low_level import Type, hash_secret_raw  # noqa: PLC0415
    from nacl.bindings import crypto_aead_chacha20poly1305_ietf_decrypt as decrypt  # noqa: PLC0415
    from nacl.exceptions import CryptoError  # noqa: PLC0415

    try:
        ciphertext, salt_bytes = base64.b64decode("".join(body.split()), validate=True), bytes.fromhex(salt)
    except (binascii.Error, ValueError):
        raise KeyArmorError("the exported key is damaged: the salt is not hex, or the body not base64") from None
    if len(salt_bytes) < 8:
        raise KeyArmorError("the exported key is damaged: the salt is too short")
    key = hash_secret_raw(
        passphrase.encode(), salt_bytes, _ARGON2_PASSES, _ARGON2_KIBIBYTES, _ARGON2_LANES, 32, Type.ID
    )
    try:
        amino = decrypt(ciphertext, None, bytes(12), key)
    except CryptoError:
        raise PassphraseError from None
    if len(amino) != len(_SECP256K1_PREFIX) + 32 or not amino.startswith(_SECP256K1_PREFIX):
        raise KeyArmorError("the exported key is not a secp256k1 key")
    return amino[len(_SECP256K1_PREFIX) :]


def _open_bcrypt(block: str, passphrase: str) -> bytes:
    # `PrivateKey.from_bcrypt_key` calls this, and also derives the public key with the `ecdsa` package.
    from cosmpy.crypto.keypairs import import_cosmos_bcrypt_armored_privkey  # noqa: PLC0415

    try:
        key, algorithm = import_cosmos_bcrypt_armored_privkey(block, passphrase=passphrase)
    except Exception:  # the library has no common error class
        raise PassphraseError from None
    if algorithm.lower() != "secp256k1":
        raise KeyArmorError("the exported key is not a secp256k1 key")
    return bytes(key)
