"""What is asked of an object store, and how a place in one is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9!_.*'()=-]+")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How an object store is reached.

    Attributes:
        endpoint: its URL; empty for Amazon's of the region.
        region: signed into requests.
        virtual_host: whether the bucket's name is part of the host name.
        credentials_file: path of an INI file with the keys; empty for the environment's.
        timeout_seconds: time limit of a call.
    """

    endpoint: str = ""
    region: str = "us-east-1"
    virtual_host: bool = False
    credentials_file: str = ""
    timeout_seconds: float = 10


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """A bucket, and a path in it without a slash at either end ("" for all of the bucket)."""

    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> BucketLocation:
        """From `s3://bucket` or `s3://bucket/some/path`.

        Raises:
            ValueError: it is not written so; says what is wrong.
        """
        scheme, separator, rest = text.partition("://")
        if scheme != "s3" or not separator:
            raise ValueError("must be like s3://bucket/path")
        bucket, _, path = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError("has a bucket's name that is none (3 to 63 small letters, digits, dots and hyphens)")
        path = path.removesuffix("/")
        for segment in path.split("/") if path else ():
            if not _SEGMENT.fullmatch(segment) or segment in {".", ".."}:
                raise ValueError("has a path that is none: letters, digits and !_.*'()=- between single slashes")
        return cls(bucket, path)

    def __str__(self) -> str:
        """As it was written."""
        return f"s3://{self.bucket}/{self.path}" if self.path else f"s3://{self.bucket}"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its bytes, and the tag of this version of it."""

    body: bytes
    tag: str


class Bucket(Protocol):
    """Objects by name, below one place. Every call is one request, tried once, and returns within the time that the
    maker set.

    All raise BucketError when it is not known what came of it (a write may have been done then) and BucketRefused when
    the store does not let us.
    """

    async def get(self, name: str) -> StoredObject | None:
        """An object, None when there is none of this name."""
        ...

    async def put(self, name: str, body: bytes) -> None:
        """Write an object, whatever is there."""
        ...

    async def create(self, name: str, body: bytes) -> str | None:
        """Write an object if there is none of this name.

        Returns:
            Its tag; None when it was not written: there is one, or another write was under way.
        """
        ...

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        """Write an object if the one that is there has this tag.

        Returns:
            The new one's tag; None when it was not written: another version is there, none at all, or another write
            was under way.
        """
        ...

    async def names(self, folder: str) -> list[str]:
        """The names of all objects below a folder, sorted."""
        ...

    async def folders(self) -> list[str]:
        """The folders right below the place, sorted."""
        ...
