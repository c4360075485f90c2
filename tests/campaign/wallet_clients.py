"""Wallets that do not give up: votes on the chain, and their shares posted until a helper has acknowledged each."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import httpx

from devnet import ballot
from devnet.ballot import Ballot
from devnet.wallet import Wallet
from tests.campaign.promise_check import Ledger
from tests.support.devnet import Chain

SHARES = "/shielded-vote/v1/shares"
Times = Callable[[], int]


class Crowd:
    """Many voters.

    Args:
        chain: where they vote.
        urls: the helpers' base URLs; asked anew for every try, as a helper may come back elsewhere.
        dice: for splits, times and order.
    """

    def __init__(self, chain: Chain, urls: Callable[[], Sequence[str]], dice: random.Random) -> None:
        self.ledger = Ledger()
        self.refused: list[tuple[int, str]] = []
        self.answers: Counter[int] = Counter()
        self._chain = chain
        self._urls = urls
        self._dice = dice

    async def vote(self, round_id: bytes, votes: int) -> list[tuple[Ballot, int]]:
        """Cast votes on the chain; each with the position of its commitment."""
        async with Wallet(self._chain.url, [], dice=self._dice) as wallet:
            sealed = [await wallet.seal(round_id, 1 + number % 3, number % 2, weight=100) for number in range(votes)]
            return list(zip(sealed, await asyncio.gather(*map(wallet.cast, sealed)), strict=True))

    async def post(
        self,
        votes: Sequence[tuple[Ballot, int]],
        due: Times,
        *,
        posters: int = 16,
        pause: float = 0.0,
        patience: float = 120.0,
        indices: Sequence[int] = range(ballot.SHARES),
    ) -> None:
        """Post all shares in random order, each until it is acknowledged, refused for good, or out of patience.

        Args:
            votes: the votes and their positions.
            due: asked once for each share: its `submit_at`.
            posters: shares in flight at once.
            pause: seconds that each poster rests between two shares.
            patience: seconds after which a share is given up.
            indices: which shares of each vote.
        """
        waiting = [(vote, index, position, due()) for vote, position in votes for index in indices]
        self._dice.shuffle(waiting)
        queue = iter(waiting)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=posters)) as http:

            async def poster(number: int) -> None:
                # spread over the pause: else all would post at one moment, rest, and post at one moment again
                await asyncio.sleep(pause * number / posters)
                for vote, index, position, submit_at in queue:
                    await self._post(http, vote, index, position, submit_at, patience)
                    await asyncio.sleep(pause)

            await asyncio.gather(*map(poster, range(posters)))

    async def _post(
        self, http: httpx.AsyncClient, vote: Ballot, index: int, position: int, submit_at: int, patience: float
    ) -> None:
        share = vote.shares[index]
        body = ballot.post_body(vote, share, position, submit_at)
        self.ledger.post(share.nullifier, vote.round_id, submit_at, position)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            for url in self._urls():
                began = time.monotonic()
                try:
                    async with asyncio.timeout(30):
                        answer = await http.post(url + SHARES, json=body, timeout=30)
                except (httpx.HTTPError, TimeoutError):
                    continue
                self.answers[answer.status_code] += 1
                if answer.status_code == 200:
                    self.ledger.acknowledge(share.nullifier, time.time(), time.monotonic() - began)
                    return
                if answer.status_code not in (429, 500, 503):
                    self.refused.append((answer.status_code, answer.text))
                    return
            await asyncio.sleep(0.2)
