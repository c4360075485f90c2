"""In-memory bucket with conditional writes and injected faults."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from helper.errors import BucketError
from helper.object_store import Bucket, StoredObject

T = TypeVar("T")
Transport = Callable[[str, Callable[[], T]], Awaitable[T]]


class MemoryBucket(Bucket):
    """A bucket without a store. Each condition and its write are atomic.

    Attributes:
        failing_writes: number of next writes that fail without effect.
        lost_replies: number of next writes that take effect and then fail.
    """

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.request_counts: Counter[str] = Counter()
        self.failing_writes = 0
        self.lost_replies = 0
        self._tags = itertools.count(1)

    async def request(self, kind: str, operation: Callable[[], T]) -> T:
        """Perform one request. Subclasses override it to add delays."""
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
        return await self.request("get", lambda: self.objects.get(name))

    async def put(self, name: str, body: bytes) -> None:
        await self.request("put", lambda: self._write(name, body))

    async def create(self, name: str, body: bytes) -> str | None:
        return await self.request("put", lambda: None if name in self.objects else self._write(name, body))

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        def replace_if_unchanged() -> str | None:
            current = self.objects.get(name)
            return self._write(name, body) if current is not None and current.etag == tag else None

        return await self.request("put", replace_if_unchanged)

    async def list_names(self, folder: str) -> list[str]:
        return await self.request(
            "list", lambda: sorted(name for name in self.objects if name.startswith(f"{folder}/"))
        )

    async def list_folders(self) -> list[str]:
        return await self.request(
            "list", lambda: sorted({name.partition("/")[0] for name in self.objects if "/" in name})
        )

    def _write(self, name: str, body: bytes) -> str:
        tag = f'"{next(self._tags)}"'
        self.objects[name] = StoredObject(body, tag)
        return tag
