"""Persistent wallets: they cast votes and post shares until each is acknowledged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import httpx

from devnet import ballot
from devnet.ballot import Ballot
from devnet.wallet import Wallet
from tests.campaign.attack_clients import SHARES_PATH
from tests.campaign.promise_check import ShareLedger
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, unix_time_in

DueTimeSource = Callable[[], int]


class WalletGroup:
    """Many voters.

    Args:
        chain: where they vote.
        urls: returns the helpers' base URLs; called for every try, because a helper may restart at another port.
        rng: for splits, times and order.
    """

    def __init__(self, chain: DevChain, urls: Callable[[], Sequence[str]], rng: random.Random) -> None:
        self.ledger = ShareLedger()
        self.refused: list[tuple[int, str]] = []
        self.status_counts: Counter[int] = Counter()
        self._chain = chain
        self._urls = urls
        self._rng = rng

    async def cast_votes(self, round_id: bytes, count: int) -> list[tuple[Ballot, int]]:
        """Cast votes on the chain; return each with the position of its commitment."""
        async with Wallet(self._chain.url, [], rng=self._rng) as wallet:
            sealed = [
                await wallet.seal_ballot(round_id, 1 + number % 3, number % 2, weight=100) for number in range(count)
            ]
            return list(zip(sealed, await asyncio.gather(*map(wallet.cast_ballot, sealed)), strict=True))

    async def post_shares(
        self,
        votes: Sequence[tuple[Ballot, int]],
        due_time: DueTimeSource,
        *,
        posters: int = 16,
        pause_seconds: float = 0.0,
        timeout_seconds: float = 120.0,
        indices: Sequence[int] = range(ballot.SHARE_COUNT),
    ) -> None:
        """Post all shares in random order, each until acknowledged, permanently refused or timed out.

        Args:
            votes: the votes and their positions.
            due_time: called once for each share; returns its `submit_at`.
            posters: shares in flight concurrently.
            pause_seconds: pause of each poster between two shares.
            timeout_seconds: seconds after which posting a share is given up.
            indices: which shares of each vote.
        """
        waiting = [(vote, index, position, due_time()) for vote, position in votes for index in indices]
        self._rng.shuffle(waiting)
        queue = iter(waiting)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=posters)) as http:

            async def run_poster(number: int) -> None:
                # Posters start spread over the pause; otherwise all would post at the same moments.
                await asyncio.sleep(pause_seconds * number / posters)
                for vote, index, position, submit_at in queue:
                    await self._post_until_acknowledged(http, vote, index, position, submit_at, timeout_seconds)
                    await asyncio.sleep(pause_seconds)

            await asyncio.gather(*map(run_poster, range(posters)))

    async def _post_until_acknowledged(
        self, http: httpx.AsyncClient, vote: Ballot, index: int, position: int, submit_at: int, timeout_seconds: float
    ) -> None:
        share = vote.shares[index]
        body = ballot.post_body(vote, share, position, submit_at)
        self.ledger.record_post(share.nullifier, vote.round_id, submit_at)
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            for url in self._urls():
                started_at = time.monotonic()
                try:
                    async with asyncio.timeout(30):
                        response = await http.post(url + SHARES_PATH, json=body, timeout=30)
                except (httpx.HTTPError, TimeoutError):
                    self.status_counts[0] += 1
                    continue
                self.status_counts[response.status_code] += 1
                if response.status_code == 200:
                    self.ledger.record_acknowledgment(share.nullifier, time.time(), time.monotonic() - started_at)
                    return
                if response.status_code not in (429, 500, 503):
                    self.refused.append((response.status_code, response.text))
                    return
            await asyncio.sleep(0.2)


async def create_waiting_bodies(chain: DevChain, helper: HelperProcess, votes: int) -> tuple[bytes, list[bytes]]:
    """Cast votes. Returns their round and the bodies of their shares, vote by vote, which are due in half an hour."""
    round_id = await chain.open_round()
    cast = await WalletGroup(chain, list, random.Random(7)).cast_votes(round_id, votes)
    await helper.wait_for_leaf(round_id, max(position for _, position in cast))
    due = unix_time_in(1800)
    bodies = (ballot.post_body(vote, share, position, due) for vote, position in cast for share in vote.shares)
    return round_id, [json.dumps(body).encode() for body in bodies]
