"""Wallets of the demo: each encrypts its votes, casts them on the chain, and posts the shares to the helpers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devnet.ballot import Ballot, post_body
from devnet.clients.client_wallet import ClientWallet, HelperState, SentShare
from devnet.clients.known_clients import DIRECT_CLIENTS, Client
from devnet.demo.plan import PlannedVote, due_times
from devnet.wallet import CastShare, CastVote, PostResult, Wallet

MAX_CONCURRENT_VOTES = 4
"""Wallets that vote concurrently."""


@dataclass(frozen=True, slots=True)
class VoteResult:
    """A choice, the resulting vote, and the name of the client that posted it ("" for the demo's own wallet)."""

    planned: PlannedVote
    vote: CastVote
    client: str = ""


async def cast_all_votes(
    chain_url: str,
    helper_urls: Sequence[str],
    round_id: bytes,
    planned_votes: Sequence[PlannedVote],
    *,
    helpers_per_share: int,
    plays_clients: bool,
    spread: float,
    rng: random.Random,
    on_accepted: Callable[[int], None],
) -> list[VoteResult]:
    """Cast all votes.

    Args:
        plays_clients: whether the shares of each voter are posted as one of the known clients does it.
        on_accepted: called per vote with the number of acceptances of its shares.
    """
    limiter = asyncio.Semaphore(MAX_CONCURRENT_VOTES)

    async def vote(choice: PlannedVote) -> VoteResult:
        wallet_ = Wallet(chain_url, helper_urls, mode="parallel", copies=helpers_per_share, rng=rng)
        async with limiter, wallet_ as wallet:
            sealed = await wallet.seal_ballot(round_id, choice.proposal, choice.decision, weight=choice.weight)
            position = await wallet.cast_ballot(sealed)
            when = due_times(choice, time.time(), spread, rng)
            client = DIRECT_CLIENTS[choice.voter % len(DIRECT_CLIENTS)] if plays_clients else None
            if client is None:
                voted = await wallet.post_shares(sealed, position, times=when)
            else:
                voted = await _post_as_client(client, helper_urls, sealed, position, times=when, rng=rng)
            on_accepted(sum(post.is_accepted for share in voted.shares for post in share.posts))
            return VoteResult(choice, voted, "" if client is None else client.name)

    return list(await asyncio.gather(*(vote(choice) for choice in planned_votes)))


async def _post_as_client(
    client: Client,
    helper_urls: Sequence[str],
    sealed: Ballot,
    position: int,
    *,
    times: Sequence[int],
    rng: random.Random,
) -> CastVote:
    sent_shares = []
    for share in sealed.shares:
        fields = {**post_body(sealed, share, position, 0), "share_index": share.index}
        helpers = dict.fromkeys(helper_urls, HelperState.UNTRIED)
        sent_shares.append(SentShare(fields, share.nullifier, times[share.index], helpers))
    async with ClientWallet(client, helper_urls, rng=rng) as wallet:
        await wallet.deliver(sent_shares)
    shares = []
    for share, sent in zip(sealed.shares, sent_shares, strict=True):
        posts = [PostResult(helper, 200, "queued", 1) for helper in sent.with_state(HelperState.ACCEPTED)]
        shares.append(CastShare(share.index, share.nullifier, sent.submit_at, tuple(posts)))
    return CastVote(sealed, position, tuple(shares))
