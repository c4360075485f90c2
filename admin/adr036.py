"""ADR-036 signatures over arbitrary bytes, as browser wallets make them with `signArbitrary`. Pure.

What is signed is an amino JSON document with sorted keys that no transaction can be; its SHA-256 is signed with
ECDSA over secp256k1 (https://docs.cosmos.network, ADR 036). The arithmetic is cosmpy's; what cosmpy leaves open
(lengths, encodings that have a twin) is checked here.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from cosmpy.crypto.address import Address
    from cosmpy.crypto.keypairs import PrivateKey, PublicKey

ACCOUNT_PREFIX: Final = "sv"
VALIDATOR_PREFIX: Final = "svvaloper"
KEY_LENGTH: Final = 33
SIGNATURE_LENGTH: Final = 64
ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""Number of points of secp256k1 (SEC 2, section 2.4.1)."""


class _Library(NamedTuple):
    """cosmpy's parts, and what it raises for bad points."""

    address: type[Address]
    private_key: type[PrivateKey]
    public_key: type[PublicKey]
    bad_point: type[Exception]


@cache
def _library() -> _Library:
    """Loaded when the first address is looked at: it takes a fifth of a second of every start."""
    from cosmpy.crypto.address import Address  # noqa: PLC0415
    from cosmpy.crypto.keypairs import PrivateKey, PublicKey  # noqa: PLC0415
    from ecdsa.errors import MalformedPointError  # noqa: PLC0415

    return _Library(Address, PrivateKey, PublicKey, MalformedPointError)


class SignatureRefusedError(Exception):
    """The signature does not show what it should; the text says why."""


def sign_doc(data: bytes, signer: str) -> bytes:
    """The document that is signed for these bytes by this address."""
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


def verify(data: bytes, *, signer: str, pub_key: bytes, signature: bytes) -> None:
    """Make sure that the owner of an address signed these bytes.

    Args:
        data: what was signed.
        signer: the account address, `sv1…`.
        pub_key: compressed point, 33 bytes.
        signature: r ‖ s, big-endian, 64 bytes, s in the lower half.

    Raises:
        SignatureRefusedError: it is not so, or cannot be told.
    """
    if address_of(pub_key) != signer:
        if not signer.startswith(f"{ACCOUNT_PREFIX}1"):
            raise SignatureRefusedError(f"operator_address: does not begin with {ACCOUNT_PREFIX}1")
        raise SignatureRefusedError("pub_key: is not the key of operator_address")
    if len(signature) != SIGNATURE_LENGTH:
        raise SignatureRefusedError(f"signature: has {len(signature)} bytes, not {SIGNATURE_LENGTH}")
    if int.from_bytes(signature[32:], "big") > ORDER // 2:
        # Its twin with the lower s is as valid: two encodings of one signature.
        raise SignatureRefusedError("signature: s is in the upper half")
    digest = hashlib.sha256(sign_doc(data, signer)).digest()
    if not _library().public_key(pub_key).verify_digest(digest, signature):
        raise SignatureRefusedError("signature: does not verify")


def address_of(pub_key: bytes, prefix: str = ACCOUNT_PREFIX) -> str:
    """The address of a compressed public key.

    Raises:
        SignatureRefusedError: it is no such key.
    """
    if len(pub_key) != KEY_LENGTH or pub_key[0] not in (2, 3):
        raise SignatureRefusedError(f"pub_key: is not a compressed key of {KEY_LENGTH} bytes")
    library = _library()
    try:
        return str(library.address(library.public_key(pub_key), prefix))
    except library.bad_point:
        raise SignatureRefusedError("pub_key: is not a point of the curve") from None


def is_address(text: str, prefix: str = ACCOUNT_PREFIX) -> bool:
    """Whether a text is an address of 20 bytes with this prefix and a right checksum, in lower case."""
    address = _library().address
    try:
        return str(address(bytes(address(text)), prefix)) == text
    except RuntimeError:
        return False


def validator_address(account: str) -> str:
    """The staking module's address for an account's: the same bytes with another prefix.

    Raises:
        ValueError: the account's is none.
    """
    if not is_address(account):
        raise ValueError("not an account address")
    address = _library().address
    return str(address(bytes(address(account)), VALIDATOR_PREFIX))


def sign(data: bytes, private_key: bytes) -> tuple[str, bytes, bytes]:
    """Sign as a wallet does: the signer's address, public key (33 bytes) and signature (64 bytes, low s).

    Raises:
        ValueError: the private key (32 bytes) is none.
    """
    if len(private_key) != 32 or not 0 < int.from_bytes(private_key, "big") < ORDER:
        raise ValueError("not a private key of secp256k1: 32 bytes, not zero, below the curve's order")
    key = _library().private_key(private_key)
    pub_key: bytes = key.public_key.public_key_bytes
    signer = address_of(pub_key)
    signature = key.sign(sign_doc(data, signer), deterministic=True, canonicalise=True)
    return signer, pub_key, signature
