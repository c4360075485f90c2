"""A wallet that behaves like library version 5.3.0: time limits, repetitions, receipts and exact reading of responses.

It votes through one base URL of the chain, gives its shares to helpers, and watches them until two helpers say that
they are counted. `devnet.wallet` is the wallet of the dev chain, which has none of these rules.

Every POST is logged with its outcome. The rules do not say when a share is overdue again that is still unconfirmed
after a recovery: in this wallet, after the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Self

import httpx

from devnet.ballot import Ballot, BallotShare, post_body
from tests.support.wallet_chain import ChainVoter, RoundTimes
from tests.support.wallet_http import Attempt, WalletHttp, normalize_base_url
from tests.support.wallet_responses import ShareOutcome, classify_share_response, is_confirmed, is_ready
from tests.support.wallet_schedule import HelperRanking, copies_per_share, draw_submit_at, overdue_seconds

READY_SOFT_SECONDS: Final = 2.0
READY_SECONDS: Final = 30.0
SHARE_SECONDS: Final = 30.0
FAN_OUT_SECONDS: Final = 60.0
"""Seconds for giving a share to its first helpers."""
MIN_ATTEMPT_SECONDS: Final = 1.0
"""No attempt begins with less time left."""
SHARE_WAITS: Final = (0.2, 0.6)
"""Seconds between the attempts at one helper."""
MAX_POSTS: Final = 128
MAX_WORKFLOWS: Final = 32

STATUS_SECONDS: Final = 5.0
STATUS_PASS_SECONDS: Final = 10.0
STATUS_CONCURRENCY: Final = 4
FIRST_POLL_SECONDS: Final = 10.0
"""Seconds from a share's time to the first question for its status."""
POLL_SECONDS: Final = 15.0
RECOVERY_END_SECONDS: Final = 10.0
"""Seconds before the end of a round after which nothing is recovered."""
CONFIRMATIONS: Final = 2


class HelperState(IntEnum):
    """What a helper has of a share, in the order in which helpers are queried to recover it. REFUSED: never again."""

    UNTRIED = 0
    INTERRUPTED = 1
    UNKNOWN = 2
    ACCEPTED = 3
    REFUSED = 4


_STATES: Final = {
    ShareOutcome.ACCEPTED: HelperState.ACCEPTED,
    ShareOutcome.REPEATABLE: HelperState.INTERRUPTED,
    ShareOutcome.REFUSED: HelperState.REFUSED,
    ShareOutcome.UNKNOWN: HelperState.UNKNOWN,
}


@dataclass(slots=True)
class SentShare:
    """A share of a cast vote.

    Attributes:
        submit_at: Unix second at which it is revealed; 0: immediately.
        confirmed_by: the helpers that said that it is counted.
    """

    ballot: Ballot = field(repr=False)
    share: BallotShare = field(repr=False)
    position: int
    submit_at: int
    helpers: dict[str, HelperState]
    confirmed_by: set[str] = field(default_factory=set)
    recoveries: int = 0

    def body(self, submit_at: int) -> bytes:
        """The body of a POST of this share: exactly the fields that the library sends."""
        fields = post_body(self.ballot, self.share, self.position, submit_at)
        del fields["all_enc_shares"]
        return json.dumps({**fields, "share_index": self.share.index, "submit_at": submit_at}).encode()

    def with_state(self, state: HelperState) -> list[str]:
        return [helper for helper, known in self.helpers.items() if known is state]


