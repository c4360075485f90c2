"""A bucket in memory that keeps to conditions, and that loses, delays and refuses where a test says so."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from helper.errors import BucketError
from helper.object_store.bucket import StoredObject

T = TypeVar("T")
Transport = Callable[[str, Callable[[], T]], Awaitable[T]]


class MemoryBucket:
    """`helper.object_store.bucket.Bucket`. Every condition and its write are one step.

    Attributes:
        objects: name -> what is there.
        request_counts: how often each kind of request came.
        failing_writes: the next so many writes fail and are not done.
        lost_replies: the next so many writes are done, and that is not told.
    """

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.request_counts: Counter[str] = Counter()
        self.failing_writes = 0
        self.lost_replies = 0
        self._tags = itertools.count(1)

    async def request(self, kind: str, operation: Callable[[], T]) -> T:
        """The way of a request there and back; overridden by who has a longer one."""
        self.request_counts[kind] += 1
        if kind != "get" and self.failing_writes:
            self.failing_writes -= 1
            raise BucketError("the store is away")
        result = operation()
        if kind != "get" and self.lost_replies:
            self.lost_replies -= 1
            raise BucketError("the answer was lost")
        return result

    async def get(self, name: str) -> StoredObject | None:
        """See `Bucket`."""
        return await self.request("get", lambda: self.objects.get(name))

    async def put(self, name: str, body: bytes) -> None:
        """See `Bucket`."""
        await self.request("put", lambda: self._write(name, body))

    async def create(self, name: str, body: bytes) -> str | None:
        """See `Bucket`."""
        return await self.request("put", lambda: None if name in self.objects else self._write(name, body))

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        """See `Bucket`."""

        def replace_if_unchanged() -> str | None:
            there = self.objects.get(name)
            return self._write(name, body) if there is not None and there.etag == tag else None

        return await self.request("put", replace_if_unchanged)

    async def list_names(self, folder: str) -> list[str]:
        """See `Bucket`."""
        return await self.request(
            "list", lambda: sorted(name for name in self.objects if name.startswith(f"{folder}/"))
        )

    async def list_folders(self) -> list[str]:
        """See `Bucket`."""
        return await self.request(
            "list", lambda: sorted({name.partition("/")[0] for name in self.objects if "/" in name})
        )

    def _write(self, name: str, body: bytes) -> str:
        tag = f'"{next(self._tags)}"'
        self.objects[name] = StoredObject(body, tag)
        return tag
