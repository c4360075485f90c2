"""ADR-036 signatures of account keys, and private keys exported by the chain's key tool. Pure.

`signArbitrary` of browser wallets creates ADR-036 signatures over arbitrary bytes. The signed document is amino JSON
with sorted keys; no transaction has this form. Its SHA-256 is signed with ECDSA over secp256k1
(https://docs.cosmos.network, ADR 036). OpenSSL does the curve arithmetic, through `cryptography`: the pure Python
`ecdsa` package, which cosmpy signs with, leaks the nonce through its timing (Minerva, CVE-2024-23342). Lengths and the
malleability of signatures are checked here.

Exported keys are OpenPGP armor with a passphrase. Newer key tools (cosmos-sdk since 0.50, `kdf: argon2`) derive a key
with Argon2id and encrypt with ChaCha20-Poly1305; the nonce is zero because each export has a new salt. Older ones
(`kdf: bcrypt`) derive it with bcrypt and encrypt with NaCl's secret box. The plaintext is the private key in amino
encoding.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from typing import Final

from argon2.low_level import Type, hash_secret_raw
from cosmpy.crypto.hashfuncs import ripemd160
from cosmpy.crypto.keypairs import import_cosmos_bcrypt_armored_privkey
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nacl.bindings import crypto_aead_chacha20poly1305_ietf_decrypt
from nacl.exceptions import CryptoError

from admin.registration_request import ACCOUNT_PREFIX, SignatureRefusedError, encode_address

PUBLIC_KEY_BYTES: Final = 33
SIGNATURE_BYTES: Final = 64
CURVE_ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""Number of points of secp256k1 (SEC 2, section 2.4.1)."""


def encode_sign_doc(data: bytes, signer: str) -> bytes:
    """Return the document that this address signs for these bytes."""
    value = {"data": base64.b64encode(data).decode(), "signer": signer}
    document = {
        "account_number": "0",
        "chain_id": "",
        "fee": {"amount": [], "gas": "0"},
        "memo": "",
        "msgs": [{"type": "sign/MsgSignData", "value": value}],
        "sequence": "0",
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def verify_signature(data: bytes, *, signer: str, pub_key: bytes, signature: bytes) -> None:
    """Verify that the owner of an address signed these bytes.

    Args:
        data: the signed bytes.
        signer: the account address, `sv1…`.
        pub_key: compressed point, 33 bytes.
        signature: r ‖ s, big-endian, 64 bytes, s in the lower half.

    Raises:
        SignatureRefusedError: the key does not belong to the address, or the signature is invalid.
    """
    if address_of(pub_key) != signer:
        if not signer.startswith(f"{ACCOUNT_PREFIX}1"):
            raise SignatureRefusedError(f"operator_address: does not begin with {ACCOUNT_PREFIX}1")
        raise SignatureRefusedError("pub_key: is not the key of operator_address")
    if len(signature) != SIGNATURE_BYTES:
        raise SignatureRefusedError(f"signature: has {len(signature)} bytes, expected {SIGNATURE_BYTES}")
    if int.from_bytes(signature[32:], "big") > CURVE_ORDER // 2:
        # Signature malleability: the same signature with s in the lower half is also valid.
        raise SignatureRefusedError("signature: s is in the upper half")
    r, s = (int.from_bytes(signature[at : at + 32], "big") for at in (0, 32))
    try:
        _public_key(pub_key).verify(encode_dss_signature(r, s), encode_sign_doc(data, signer), _ecdsa_sha256())
    except InvalidSignature:
        raise SignatureRefusedError("signature: does not verify") from None


def address_of(pub_key: bytes, prefix: str = ACCOUNT_PREFIX) -> str:
    """Return the address of a compressed public key.

    Raises:
        SignatureRefusedError: the key is invalid.
    """
    _public_key(pub_key)
    return encode_address(ripemd160(hashlib.sha256(pub_key).digest()), prefix)


def _public_key(pub_key: bytes) -> ec.EllipticCurvePublicKey:
    if len(pub_key) != PUBLIC_KEY_BYTES or pub_key[0] not in (2, 3):
        raise SignatureRefusedError(f"pub_key: is not a compressed key of {PUBLIC_KEY_BYTES} bytes")
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), pub_key)
    except ValueError:
        raise SignatureRefusedError("pub_key: is not a point of the curve") from None


def _ecdsa_sha256() -> ec.ECDSA:
    """ECDSA over SHA-256; nonces are derived from key and message (RFC 6979)."""
    return ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


def sign_data(data: bytes, private_key: bytes) -> tuple[str, bytes, bytes]:
    """Sign data as an ADR-036 document, as wallets do.

    Returns the signer's address, public key (33 bytes) and signature (64 bytes, low s).

    Raises:
        ValueError: not a private key of secp256k1 (32 bytes).
    """
    if len(private_key) != 32 or not 0 < int.from_bytes(private_key, "big") < CURVE_ORDER:
        raise ValueError("not a private key of secp256k1: 32 bytes, not zero, below the curve's order")
    key = ec.derive_private_key(int.from_bytes(private_key, "big"), ec.SECP256K1())
    pub_key = key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    signer = address_of(pub_key)
    r, s = decode_dss_signature(key.sign(encode_sign_doc(data, signer), _ecdsa_sha256()))
    low_s = min(s, CURVE_ORDER - s)
    return signer, pub_key, r.to_bytes(32, "big") + low_s.to_bytes(32, "big")


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
        amino = crypto_aead_chacha20poly1305_ietf_decrypt(ciphertext, None, bytes(12), key)
    except CryptoError:
        raise PassphraseError from None
    if len(amino) != len(_SECP256K1_PREFIX) + 32 or not amino.startswith(_SECP256K1_PREFIX):
        raise KeyArmorError("the exported key is not a secp256k1 key")
    return amino[len(_SECP256K1_PREFIX) :]


def _open_bcrypt(block: str, passphrase: str) -> bytes:
    # `PrivateKey.from_bcrypt_key` calls this function, and also derives the public key with the `ecdsa` package.
    try:
        key, algorithm = import_cosmos_bcrypt_armored_privkey(block, passphrase=passphrase)
    except Exception:  # the library has no common error class
        raise PassphraseError from None
    if algorithm.lower() != "secp256k1":
        raise KeyArmorError("the exported key is not a secp256k1 key")
    return bytes(key)
