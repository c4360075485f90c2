"""A bucket in memory that keeps to conditions, and that loses, delays and refuses where a test says so."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from helper.errors import BucketError
from helper.object_store.bucket import StoredObject

T = TypeVar("T")
Way = Callable[[str, Callable[[], T]], Awaitable[T]]


class MemoryBucket:
    """`helper.object_store.bucket.Bucket`. Every condition and its write are one step.

    Attributes:
        objects: name -> what is there.
        asked: how often each kind of request came.
        fails: the next so many writes fail and are not done.
        loses: the next so many writes are done, and that is not told.
    """

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.asked: Counter[str] = Counter()
        self.fails = 0
        self.loses = 0
        self._tags = itertools.count(1)

    async def way(self, kind: str, act: Callable[[], T]) -> T:
        """The way of a request there and back; overridden by who has a longer one."""
        self.asked[kind] += 1
        if kind != "get" and self.fails:
            self.fails -= 1
            raise BucketError("the store is away")
        result = act()
        if kind != "get" and self.loses:
            self.loses -= 1
            raise BucketError("the answer was lost")
        return result

    async def get(self, name: str) -> StoredObject | None:
        """See `Bucket`."""
        return await self.way("get", lambda: self.objects.get(name))

    async def put(self, name: str, body: bytes) -> None:
        """See `Bucket`."""
        await self.way("put", lambda: self._write(name, body))

    async def create(self, name: str, body: bytes) -> str | None:
        """See `Bucket`."""
        return await self.way("put", lambda: None if name in self.objects else self._write(name, body))

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        """See `Bucket`."""

        def act() -> str | None:
            there = self.objects.get(name)
            return self._write(name, body) if there is not None and there.tag == tag else None

        return await self.way("put", act)

    async def names(self, folder: str) -> list[str]:
        """See `Bucket`."""
        return await self.way("list", lambda: sorted(name for name in self.objects if name.startswith(f"{folder}/")))

    async def folders(self) -> list[str]:
        """See `Bucket`."""
        return await self.way("list", lambda: sorted({name.partition("/")[0] for name in self.objects if "/" in name}))

    def _write(self, name: str, body: bytes) -> str:
        tag = f'"{next(self._tags)}"'
        self.objects[name] = StoredObject(body, tag)
        return tag
