"""The bucket protocol, bucket locations, connection settings, and credentials files of S3 tools.

A credentials file is an INI file with one section per profile.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from helper.errors import ConfigError

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PATH_SEGMENT: Final = re.compile(r"[A-Za-z0-9!_.*'()=-]+")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Connection settings of an object store.

    Attributes:
        endpoint: its URL; empty for Amazon S3 in the region.
        region: the region, which is part of request signatures.
        virtual_host: whether the bucket name is part of the host name.
        credentials_file: path of an INI file with the keys; empty to use the environment.
        timeout_seconds: time limit of a request.
    """

    endpoint: str = ""
    region: str = "us-east-1"
    virtual_host: bool = False
    credentials_file: str = ""
    timeout_seconds: float = 10


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


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its bytes and the ETag of this version."""

    body: bytes
    etag: str


class Bucket(Protocol):
    """Named objects below one path.

    Each method except `list_names` makes one request, without retry and with a time limit.

    All raise BucketError if the outcome is unknown (a write may have been done), and BucketRefused if the store denies
    access.
    """

    async def get(self, name: str) -> StoredObject | None:
        """Return an object, None if it does not exist."""
        ...

    async def put(self, name: str, body: bytes) -> None:
        """Write an object unconditionally."""
        ...

    async def create(self, name: str, body: bytes) -> str | None:
        """Write an object if it does not exist.

        Returns:
            Its ETag; None if it was not written, because it exists or another write was in progress.
        """
        ...

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        """Replace an object if its ETag is `tag`.

        Returns:
            The new ETag; None if it was not written, because the version differs, the object is missing, or another
            write was in progress.
        """
        ...

    async def list_names(self, folder: str) -> list[str]:
        """Return the names of all objects below a directory, sorted. May need several requests."""
        ...

    async def list_folders(self) -> list[str]:
        """Return the directories directly below the path, sorted."""
        ...


CREDENTIALS_DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
"""Environment variable: the directory of the credentials that a service manager passes (systemd.exec(5))."""
SYSTEMD_CREDENTIAL: Final = "s3-credentials"
"""Name of the file as a systemd credential (systemd.exec(5), LoadCredential)."""
CREDENTIALS_FILE_VARIABLE: Final = "AWS_SHARED_CREDENTIALS_FILE"
PROFILE_VARIABLE: Final = "AWS_PROFILE"


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """Keys that sign requests. Not part of the representation, so that they are never logged."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def find_credentials_file(configured: str, env: Mapping[str, str]) -> Path | None:
    """Find the credentials file: the configured one, the systemd credential, or the environment's.

    Returns:
        None if there is none. The client then finds keys itself: AWS_ACCESS_KEY_ID and related variables, a web
        identity, or the role of the container or machine.
    """
    if configured:
        return Path(configured)
    if folder := env.get(CREDENTIALS_DIRECTORY):
        credential = Path(folder, SYSTEMD_CREDENTIAL)
        if credential.exists():
            return credential
    return Path(env[CREDENTIALS_FILE_VARIABLE]) if env.get(CREDENTIALS_FILE_VARIABLE) else None


def read_access_keys(path: Path, profile: str = "default") -> AccessKeys:
    """Read the keys of a profile from a credentials file.

    Raises:
        ConfigError: it cannot be read or has no keys. The message quotes nothing from the file.
    """
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, configparser.Error):
        raise ConfigError(f"{path} is not a credentials file: [{profile}], then aws_access_key_id = …") from None
    if not parser.has_section(profile):
        raise ConfigError(f"{path} has no section [{profile}]")
    section = parser[profile]
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        raise ConfigError(f"{path}: [{profile}] needs aws_access_key_id and aws_secret_access_key")
    return AccessKeys(access, secret, section.get("aws_session_token") or None)
