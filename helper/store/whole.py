"""All that the service asks of its store, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from helper.store.action_store import ActStore
from helper.store.base import Outlook, Store
from helper.store.writer_thread import WriterStats


class WholeStore(Store, ActStore, Outlook, Protocol):
    """The parts that the service gives to its own, and what only the service itself asks for."""

    @property
    def trouble(self) -> str | None:
        """Why the last changes could not be kept, None while they can."""
        ...

    @property
    def stats(self) -> WriterStats:
        """What the writer has done since the start."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other hosts work on the same queue."""
        ...

    async def pulse(self) -> None:
        """Return once the writing thread has had a turn, however the database is."""
        ...

    async def verify(self) -> list[str]:
        """Look through all of it: damaged shares are set aside. What is still wrong, in words."""
        ...

    async def tree_sizes(self) -> dict[bytes, int]:
        """How many leaves of each round's tree are kept."""
        ...

    async def sender_host(self) -> str:
        """Which of the hosts that share the database sends now, "" for none; "" where there are no others.

        Raises:
            StoreError: it cannot be asked.
        """
        ...

    async def skew(self) -> float:
        """How many seconds the database's clock is ahead of this host's; 0 where it is this host's.

        Raises:
            StoreError: it cannot be asked.
        """
        ...

    def listen(self, heard: Callable[[str], None]) -> None:
        """Have words of other hosts told on the event loop, from `open` on: `work.DUE`, `messages.PREPARED`.

        They are no more than a reason to look at once: any may be lost, and "" is told when some may have been.
        """
        ...
