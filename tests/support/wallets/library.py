"""A wallet that behaves like library version 5.3.0: time limits, repetitions, receipts and exact reading of responses.

It votes through one base URL of the chain, gives its shares to helpers, and watches them until two helpers say that
they are counted. `devnet.wallet` is the wallet of the dev chain, which has none of these rules.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from devnet.ballot import Ballot, BallotShare, post_body
from devnet.clients.client_wallet import ClientWallet, HelperState, SentShare
from devnet.clients.known_clients import LIBRARY
from devnet.clients.schedule import draw_submit_at
from devnet.clients.wallet_http import normalize_base_url
from tests.support.wallets.chain import ChainVoter, RoundTimes


@dataclass(slots=True)
class LibraryShare(SentShare):
    """A share of a vote that the wallet has cast itself."""

    ballot: Ballot = field(kw_only=True, repr=False)
    share: BallotShare = field(kw_only=True, repr=False)
    position: int = field(kw_only=True)


class LibraryWallet(ClientWallet):
    """A wallet of library version 5.3.0. An async context manager.

    Args:
        chain_url: base URL of the chain.
        helper_urls: base URLs of all helpers of the published configuration.
        rng: draws times, splits and the order of helpers.
    """

    def __init__(
        self,
        chain_url: str,
        helper_urls: Sequence[str],
        *,
        rng: random.Random,
        now: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(LIBRARY, helper_urls, rng=rng, now=now, transport=transport)
        self.chain = ChainVoter(self._http, normalize_base_url(chain_url), rng)
        self._rng = rng

    async def cast_votes(self, round_: RoundTimes, choices: Sequence[tuple[int, int, int]]) -> list[LibraryShare]:
        """Cast votes (`ChainVoter.cast_votes`). Returns their shares with their times; no helper has them yet."""
        return [
            create_share(
                ballot,
                share,
                position,
                draw_submit_at(int(self._now()), created_at=round_.created_at, end=round_.end, rng=self._rng),
                self.helper_urls,
            )
            for ballot, position in await self.chain.cast_votes(round_, choices)
            for share in ballot.shares
        ]


def create_share(
    ballot: Ballot, share: BallotShare, position: int, submit_at: int, helper_urls: Sequence[str]
) -> LibraryShare:
    """A share that no helper has yet, with exactly the fields that the library sends."""
    fields = {**post_body(ballot, share, position, 0), "share_index": share.index}
    del fields["all_enc_shares"]
    helpers = dict.fromkeys(helper_urls, HelperState.UNTRIED)
    return LibraryShare(fields, share.nullifier, submit_at, helpers, ballot=ballot, share=share, position=position)