class LibraryWallet:
    """A wallet of library version 5.3.0. An async context manager.

    Args:
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
        self.helper_urls = list(dict.fromkeys(map(normalize_base_url, helper_urls)))
        self._http = WalletHttp(transport)
        self.attempts = self._http.attempts
        self.chain = ChainVoter(self._http, normalize_base_url(chain_url), rng)
        self._rng = rng
        self._now = now
        self._posts = asyncio.Semaphore(MAX_POSTS)
        self._workflows = asyncio.Semaphore(MAX_WORKFLOWS)
        self._ranking = HelperRanking(self.helper_urls, rng)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def cast_votes(self, round_: RoundTimes, choices: Sequence[tuple[int, int, int]]) -> list[SentShare]:
        """Cast votes (`ChainVoter.cast_votes`). Returns their shares with their times; no helper has them yet."""
        return [
            SentShare(
                ballot,
                share,
                position,
                draw_submit_at(int(self._now()), created_at=round_.created_at, end=round_.end, rng=self._rng),
                dict.fromkeys(self.helper_urls, HelperState.UNTRIED),
            )
            for ballot, position in await self.chain.cast_votes(round_, choices)
            for share in ballot.shares
        ]

    async def rank_helpers(self) -> None:
        """Query whether each helper accepts shares. Those that say so within 2 s are queried first."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()

        async def rank(helper: str) -> None:
            response = await self._http.get(helper, "status", READY_SECONDS)
            is_soon = loop.time() - started_at <= READY_SOFT_SECONDS
            self._ranking.set_rank(helper, 0 if is_ready(response) and is_soon else 1 if is_ready(response) else 2)

        await asyncio.gather(*map(rank, self.helper_urls))

    async def deliver(self, shares: Sequence[SentShare]) -> None:
        """Give shares to helpers. The first share of the lowest proposal goes first and has no time."""
        loop = asyncio.get_running_loop()
        ordered = sorted(shares, key=lambda sent: (sent.ballot.proposal_id, sent.share.index))
        ordered[0].submit_at = 0
        orders: list[list[str]] = []
        for proposal in dict.fromkeys(sent.ballot.proposal_id for sent in ordered):
            count = sum(sent.ballot.proposal_id == proposal for sent in ordered)
            orders += self._ranking.assign(count, loop.time())
        await self._fan_out(ordered[0], orders[0])
        await asyncio.gather(*(self._fan_out(*pair) for pair in zip(ordered[1:], orders[1:], strict=True)))

    async def _fan_out(self, sent: SentShare, order: Sequence[str]) -> None:
        """Give a share to its first helpers, to the next one for each that does not accept it."""
        async with self._workflows:
            end = asyncio.get_running_loop().time() + FAN_OUT_SECONDS
            for helper in order:
                if len(sent.with_state(HelperState.ACCEPTED)) >= copies_per_share(len(self.helper_urls)):
                    return
                await self._give(sent, helper, end)

    async def _give(self, sent: SentShare, helper: str, end: float) -> None:
        """POST a share to one helper, up to three times while no attempt had an effect."""
        loop = asyncio.get_running_loop()
        for wait in (*SHARE_WAITS, None):
            left = end - loop.time()
            if left < MIN_ATTEMPT_SECONDS:
                return
            outcome = await self._post_share(sent, helper, sent.submit_at, min(SHARE_SECONDS, left))
            if outcome is not ShareOutcome.REPEATABLE or wait is None:
                self._record(helper, outcome)
                return
            await asyncio.sleep(wait)

    async def _post_share(self, sent: SentShare, helper: str, submit_at: int, seconds: float) -> ShareOutcome:
        """Make one attempt, with a new token, and note what the helper has of the share."""
        token = secrets.token_hex(32)
        async with self._posts:
            response = await self._http.post(helper, "shares", sent.body(submit_at), token, seconds)
        outcome = classify_share_response(response, token)
        self.attempts.append(Attempt("shares", helper, response.status, outcome))
        if sent.helpers[helper] is not HelperState.ACCEPTED:
            sent.helpers[helper] = _STATES[outcome]
        return outcome

    async def watch(self, sent: SentShare, end: float) -> bool:
        """Query helpers for a share until it is confirmed, and recover it when it is overdue.

        Returns whether two different helpers (one if there is only one) confirmed it before the round's `end`.
        """
        due_time = sent.submit_at or self._now()
        overdue_at = due_time + overdue_seconds(due_time, end)
        await asyncio.sleep(due_time + FIRST_POLL_SECONDS - self._now())
        needed = min(CONFIRMATIONS, len(self.helper_urls))
        while True:
            await self._query_status(sent)
            now = self._now()
            if len(sent.confirmed_by) >= needed or now >= end - RECOVERY_END_SECONDS:
                return len(sent.confirmed_by) >= needed
            if now >= overdue_at:
                await self._recover(sent)
                overdue_at = self._now() + overdue_seconds(due_time, end)
            await asyncio.sleep(POLL_SECONDS)

    async def _query_status(self, sent: SentShare) -> None:
        """Query the helpers that did not confirm a share yet, whether or not they ever got it."""
        path = f"share-status/{sent.ballot.round_id.hex()}/{sent.share.nullifier.hex()}"
        concurrent = asyncio.Semaphore(STATUS_CONCURRENCY)

        async def query(helper: str) -> None:
            async with concurrent:
                if is_confirmed(await self._http.get(helper, path, STATUS_SECONDS)):
                    sent.confirmed_by.add(helper)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_PASS_SECONDS):
                await asyncio.gather(*(query(helper) for helper in self.helper_urls if helper not in sent.confirmed_by))

    async def _recover(self, sent: SentShare) -> None:
        """POST an overdue share once, without a time, to the helper that has least of it."""
        order = self._ranking.order(asyncio.get_running_loop().time())
        helper = min(order, key=lambda helper: sent.helpers[helper])
        if sent.helpers[helper] is not HelperState.REFUSED:
            sent.recoveries += 1
            self._record(helper, await self._post_share(sent, helper, 0, SHARE_SECONDS))

    def _record(self, helper: str, outcome: ShareOutcome) -> None:
        """Record the last outcome of a helper. A refusal is about the share and says nothing about the helper."""
        if outcome is ShareOutcome.ACCEPTED:
            self._ranking.record_success(helper)
        elif outcome is not ShareOutcome.REFUSED:
            self._ranking.record_failure(helper, asyncio.get_running_loop().time())
