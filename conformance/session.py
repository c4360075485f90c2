"""One run against a helper: the client, the shares, the dev chain, and what the run has posted so far."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from conformance.check_failures import CheckSkipped, require
from conformance.dev_chain import ChainRound, DevChain
from conformance.http_requests import Headers, HelperClient, Reply
from conformance.shares import Body, TestShare, encode, invented_share, read_shares_file, seal, shares_of
from devnet.ballot import Ballot
from helper.clock import Clock

ROUND_SECONDS: Final = 3600.0
"""Duration of the rounds that a run creates. No run lasts as long."""
_FAR_SECONDS: Final = 1200
"""Seconds before the end of its round at which a share is due that must wait during the whole run."""
ACCEPT_SECONDS: Final = 60.0
"""Seconds in which a helper must know a new round and its votes. The original reads rounds when a share arrives."""
REVEAL_SECONDS: Final = 60.0
"""Default limit from its time until a share is counted, in seconds. The original proves 0.6 shares per second."""
ENDED: Final = "the round of the shares has ended"
_RETRY_SECONDS: Final = 0.5
_SPARE_SHARES: Final = 32
"""Shares of a dev chain for the posts that must be refused, and that a faulty helper accepts."""

T = TypeVar("T")
MakeBody = Callable[[TestShare, int], Body | bytes]
"""Creates a body from a share and its `submit_at`."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A share that the helper accepted in this run, and the Unix seconds at which it was due and was posted."""

    share: TestShare
    due_at: float
    posted_at: float


