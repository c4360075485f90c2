"""Signatures of rounds in the published voting configuration (`auth_version` 2). Pure.

A signature by a trusted key binds the id of a round to the public key of its election authority and to the layout of
the PIR databases.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final

from helper.core.round_authentication import RoundAuthentication

AUTH_VERSION: Final = 2
"""The version of the signed message that wallets accept. Version 1 signed only the election authority's key."""
ALGORITHM: Final = "ed25519"
KEY_BYTES: Final = 32
"""Length of a public key and of a round id in bytes."""
SIGNATURE_BYTES: Final = 64
LAYOUT_FIELDS: Final = ("pir_depth", "tier0_layers", "tier1_layers", "poly_len")
"""Fields of `pir_layout`, in the order in which they are signed."""
_MESSAGE_PREFIX: Final = b"zcash-shielded-vote:round-auth:v2"
_ROUND_ID: Final = re.compile(r"[0-9a-f]{64}")


def encode_layout(layout: Mapping[str, int]) -> bytes:
    """Encode `pir_layout` as it is signed: four u32 in little-endian order.

    Raises:
        ValueError: a number is missing or not a u32.
    """
    numbers = [layout.get(name) for name in LAYOUT_FIELDS]
    if any(isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**32 for number in numbers):
        raise ValueError("not four numbers of 32 bits")
    return b"".join(number.to_bytes(4, "little") for number in numbers if number is not None)


def signed_message(round_id: bytes, authority_key: bytes, layout: bytes) -> bytes:
    """Return the message of version 2.

    Args:
        round_id: 32 bytes.
        authority_key: 32 bytes, `ea_pk` of the entry.
        layout: result of `encode_layout`.
    """
    return _MESSAGE_PREFIX + round_id + authority_key + layout


def authenticate_rounds(
    entries: Mapping[str, Any], layout: bytes | None, keys: Mapping[str, bytes]
) -> dict[bytes, RoundAuthentication]:
    """Check the signatures of all rounds, by round id. Entries whose name is not a round id are omitted.

    One valid signature by a trusted key is sufficient; the other signatures may be anything.

    Args:
        entries: `rounds` of the configuration; the entries are not validated.
        layout: result of `encode_layout`; None if the configuration has no `pir_layout`, so that no message is known.
        keys: trusted ed25519 public keys by `key_id`.
    """
    return {
        bytes.fromhex(name): _authenticate(bytes.fromhex(name), entry, layout, keys)
        for name, entry in entries.items()
        if _ROUND_ID.fullmatch(name)
    }


def read_authority_keys(entries: Mapping[str, Any]) -> dict[bytes, bytes]:
    """Return the public keys of the election authorities (32 bytes) by round id; invalid ones are omitted."""
    keys = {
        bytes.fromhex(name): decode_base64(entry.get("ea_pk"), KEY_BYTES)
        for name, entry in entries.items()
        if _ROUND_ID.fullmatch(name) and isinstance(entry, dict)
    }
    return {round_id: key for round_id, key in keys.items() if key is not None}


def decode_base64(value: object, length: int) -> bytes | None:
    """Decode standard base64 of exactly this number of bytes; None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        decoded = base64.b64decode(value, validate=True)
    except ValueError:
        return None
    return decoded if len(decoded) == length else None


def _authenticate(
    round_id: bytes, entry: object, layout: bytes | None, keys: Mapping[str, bytes]
) -> RoundAuthentication:
    if not isinstance(entry, dict):
        return RoundAuthentication.NO_VALID_SIGNATURE
    version = entry.get("auth_version")
    if version != AUTH_VERSION or not isinstance(version, int):
        return RoundAuthentication.UNSUPPORTED_VERSION
    authority_key, signatures = decode_base64(entry.get("ea_pk"), KEY_BYTES), entry.get("signatures")
    if authority_key is None or layout is None or not isinstance(signatures, list):
        return RoundAuthentication.NO_VALID_SIGNATURE
    message = signed_message(round_id, authority_key, layout)
    if any(_is_valid(signature, message, keys) for signature in signatures):
        return RoundAuthentication.AUTHENTICATED
    return RoundAuthentication.NO_VALID_SIGNATURE


def _is_valid(signature: object, message: bytes, keys: Mapping[str, bytes]) -> bool:
    # Imported here, because hosts without a static configuration do not need the library.
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    if not isinstance(signature, dict) or signature.get("alg") != ALGORITHM:
        return False
    name, encoded = signature.get("key_id"), decode_base64(signature.get("sig"), SIGNATURE_BYTES)
    key = keys.get(name) if isinstance(name, str) else None
    if key is None or encoded is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(encoded, message)
    except (InvalidSignature, ValueError):  # ValueError: OpenSSL rejects the key
        return False
    return True
