"""Registry of the chain's voting rounds, and the only judge of whether a round is closed.

A single node cannot change what is known. A round that a node omits, moves to an earlier status or shows with invalid
data keeps its state, and the node is set aside if another usable node shows the round as known. If none does, the round
is *frozen*: no share of it is accepted, revealed or purged until a node shows it correctly. Other rounds go on.

Another `vote_end_time` takes effect once two nodes report it, or once the only configured node has reported it for ten
blocks. Until then the round is not frozen: a due share is still revealed, as a reveal outside the round is refused by
the chain while a missed one is lost. Only shares that depend on which end is right are not accepted.

A round is closed only by the chain: a block at or after the round's end was processed, and the round is being tallied
or finalized according to two nodes (one if only one is configured). A status that this version does not know counts as
closed after the end too, once it is confirmed like another end: it freezes the round, but does not keep its witnesses
for ever (docs/decisions/0016-round-changes.md).

A round that was over when it was first seen has no shares here. It is known, so that a wallet is told that it is not
active, but it is never stored, closed, reported or purged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from helper.chain.block_cadence import Observation, next_observation
from helper.chain.models import BlockHead, Proposal, Round, RoundList, RoundStatus, UnknownStatus
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.round_changes import ReportedChanges
from helper.clock import Clock
from helper.errors import ChainAnswerError, ChainError, WrongChain
from helper.store.store import Store

# The order in which a round's status moves.
_ORDER = {RoundStatus.PENDING: 0, RoundStatus.ACTIVE: 1, RoundStatus.TALLYING: 2, RoundStatus.FINALIZED: 3}
_OVER = (RoundStatus.TALLYING, RoundStatus.FINALIZED)

# A node this many blocks before the height at which something was learnt may honestly not know it yet.
_LAG = 3

# Seconds of the chain's time after a round's end in which its endpoints may honestly differ about it.
_GRACE = 60

_CHAIN_ID = "chain_id"


@dataclass(frozen=True, slots=True)
class _Answer:
    """A node's list of rounds, compared with what is known.

    Attributes:
        endpoint: the node.
        head: its newest block before the request; None before the first.
        began: when the request was sent, monotonic seconds.
        listed: the list.
        odd: why a round cannot be as it is listed, by round id.
        ends: the `vote_end_time` of rounds that are listed with another one than is known.
    """

    endpoint: Node
    head: BlockHead | None
    began: float
    listed: RoundList
    odd: dict[bytes, str]
    ends: dict[bytes, int]

    @property
    def differences(self) -> dict[bytes, str]:
        """What differs from what is known, by round id."""
        return {**{round_id: f"it is listed with the end {end}" for round_id, end in self.ends.items()}, **self.odd}


class RoundRegistry:
    """All rounds that the chain ever told us of, and which chain that is.

    Attributes:
        synced: whether the chain's list was read since the start.
        look: the last valid answer with the list of rounds.
        revision: goes up with all that may close a round or let it be purged: a block that was processed while a
            round is over and not closed, a round that was learnt, frozen or released, or that another host has closed.
    """

    def __init__(self, store: Store, endpoints: NodePool, *, clock: Clock) -> None:
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
        self._other_ends: dict[bytes, int] = {}  # reported and not confirmed
        self._end_since: dict[bytes, int] = {}  # the height at which another end was confirmed
        self._reported_ends = ReportedChanges()
        self._reported_unknown = ReportedChanges()
        self.look: Observation | None = None
        self._reread: set[bytes] = set()  # rounds that were kept when that was last looked at
        self._waits: set[bytes] = set()  # rounds of which it was said whose word is missing
        self._chain_time: float | None = None
        self._complete_from = 0
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
        """Take over which rounds other hosts on the same store have closed and purged, and ends that they confirmed.

        Raises `StoreError` when it cannot be read.
        """
        rows = await self._store.rounds()
        kept = {row.round_id: row.closed_at for row in rows}
        for round_id in ((self._reread | self._closed) & self._rounds.keys()) - kept.keys():
            self.forget(round_id)
        closed = {round_id for round_id, closed_at in kept.items() if closed_at is not None}
        if not closed <= self._closed:
            # who closed it may be gone before it was alerted or purged, and this one knows of no block any more that
            # would have it look
            self.revision += 1
        self._closed |= closed
        for row in rows:
            known = self._rounds.get(row.round_id)
            if known is not None and known.vote_end_time != row.vote_end_time:
                self._take_end(known, row.vote_end_time, self._endpoints.newest_height)
        self._reread = set(kept)

    def get(self, round_id: bytes) -> Round | None:
        """A round, or None when the chain has not told us of it. Frozen rounds and those of the past too."""
        return self._rounds.get(round_id) or self._past.get(round_id)

    def frozen(self, round_id: bytes) -> str | None:
        """Why nothing of this round may be taken, revealed or purged now, or None. Also for rounds that were
        never heard of but in a way that cannot be read.
        """
        return self._frozen.get(round_id)

    def unconfirmed_end(self, round_id: bytes) -> int | None:
        """Another `vote_end_time` of a round that is reported and not confirmed, None without one."""
        return self._other_ends.get(round_id)

    def latest_end(self, known: Round) -> int:
        """The latest end that a round may have, in unix seconds: the known one or one that is not confirmed."""
        return max(known.vote_end_time, self._other_ends.get(known.round_id, 0))

    def unconfirmed(self) -> dict[bytes, str]:
        """What nodes report about rounds and is not accepted, by round id: other ends, and why rounds are frozen."""
        ends = {
            round_id: f"its end {end} is reported and not confirmed; {self._rounds[round_id].vote_end_time} is known"
            for round_id, end in self._other_ends.items()
        }
        return {**ends, **self._frozen}

    def all(self) -> list[Round]:
        """Every round that is kept, oldest first."""
        return list(self._rounds.values())

    def active(self) -> list[Round]:
        """The open rounds that take votes, oldest first; frozen ones are not among them."""
        active = [known for known in self.open() if known.status is RoundStatus.ACTIVE]
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
        self._other_ends.pop(round_id, None)
        self._reported_ends.forget(round_id)
        self._reported_unknown.forget(round_id)

    def processed(self, block_time: float, *, complete_from: int = 0) -> None:
        """The block follower has reached a block.

        Args:
            block_time: the block's time in unix seconds.
            complete_from: every block from this height up to that one was processed. Earlier ones may be unread, so
                rounds that were created before it are not closed.
        """
        is_new = block_time != self._chain_time
        if is_new:
            self._chain_time = block_time
            self._chain_seen = self._clock.monotonic()
        if is_new or complete_from != self._complete_from:
            self._complete_from = complete_from
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
        await self._keep_chain()
        self._freeze(answer.odd)
        self._note_other_ends(answer.ends)
        await self._close_unknown()
        self._note_past(answer.listed.rounds)
        # The end is changed by `_confirm_ends` only.
        listed = [replace(told, vote_end_time=self._end_of(told)) for told in answer.listed.rounds]
        news = [told for told in listed if self._is_news(told)]
        if news:
            await self._store.save_rounds(news, self._clock.now())
        for told in news:
            known = self._rounds.get(told.round_id)
            if known is None or known.status is not told.status:
                self._learnt[told.round_id] = answer.endpoint.height
                self._log.info(
                    "round", round=told.round_id.hex()[:8], status=told.status.name, height=answer.endpoint.height
                )
            self._keep(told)
            self.revision += 1
        if answer.head is not None:
            self.look = next_observation(self.look, answer.endpoint.name, answer.head, answer.began)
        self.synced = True

    def _end_of(self, told: Round) -> int:
        known = self._rounds.get(told.round_id)
        return told.vote_end_time if known is None else known.vote_end_time

    def _keep(self, told: Round) -> None:
        known = {**self._rounds, told.round_id: told}.values()
        ordered = sorted(known, key=lambda one: (one.created_at_height, one.round_id))
        self._rounds = {one.round_id: one for one in ordered}

    async def _hear(self, head: int) -> _Answer:
        """The list of the first node that shows no difference, else of the one that shows the fewest. Nodes whose
        differences this one contradicts are set aside.

        Ends that enough nodes report are taken over before the answers are compared.
        """
        answers = await self._endpoints.ask(self._ask, enough=lambda answer: not answer.differences, min_height=head)
        if await self._confirm_ends():
            answers = [self._compare(a.endpoint, a.head, a.began, a.listed) for a in answers]
        best = min(answers, key=lambda answer: len(answer.differences))
        best.endpoint.health.failures = 0
        for answer in answers:
            wrong = {k: reason for k, reason in answer.differences.items() if k not in best.differences}
            for round_id, reason in list(wrong.items())[:1]:
                error = ChainAnswerError(f"rounds: round {round_id.hex()[:8]}: {reason}")
                self._endpoints.failed(answer.endpoint, error)
        return best

    async def _confirm_ends(self) -> bool:
        """Take over the ends that enough nodes report; whether there was one."""
        heights = {endpoint.name: endpoint.height for endpoint in self._endpoints.all}
        changed = False
        for known in self.open():
            end = self._reported_ends.confirmed(known.round_id, heights)
            if end is None:
                continue
            await self._store.save_rounds([replace(known, vote_end_time=end)], self._clock.now())
            self._take_end(known, end, max(heights.values()))
            changed = True
        return changed

    def _take_end(self, known: Round, end: int, height: int) -> None:
        """Another end of a round was confirmed at a height and is stored."""
        self._keep(replace(known, vote_end_time=end))
        self._end_since[known.round_id] = height
        self._said_over.pop(known.round_id, None)
        self._other_ends.pop(known.round_id, None)
        self._reported_ends.forget(known.round_id)
        self.revision += 1
        self._log.warning(
            "round_end_changed",
            round=known.round_id.hex()[:8],
            height=height,
            reason=f"vote_end_time is {end}, it was {known.vote_end_time}",
        )

    def _note_other_ends(self, ends: dict[bytes, int]) -> None:
        """Replace the ends that are reported and not confirmed; each change is logged once."""
        for round_id, end in ends.items():
            if self._other_ends.get(round_id) != end:
                known = self._rounds[round_id].vote_end_time
                self._log.warning(
                    "round_end_unconfirmed",
                    round=round_id.hex()[:8],
                    reason=f"a node reports vote_end_time {end}, {known} is known",
                )
        for round_id in self._other_ends.keys() - ends.keys():
            self._log.info("round_end_report_withdrawn", round=round_id.hex()[:8])
        if ends.keys() != self._other_ends.keys():
            self.revision += 1
        self._other_ends = dict(ends)

    async def _close_unknown(self) -> None:
        """Close the rounds that are past their end and whose unknown status enough nodes report."""
        heights = {endpoint.name: endpoint.height for endpoint in self._endpoints.all}
        for known in self.open():
            ended = self._chain_time is not None and known.vote_end_time <= self._chain_time
            if not ended or known.round_id in self._other_ends:
                continue
            status = self._reported_unknown.confirmed(known.round_id, heights)
            if status is None:
                continue
            await self._store.mark_closed(known.round_id, self.chain_now() or self._clock.now())
            self._closed.add(known.round_id)
            self._frozen.pop(known.round_id, None)
            self.revision += 1
            self._log.warning(
                "round_closed", round=known.round_id.hex()[:8], reason=f"past its end with the unknown status {status}"
            )

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
        read = [r for r in over if r.created_at_height >= self._complete_from - 1]
        ended = [r for r in read if self._chain_time is not None and r.vote_end_time <= self._chain_time]
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

    async def _ask(self, endpoint: Node) -> _Answer:
        """A node's rounds, compared with what is known; who reports what is noted."""
        head, began = endpoint.health.head, self._clock.monotonic()
        answer = self._compare(endpoint, head, began, await endpoint.client.rounds())
        for told in answer.listed.rounds:
            said = self._said_over.setdefault(told.round_id, set())
            if told.round_id in answer.differences:
                said.discard(endpoint.name)
            elif told.status in _OVER and head is not None and head.time >= told.vote_end_time:
                said.add(endpoint.name)
        for known in self.open():
            end, unknown = answer.ends.get(known.round_id), answer.listed.unknown.get(known.round_id)
            if end is not None:
                self._reported_ends.note(known.round_id, endpoint.name, end, endpoint.height)
            else:
                self._reported_ends.retract(known.round_id, endpoint.name)
            if unknown is not None and head is not None and head.time >= known.vote_end_time:
                self._reported_unknown.note(known.round_id, endpoint.name, unknown.status, endpoint.height)
            else:
                self._reported_unknown.retract(known.round_id, endpoint.name)
        return answer

    def _compare(self, endpoint: Node, head: BlockHead | None, began: float, listed: RoundList) -> _Answer:
        """A node's list with what differs from what is known."""
        told: dict[bytes, Round | UnknownStatus] = {found.round_id: found for found in listed.rounds}
        told |= listed.unknown
        odd, ends = dict(listed.odd), dict[bytes, int]()
        for round_id, unknown in listed.unknown.items():
            if round_id not in self._closed | self._past.keys() | self._forgotten:
                odd[round_id] = f"its status {unknown.status} is unknown to this version"
        for known in (*self._rounds.values(), *self._past.values()):
            found = told.get(known.round_id)
            if known.round_id in listed.odd:
                continue
            reason = self._oddity(known, found, endpoint.height)
            if reason is not None:
                odd[known.round_id] = reason
            elif found is not None and self._has_other_end(known, found, endpoint.height):
                ends[known.round_id] = found.vote_end_time
        return _Answer(endpoint, head, began, listed, odd, ends)

    def _oddity(self, known: Round, told: Round | UnknownStatus | None, height: int) -> str | None:
        """Why a round cannot be as a node of this height shows it; None when it can."""
        may_lag = height < self._learnt.get(known.round_id, 0) + _LAG
        if told is None:
            # A finished round may be dropped by its chain; a young one may not have got to this node.
            done = known.status is RoundStatus.FINALIZED or known.round_id in self._closed | self._past.keys()
            return None if done or may_lag else "it is not listed any more"
        if told.created_at_height != known.created_at_height:
            return "it is listed with another beginning than before"
        if isinstance(told, Round) and _ORDER[told.status] < _ORDER[known.status] and not may_lag:
            return f"it went back from {known.status.name} to {told.status.name}"
        return None

    def _has_other_end(self, known: Round, told: Round | UnknownStatus, height: int) -> bool:
        """Whether a node of this height reports another end of an open round."""
        is_open = known.round_id in self._rounds and known.round_id not in self._closed
        may_lag = height < self._end_since.get(known.round_id, 0) + _LAG
        return is_open and not may_lag and told.vote_end_time != known.vote_end_time

    def _is_news(self, told: Round) -> bool:
        if any(told.round_id in rounds for rounds in (self._past, self._forgotten, self._frozen)):
            return False
        known = self._rounds.get(told.round_id)
        return known is None or (told != known and _ORDER[told.status] >= _ORDER[known.status])
