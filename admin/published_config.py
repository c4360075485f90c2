"""Documents of the published voting configuration, and the signatures of its rounds. Pure.

A *static* document (versions 1 and 2) names the keys that sign rounds and the URLs of the *dynamic* document, which
names the servers and the rounds.

A signature by a trusted key (`auth_version` 2) binds the id of a round to the public key of its election authority and
to the layout of the PIR databases.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Never

import httpx

from admin.url_policy import MAX_URL_CHARS
from helper.chain.chain_data import RoundAuthentication

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


def encode_layout(layout: object) -> bytes:
    """Encode `pir_layout` as it is signed: four u32 in little-endian order.

    Raises:
        InvalidConfigError: it is not an object, or a number is missing or not a u32.
    """
    if not isinstance(layout, dict):
        raise InvalidConfigError("pir_layout is not an object")
    numbers = [layout.get(name) for name in LAYOUT_FIELDS]
    if any(isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**32 for number in numbers):
        raise InvalidConfigError("pir_layout is not four numbers of 32 bits")
    return b"".join(number.to_bytes(4, "little") for number in numbers if number is not None)


def signed_message(round_id: bytes, authority_key: bytes, layout: bytes) -> bytes:
    """Return the message of version 2.

    Args:
        round_id: 32 bytes.
        authority_key: 32 bytes, `ea_pk` of the entry.
        layout: result of `encode_layout`.
    """
    return _MESSAGE_PREFIX + round_id + authority_key + layout


def parse_entry(body: bytes) -> bytes:
    """Return the message that managers sign for an entry: round id in lower-case hex, `ea_pk` in base64, PIR layout.

    Raises:
        InvalidConfigError: the entry is invalid.
    """
    entry = _parse_object(body)
    round_id, version = entry.get("round_id"), entry.get("auth_version")
    key = decode_base64(entry.get("ea_pk"), KEY_BYTES)
    if not isinstance(round_id, str) or not _ROUND_ID.fullmatch(round_id):
        raise InvalidConfigError("round_id is not 64 lower-case hex characters")
    if key is None:
        raise InvalidConfigError(f"ea_pk is not {KEY_BYTES} bytes in base64")
    if type(version) is not int or version != AUTH_VERSION:
        raise InvalidConfigError(f"auth_version is not {AUTH_VERSION}")
    if entry.get("pir_layout") is None:
        raise InvalidConfigError("pir_layout is missing")
    return signed_message(bytes.fromhex(round_id), key, encode_layout(entry["pir_layout"]))


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


MAX_ORIGINS_CHARS: Final = 2000
"""Maximum number of characters of all origins: proxies limit the size of response headers, nginx to 4 kB."""
MAX_SERVERS: Final = 256
"""Maximum number of vote servers read for the content security policy; production has ten."""
MAX_MIRRORS: Final = 16
"""Maximum number of URLs of the dynamic document; production has two."""
MAX_KEY_ID_CHARS: Final = 256
_HOST: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1")
_STATIC_VERSION: Final = "static_config_version"
_URL_FIELDS: Final = {1: "dynamic_config_url", 2: "dynamic_config_urls"}
"""Field with the URLs of the dynamic document, by version of the static one."""


class InvalidConfigError(Exception):
    """The fetch failed, or the response is not a voting configuration. The text states the reason."""


@dataclass(frozen=True, slots=True)
class StaticConfig:
    """A validated static document.

    Attributes:
        body: the published bytes.
        mirrors: URLs of the dynamic document, in the order in which they are tried.
        keys: trusted ed25519 public keys by `key_id`; keys of other algorithms are omitted.
    """

    body: bytes
    mirrors: tuple[str, ...]
    keys: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """A validated voting configuration.

    Attributes:
        body: the published bytes of the dynamic document.
        origins: distinct origins of its vote servers that a page may connect to, in order: https origins, and http
            origins on the visitor's own host. Omits hosts that a content security policy cannot express (IPv6
            addresses), and all above `MAX_SERVERS` or `MAX_ORIGINS_CHARS`.
        vote_servers: URLs of all vote servers.
        static: the static document that named its URL, None if it was configured directly.
        rounds: its rounds, by id; empty without trusted keys.
        authority_keys: public keys of the election authorities by round id; empty without trusted keys.
    """

    body: bytes
    origins: tuple[str, ...]
    vote_servers: tuple[str, ...]
    static: StaticConfig | None
    rounds: Mapping[bytes, RoundAuthentication]
    authority_keys: Mapping[bytes, bytes]

    @property
    def authenticates_a_round(self) -> bool:
        """Whether at least one round is authenticated."""
        return RoundAuthentication.AUTHENTICATED in self.rounds.values()

    def get_authentication(self, round_id: bytes, chain_key: bytes) -> RoundAuthentication:
        """Return whether a round is authenticated.

        Args:
            round_id: 32 bytes.
            chain_key: public key of its election authority on the chain; empty if it is not known.
        """
        if self.static is None:
            return RoundAuthentication.UNKNOWN
        result = self.rounds.get(round_id, RoundAuthentication.NOT_LISTED)
        is_other_key = chain_key not in (b"", self.authority_keys.get(round_id))
        if result is RoundAuthentication.AUTHENTICATED and is_other_key:
            return RoundAuthentication.KEY_MISMATCH
        return result


def parse_static(body: bytes) -> StaticConfig | None:
    """Validate a static document. Returns None for a document that is not static.

    Raises:
        InvalidConfigError: it is not a JSON object, or a static document with an error.
    """
    config = _parse_object(body)
    if _STATIC_VERSION not in config:
        return None
    version = config[_STATIC_VERSION]
    if isinstance(version, bool) or not isinstance(version, int) or version not in _URL_FIELDS:
        raise InvalidConfigError(f"{_STATIC_VERSION} is not 1 or 2")
    field, other = _URL_FIELDS[version], _URL_FIELDS[3 - version]
    if other in config:
        raise InvalidConfigError(f"{other} does not belong into {_STATIC_VERSION} {version}")
    urls = config.get(field)
    mirrors = _check_mirrors([urls] if version == 1 else urls, field)
    return StaticConfig(body, mirrors, _check_keys(config.get("trusted_keys")))


def parse_config(body: bytes, static: StaticConfig | None = None) -> PublishedConfig:
    """Validate a dynamic document. The fields that pages read are required; unknown fields are allowed.

    A hostile document of 1 MiB takes one to three seconds (thousands of signatures); call this in a thread.

    Args:
        body: the published bytes.
        static: the static document with the trusted keys, None if it is not known.

    Raises:
        InvalidConfigError: it is not a voting configuration.
    """
    config = _parse_object(body)
    _check_version(config)
    servers = _check_list(config, "vote_servers", required=True)
    _check_list(config, "pir_endpoints", required=False)
    height = config.get("snapshot_height")
    if height is not None and (isinstance(height, bool) or not isinstance(height, int) or height < 0):
        raise InvalidConfigError("snapshot_height is not a height")
    layout = None if config.get("pir_layout") is None else encode_layout(config["pir_layout"])
    rounds = config.get("rounds", {})
    if not isinstance(rounds, dict):
        raise InvalidConfigError("rounds is not an object")
    authentications = {} if static is None else authenticate_rounds(rounds, layout, static.keys)
    authority_keys = {} if static is None else read_authority_keys(rounds)
    return PublishedConfig(body, _origins(servers), tuple(servers), static, authentications, authority_keys)


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        config = json.loads(body.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise InvalidConfigError("it is not JSON in UTF-8") from None
    if not isinstance(config, dict):
        raise InvalidConfigError("it is not an object")
    return config


def _reject_constant(name: str) -> Never:
    """Reject NaN and infinities, which Python accepts and browsers do not."""
    raise ValueError(f"{name} is not JSON")


def _check_version(config: Mapping[str, Any]) -> None:
    versions = {name: config[name] for name in ("config_version", "version") if name in config}
    if not versions:
        raise InvalidConfigError("version and config_version are missing")
    for name, version in versions.items():
        if isinstance(version, bool) or not isinstance(version, int | str):
            raise InvalidConfigError(f"{name} is not a version")


def _check_mirrors(urls: object, field: str) -> tuple[str, ...]:
    if not isinstance(urls, list) or not urls:
        raise InvalidConfigError(f"{field} is missing or not a list")
    if len(urls) > MAX_MIRRORS:
        raise InvalidConfigError(f"{field} has more than {MAX_MIRRORS} entries")
    for url in urls:
        if not isinstance(url, str) or not url.startswith(("https://", "http://")) or len(url) > MAX_URL_CHARS:
            raise InvalidConfigError(f"{field} contains something other than a web URL")
    if len(set(urls)) < len(urls):
        raise InvalidConfigError(f"{field} contains a URL twice")
    return tuple(urls)


def _check_keys(entries: object) -> dict[str, bytes]:
    if not isinstance(entries, list):
        raise InvalidConfigError("trusted_keys is missing or not a list")
    keys: dict[str, bytes] = {}
    names = set[str]()
    for entry in entries:
        name = entry.get("key_id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_KEY_ID_CHARS:
            raise InvalidConfigError("an entry of trusted_keys has no valid key_id")
        if name in names:
            raise InvalidConfigError("trusted_keys contains a key_id twice")
        names.add(name)
        if entry.get("alg") != ALGORITHM:
            continue
        key = decode_base64(entry.get("pubkey"), KEY_BYTES)
        if key is None:
            raise InvalidConfigError(f"a pubkey of trusted_keys is not {KEY_BYTES} bytes in base64")
        keys[name] = key
    return keys


def _check_list(config: dict[str, Any], name: str, *, required: bool) -> list[str]:
    """Validate a list of servers and return their URLs."""
    entries = config.get(name)
    if entries is None and not required:
        return []
    if not isinstance(entries, list):
        raise InvalidConfigError(f"{name} is not a list")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
            raise InvalidConfigError(f"an entry of {name} has no url")
        if not entry["url"].startswith(("https://", "http://")):
            raise InvalidConfigError(f"an entry of {name} has a url that is not http or https")
    return [entry["url"] for entry in entries]


def _origins(urls: Sequence[str]) -> tuple[str, ...]:
    origins: list[str] = []
    size = 0
    for url in urls[:MAX_SERVERS]:
        origin = _origin(url)
        if origin is None or origin in origins:
            continue
        size += len(origin) + 1
        if size > MAX_ORIGINS_CHARS:
            break
        origins.append(origin)
    return tuple(origins)


def _origin(url: str) -> str | None:
    if len(url) > MAX_URL_CHARS or not url.isascii():  # slow to parse
        return None
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode()
    except (httpx.InvalidURL, UnicodeError):
        return None
    if not _HOST.fullmatch(host) or (parsed.scheme != "https" and host not in _LOOPBACK_HOSTS):
        return None
    return f"{parsed.scheme}://{host}" + (f":{parsed.port}" if parsed.port else "")
