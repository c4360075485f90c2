"""ADR-036 signatures over arbitrary bytes, as created by `signArbitrary` of browser wallets. Pure.

The signed document is amino JSON with sorted keys; no transaction has this form. Its SHA-256 is signed with ECDSA over
secp256k1 (https://docs.cosmos.network, ADR 036). OpenSSL does the curve arithmetic, through `cryptography`:
the pure Python `ecdsa` package, which cosmpy signs with, leaks the nonce through its timing (Minerva, CVE-2024-23342).
Lengths and the malleability of signatures are checked here; cosmpy encodes addresses.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cosmpy.crypto.address import Address
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey

ACCOUNT_PREFIX: Final = "sv"
VALIDATOR_PREFIX: Final = "svvaloper"
PUBLIC_KEY_BYTES: Final = 33
SIGNATURE_BYTES: Final = 64
CURVE_ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""Number of points of secp256k1 (SEC 2, section 2.4.1)."""


@cache
def _address_type() -> type[Address]:
    # Imported on first use: the import takes 0.2 s, and most commands do not need it.
    from cosmpy.crypto.address import Address  # noqa: PLC0415

    address: type[Address] = Address
    return address


class SignatureRefusedError(Exception):
    """The signature is invalid. The text states the field and the reason."""


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
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature  # noqa: PLC0415

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
    from cosmpy.crypto.hashfuncs import ripemd160  # noqa: PLC0415

    return str(_address_type()(ripemd160(hashlib.sha256(pub_key).digest()), prefix))


def _public_key(pub_key: bytes) -> EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    if len(pub_key) != PUBLIC_KEY_BYTES or pub_key[0] not in (2, 3):
        raise SignatureRefusedError(f"pub_key: is not a compressed key of {PUBLIC_KEY_BYTES} bytes")
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), pub_key)
    except ValueError:
        raise SignatureRefusedError("pub_key: is not a point of the curve") from None


def _ecdsa_sha256() -> ECDSA:
    """ECDSA over SHA-256; nonces are derived from key and message (RFC 6979)."""
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    return ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


def is_address(text: str, prefix: str = ACCOUNT_PREFIX) -> bool:
    """Return whether a text is a lower-case bech32 address of 20 bytes with this prefix."""
    address = _address_type()
    try:
        return str(address(bytes(address(text)), prefix)) == text
    except RuntimeError:
        return False


def validator_address(account: str) -> str:
    """Return the validator address of an account: the same bytes with another prefix.

    Raises:
        ValueError: not an account address.
    """
    if not is_address(account):
        raise ValueError("not an account address")
    address = _address_type()
    return str(address(bytes(address(account)), VALIDATOR_PREFIX))


def sign_data(data: bytes, private_key: bytes) -> tuple[str, bytes, bytes]:
    """Sign data as an ADR-036 document, as wallets do.

    Returns the signer's address, public key (33 bytes) and signature (64 bytes, low s).

    Raises:
        ValueError: not a private key of secp256k1 (32 bytes).
    """
    if len(private_key) != 32 or not 0 < int.from_bytes(private_key, "big") < CURVE_ORDER:
        raise ValueError("not a private key of secp256k1: 32 bytes, not zero, below the curve's order")
    from cryptography.hazmat.primitives.asymmetric import ec, utils  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: PLC0415

    key = ec.derive_private_key(int.from_bytes(private_key, "big"), ec.SECP256K1())
    pub_key = key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    signer = address_of(pub_key)
    r, s = utils.decode_dss_signature(key.sign(encode_sign_doc(data, signer), _ecdsa_sha256()))
    low_s = min(s, CURVE_ORDER - s)
    return signer, pub_key, r.to_bytes(32, "big") + low_s.to_bytes(32, "big")
