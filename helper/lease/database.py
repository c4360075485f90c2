"""The lease of hosts that share a database: that database says who sends, in the transaction that notes a send."""

from __future__ import annotations

from typing import Final, Protocol

from helper.clock import Clock
from helper.errors import LeaseError, StoreError
from helper.lease import Lease
from helper.lease.term import Term

MARGIN: Final = 0.1
"""The part of a lease by which this host believes it to be over before the database does."""


class SenderLeaseStore(Protocol):
    """The part of the store that says who sends, as `helper.store.postgres.PostgresStore` does."""

    @property
    def lease_seconds(self) -> float:
        """For how long it says so without a word."""
        ...

    async def take_sender(self, outer: int | None = None) -> int | None:
        """Become the one that sends: the fence, None where another host does."""
        ...

    async def keep_sender(self) -> bool:
        """Stay it; False when another host has taken over."""
        ...

    async def leave_sender(self) -> None:
        """Stop being it."""
        ...

    async def sender_host(self) -> str:
        """Which host sends, "" for none."""
        ...


class DatabaseLease:
    """`helper.lease.Lease` in the queue's own database.

    The database asks for the fence whenever a send is noted (`mark_sending`), by its own clock, so nothing depends on
    this host's. `held` is for what lies between the note and the first byte.

    Args:
        place: the database.
        clock: this host's.
        outer: a lease that is kept elsewhere and gives the right to this one, by its number: a greater one takes over
            in the database from whoever is there. None where the database alone says who sends. Both hold for as long.
    """

    def __init__(self, place: SenderLeaseStore, *, clock: Clock, outer: Lease | None = None) -> None:
        self.seconds = place.lease_seconds
        self.fence = 0
        self.holder = ""
        self._place = place
        self._outer = outer
        self._term = Term(clock, seconds=self.seconds, margin=self.seconds * MARGIN)

    @property
    def held(self) -> bool:
        """Whether this host surely sends now."""
        return self._term.running and (self._outer is None or self._outer.held)

    async def acquire(self) -> bool:
        """Take it, or learn who has it."""
        if self._outer is not None and not self._outer.held and not await self._outer.acquire():
            self.holder = self._outer.holder
            return False
        asked = self._term.ask()
        try:
            fence = await self._place.take_sender(None if self._outer is None else self._outer.fence)
            if fence is None:
                self.holder = await self._place.sender_host()
                return False
        except StoreError as error:
            raise LeaseError(f"the database could not be asked who sends: {error}", advice=error.advice) from error
        self.fence, self.holder = fence, ""
        self._term.begin(asked)
        return True

    async def renew(self) -> bool:
        """Have it hold for longer, or learn that it is lost."""
        if self._outer is not None and not await self._outer.renew():
            self._term.end()
            self.holder = self._outer.holder
            return False
        asked = self._term.ask()
        try:
            if await self._place.keep_sender():
                self._term.begin(asked)
                return True
            self._term.end()
            self.holder = await self._place.sender_host()
        except StoreError as error:
            raise LeaseError(f"the database could not be told who sends: {error}", advice=error.advice) from error
        return False

    async def release(self) -> None:
        """Let go at once."""
        self._term.end()
        try:
            await self._place.leave_sender()
        except StoreError as error:
            raise LeaseError(f"the database could not be told who sends: {error}", advice=error.advice) from error
        finally:
            if self._outer is not None:
                await self._outer.release()
