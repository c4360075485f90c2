"""Wallets that vote: fetch the round, encrypt, cast the vote on the dev chain, post the shares to helpers.

They have the timeouts and retries of real wallets. A sequential wallet waits 5 s for a POST and retries after 200 and
600 ms if the error may be temporary; a helper that failed three times in a row is tried last for 30 s. A parallel
wallet posts all shares concurrently and waits 30 s.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from devnet.ballot import SHARE_COUNT, Ballot, BallotShare, immediate_times, post_body, seal_ballot
from devnet.vote_submission import CastingError, delegate_and_cast

_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_RETRY_WAITS_SECONDS = (0.2, 0.6)
_TIMEOUTS_SECONDS = {"sequential": 5.0, "parallel": 30.0}
_PENALTY_SECONDS = 30.0
_SHARES_PATH = "/shielded-vote/v1/shares"
PostingMode = Literal["sequential", "parallel"]


class WalletError(RuntimeError):
    """The vote could not be cast, and no share was posted."""


@dataclass(frozen=True, slots=True)
class PostResult:
    """Result of posting a share to a helper: HTTP status (None: no response), and `status` or error of the response."""

    helper: str
    status: int | None
    outcome: str
    attempts: int

    @property
    def is_accepted(self) -> bool:
        """Whether the helper has the share, queued now or earlier."""
        return self.status == 200 and self.outcome in ("queued", "duplicate")


@dataclass(frozen=True, slots=True)
class CastShare:
    """A posted share: index, nullifier, `submit_at`, and the result of each POST."""

    index: int
    nullifier: bytes
    submit_at: int
    posts: tuple[PostResult, ...]

    @property
    def is_accepted(self) -> bool:
        """Whether at least one helper has the share."""
        return any(post.is_accepted for post in self.posts)


@dataclass(frozen=True, slots=True)
class CastVote:
    """A cast vote: ballot, position of its commitment, and its posted shares."""

    ballot: Ballot = field(repr=False)
    position: int
    shares: tuple[CastShare, ...]

    @property
    def is_accepted(self) -> bool:
        """Whether every posted share was accepted by a helper."""
        return all(share.is_accepted for share in self.shares)


class Wallet:
    """One voter's wallet; an async context manager.

    With `uses_control_routes`, votes are cast over the dev chain's control route, which is not in the request log.
    Without it, they are cast over the routes of real wallets at `chain_url`, which may be a proxy.
    """

    def __init__(
        self,
        chain_url: str,
        helper_urls: Sequence[str],
        *,
        mode: PostingMode = "sequential",
        copies: int = 1,
        uses_control_routes: bool = True,
        token: str = "",
        rng: random.Random | None = None,
        http: httpx.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.chain_url = chain_url.rstrip("/")
        self.helper_urls = [url.rstrip("/") for url in helper_urls]
        self.mode = mode
        self.copies = min(max(copies, 1), max(len(helper_urls), 1))
        self.uses_control_routes = uses_control_routes
        self._headers = {"X-Helper-Token": token} if token else {}
        self._rng = rng or random.Random()
        self._http = http or httpx.AsyncClient(timeout=_TIMEOUTS_SECONDS[mode])
        self._owns_http = http is None
        self._sleep = sleep
        self._failures = dict.fromkeys(self.helper_urls, 0)
        self._penalized_until = dict.fromkeys(self.helper_urls, 0.0)

    async def __aenter__(self) -> Wallet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of the wallet's own HTTP client."""
        if self._owns_http:
            await self._http.aclose()

    async def cast_vote(
        self,
        round_id: bytes,
        proposal_id: int,
        vote_decision: int,
        *,
        weight: int | None = None,
        times: Sequence[int] | None = None,
    ) -> CastVote:
        """Vote. `weight` is random by default; `times` are the 16 values of `submit_at` (default: immediately)."""
        ballot = await self.seal_ballot(round_id, proposal_id, vote_decision, weight=weight)
        position = await self.cast_ballot(ballot)
        return await self.post_shares(ballot, position, times=immediate_times() if times is None else times)

    async def seal_ballot(
        self, round_id: bytes, proposal_id: int, vote_decision: int, *, weight: int | None = None
    ) -> Ballot:
        """Encrypt a vote with the key of its round."""
        response = await self._http.get(f"{self.chain_url}/shielded-vote/v1/round/{round_id.hex()}")
        key = response.json().get("round", {}).get("ea_pk") if response.status_code == 200 else None
        if not key:
            raise WalletError(f"the round does not accept votes: HTTP {response.status_code} {response.text[:200]}")
        return await asyncio.to_thread(
            seal_ballot,
            round_id=round_id,
            ea_pk=base64.b64decode(key),
            proposal_id=proposal_id,
            vote_decision=vote_decision,
            weight=self._rng.randint(1, 10_000) if weight is None else weight,
            rng=self._rng,
        )

    async def cast_ballot(self, ballot: Ballot, *, timeout: float = 60.0) -> int:
        """Cast the vote on the chain. Returns the position of its commitment in the round's tree."""
        if not self.uses_control_routes:
            return await self._cast_over_public_routes(ballot, timeout)
        body = {
            "round_id": ballot.round_id.hex(),
            "vote_commitment": ballot.commitment.hex(),
            "proposal_id": ballot.proposal_id,
        }
        sent = await self._http.post(f"{self.chain_url}/devnet/cast", json=body)
        if sent.status_code != 200:
            raise WalletError(f"the chain refused the vote: {sent.text[:200]}")
        url = f"{self.chain_url}/devnet/cast/{sent.json()['tx_hash']}"
        async with asyncio.timeout(timeout):
            while True:
                included = await self._http.get(url, params={"wait": 2})
                if included.status_code == 200:
                    break
        result: dict[str, Any] = included.json()
        if result["code"] != 0:
            raise WalletError(f"the vote failed in its block: {result['log']}")
        return int(result["vc_position"])

    async def _cast_over_public_routes(self, ballot: Ballot, timeout: float) -> int:
        """Cast the vote over the routes of real chains."""
        try:
            async with asyncio.timeout(timeout):
                return await delegate_and_cast(self._http, self.chain_url, ballot)
        except CastingError as error:
            raise WalletError(f"the chain refused the vote: {error}") from None

    async def post_shares(
        self,
        ballot: Ballot,
        position: int,
        *,
        times: Sequence[int],
        indices: Sequence[int] = range(SHARE_COUNT),
    ) -> CastVote:
        """Post shares, each to `copies` helpers. Late voters post index 0 only."""
        if len(times) != SHARE_COUNT:
            raise ValueError(f"a vote has {SHARE_COUNT} shares, got {len(times)} times")
        chosen = [ballot.shares[index] for index in indices]
        if self.mode == "parallel":
            waiting = [self._post_share(ballot, share, position, times[share.index]) for share in chosen]
            posted = list(await asyncio.gather(*waiting))
        else:
            posted = [await self._post_share(ballot, share, position, times[share.index]) for share in chosen]
        return CastVote(ballot, position, tuple(posted))

    async def _post_share(self, ballot: Ballot, share: BallotShare, position: int, submit_at: int) -> CastShare:
        """Post one share until enough helpers accepted it or all were tried."""
        body = post_body(ballot, share, position, submit_at)
        posts: list[PostResult] = []
        for helper in self._order_helpers(share.index):
            posts.append(await self._post_with_retries(helper, body))
            if sum(post.is_accepted for post in posts) >= self.copies:
                break
        return CastShare(share.index, share.nullifier, submit_at, tuple(posts))

    def _order_helpers(self, index: int) -> list[str]:
        """The order of helpers for this share: round-robin, paused ones last."""
        now = asyncio.get_running_loop().time()
        turn = index % max(len(self.helper_urls), 1)
        turned = self.helper_urls[turn:] + self.helper_urls[:turn]
        return sorted(turned, key=lambda helper: self._penalized_until[helper] > now)

    async def _post_with_retries(self, helper: str, body: dict[str, Any]) -> PostResult:
        """Post one share to one helper, with the retries of a real wallet."""
        posted = PostResult(helper, None, "", 0)
        for attempt, wait in enumerate((*_RETRY_WAITS_SECONDS, None), 1):
            try:
                async with asyncio.timeout(_TIMEOUTS_SECONDS[self.mode]):
                    response = await self._http.post(helper + _SHARES_PATH, json=body, headers=self._headers)
                posted = PostResult(helper, response.status_code, _response_status(response), attempt)
            except (httpx.HTTPError, TimeoutError) as error:
                posted = PostResult(helper, None, type(error).__name__, attempt)
            if posted.status is not None and posted.status not in _RETRIED_STATUSES:
                break
            if wait is not None:
                await self._sleep(wait)
        self._record_result(helper, posted.is_accepted)
        return posted

    def _record_result(self, helper: str, is_accepted: bool) -> None:
        """Record the success or failure of a helper."""
        self._failures[helper] = 0 if is_accepted else self._failures[helper] + 1
        if self._failures[helper] >= 3:
            self._failures[helper] = 0
            self._penalized_until[helper] = asyncio.get_running_loop().time() + _PENALTY_SECONDS


def _response_status(response: httpx.Response) -> str:
    """The `status` of a successful response, or the error of a failed one."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:200]
    if not isinstance(body, dict):
        return response.text[:200]
    return str(body.get("status") if response.status_code == 200 else body.get("error", body))
