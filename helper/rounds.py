"""The chain's voting rounds, kept in memory and in step with the chain, and the one judge of when a round
is over.

A node cannot make us forget: a round that it leaves out, moves backwards, or shows in a way that cannot be is
kept as it was, and the node is set aside if another fresh one shows it as it should be. If none does, that one
round is *frozen* until one does: no share of it is taken, revealed or purged; the other rounds go on.

A round is closed only by the chain's own word: the listener has processed a block at or after the round's end,
and the round is being tallied or finalised according to two endpoints (one where only one is configured).

A round that was over when we first heard of it has nothing of ours: it is known here, so that a wallet hears
that it is not active, but never kept on disk, closed, reported or purged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog

from helper.chain.endpoint import Endpoint
from helper.chain.failover import Endpoints
from helper.chain.models import Proposal, Round, RoundStatus
from helper.clock import Clock
from helper.errors import ChainAnswerError, ChainError, WrongChain
from helper.share import ShareState
from helper.store.base import ChainStore

# The order in which a round's status moves.
_ORDER = {RoundStatus.PENDING: 0, RoundStatus.ACTIVE: 1, RoundStatus.TALLYING: 2, RoundStatus.FINALIZED: 3}
_OVER = (RoundStatus.TALLYING, RoundStatus.FINALIZED)

# A node this many blocks before the height at which something was learnt may honestly not know it yet.
_LAG = 3

# Seconds of the chain's time after a round's end in which its endpoints may honestly differ about it.
_GRACE = 60

_CHAIN_ID = "chain_id"


class RoundStore(ChainStore, Protocol):
    """The part of the store that the book reads and writes."""

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state; rounds without any are left out."""
        ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """An endpoint's list, and what is odd about it by round id."""

    endpoint: Endpoint
    rounds: list[Round]
    odd: dict[bytes, str]


