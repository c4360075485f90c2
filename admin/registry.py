"""Who waits to join and who is in: claims are kept until their validator has a staking record, or a week is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import structlog

from admin import adr036
from admin.claim import Claim, SignedClaim
from admin.rarely import Rarely
from admin.store import AdminStore, Registration
from helper.chain.client import ChainClient
from helper.clock import Clock
from helper.errors import ChainError, HelperError

log = structlog.get_logger("helper.admin")

T = TypeVar("T")

SWEEP: Final = 3600.0
"""Seconds between two sweeps."""
AT_ONCE: Final = 8
"""Questions about staking in flight."""


class Chain(Protocol):
    """The nodes, as `helper.chain.onlooker.Onlooker` asks them."""

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        """Ask the fresh ones in order until one answers; raises ChainError when none does."""
        ...


@dataclass(frozen=True, slots=True)
class Registered:
    """The validator has a staking record: nothing to wait for."""


class Registry:
    """Registrations, held against staking."""

    def __init__(self, store: AdminStore, chain: Chain, *, clock: Clock) -> None:
        self._store = store
        self._chain = chain
        self._clock = clock
        self._look_rarely = Rarely(self._look, clock=clock)

    async def register(self, signed: SignedClaim) -> Registration | Registered:
        """Take a claim in.

        A chain that cannot be asked leaves the claim waiting. A claim that is not newer than the one known changes
        nothing; the answer says what stands.

        Raises:
            SignatureRefusedError: its owner did not sign it.
            RegistryFullError: too many wait.
            StoreError: it could not be kept.
        """
        claim = signed.claim
        await asyncio.to_thread(_verify, signed)
        if await self._in_staking(claim.operator_address):
            await self._store.drop([claim.operator_address])
            return Registered()
        registration = await self._store.register(claim, now=self._clock.now())
        log.info("a validator waits", operator=claim.operator_address)
        return registration

    async def waiting(self) -> list[Registration]:
        """Who waits, the longest first, without those who came into staking meanwhile."""
        await self._look_rarely()
        return await self._store.waiting(now=self._clock.now())

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            try:
                await self._store.sweep(now=self._clock.now())
                await self.waiting()
            except HelperError as error:
                log.error("registrations could not be swept", error=str(error), advice=error.advice)
            await self._clock.sleep(SWEEP)

    async def _look(self) -> None:
        """Drop those who are in staking; where no node can say, the rest is not asked about."""
        waiting = [registration.operator_address for registration in await self._store.waiting(now=self._clock.now())]
        for start in range(0, len(waiting), AT_ONCE):
            some = waiting[start : start + AT_ONCE]
            found = await asyncio.gather(*(self._in_staking(address) for address in some))
            await self._store.drop([address for address, inside in zip(some, found, strict=True) if inside])
            if all(inside is None for inside in found):
                return

    async def _in_staking(self, account: str) -> bool | None:
        """Whether there is a staking record, whatever its status; None when no node can say."""
        address = adr036.validator_address(account)
        try:
            return await self._chain.call(lambda client: client.validator(address)) is not None
        except ChainError:
            return None


def _verify(signed: SignedClaim) -> None:
    claim: Claim = signed.claim
    adr036.verify(
        claim.signed_text(), signer=claim.operator_address, pub_key=signed.pub_key, signature=signed.signature
    )
