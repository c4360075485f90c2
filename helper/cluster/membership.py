"""What a host does because it is one of several that share a queue: who sends, whose clock counts, what others know.

Nothing of it runs where the queue is a file, but for the lease where one is set: it keeps a copy of the file on
another host from being worked beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import structlog

from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.cluster.clock_skew import ClockSkewMonitor
from helper.core.roles import Role
from helper.errors import StoreError
from helper.lease import Lease
from helper.lease.keeper import LeaseKeeper
from helper.reveal.circuit_selector import CircuitSelector
from helper.store.store import Store

log = structlog.get_logger("helper.among")

LONGEST_SLEEP: Final = 1.0
"""Seconds after which a loop of a shared queue looks round in any case: nobody may have told."""
AGREE_SECONDS: Final = 2.0


class ClusterMember:
    """One host among others.

    Args:
        lease: the right to send.
        role: what this host does.
        standby: wait while another host sends.
        changed: called when this host became the sender.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease: Lease,
        role: Role,
        standby: bool,
        circuits: CircuitSelector,
        rounds: RoundRegistry,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._lease = lease
        self._circuits = circuits
        self._rounds = rounds
        self._clock = clock
        self._told: str | None = None
        self._sender: str | None = None
        self.skew = ClockSkewMonitor(store, clock=clock)
        keeping = partial(LeaseKeeper, lease, clock=clock, standby=standby, changed=changed)
        self.keeper = keeping(fit=lambda: self.off is None) if role.sends else None

    async def begin(self) -> None:
        """Before any work: compare the clocks, take the lease.

        Raises:
            StoreError: the database cannot be asked.
            LeaseHeld: another host sends, and this one is to as well.
        """
        await self.skew.look()
        if self.keeper is not None:
            await self.keeper.begin()

    @property
    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs for ever."""
        found = {"clock": self.skew.run(), "agreement": self._agree()} if self._store.shared else {}
        if self.keeper is not None:
            found["lease"] = self.keeper.run()
        return found

    @property
    def off(self) -> str | None:
        """Why this host's clock is not the one that all go by, or None. A file knows of no other clock."""
        return self.skew.trouble if self._store.shared else None

    @property
    def waits(self) -> str | None:
        """Why nothing of the queue is proven here for now, or None. A queue that is shared is worked by all."""
        if self._store.shared or self._lease.held:
            return None
        return self.elsewhere or "the place of the lease has not answered for so long that another host may send"

    @property
    def elsewhere(self) -> str | None:
        """Why no share is taken here, or None: one that only this copy of a queue had would wait until it sends."""
        if self._store.shared or self._lease.held:
            return None
        if self._lease.holder:
            return f"the host {self._lease.holder!r} works on this queue, or on a copy of it"
        return None if self._lease.fence else "it is not known yet whether another host works on this queue"

    def facts(self) -> dict[str, Any]:
        """For operators: `sender` is the host that sends, as the database says where the queue is shared ("" for none,
        None while it was not asked), else who has the lease and is not this host.
        """
        if self._store.shared:
            sender, skew = self._sender, {"database_skew": round(self.skew.seconds, 3)}
        else:
            sender, skew = self._lease.holder if self.keeper is not None else None, {}
        return {"sends": self._lease.held, "sender": sender, **skew}

    async def _agree(self) -> None:
        """Tell or learn what the sender found out: which circuit the chain takes, which rounds are over; learn who
        sends."""
        while True:
            try:
                await self._agree_once()
            except StoreError as error:
                self._sender = None
                log.warning("what other hosts found out is not known", reason=str(error))
            await self._clock.sleep(AGREE_SECONDS)

    async def _agree_once(self) -> None:
        key = self._circuits.shared_key
        if key is not None:
            if self._lease.held:
                told = self._circuits.tell()
                if told != self._told:
                    await self._store.set_meta(key, told)
                    self._told = told
            else:
                self._told = None
                accepted = await self._store.get_meta(self._circuits.accepted_key)
                self._circuits.hear(await self._store.get_meta(key), accepted)
        await self._rounds.reread()
        self._sender = await self._store.sender_host()
