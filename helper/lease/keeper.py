"""Takes the lease of the sender, renews it, and says when another host has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from helper.clock import Clock
from helper.errors import LeaseError, LeaseHeld
from helper.lease import Lease

log = structlog.get_logger("helper.lease")

WORDS_A_TERM: Final = 3
"""How often a lease is renewed in its time: two words may be lost."""
TRIES_A_TERM: Final = 10
"""How often a host that waits for the lease asks for it in the time of one."""

NOT_SENT: Final = "nothing is sent from here for now"
UNFIT: Final = "this machine's clock is not the one that all hosts go by"


class LeaseKeeper:
    """One host's part in who sends.

    Args:
        lease: the right to send.
        clock: for the waits.
        standby: wait for as long as another host sends, instead of refusing to run.
        changed: called whenever it was taken.
        fit: whether this host may send at all. One that may not leaves the lease to others, or has nobody send.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        clock: Clock,
        standby: bool = False,
        changed: Callable[[], None] = lambda: None,
        fit: Callable[[], bool] = lambda: True,
    ) -> None:
        self._lease = lease
        self._clock = clock
        self._standby = standby
        self._changed = changed
        self._fit = fit
        self._mine = False
        self._told: str | None = None

    async def begin(self) -> None:
        """Before any work: refuse it where another host sends. Where nobody can be asked, `run` goes on asking.

        Raises:
            LeaseHeld: another host holds it, and held it for the whole time in which a host that died loses it.
        """
        if not self._standby:
            await self._take(at_once=True)

    async def run(self) -> None:
        """Take it and keep it until cancelled, then let go.

        Raises:
            LeaseHeld: another host holds it, and held it for the whole time in which a host that died loses it.
        """
        try:
            while True:
                await (self._keep() if self._mine else self._take())
        finally:
            await self._let_go()

    async def _take(self, *, at_once: bool = False) -> None:
        """Ask until it is ours. A holder that does not live loses it within its time; one that does is a mistake.

        Args:
            at_once: give up, without an error, when nobody can be asked.
        """
        patience = self._lease.seconds * (1 + 1 / TRIES_A_TERM)
        answered: float | None = None  # since when it has been answered that it is another's, without a gap
        while True:
            while not self._fit():
                self._tell(NOT_SENT, UNFIT, "It takes the lease again once that is over.")
                if at_once:
                    return
                answered = None
                await self._clock.sleep(self._lease.seconds / TRIES_A_TERM)
            try:
                if await self._lease.acquire():
                    break
            except LeaseError as error:
                self._tell(NOT_SENT, str(error), error.advice)
                if at_once:
                    return
                answered = None
            else:
                self._tell(NOT_SENT, *self._why())
                now = self._clock.monotonic()
                answered = now if answered is None else answered
                if not self._standby and now - answered >= patience:
                    raise LeaseHeld(f"{self._other} sends for this queue, and one host does")
            await self._clock.sleep(self._lease.seconds / TRIES_A_TERM)
        self._mine, self._told = True, None
        log.info("this host sends", fence=self._lease.fence)
        self._changed()

    @property
    def _other(self) -> str:
        """Who has it."""
        return f"the host {self._lease.holder!r}" if self._lease.holder else "another host"

    def _why(self) -> tuple[str, str]:
        """Why it was not to be had, and what there is to do."""
        if not self._lease.holder:  # where nothing says who had it, it may still be somebody's
            return "it is waited for whether another host sends", f"This takes {self._lease.seconds:g} s."
        advice = "This one takes over when that one is gone." if self._standby else LeaseHeld.advice
        return f"{self._other} sends", advice

    async def _keep(self) -> None:
        await self._clock.sleep(self._lease.seconds / WORDS_A_TERM)
        if not self._fit():
            await self._let_go()
            return
        try:
            self._mine = await self._lease.renew()
            self._told = None
        except LeaseError as error:
            # Nothing is lost yet: it may still be ours, and `held` says for how long that is sure.
            self._tell("the lease of the sender could not be renewed", str(error), error.advice)
        if not self._mine:
            log.error("another host sends now", host=self._lease.holder)

    async def _let_go(self) -> None:
        if self._mine:
            self._mine = False
            try:
                await self._lease.release()
            except LeaseError as error:
                log.warning("the lease of the sender ends by itself", reason=str(error))

    def _tell(self, what: str, reason: str, advice: str) -> None:
        """One line for each reason, not one a try."""
        if reason != self._told:
            self._told = reason
            log.warning(what, reason=reason, advice=advice)
