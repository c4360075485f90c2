"""Wallets of the demo: each encrypts its votes, casts them on the chain, and posts the shares to the helpers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devnet.demo.plan import PlannedVote, due_times
from devnet.wallet import CastVote, Wallet

MAX_CONCURRENT_VOTES = 4
"""Wallets that vote concurrently."""


@dataclass(frozen=True, slots=True)
class VoteResult:
    """A choice and the resulting vote."""

    planned: PlannedVote
    vote: CastVote


async def cast_all_votes(
    chain_url: str,
    helper_urls: Sequence[str],
    round_id: bytes,
    planned_votes: Sequence[PlannedVote],
    *,
    helpers_per_share: int,
    spread: float,
    rng: random.Random,
    on_accepted: Callable[[int], None],
) -> list[VoteResult]:
    """Cast all votes. `on_accepted` is called per vote with the number of acceptances of its shares."""
    limiter = asyncio.Semaphore(MAX_CONCURRENT_VOTES)

    async def vote(choice: PlannedVote) -> VoteResult:
        wallet_ = Wallet(chain_url, helper_urls, mode="parallel", copies=helpers_per_share, rng=rng)
        async with limiter, wallet_ as wallet:
            sealed = await wallet.seal_ballot(round_id, choice.proposal, choice.decision, weight=choice.weight)
            position = await wallet.cast_ballot(sealed)
            when = due_times(choice, time.time(), spread, rng)
            voted = await wallet.post_shares(sealed, position, times=when)
            on_accepted(sum(post.is_accepted for share in voted.shares for post in share.posts))
            return VoteResult(choice, voted)

    return list(await asyncio.gather(*(vote(choice) for choice in planned_votes)))
