"""Types of settings, with validation and error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_network
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from helper.core.text_forms import is_loopback

MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a unix socket on Linux: `sun_path` has 108 bytes, the last one is zero."""
_ONION_ADDRESS: Final = re.compile(r"[a-z2-7]{56}\.onion")
_CHECKSUM_PARAMETER: Final = "checksum"
_CHECKSUM: Final = re.compile(r"sha256:([0-9a-f]{64})")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PATH_SEGMENT: Final = re.compile(r"[A-Za-z0-9!_.*'()=-]+")


@dataclass(frozen=True, slots=True)
class PinnedUrl:
    """A URL, and the SHA-256 that its content must have.

    Attributes:
        url: the URL to request, without the checksum.
        sha256: 32 bytes; None if the content is not pinned.
    """

    url: str
    sha256: bytes | None = None

    @classmethod
    def parse(cls, text: str) -> PinnedUrl:
        """Split a URL and the query parameter `checksum`. Other parameters stay in the URL.

        Raises:
            ValueError: the checksum is not `sha256:` and 64 lower-case hexadecimal digits, or given twice.
        """
        parts = urlsplit(text)
        parameters = parts.query.split("&")
        checksums = [parameter for parameter in parameters if parameter.partition("=")[0] == _CHECKSUM_PARAMETER]
        if not checksums:
            return cls(text)
        match = _CHECKSUM.fullmatch(checksums[0].partition("=")[2])
        if match is None or len(checksums) > 1:
            raise ValueError("has a checksum that is not sha256: and 64 lower-case hexadecimal digits")
        query = "&".join(parameter for parameter in parameters if parameter not in checksums)
        return cls(parts._replace(query=query).geturl(), bytes.fromhex(match[1]))

    def matches(self, content: bytes) -> bool:
        """Whether content has the pinned SHA-256, or none is pinned."""
        return self.sha256 is None or sha256(content).digest() == self.sha256


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """A bucket and a path in it, without leading or trailing slashes ("" for the entire bucket)."""

    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> BucketLocation:
        """Parse `s3://bucket` or `s3://bucket/some/path`.

        Raises:
            ValueError: the text is not a location; the message says why.
        """
        scheme, separator, rest = text.partition("://")
        if scheme != "s3" or not separator:
            raise ValueError("must have the form s3://bucket/path")
        bucket, _, path = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError("has an invalid bucket name (3 to 63 lower-case letters, digits, dots and hyphens)")
        path = path.removesuffix("/")
        for segment in path.split("/") if path else ():
            if not _PATH_SEGMENT.fullmatch(segment) or segment in {".", ".."}:
                raise ValueError("has an invalid path: letters, digits and !_.*'()=- between single slashes")
        return cls(bucket, path)

    def __str__(self) -> str:
        """Return the location as a URL."""
        return f"s3://{self.bucket}/{self.path}" if self.path else f"s3://{self.bucket}"


def _or_blank(validate: Callable[[str], str]) -> Callable[[str], str]:
    """Make a validator that also accepts an empty value."""
    return lambda value: validate(value) if value else value


