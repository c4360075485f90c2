"""Wallets of the demo: each encrypts its votes, casts them on the chain, and posts the shares to the helper."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devnet.demo.plan import Choice, times
from devnet.wallet import CastVote, Wallet

AT_ONCE = 4
"""Wallets that vote concurrently."""


@dataclass(frozen=True, slots=True)
class Voted:
    """A choice and the resulting vote."""

    choice: Choice
    vote: CastVote


async def vote_all(
    chain_url: str,
    helper_url: str,
    round_id: bytes,
    cast: Sequence[Choice],
    *,
    spread: float,
    dice: random.Random,
    accepted: Callable[[int], None],
) -> list[Voted]:
    """Cast all votes. `accepted` is called per vote with the number of accepted shares."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def vote(choice: Choice) -> Voted:
        async with gate, Wallet(chain_url, [helper_url], mode="parallel", dice=dice) as wallet:
            sealed = await wallet.seal(round_id, choice.proposal, choice.decision, weight=choice.weight)
            position = await wallet.cast(sealed)
            when = times(choice, time.time(), spread, dice)
            voted = await wallet.post(sealed, position, times=when)
            accepted(sum(share.accepted for share in voted.shares))
            return Voted(choice, voted)

    return list(await asyncio.gather(*(vote(choice) for choice in cast)))
