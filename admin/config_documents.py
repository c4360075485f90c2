"""The documents of the published voting configuration. Pure.

A *static* document (versions 1 and 2) names the keys that sign rounds and the URLs of the *dynamic* document, which
names the servers and the rounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Never

import httpx

from admin.round_signatures import (
    ALGORITHM,
    KEY_BYTES,
    authenticate_rounds,
    decode_base64,
    encode_layout,
    read_authority_keys,
)
from admin.url_policy import MAX_URL_CHARS
from helper.core.round_authentication import RoundAuthentication

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
    layout, rounds = _check_layout(config.get("pir_layout")), config.get("rounds", {})
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


def _check_layout(layout: object) -> bytes | None:
    if layout is None:
        return None
    if not isinstance(layout, dict):
        raise InvalidConfigError("pir_layout is not an object")
    try:
        return encode_layout(layout)
    except ValueError as error:
        raise InvalidConfigError(f"pir_layout is {error}") from None


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
