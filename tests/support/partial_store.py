"""Base class for test stores that implement only the methods under test."""

from __future__ import annotations

from helper.store.store import Store


class PartialStore(Store):
    """A store without a database. Methods that a subclass does not override fail."""

    def __init__(self) -> None:
        """Skip the base class, which needs a writer and a reader."""

    async def open(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def wait_for_erasure(self) -> None:
        raise NotImplementedError

    async def verify(self) -> list[str]:
        raise NotImplementedError