def _validate_url(value: str) -> str:
    """Validate an http(s) URL without a query; remove a trailing slash."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError("must be a URL such as http://127.0.0.1:1317")
    if parts.query or parts.fragment:
        raise ValueError("must be a URL without a query")
    return value.rstrip("/")


def _validate_url_with_query(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be empty or an http(s) URL")
    return value


def _validate_pinned_url(value: str) -> str:
    PinnedUrl.parse(value)
    return _validate_url_with_query(value)


def _validate_network(value: str) -> str:
    try:
        ip_network(value)
    except ValueError as error:
        raise ValueError(f"must be an address or a network such as 10.0.0.0/8: {error}") from None
    return value


def _validate_header_token(value: str) -> str:
    """Validate a token that is sent in an HTTP header."""
    if value != value.strip() or not value.isprintable():
        raise ValueError("must not begin or end with a space or contain control characters")
    return value


def _validate_nonblank(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise ValueError("must not be empty")
    return value


def _validate_database_url(value: str) -> str:
    """Validate the scheme of a PostgreSQL URL; the store parses the rest."""
    if not value.startswith(("postgresql://", "postgres://")):
        raise ValueError("must be empty or a URL such as postgresql://user@host/database")
    return value


def _validate_schema(value: str) -> str:
    """Validate a PostgreSQL schema name that needs no quotes."""
    if not (value.isidentifier() and value.isascii() and value == value.lower() and len(value) < 64):
        raise ValueError("must be up to 63 lower-case letters, digits and _, and must not begin with a digit")
    return value


def _validate_host_name(value: str) -> str:
    """Validate the name of a host, which is also the application name of its database connections."""
    if not value.isprintable() or len(value.encode()) > 63:
        raise ValueError("must be up to 63 printable characters")
    return value


def _validate_store_url(value: str) -> str:
    """Validate the URL of an object store. Requests contain credentials, so TLS is required unless it is local."""
    url = _validate_url(value)
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname != "localhost" and not is_loopback(parts.hostname or ""):
        raise ValueError("must be https, or on this machine (127.0.0.1, ::1, localhost)")
    return url


def _validate_socket_path(value: str) -> str:
    """Validate the path of a unix socket: absolute, at most 107 bytes (sockaddr_un)."""
    if not value.startswith("/") or "\0" in value or len(os.fsencode(value)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"must be an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes")
    return value


def _validate_onion_address(value: str) -> str:
    """Validate a version 3 onion address: 56 base32 characters, without a port or subdomain."""
    if not _ONION_ADDRESS.fullmatch(value):
        raise ValueError("must be empty or an onion address: 56 characters a-z and 2-7, then .onion")
    return value


def _validate_socks_address(value: str) -> str:
    if value.startswith("unix:"):
        _validate_socket_path(value.removeprefix("unix:"))
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("must be unix:PATH or HOST:PORT, such as 127.0.0.1:9050")
    return value


def _validate_location(value: str) -> str:
    return str(BucketLocation.parse(value))


def _validate_lease_storage(value: str) -> str:
    if value in {"auto", "postgres"}:
        return value
    if not value.startswith("s3:"):
        raise ValueError("must be auto, postgres, or an object such as s3://bucket/sender.json")
    location = BucketLocation.parse(value)
    if not location.path:
        raise ValueError(f"must include an object name, such as {location}/sender.json")
    return str(location)


Url = Annotated[str, AfterValidator(_validate_url)]
BlankUrl = Annotated[str, AfterValidator(_or_blank(_validate_url))]
PinnedUrlText = Annotated[str, AfterValidator(_or_blank(_validate_pinned_url))]
OptionalUrl = Annotated[str, AfterValidator(_or_blank(_validate_url_with_query))]
StoreUrl = Annotated[str, AfterValidator(_or_blank(_validate_store_url))]
DatabaseUrl = Annotated[str, AfterValidator(_or_blank(_validate_database_url))]
BucketUrl = Annotated[str, AfterValidator(_or_blank(_validate_location))]
LeaseStorage = Annotated[str, AfterValidator(_validate_lease_storage)]
NetworkText = Annotated[str, AfterValidator(_validate_network)]
Token = Annotated[str, AfterValidator(_validate_header_token)]
SchemaName = Annotated[str, AfterValidator(_validate_schema)]
SocketPath = Annotated[str, AfterValidator(_or_blank(_validate_socket_path))]
OnionAddress = Annotated[str, AfterValidator(_or_blank(_validate_onion_address))]
SocksAddress = Annotated[str, AfterValidator(_validate_socks_address)]
HostName = Annotated[str, AfterValidator(_validate_host_name)]
FilePath = Annotated[str, AfterValidator(_validate_nonblank)]
Host = Annotated[str, AfterValidator(_validate_nonblank)]
Port = Annotated[int, Field(ge=0, le=65535)]