class RoundBook:
    """All rounds that the chain ever told us of, and which chain that is.

    Attributes:
        synced: whether the chain's list was read since the start.
        revision: goes up with all that may close a round or let it be purged: a block that was processed while a
            round is over and not closed, a round that was learnt, frozen or released, or that another host has closed.
    """

    def __init__(self, store: RoundStore, endpoints: Endpoints, *, clock: Clock) -> None:
        self._store = store
        self._endpoints = endpoints
        self._clock = clock
        self._log = structlog.get_logger("helper.chain")
        self._rounds: dict[bytes, Round] = {}  # oldest first
        self._learnt: dict[bytes, int] = {}  # the height of the node that told the round's present status
        self._closed: set[bytes] = set()
        self._said_over: dict[bytes, set[str]] = {}  # names of the endpoints that said so
        self._past: dict[bytes, Round] = {}  # over before we heard of them
        self._forgotten: set[bytes] = set()
        self._ours: set[bytes] = set()  # rounds with shares on disk
        self._frozen: dict[bytes, str] = {}
        self._reread: set[bytes] = set()  # rounds that were kept when that was last looked at
        self._waits: set[bytes] = set()  # rounds of which it was said whose word is missing
        self._chain_time: float | None = None
        self._chain_seen = 0.0  # when that block was processed, monotonic
        self._chain_kept = False
        self.synced = False
        self.revision = 0

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
            self._keep(Round(row.round_id, status, row.vote_end_time, proposals, row.created_at_height))
            if row.closed_at is not None:
                self._closed.add(row.round_id)
        self._ours = set(await self._store.counts())

    async def reread(self) -> None:
        """Take over what other hosts on the same store have closed and purged.

        Raises `StoreError` when it cannot be read.
        """
        kept = {row.round_id: row.closed_at for row in await self._store.rounds()}
        for round_id in ((self._reread | self._closed) & self._rounds.keys()) - kept.keys():
            self.forget(round_id)
        closed = {round_id for round_id, closed_at in kept.items() if closed_at is not None}
        if not closed <= self._closed:
            # who closed it may be gone before it was alerted or purged, and this one knows of no block any more that
            # would have it look
            self.revision += 1
        self._closed |= closed
        self._reread = set(kept)

    def get(self, round_id: bytes) -> Round | None:
        """A round, or None when the chain has not told us of it. Frozen rounds and those of the past too."""
        return self._rounds.get(round_id) or self._past.get(round_id)

    def frozen(self, round_id: bytes) -> str | None:
        """Why nothing of this round may be taken, revealed or purged now, or None. Also for rounds that were
        never heard of but in a way that cannot be read.
        """
        return self._frozen.get(round_id)

    def all(self) -> list[Round]:
        """Every round that is kept, oldest first."""
        return list(self._rounds.values())

    def active(self) -> list[Round]:
        """The rounds that take votes, oldest first; frozen ones are not among them."""
        active = [known for known in self.all() if known.status is RoundStatus.ACTIVE]
        return [known for known in active if known.round_id not in self._frozen]

    def open(self) -> list[Round]:
        """The rounds that are not known to be closed, oldest first."""
        return [known for known in self.all() if known.round_id not in self._closed]

    def forget(self, round_id: bytes) -> None:
        """A closed round was purged: it is unknown from now on, and one of the past after a restart."""
        self._forgotten.add(round_id)
        self._rounds.pop(round_id, None)
        self._ours.discard(round_id)
        self._said_over.pop(round_id, None)

    def processed(self, block_time: float) -> None:
        """The listener has processed every block up to one of this time (unix seconds)."""
        if block_time != self._chain_time:
            self._chain_time = block_time
            self._chain_seen = self._clock.monotonic()
            if any(known.vote_end_time <= block_time for known in self.open()):
                self.revision += 1

    def chain_now(self) -> float | None:
        """The chain's time in unix seconds: that of the newest block that was processed, and what has passed since. Our
        wall clock has no part in it. None before the first block.
        """
        if self._chain_time is None:
            return None
        return self._chain_time + self._clock.monotonic() - self._chain_seen

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain's own word has closed the round for good. Never while it is frozen.

        May ask further endpoints for their rounds, when this one is over and has not been confirmed yet.
        Raises `StoreError` when the closing cannot be kept.
        """
        if round_id in self._frozen:
            return False
        if round_id not in self._closed:
            await self._confirm_closings()
        return round_id in self._closed

    async def sync(self, head: int = 0) -> None:
        """Ask for the whole list of rounds and keep what is new. `head`: the height that the answer should
        know.

        Raises `ChainUnavailable` when no endpoint gave a list, `StoreError` when it cannot be kept.
        """
        answer = await self._hear(head)
        height = answer.endpoint.height
        await self._keep_chain()
        self._freeze(answer.odd)
        self._note_past(answer.rounds)
        news = [told for told in answer.rounds if self._is_news(told)]
        if news:
            await self._store.save_rounds(news, self._clock.now())
        for told in news:
            known = self._rounds.get(told.round_id)
            if known is None or known.status is not told.status:
                self._learnt[told.round_id] = height
                self._log.info("round", round=told.round_id.hex()[:8], status=told.status.name, height=height)
            self._keep(told)
            self.revision += 1
        self.synced = True

    def _keep(self, told: Round) -> None:
        known = {**self._rounds, told.round_id: told}.values()
        ordered = sorted(known, key=lambda one: (one.created_at_height, one.round_id))
        self._rounds = {one.round_id: one for one in ordered}

    async def _hear(self, head: int) -> _Answer:
        """The list of the first endpoint that shows nothing odd, else of the one that shows least. Endpoints
        that show what this one contradicts are set aside.
        """
        answers = await self._endpoints.ask(self._ask, enough=lambda answer: not answer.odd, min_height=head)
        best = min(answers, key=lambda answer: len(answer.odd))
        best.endpoint.health.failures = 0
        for answer in answers:
            wrong = [f"round {odd.hex()[:8]}: {reason}" for odd, reason in answer.odd.items() if odd not in best.odd]
            if wrong:
                self._endpoints.failed(answer.endpoint, ChainAnswerError("rounds: " + wrong[0]))
        return best

    def _freeze(self, odd: dict[bytes, str]) -> None:
        """Freeze what every fresh endpoint shows in an odd way, and release what is as it should be again."""
        for round_id, reason in odd.items():
            if round_id not in self._frozen:
                tell = self._log.error if round_id in self._rounds else self._log.warning
                tell("round frozen: no node shows it as it should be", round=round_id.hex()[:8], reason=reason)
        for round_id in self._frozen.keys() - odd.keys():
            self._log.info("round no longer frozen", round=round_id.hex()[:8])
        if odd.keys() != self._frozen.keys():
            self.revision += 1
        self._frozen = dict(odd)

    def _note_past(self, listed: list[Round]) -> None:
        """Remember rounds that have nothing of ours, in memory only."""
        for told in listed:
            known = (self._rounds, self._ours, self._forgotten, self._frozen)
            if told.status in _OVER and not any(told.round_id in rounds for rounds in known):
                self._past[told.round_id] = told

    async def _keep_chain(self) -> None:
        """Rounds of two chains never meet in one database."""
        if not self._chain_kept and self._endpoints.chain_id is not None:
            await self._store.set_meta(_CHAIN_ID, self._endpoints.chain_id)
            self._chain_kept = True

    async def _confirm_closings(self) -> None:
        """Close the rounds that ended by the time of a block that the listener has processed."""
        over = [r for r in self.open() if r.status in _OVER and r.round_id not in self._frozen]
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
                await self._store.mark_closed(known.round_id, self.chain_now() or self._clock.now())
                self._closed.add(known.round_id)
                self._log.info("round closed", round=known.round_id.hex()[:8], status=known.status.name)
        self._tell_waits(ended, needed)

    def _tell_waits(self, ended: list[Round], needed: int) -> None:
        """Say once a round whose word is missing for its closing."""
        for known in ended:
            said = self._said_over.get(known.round_id, set())
            late = self._chain_time is not None and self._chain_time >= known.vote_end_time + _GRACE
            if late and len(said) < needed and known.round_id not in self._waits:
                self._waits.add(known.round_id)
                self._log.warning(
                    "a round waits for a second endpoint's word before it is closed",
                    round=known.round_id.hex()[:8],
                    endpoint=", ".join(e.name for e in self._endpoints.all if e.name not in said),
                )

    async def _ask(self, endpoint: Endpoint) -> _Answer:
        """An endpoint's rounds, and which of them contradict what is known."""
        listed = await endpoint.client.rounds()
        told = {found.round_id: found for found in listed.rounds}
        odd = dict(listed.odd)
        for known in (*self._rounds.values(), *self._past.values()):
            reason = self._oddity(known, told.get(known.round_id), endpoint.height)
            if reason is not None and known.round_id not in odd:
                odd[known.round_id] = reason
        head = endpoint.health.head
        for round_id, found in told.items():
            said = self._said_over.setdefault(round_id, set())
            if round_id in odd:
                said.discard(endpoint.name)
            elif found.status in _OVER and head is not None and head.time >= found.vote_end_time:
                said.add(endpoint.name)
        return _Answer(endpoint, listed.rounds, odd)

    def _oddity(self, known: Round, told: Round | None, height: int) -> str | None:
        """What cannot be about a round as a node of this height shows it; None when it may be."""
        may_lag = height < self._learnt.get(known.round_id, 0) + _LAG
        if told is None:
            # A finished round may be dropped by its chain; a young one may not have got to this node.
            done = known.status is RoundStatus.FINALIZED or known.round_id in self._closed | self._past.keys()
            return None if done or may_lag else "it is not listed any more"
        if told.vote_end_time != known.vote_end_time or told.created_at_height != known.created_at_height:
            return "it is listed with another end or beginning than before"
        if _ORDER[told.status] < _ORDER[known.status] and not may_lag:
            return f"it went back from {known.status.name} to {told.status.name}"
        return None

    def _is_news(self, told: Round) -> bool:
        if any(told.round_id in rounds for rounds in (self._past, self._forgotten, self._frozen)):
            return False
        known = self._rounds.get(told.round_id)
        return known is None or (told != known and _ORDER[told.status] >= _ORDER[known.status])
