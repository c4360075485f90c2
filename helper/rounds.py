"""The chain's voting rounds, kept in memory and in step with the chain, and the one judge of when a round
is over.

A node cannot make us forget: a round that it leaves out, moves backwards, or shows with another end than
before is kept as it was, and the node is set aside. A round is closed only by the chain's own word: the
listener has processed a block at or after the round's end, and the round is being tallied or finalised
according to two endpoints (one where only one is configured).
"""

from __future__ import annotations

import structlog

from helper.chain.endpoint import Endpoint
from helper.chain.failover import Endpoints
from helper.chain.models import Proposal, Round, RoundStatus
from helper.clock import Clock
from helper.errors import ChainAnswerError, ChainError, WrongChain
from helper.store.base import ChainStore

# The order in which a round's status moves.
_ORDER = {RoundStatus.PENDING: 0, RoundStatus.ACTIVE: 1, RoundStatus.TALLYING: 2, RoundStatus.FINALIZED: 3}
_OVER = (RoundStatus.TALLYING, RoundStatus.FINALIZED)

# A node this many blocks before the height at which something was learnt may honestly not know it yet.
_LAG = 3

_CHAIN_ID = "chain_id"


class RoundBook:
    """All rounds that the chain ever told us of, and which chain that is.

    Attributes:
        synced: whether the chain's list was read since the start.
    """

    def __init__(self, store: ChainStore, endpoints: Endpoints, *, clock: Clock) -> None:
        self._store = store
        self._endpoints = endpoints
        self._clock = clock
        self._log = structlog.get_logger("helper.chain")
        self._rounds: dict[bytes, Round] = {}
        self._learnt: dict[bytes, int] = {}  # the height of the node that told the round's present status
        self._closed: set[bytes] = set()
        self._said_over: dict[bytes, set[str]] = {}  # names of the endpoints that said so
        self._forgotten: set[bytes] = set()
        self._chain_time: float | None = None
        self._chain_kept = False
        self.synced = False

    async def restore(self) -> None:
        """Take the rounds back from the store, closings and the chain's id too.

        Raises `WrongChain` when the store is of another chain than the endpoints are configured for.
        """
        chain_id = await self._store.get_meta(_CHAIN_ID)
        if chain_id is not None and self._endpoints.chain_id not in (None, chain_id):
            raise WrongChain(
                f"the database is of chain {chain_id}, not {self._endpoints.chain_id}",
                advice="Give this chain a database of its own ([helper] db_path), or mend [chain] chain_id.",
            )
        self._endpoints.chain_id = self._endpoints.chain_id or chain_id
        self._chain_kept = chain_id is not None
        for row in await self._store.rounds():
            proposals = tuple(Proposal(number, "", tuple(options)) for number, options in row.proposals)
            status = RoundStatus(row.status)
            self._rounds[row.round_id] = Round(
                row.round_id, status, row.vote_end_time, proposals, row.created_at_height
            )
            if row.closed_at is not None:
                self._closed.add(row.round_id)

    def get(self, round_id: bytes) -> Round | None:
        """A round, or None when the chain has not told us of it."""
        return self._rounds.get(round_id)

    def all(self) -> list[Round]:
        """Every round, oldest first."""
        return sorted(self._rounds.values(), key=lambda known: (known.created_at_height, known.round_id))

    def active(self) -> list[Round]:
        """The rounds that take votes, oldest first."""
        return [known for known in self.all() if known.status is RoundStatus.ACTIVE]

    def open(self) -> list[Round]:
        """The rounds that are not known to be closed, oldest first."""
        return [known for known in self.all() if known.round_id not in self._closed]

    def forget(self, round_id: bytes) -> None:
        """A closed round was purged: it is unknown from now on, and not learnt again before a restart."""
        self._forgotten.add(round_id)
        self._rounds.pop(round_id, None)
        self._said_over.pop(round_id, None)

    def processed(self, block_time: float) -> None:
        """The listener has processed every block up to one of this time (unix seconds)."""
        self._chain_time = block_time

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain's own word has closed the round for good.

        May ask further endpoints for their rounds, when this one is over and has not been confirmed yet.
        Raises `StoreError` when the closing cannot be kept.
        """
        if round_id not in self._closed:
            await self._confirm_closings()
        return round_id in self._closed

    async def sync(self, head: int = 0) -> None:
        """Ask for the whole list of rounds and keep what is new. `head`: the height that the answer should
        know.

        Raises `ChainUnavailable` when no endpoint gave a list that agrees with what is known, `StoreError`
        when it cannot be kept.
        """
        endpoint, listed = await self._endpoints.call_endpoint(self._ask, min_height=head)
        height = endpoint.height
        await self._keep_chain()
        news = [told for told in listed if self._is_news(told)]
        if news:
            await self._store.save_rounds(news, self._clock.now())
        for told in news:
            known = self._rounds.get(told.round_id)
            if known is None or known.status is not told.status:
                self._learnt[told.round_id] = height
                self._log.info("round", round=told.round_id.hex()[:8], status=told.status.name, height=height)
            self._rounds[told.round_id] = told
        self.synced = True

    async def _keep_chain(self) -> None:
        """Rounds of two chains never meet in one database."""
        if not self._chain_kept and self._endpoints.chain_id is not None:
            await self._store.set_meta(_CHAIN_ID, self._endpoints.chain_id)
            self._chain_kept = True

    async def _confirm_closings(self) -> None:
        """Close the rounds that ended by the time of a block that the listener has processed."""
        over = [known for known in self.open() if known.status in _OVER]
        ended = [r for r in over if self._chain_time is not None and r.vote_end_time <= self._chain_time]
        if not ended:
            return
        needed = min(2, len(self._endpoints.all))
        for endpoint in self._endpoints.fresh:
            if all(len(self._said_over.get(known.round_id, ())) >= needed for known in ended):
                break
            if all(endpoint.name in self._said_over.get(known.round_id, ()) for known in ended):
                continue
            try:
                await self._ask(endpoint)
            except ChainError as error:
                self._endpoints.failed(endpoint, error)
        for known in ended:
            if len(self._said_over.get(known.round_id, ())) >= needed:
                await self._store.mark_closed(known.round_id, self._clock.now())
                self._closed.add(known.round_id)
                self._log.info("round closed", round=known.round_id.hex()[:8], status=known.status.name)

    async def _ask(self, endpoint: Endpoint) -> tuple[Endpoint, list[Round]]:
        """An endpoint's rounds, or `ChainAnswerError` when they contradict what is known."""
        listed = await endpoint.client.rounds()
        by_id = {told.round_id: told for told in listed}
        if len(by_id) != len(listed):
            raise ChainAnswerError("rounds: a round is listed twice")
        for known in self._rounds.values():
            self._check(known, by_id.get(known.round_id), endpoint.height)
        head = endpoint.health.head
        for told in listed:
            if told.status in _OVER and head is not None and head.time >= told.vote_end_time:
                self._said_over.setdefault(told.round_id, set()).add(endpoint.name)
        return endpoint, listed

    def _check(self, known: Round, told: Round | None, height: int) -> None:
        name = f"round {known.round_id.hex()[:8]}"
        may_lag = height < self._learnt.get(known.round_id, 0) + _LAG
        if told is None:
            # A finished round may be dropped by its chain; a young one may not have got to this node.
            if known.status is not RoundStatus.FINALIZED and not may_lag:
                raise ChainAnswerError(f"rounds: {name} is not listed any more")
            return
        if told.vote_end_time != known.vote_end_time or told.created_at_height != known.created_at_height:
            raise ChainAnswerError(f"rounds: {name} is listed with another end or beginning than before")
        if _ORDER[told.status] < _ORDER[known.status] and not may_lag:
            raise ChainAnswerError(f"rounds: {name} went back from {known.status.name} to {told.status.name}")

    def _is_news(self, told: Round) -> bool:
        known = self._rounds.get(told.round_id)
        if known is None:
            return told.round_id not in self._forgotten
        return told != known and _ORDER[told.status] >= _ORDER[known.status]
