"""Plays a client: it gives the shares of a vote to helpers, and watches them until they are confirmed.

Every POST is logged with its outcome. What the sources leave open: a share that is still unconfirmed after it was
posted again is overdue again after the same time; zkool posts overdue shares as the library does, and asks all helpers
for a share's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Self

import httpx

from devnet.clients.known_clients import AsksOn, Client
from devnet.clients.responses import ShareOutcome, is_ready
from devnet.clients.schedule import HelperRanking, copies_per_share, overdue_seconds
from devnet.clients.wallet_http import ATTEMPT_HEADER, Attempt, WalletHttp, normalize_base_url

READY_SOFT_SECONDS: Final = 2.0
READY_SECONDS: Final = 30.0
MIN_ATTEMPT_SECONDS: Final = 1.0
"""No attempt begins with less time left."""
MAX_POSTS: Final = 128

STATUS_SECONDS: Final = 5.0
STATUS_PASS_SECONDS: Final = 10.0
STATUS_CONCURRENCY: Final = 4
RECOVERY_END_SECONDS: Final = 10.0
"""Seconds before the end of a round after which nothing is recovered."""


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
    ShareOutcome.ENDS_SHARE: HelperState.INTERRUPTED,
    ShareOutcome.ENDS_VOTE: HelperState.INTERRUPTED,
}


@dataclass(slots=True)
class SentShare:
    """A share of a cast vote.

    Attributes:
        fields: the fields of its body without `submit_at`.
        submit_at: Unix second at which it is revealed; 0: immediately.
        helpers: what each helper has of it.
        confirmed_by: the helpers that said that it is counted.
        is_given_up: whether the wallet gives it to no other helper.
        times: seconds of the event loop of its first attempt and of its first acceptance.
    """

    fields: Mapping[str, Any] = field(repr=False)
    nullifier: bytes
    submit_at: int
    helpers: dict[str, HelperState]
    confirmed_by: set[str] = field(default_factory=set)
    recoveries: int = 0
    is_given_up: bool = False
    times: list[float] = field(default_factory=list)

    def with_state(self, state: HelperState) -> list[str]:
        """The helpers that have this state."""
        return [helper for helper, known in self.helpers.items() if known is state]


class _RunEndedError(Exception):
    """A share ended the run, also for the others."""


class ClientWallet:
    """A wallet of a client. An async context manager.

    Args:
        client: what it does.
        helper_urls: base URLs of all helpers of the published configuration.
        rng: draws the order of helpers.
        now: the Unix time.
        transport: its connections; by default, those of the client.

    Attributes:
        failure: why the user must act; empty if he need not.
    """

    def __init__(
        self,
        client: Client,
        helper_urls: Sequence[str],
        *,
        rng: random.Random,
        now: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.client = client
        self.helper_urls = list(dict.fromkeys(map(normalize_base_url, helper_urls)))
        self.failure = ""
        keeps = None if client.keeps_connections else 0
        limits = httpx.Limits(max_connections=client.connections, max_keepalive_connections=keeps)
        self._http = WalletHttp(
            transport or httpx.AsyncHTTPTransport(limits=limits, trust_env=False),
            silence_seconds=client.silence_seconds,
            follows_redirects=client.follows_redirects,
            ends_late_requests=client.ends_late_requests,
        )
        self.attempts = self._http.attempts
        self._now = now
        self._posts = asyncio.Semaphore(MAX_POSTS)
        self._shares = asyncio.Semaphore(client.shares_at_once)
        self._has_ended = False
        self.ranking = HelperRanking(
            self.helper_urls,
            rng,
            failures_before_pause=client.failures_before_pause,
            pause_seconds=client.pause_seconds,
            leaves_out_paused=client.leaves_out_paused,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def rank_helpers(self) -> None:
        """Query whether each helper accepts shares. Those that say so within 2 s are queried first."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()

        async def rank(helper: str) -> None:
            response = await self._http.get(helper, "status", READY_SECONDS)
            is_soon = loop.time() - started_at <= READY_SOFT_SECONDS
            self.ranking.set_rank(helper, 0 if is_ready(response) and is_soon else 1 if is_ready(response) else 2)

        await asyncio.gather(*map(rank, self.helper_urls))

    # ------------------------------------------------------------------ delivery

    async def deliver(self, shares: Sequence[SentShare]) -> None:
        """Give the shares of a vote to helpers, those of the lowest proposal first."""
        client = self.client
        ordered = sorted(shares, key=lambda sent: (sent.fields["proposal_id"], sent.fields["share_index"]))
        if client.sends_first_alone:
            ordered[0].submit_at = 0
        for wait in (*client.run_waits, None):
            await self._deliver_once(ordered)
            missing = [sent for sent in ordered if not self.is_delivered(sent) and not sent.is_given_up]
            if self.failure or not missing:
                return
            if wait is None:
                self.failure = "no helper has accepted a share"
                return
            await asyncio.sleep(wait)
            ordered = missing if client.remembers_accepted else ordered

    def is_delivered(self, sent: SentShare) -> bool:
        """Whether enough helpers have accepted a share."""
        needed = self._copies(len(self.helper_urls)) if self.client.needs_all_copies else 1
        return len(sent.with_state(HelperState.ACCEPTED)) >= needed

    def _copies(self, helpers: int) -> int:
        return min(copies_per_share(helpers), self.client.max_copies)

    async def _deliver_once(self, ordered: Sequence[SentShare]) -> None:
        orders: list[list[str] | None] = [None] * len(ordered)
        if self.client.max_first_shares is not None:
            now = asyncio.get_running_loop().time()
            orders = []
            for proposal in dict.fromkeys(sent.fields["proposal_id"] for sent in ordered):
                count = sum(sent.fields["proposal_id"] == proposal for sent in ordered)
                orders += self.ranking.assign(count, now, most=self.client.max_first_shares)
        pairs = list(zip(ordered, orders, strict=True))
        self._has_ended = False
        try:
            async with asyncio.TaskGroup() as group:
                if self.client.sends_first_alone:
                    await self._fan_out(*pairs.pop(0))
                for pair in pairs:
                    group.create_task(self._fan_out(*pair))
        except* _RunEndedError:
            pass

    async def _fan_out(self, sent: SentShare, order: list[str] | None) -> None:
        """Give a share to its first helpers, and to further ones for those that do not accept it."""
        client = self.client
        async with self._shares:
            if self._has_ended:
                return
            now = asyncio.get_running_loop().time()
            end = now + client.fan_out_seconds
            order = self.ranking.order(now) if order is None else order
            copies = self._copies(len(order))
            order = [helper for helper in order if self._may_ask(sent, helper)] or order
            first = order[:copies] if client.first_at_once else []
            await asyncio.gather(*(self._give(sent, helper, end) for helper in first))
            enough = {AsksOn.NEVER: 0, AsksOn.UNTIL_ONE: 1, AsksOn.UNTIL_ALL: copies}[client.asks_on]
            for helper in order[len(first) :]:
                if len(sent.with_state(HelperState.ACCEPTED)) >= enough or sent.is_given_up or self.failure:
                    break
                await self._give(sent, helper, end)
            if self.failure or (client.stops_at_failure and not self.is_delivered(sent)):
                self._has_ended = True  # for a share that begins before the group cancels it
                raise _RunEndedError

    def _may_ask(self, sent: SentShare, helper: str) -> bool:
        if self.client.skips_own_number and self.helper_urls.index(helper) % 16 == sent.fields["share_index"]:
            return False
        return self.client.repeats_unknown or sent.helpers[helper] <= HelperState.INTERRUPTED

    async def _give(self, sent: SentShare, helper: str, end: float) -> None:
        """POST a share to one helper, again while no attempt had an effect and the client repeats it."""
        loop = asyncio.get_running_loop()
        repetitions = 0
        while (left := end - loop.time()) >= MIN_ATTEMPT_SECONDS:
            seconds = min(self.client.post_seconds, left)
            response_waits, outcome = await self._post_share(sent, helper, sent.submit_at, seconds)
            if outcome is not ShareOutcome.REPEATABLE or repetitions >= len(response_waits):
                self._record(sent, helper, outcome)
                return
            await asyncio.sleep(response_waits[repetitions])
            repetitions += 1

    async def _post_share(
        self, sent: SentShare, helper: str, submit_at: int, seconds: float
    ) -> tuple[Sequence[float], ShareOutcome]:
        """Make one attempt, with a new token, and note what the helper has of the share.

        Returns the waits before repetitions, and the outcome.
        """
        client, token, time = self.client, secrets.token_hex(32), asyncio.get_running_loop().time
        sent.times = sent.times or [time()]
        headers = {**client.headers, **({ATTEMPT_HEADER: token} if client.names_attempt else {})}
        content = client.encode({**sent.fields, "submit_at": submit_at})
        async with self._posts:
            response = await self._http.post(helper, "shares", content, seconds, headers)
        outcome = client.read(response, token)
        self.attempts.append(Attempt("shares", helper, response.status, outcome))
        if sent.helpers[helper] is not HelperState.ACCEPTED:
            sent.helpers[helper] = _STATES[outcome]
        if outcome is ShareOutcome.ACCEPTED and len(sent.times) == 1:
            sent.times.append(time())
        return client.waits(response), outcome

    def _record(self, sent: SentShare, helper: str, outcome: ShareOutcome) -> None:
        """Record the last outcome of a helper. A refusal is about the share and says nothing about the helper."""
        if outcome is ShareOutcome.ACCEPTED:
            self.ranking.record_success(helper)
            if self.client.prefers_last:
                self.ranking.prefer(helper)
        elif outcome is ShareOutcome.ENDS_SHARE:
            sent.is_given_up = True
        elif outcome is ShareOutcome.ENDS_VOTE:
            self.failure = f"{helper} has refused a share"
        elif outcome is not ShareOutcome.REFUSED:
            self.ranking.record_failure(helper, asyncio.get_running_loop().time())

    # ------------------------------------------------------------------ confirmation

    async def watch(self, sent: SentShare, end: float, *, earliest: float | None = None) -> bool:
        """Query helpers for a share until it is confirmed, and recover it when it is overdue.

        A share that the wallet had given up is delivered before the first question.

        Returns whether the wallet takes it for confirmed before the round's `end`. `earliest` is the time of the
        earliest share of its vote.
        """
        client = self.client
        due_time = sent.submit_at or self._now()
        overdue_at = due_time + overdue_seconds(due_time, end)
        first_at = (earliest or due_time) if client.poll_delay is None else due_time + client.poll_delay
        await asyncio.sleep(max(0.0, first_at - self._now()))
        if sent.is_given_up:
            sent.is_given_up = False
            await self.deliver([sent])
        needed = min(client.confirmations, len(self.helper_urls))
        while True:
            await self._query_status(sent)
            now = self._now()
            if len(sent.confirmed_by) >= needed or now >= end - RECOVERY_END_SECONDS:
                return len(sent.confirmed_by) >= needed
            if now >= overdue_at and client.recovers and (sent.submit_at or client.recovers_immediate):
                await self._recover(sent)
                overdue_at = self._now() + overdue_seconds(due_time, end)
            await asyncio.sleep(client.poll_seconds)

    async def _query_status(self, sent: SentShare) -> None:
        """Query the helpers that did not confirm a share yet."""
        client = self.client
        path = f"share-status/{sent.fields['vote_round_id']}/{sent.nullifier.hex()}"
        concurrent = asyncio.Semaphore(STATUS_CONCURRENCY)

        async def query(helper: str) -> None:
            async with concurrent:
                response = await self._http.get(helper, path, STATUS_SECONDS, headers=client.status_headers)
                if client.is_confirmed(response):
                    sent.confirmed_by.add(helper)

        asked = self.helper_urls if client.asks_all_helpers else sent.with_state(HelperState.ACCEPTED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_PASS_SECONDS):
                await asyncio.gather(*(query(helper) for helper in asked if helper not in sent.confirmed_by))

    async def _recover(self, sent: SentShare) -> None:
        """POST an overdue share without a time, to the helpers that have least of it first."""
        client = self.client
        sent.recoveries += 1
        order = self.ranking.order(asyncio.get_running_loop().time())
        order = sorted(order, key=lambda helper: sent.helpers[helper])
        order = [helper for helper in order if sent.helpers[helper] is not HelperState.REFUSED]
        untried = sum(sent.helpers[helper] is HelperState.UNTRIED for helper in order)
        first = max(1, client.recovers_at_once(untried))
        outcomes = list(await asyncio.gather(*(self._post_again(sent, helper) for helper in order[:first])))
        for helper in order[first:] if client.recovers_until_accepted else []:
            if ShareOutcome.ACCEPTED in outcomes:
                return
            outcomes.append(await self._post_again(sent, helper))

    async def _post_again(self, sent: SentShare, helper: str) -> ShareOutcome:
        _, outcome = await self._post_share(sent, helper, 0, self.client.post_seconds)
        if outcome not in (ShareOutcome.ENDS_SHARE, ShareOutcome.ENDS_VOTE):  # here no response is final
            self._record(sent, helper, outcome)
        return outcome
