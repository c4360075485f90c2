"""Registration requests of validators: parsing, validation, addresses and the signed text. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from bech32 import bech32_decode, bech32_encode, convertbits

from admin.url_policy import MAX_URL_CHARS, UrlNotAllowedError, check_url

ACCOUNT_PREFIX: Final = "sv"
VALIDATOR_PREFIX: Final = "svvaloper"
ADDRESS_BYTES: Final = 20
MAX_REGISTRATION_BYTES: Final = 16 << 10
MAX_ADDRESS_CHARS: Final = 128
MAX_BASE64_CHARS: Final = 256
"""Characters of base64."""
MAX_MONIKER_CHARS: Final = 140
"""Characters; the staking module accepts 70 bytes."""
MAX_CLOCK_DIFFERENCE_SECONDS: Final = 300
"""Maximum difference in seconds between a request's timestamp and the server's clock."""
_AMBIGUOUS_CHARS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, and characters that JSON encoders escape differently, which would make the signed text
ambiguous."""
_DIRECTION_CHARS: Final = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""Characters that change the writing direction of the text around them."""


class RegistrationError(ValueError):
    """The registration request is invalid. The text states the field and the reason."""


class SignatureRefusedError(Exception):
    """The signature is invalid. The text states the field and the reason."""


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """A validator's registration data.

    Attributes:
        operator_address: account address, `sv1…`.
        url: base URL of its helper, may be empty.
        moniker: display name.
        timestamp: time of the signature, Unix seconds.
    """

    operator_address: str
    url: str
    moniker: str
    timestamp: int

    def signed_text(self) -> bytes:
        """Return the signed text: compact JSON, keys in this order, UTF-8, no HTML escaping."""
        fields = {
            "operator_address": self.operator_address,
            "url": self.url,
            "moniker": self.moniker,
            "timestamp": self.timestamp,
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def parse_registration(body: bytes, *, now: float, production: bool) -> tuple[RegistrationRequest, bytes, bytes]:
    """Parse and validate a registration request, its public key and its signature, which is not verified.

    Args:
        body: JSON.
        now: Unix seconds.
        production: whether the URL must be a public HTTPS URL.

    Raises:
        RegistrationError: a field is missing, of the wrong type or out of bounds.
    """
    fields = _parse_object(body)
    address = _parse_text(fields, "operator_address", MAX_ADDRESS_CHARS)
    if not is_address(address, address.rpartition("1")[0]):
        raise RegistrationError("operator_address: is not an address")
    request = RegistrationRequest(
        operator_address=address,
        url=_parse_url(fields, production=production),
        moniker=_parse_moniker(fields),
        timestamp=_parse_timestamp(fields, now),
    )
    return request, _parse_base64(fields, "pub_key"), _parse_base64(fields, "signature")


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise RegistrationError("body: is not JSON in UTF-8") from None
    if not isinstance(parsed, dict):
        raise RegistrationError("body: is not an object")
    return parsed


def _parse_text(fields: dict[str, Any], name: str, max_chars: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise RegistrationError(f"{name}: is not a string" if name in fields else f"{name}: is missing")
    if len(value) > max_chars:
        raise RegistrationError(f"{name}: is longer than {max_chars} characters")
    if _AMBIGUOUS_CHARS.search(value):
        raise RegistrationError(f"{name}: contains a control character or a line separator")
    return value


def _parse_url(fields: dict[str, Any], *, production: bool) -> str:
    url = _parse_text(fields, "url", MAX_URL_CHARS)
    try:
        if url:
            check_url(url, production=production)
    except UrlNotAllowedError as error:
        raise RegistrationError(f"url: {error}") from None
    return url


def _parse_moniker(fields: dict[str, Any]) -> str:
    moniker = _parse_text(fields, "moniker", MAX_MONIKER_CHARS)
    if not any(char.isprintable() and char != " " for char in moniker):
        raise RegistrationError("moniker: is empty or has no visible character")
    if _DIRECTION_CHARS.search(moniker):
        raise RegistrationError("moniker: contains a character that changes the writing direction")
    return moniker


def _parse_timestamp(fields: dict[str, Any], now: float) -> int:
    value = fields.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int):
        raise RegistrationError("timestamp: is not an integer" if "timestamp" in fields else "timestamp: is missing")
    # `value - now` may overflow a float, so compare with the bounds
    if not now - MAX_CLOCK_DIFFERENCE_SECONDS <= value <= now + MAX_CLOCK_DIFFERENCE_SECONDS:
        raise RegistrationError(
            f"timestamp: is more than {MAX_CLOCK_DIFFERENCE_SECONDS} s from this server's clock ({int(now)})"
        )
    return value


def _parse_base64(fields: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_parse_text(fields, name, MAX_BASE64_CHARS), validate=True)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, RegistrationError):
            raise
        raise RegistrationError(f"{name}: is not base64") from None


def is_address(text: str, prefix: str = ACCOUNT_PREFIX) -> bool:
    """Return whether a text is a lower-case bech32 address of 20 bytes with this prefix."""
    address = _decode_address(text)
    return address is not None and encode_address(address, prefix) == text


def validator_address(account: str) -> str:
    """Return the validator address of an account: the same bytes with another prefix.

    Raises:
        ValueError: not an account address.
    """
    address = _decode_address(account)
    if address is None or not is_address(account):
        raise ValueError("not an account address")
    return encode_address(address, VALIDATOR_PREFIX)


def encode_address(address: bytes, prefix: str) -> str:
    """Return the bech32 text of an address."""
    words = convertbits(address, 8, 5)
    assert words is not None, "bytes have eight bits"
    return bech32_encode(prefix, words)


def _decode_address(text: str) -> bytes | None:
    _, words = bech32_decode(text)
    address = None if words is None else convertbits(words, 5, 8, pad=False)
    return None if address is None or len(address) != ADDRESS_BYTES else bytes(address)