class Session:
    """State and tools that the checks of one run share.

    Args:
        chain: the dev chain that the helper uses.
        shares_file: file of real shares.
        share_count: number of new shares that the selected checks post.
        reveal_seconds: seconds after its time within which a share must be counted.

    Attributes:
        all_shares: all shares of this run, posted or not.
        log_start: the last entry of the request log before this run.
    """

    def __init__(
        self,
        client: HelperClient,
        clock: Clock,
        *,
        chain: DevChain | None = None,
        shares_file: Path | None = None,
        restart_command: str | None = None,
        share_count: int = 0,
        reveal_seconds: float = REVEAL_SECONDS,
    ) -> None:
        self.client = client
        self.clock = clock
        self.restart_command = restart_command
        self.reveal_seconds = reveal_seconds
        self.accepted: list[Posted] = []
        self.asked_nullifiers: list[bytes] = []
        self.revealed_elsewhere: list[TestShare] = []
        self._chain = chain
        self._share_count = share_count
        self._round: ChainRound | None = None
        self._open_rounds: list[bytes] = []
        self.log_start = 0
        self.all_shares: list[TestShare] = []
        self._unused: list[TestShare] = []
        self._template: TestShare | None = None
        self._refusable: TestShare | None = None
        self._invented: TestShare | None = None
        self._cached: dict[object, asyncio.Future[Any]] = {}
        self._number = 0
        self._from_file = shares_file is not None
        self._end: int | None = None
        if shares_file is not None:
            self._unused, self._end = read_shares_file(shares_file)
            self.all_shares = list(self._unused)
            self._take_template()

    @property
    def has_shares(self) -> bool:
        """Whether there is a source of shares."""
        return self._chain is not None or self._from_file

    @property
    def has_chain(self) -> bool:
        """Whether there is a dev chain."""
        return self._chain is not None

    @property
    def chain(self) -> DevChain:
        """The dev chain; raises CheckSkipped without one."""
        if self._chain is None:
            raise CheckSkipped("needs a dev chain (--devnet)")
        return self._chain

    @property
    def round(self) -> ChainRound:
        """The round of the dev chain in which the shares are."""
        assert self._round is not None
        return self._round

    @property
    def template(self) -> TestShare:
        """A share that is never posted with all its values. Checks that expect a refusal alter it."""
        self._require_open()
        if self._template is None:
            raise CheckSkipped("no unused share left" if self.has_shares else "needs shares (--devnet or --shares)")
        return self._template

    def share_of_other_vote(self) -> TestShare:
        """A share of another vote than the template, posted or not."""
        commitment = self.template.commitment
        for share in self.all_shares:
            if share.commitment != commitment and share.round_id == self.template.round_id:
                return share
        raise CheckSkipped("needs shares of two votes")

    def invented(self) -> TestShare:
        """A well-formed share of a round that does not exist; needs no chain."""
        if self._invented is None:
            self._invented = invented_share()
        return self._invented

    def take(self, index: int | None = None) -> TestShare:
        """Take a share that no check has posted, with this index among the shares of its vote if one is given."""
        self._require_open()
        if not self._unused:
            raise CheckSkipped("the file has no unused share left" if self._from_file else "no unused share left")
        for number in reversed(range(len(self._unused))):
            if index in (None, self._unused[number].index):
                return self._unused.pop(number)
        raise CheckSkipped(f"no unused share with index {index} left")

    def take_many(self, count: int) -> list[TestShare]:
        """Take several shares."""
        self._require_open()
        if len(self._unused) < count:
            raise CheckSkipped(f"needs {count} unused shares, {len(self._unused)} are left")
        return [self._unused.pop() for _ in range(count)]

    @property
    def end(self) -> int:
        """The end of the round of the shares, in Unix seconds."""
        if self._end is None:
            raise CheckSkipped("the file does not have the round's vote_end_time")
        return self._end

    def next_number(self) -> int:
        """A number that was not returned before."""
        self._number += 1
        return self._number

    def time_for(self, share: TestShare) -> int:
        """When a share is to be revealed: as stated in its file, or after the run and before the end of its round.

        The helper accepts shares of the round with this time, so it does not refuse an altered one because of it.
        """
        if share.submit_at is not None:
            return share.submit_at
        return 0 if self._end is None else self._end - _FAR_SECONDS

    @property
    def has_ended(self) -> bool:
        """Whether the round of the shares has ended, so that every share may be refused."""
        return self._end is not None and self.clock.now() >= self._end

    def _require_open(self) -> None:
        if self.has_ended:
            raise CheckSkipped(ENDED)

    def _take_template(self) -> None:
        """Choose the next template: of another vote, and without a zero, because a missing number means zero."""
        last = None if self._template is None else self._template.commitment
        suited = [share for share in self._unused if share.index and share.fields["vote_decision"]]
        other = [share for share in suited if share.commitment != last]
        self._template = next(iter(other or suited or self._unused), None)
        self._unused = [share for share in self._unused if share is not self._template]

    async def post_altered(self, make: Callable[[TestShare, int], Body]) -> Reply:
        """Post the template with another value, which must be refused.

        A helper that accepts it has stored something else under the key of a share, which no other check posts.
        """
        share = self.template
        body = make(share, self.time_for(share))
        reply = await self.client.post(encode(body))
        if reply.is_accepted:
            sealed = body.get("enc_share")
            key = (share.commitment, sealed.get("share_index", 0) if isinstance(sealed, dict) else 0)
            self._unused = [other for other in self._unused if (other.commitment, other.index) != key]
            self._take_template()
        return reply

    async def post_refusable(self, make: MakeBody, headers: Headers = ()) -> Reply:
        """Post a share that must be refused although a lenient helper can read all its values.

        A helper that accepts it has the share. If it is refused, the next such check posts it.
        """
        share = self.refusable()
        due = self.time_for(share)
        reply = await self.post_share(share, due, body=make(share, due), headers=headers)
        return self.settle(share, reply)

    def refusable(self) -> TestShare:
        """The share of the next post that must be refused; its response is given to `settle`."""
        share, self._refusable = self._refusable or self.take(), None
        return share

    def settle(self, share: TestShare, reply: Reply) -> Reply:
        """Keep a refused share for the next check that expects a refusal. Returns the response."""
        if not reply.is_accepted:
            self._refusable = share
        return reply

    async def prepare(self) -> None:
        """Create the round and the votes, and wait until the helper accepts their shares.

        Raises:
            CheckFailed: it does not accept any.
            ChainUnavailable: the dev chain does not respond.
        """
        if self._chain is not None:
            await self._prepare_chain(self._chain)
        if self.has_shares and self._unused:
            seconds = 0.0 if self._from_file else ACCEPT_SECONDS
            reply = await self.post_until_accepted(self._unused.pop(0), seconds=seconds)
            require(reply.is_accepted, f"POST of a valid share → {reply}")

    async def _prepare_chain(self, chain: DevChain) -> None:
        entries = await chain.requests_after(0)
        self.log_start = entries[-1]["seq"] if entries else 0
        self._round = await self.open_round()
        self._end = self._round.end
        await chain.add_leaves(self._round.round_id)
        votes = 2 + -(-(self._share_count + _SPARE_SHARES) // 16)
        self._unused = await self.cast_votes(self._round, votes)
        self._take_template()

    async def open_round(self) -> ChainRound:
        """Create an active round on the dev chain."""
        opened = await self.chain.open_round(ROUND_SECONDS)
        self._open_rounds.append(opened.round_id)
        return opened

    async def end_round(self, round_id: bytes) -> None:
        """End a round of this run before its time."""
        self._open_rounds.remove(round_id)
        await self.chain.end_round(round_id)

    async def end_rounds(self) -> None:
        """End all rounds of this run, so that the next run on the same chain finds the helper idle."""
        for round_id in list(self._open_rounds):
            await self.end_round(round_id)

    async def cast_votes(
        self, chain_round: ChainRound, count: int, *, proposal_id: int = 1, vote_decision: int = 1
    ) -> list[TestShare]:
        """Cast votes on the chain. Returns their shares; the last vote's shares come first."""
        sealing = partial(seal, chain_round.round_id, chain_round.ea_pk, proposal_id, vote_decision)
        votes: list[Ballot] = [await asyncio.to_thread(sealing) for _ in range(count)]
        positions = await self.chain.cast(chain_round.round_id, [vote.commitment for vote in votes])
        pairs = list(zip(votes, positions, strict=True))
        shares = [share for vote, position in reversed(pairs) for share in shares_of(vote, position)]
        self.all_shares += shares
        return shares

    async def cast_known_vote(self, *, proposal_id: int, vote_decision: int) -> TestShare:
        """Cast a vote in the round and wait until the helper has read its block. Returns one of its shares.

        Raises:
            CheckFailed: the helper does not accept a share of a later vote.
        """
        share = (await self.cast_votes(self.round, 1, proposal_id=proposal_id, vote_decision=vote_decision))[0]
        later = (await self.cast_votes(self.round, 1))[0]
        reply = await self.post_until_accepted(later)
        require(reply.is_accepted, f"POST of a share of a new vote → {reply}")
        return share

    async def post_share(
        self,
        share: TestShare,
        submit_at: int | None = None,
        *,
        body: Body | bytes | None = None,
        headers: Headers = (),
    ) -> Reply:
        """Post a share that the helper must accept, and record it.

        Args:
            submit_at: when to reveal it; None for far ahead, or the time in its file.
            body: replaces the JSON of the share.
        """
        due = self.time_for(share) if submit_at is None else submit_at
        content = body if isinstance(body, bytes) else encode(share.body(due) if body is None else body)
        posted_at = self.clock.now()
        reply = await self.client.post(content, headers)
        if reply.is_accepted:
            self.record_accepted(share, due, posted_at)
        return reply

    async def post_until_accepted(self, share: TestShare, *, seconds: float = ACCEPT_SECONDS) -> Reply:
        """Post a share of a new vote until the helper, which reads the vote's block first, accepts it.

        Returns:
            the last response, which is not an acceptance if `seconds` are over.
        """
        ends_at = self.clock.monotonic() + seconds
        while True:
            reply = await self.post_share(share)
            if reply.is_accepted or self.clock.monotonic() >= ends_at:
                return reply
            await self.clock.sleep(_RETRY_SECONDS)

    def record_accepted(self, share: TestShare, submit_at: int, posted_at: float) -> None:
        """Record that the helper has accepted a share. A repeat may move it up to an earlier time."""
        due_at = max(submit_at, posted_at)
        for at, known in enumerate(self.accepted):
            if known.share is share:
                self.accepted[at] = replace(known, due_at=min(known.due_at, due_at))
                return
        self.accepted.append(Posted(share, due_at, posted_at))

    async def share_status(self, share: TestShare) -> Reply:
        """Query the status of a share."""
        return await self.client.get(self.status_path(share.round_id, share.nullifier))

    def status_path(self, round_id: bytes, nullifier: bytes) -> str:
        """The path of a share's status. The nullifier must not reach a node."""
        self.asked_nullifiers.append(nullifier)
        return f"/shielded-vote/v1/share-status/{round_id.hex()}/{nullifier.hex()}"

    async def once(self, make: Callable[[Session], Awaitable[T]]) -> T:
        """Run something once and return its result to every caller, even if it raises."""
        if make not in self._cached:
            self._cached[make] = asyncio.ensure_future(make(self))
        result: T = await asyncio.shield(self._cached[make])
        return result

    async def wait_for(
        self, condition: Callable[[], Awaitable[bool]], seconds: float, pause_seconds: float = _RETRY_SECONDS
    ) -> bool:
        """Wait until a condition holds. Returns whether it did in time."""
        ends_at = self.clock.monotonic() + seconds
        while not await condition():
            if self.clock.monotonic() > ends_at:
                return False
            await self.clock.sleep(pause_seconds)
        return True


def describe_many(replies: Sequence[Reply]) -> str:
    """Count replies by status and outcome."""
    counts: dict[str, int] = {}
    for reply in replies:
        text = f"{reply.status} {reply.outcome}".rstrip()
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} × {text}" for text, count in sorted(counts.items()))
