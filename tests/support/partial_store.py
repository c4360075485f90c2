"""Base class for test stores that implement only the methods under test."""

from __future__ import annotations

from collections.abc import Callable

from helper.store.store import Store
from helper.store.writer_thread import WriterStats


class PartialStore(Store):
    """A store without a database. Methods that a subclass does not override fail."""

    def __init__(self) -> None:
        """Skip the base class, which needs a writer and a reader."""

    async def open(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    @property
    def write_error(self) -> str | None:
        raise NotImplementedError

    @property
    def stats(self) -> WriterStats:
        raise NotImplementedError

    @property
    def is_shared(self) -> bool:
        raise NotImplementedError

    async def wait_for_erasure(self) -> None:
        raise NotImplementedError

    async def verify(self) -> list[str]:
        raise NotImplementedError

    async def get_sender_host(self) -> str:
        raise NotImplementedError

    async def measure_clock_skew(self) -> float:
        raise NotImplementedError

    def listen(self, callback: Callable[[str], None]) -> None:
        raise NotImplementedError
