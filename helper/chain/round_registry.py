"""Registry of the chain's voting rounds, and the only judge of whether a round is closed.

A single node cannot change what is known. A round that a node omits, moves to an earlier status or shows with invalid
data keeps its state, and the node is set aside if another usable node shows the round as known. If none does, the round
is *frozen*: no share of it is accepted, revealed or purged until a node shows it correctly. Other rounds go on.

Another `vote_end_time`, another status and other proposals take effect once two nodes report them, or once the only
configured node has reported them for ten blocks (a status that fits a processed block after the end: at once). Until
then the round is not frozen: a due share is still revealed, as a reveal outside the round is refused by the chain while
a missed one is lost. Only shares that depend on which value is right are not accepted.

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
from helper.chain.round_changes import (
    CONFIRMING_BLOCKS,
    CONFIRMING_NODES,
    OVER,
    ReportedChanges,
    ReportedValue,
    RoundField,
    changed_proposals,
    changed_status,
    describe,
    with_change,
    without_changes,
)
from helper.clock import Clock
from helper.core.share import ShareState
from helper.errors import ChainAnswerError, ChainError, WrongChain
from helper.store.store import Store

# The order in which a round's status moves.
_ORDER = {RoundStatus.PENDING: 0, RoundStatus.ACTIVE: 1, RoundStatus.TALLYING: 2, RoundStatus.FINALIZED: 3}
_WAITING = (ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST)

MAX_PAST_ROUNDS = 4096
"""Rounds remembered that were over when first listed. A node can list any number of them."""

# A node this many blocks before the height at which something was learnt may honestly not know it yet.
_LAG = 3

# How log events name the fields.
_EVENT = {RoundField.END: "end", RoundField.STATUS: "status", RoundField.PROPOSALS: "proposals"}

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
        changes: the fields of rounds that are listed with another value than is known.
    """

    endpoint: Node
    head: BlockHead | None
    began: float
    listed: RoundList
    odd: dict[bytes, str]
    changes: dict[bytes, dict[RoundField, ReportedValue]]

    @property
    def differences(self) -> dict[bytes, str]:
        """What differs from what is known, by round id."""
        changes = {
            round_id: "it is listed with " + ", ".join(describe(field, value) for field, value in fields.items())
            for round_id, fields in self.changes.items()
        }
        return {**changes, **self.odd}


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
        self._frozen_shares: dict[bytes, int] = {}  # waiting shares of frozen rounds
        self._unconfirmed: dict[bytes, dict[RoundField, ReportedValue]] = {}  # reported and not confirmed
        self._changed_at: dict[bytes, int] = {}  # the height at which a change was confirmed
        self._reported = ReportedChanges()
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
                changed = replace(known, vote_end_time=row.vote_end_time)
                self._keep(changed)
                self._note_change(known, RoundField.END, changed, self._endpoints.newest_height)
                self.revision += 1
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
        end = self._unconfirmed.get(round_id, {}).get(RoundField.END)
        return end if isinstance(end, int) else None

    def has_unconfirmed_status(self, round_id: bytes) -> bool:
        """Whether another status of a round is reported and not confirmed, or its only known one is not."""
        if round_id in self._past:
            return not self._is_settled(round_id)
        return RoundField.STATUS in self._unconfirmed.get(round_id, {})

    def has_unconfirmed_proposals(self, round_id: bytes) -> bool:
        """Whether other proposals of a round are reported and not confirmed."""
        return RoundField.PROPOSALS in self._unconfirmed.get(round_id, {})

    def latest_end(self, known: Round) -> int:
        """The latest end that a round may have, in unix seconds: the known one or one that is not confirmed."""
        return max(known.vote_end_time, self.unconfirmed_end(known.round_id) or 0)

    def unconfirmed(self) -> dict[bytes, str]:
        """What nodes report about rounds and is not accepted, by round id: changes, and why rounds are frozen."""
        changes = {
            round_id: "; ".join(self._describe_unconfirmed(round_id, field, value) for field, value in fields.items())
            for round_id, fields in self._unconfirmed.items()
        }
        return {**changes, **self._frozen}

    def frozen_shares(self) -> dict[bytes, int]:
        """Number of waiting shares of each frozen round that has any, as of the last sync."""
        return dict(self._frozen_shares)

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
        self._unconfirmed.pop(round_id, None)
        for field in RoundField:
            self._reported.forget(round_id, field)

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
        await self._freeze(answer.odd)
        self._note_unconfirmed(answer.changes)
        await self._close_unknown()
        self._note_past(answer.listed.rounds)
        # Fields that need a confirmation are changed by `_confirm_changes` only.
        listed = [without_changes(self._rounds.get(told.round_id), told) for told in answer.listed.rounds]
        await self._learn([told for told in listed if self._is_news(told)], answer.endpoint.height)
        if answer.head is not None:
            self.look = next_observation(self.look, answer.endpoint.name, answer.head, answer.began)
        self.synced = True

    async def _learn(self, news: list[Round], height: int) -> None:
        """Store and keep rounds as a node of this height lists them, or as they are after a confirmed change."""
        if news:
            await self._store.save_rounds(news, self._clock.now())
        for told in news:
            known = self._rounds.get(told.round_id)
            if known is None or known.status is not told.status:
                self._learnt[told.round_id] = height
                self._log.info("round", round=told.round_id.hex()[:8], status=told.status.name, height=height)
            self._keep(told)
            self.revision += 1

    def _keep(self, told: Round) -> None:
        known = {**self._rounds, told.round_id: told}.values()
        ordered = sorted(known, key=lambda one: (one.created_at_height, one.round_id))
        self._rounds = {one.round_id: one for one in ordered}

    async def _hear(self, head: int) -> _Answer:
        """The list of the first node that shows no difference, else of the one that shows the fewest. Nodes whose
        differences this one contradicts are set aside.

        Changes that enough nodes report are taken over before the answers are compared.
        """
        answers = await self._endpoints.ask(self._ask, enough=self._is_enough, min_height=head)
        changed = await self._revive(answers)
        while changed or await self._confirm_changes():
            answers = [self._compare(a.endpoint, a.head, a.began, a.listed) for a in answers]
            changed = False
        best = min(answers, key=lambda answer: len(answer.differences))
        best.endpoint.health.failures = 0
        for answer in answers:
            if answer.endpoint.height > best.endpoint.height and not answer.odd:
                continue  # the best one may not have the block with the change yet
            wrong = {k: reason for k, reason in answer.differences.items() if k not in best.differences}
            for round_id, reason in list(wrong.items())[:1]:
                error = ChainAnswerError(f"rounds: round {round_id.hex()[:8]}: {reason}")
                self._endpoints.failed(answer.endpoint, error)
        return best

    def _is_enough(self, answer: _Answer) -> bool:
        """Whether no further node need be asked: nothing differs, and no round is over on this node's word alone."""
        new = [
            told.round_id for told in answer.listed.rounds if told.status in OVER and self._is_foreign(told.round_id)
        ]
        return not answer.differences and all(self._is_settled(round_id) for round_id in new)

    def _is_foreign(self, round_id: bytes) -> bool:
        """Whether a round is not among those that are kept here."""
        return not any(round_id in rounds for rounds in (self._rounds, self._ours, self._forgotten))

    def _is_settled(self, round_id: bytes) -> bool:
        """Whether as many nodes as are needed report a round as over."""
        needed = min(CONFIRMING_NODES, len(self._endpoints.all))
        return len(self._said_over.get(round_id, ())) >= needed

    async def _revive(self, answers: list[_Answer]) -> bool:
        """Learn rounds that one node first listed as over and another one lists as open; whether there are any."""
        over = {told.round_id for answer in answers for told in answer.listed.rounds if told.status in OVER}
        revived: dict[bytes, Round] = {}
        for answer in answers:
            for told in answer.listed.rounds:
                doubtful = told.round_id in over | self._past.keys() and not self._is_settled(told.round_id)
                if told.status not in OVER and doubtful and self._is_foreign(told.round_id):
                    revived.setdefault(told.round_id, told)
        for round_id in revived:
            self._past.pop(round_id, None)
        await self._learn(list(revived.values()), max(answer.endpoint.height for answer in answers))
        return bool(revived)

    async def _confirm_changes(self) -> bool:
        """Take over the changes that enough nodes report; whether there was one."""
        heights = {endpoint.name: endpoint.height for endpoint in self._endpoints.all}
        changed = False
        for known in (*self.open(), *self._past.values()):
            for field in (RoundField.END, RoundField.STATUS, RoundField.PROPOSALS):
                value = self._reported.confirmed(
                    known.round_id, field, heights, blocks=self._blocks_needed(known, field)
                )
                if value is None:
                    continue
                current = self._rounds.get(known.round_id, known)
                await self._take_change(current, field, with_change(current, field, value), max(heights.values()))
                changed = True
        return changed

    def _blocks_needed(self, known: Round, field: RoundField) -> int:
        """Blocks for which the only configured node must report a change. That a round is over after its end is what a
        processed block already says.
        """
        return 0 if field is RoundField.STATUS and self._has_ended(known) else CONFIRMING_BLOCKS

    def _has_ended(self, known: Round) -> bool:
        """Whether a block at or after the round's end was processed."""
        return self._chain_time is not None and known.vote_end_time <= self._chain_time

    async def _take_change(self, known: Round, field: RoundField, changed: Round, height: int) -> None:
        """Store and keep a change that was confirmed at a height."""
        self._past.pop(known.round_id, None)
        await self._learn([changed], height)
        self._note_change(known, field, changed, height)

    def _note_change(self, known: Round, field: RoundField, changed: Round, height: int) -> None:
        """A change was confirmed at a height and is stored."""
        round_id = known.round_id
        self._changed_at[round_id] = height
        self._unconfirmed.get(round_id, {}).pop(field, None)
        self._reported.forget(round_id, field)
        if field is RoundField.END:
            self._said_over.pop(round_id, None)
        if field is not RoundField.STATUS:
            is_end = field is RoundField.END
            before = f"vote_end_time is {changed.vote_end_time}, it was {known.vote_end_time}" if is_end else None
            self._log.warning(
                "round_end_changed" if is_end else "round_proposals_changed",
                round=round_id.hex()[:8],
                height=height,
                reason=before or describe(field, changed.proposals),
            )

    def _describe_unconfirmed(self, round_id: bytes, field: RoundField, value: ReportedValue) -> str:
        known = self.get(round_id)
        if field is RoundField.END and known is not None:
            return f"its end {value} is reported and not confirmed; {known.vote_end_time} is known"
        status = f"; {known.status.name} is known" if field is RoundField.STATUS and known is not None else ""
        return f"{describe(field, value)} reported and not confirmed{status}"

    def _note_unconfirmed(self, changes: dict[bytes, dict[RoundField, ReportedValue]]) -> None:
        """Replace the changes that are reported and not confirmed; each one is logged once."""
        for round_id, fields in changes.items():
            for field, value in fields.items():
                if self._unconfirmed.get(round_id, {}).get(field) != value:
                    self._log.warning(
                        f"round_{_EVENT[field]}_unconfirmed",
                        round=round_id.hex()[:8],
                        reason=self._describe_unconfirmed(round_id, field, value),
                    )
        for round_id, fields in self._unconfirmed.items():
            for field in fields.keys() - changes.get(round_id, {}).keys():
                self._log.info(f"round_{_EVENT[field]}_report_withdrawn", round=round_id.hex()[:8])
        unconfirmed = {round_id: dict(fields) for round_id, fields in changes.items()}
        if {(r, f) for r in unconfirmed for f in unconfirmed[r]} != {
            (r, f) for r in self._unconfirmed for f in self._unconfirmed[r]
        }:
            self.revision += 1
        self._unconfirmed = unconfirmed

    async def _close_unknown(self) -> None:
        """Close the rounds that are past their end and whose unknown status enough nodes report."""
        heights = {endpoint.name: endpoint.height for endpoint in self._endpoints.all}
        for known in self.open():
            if not self._has_ended(known) or known.round_id in self._unconfirmed:
                continue
            status = self._reported.confirmed(known.round_id, RoundField.UNKNOWN_STATUS, heights)
            if status is None:
                continue
            await self._store.mark_closed(known.round_id, self.chain_now() or self._clock.now())
            self._closed.add(known.round_id)
            self._frozen.pop(known.round_id, None)
            self._frozen_shares.pop(known.round_id, None)
            self.revision += 1
            self._log.warning(
                "round_closed", round=known.round_id.hex()[:8], reason=f"past its end with the unknown status {status}"
            )

    async def _freeze(self, odd: dict[bytes, str]) -> None:
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
        counts = await self._store.counts() if odd else {}
        waiting = {r: sum(counts.get(r, {}).get(state, 0) for state in _WAITING) for r in odd}
        self._frozen_shares = {round_id: number for round_id, number in waiting.items() if number}

    def _note_past(self, listed: list[Round]) -> None:
        """Remember rounds that have nothing of ours, in memory only."""
        for told in listed:
            seen = (self._rounds, self._ours, self._forgotten, self._frozen)
            if told.status in OVER and not any(told.round_id in rounds for rounds in seen):
                self._past[told.round_id] = told
        while len(self._past) > MAX_PAST_ROUNDS:
            del self._past[next(iter(self._past))]
        known = (self._rounds, self._ours, self._frozen, self._past)
        for round_id in [one for one in self._said_over if not any(one in rounds for rounds in known)]:
            del self._said_over[round_id]

    async def _keep_chain(self) -> None:
        """Rounds of two chains never meet in one database."""
        if not self._chain_kept and self._endpoints.chain_id is not None:
            await self._store.set_meta(_CHAIN_ID, self._endpoints.chain_id)
            self._chain_kept = True

    async def _confirm_closings(self) -> None:
        """Close the rounds that ended by the time of a block that the listener has processed."""
        over = [r for r in self.open() if self._is_reported_over(r) and r.round_id not in self._frozen]
        read = [r for r in over if r.created_at_height >= self._complete_from - 1]
        ended = [r for r in read if self._has_ended(r)]
        if not ended:
            return
        needed = min(CONFIRMING_NODES, len(self._endpoints.all))
        for endpoint in self._endpoints.fresh:
            if all(len(self._said_over.get(known.round_id, ())) >= needed for known in ended):
                break
            if all(endpoint.name in self._said_over.get(known.round_id, ()) for known in ended):
                continue
            try:
                await self._ask(endpoint)
            except ChainError as error:
                self._endpoints.failed(endpoint, error)
        await self._confirm_changes()
        ended = [self._rounds.get(known.round_id, known) for known in ended]
        for known in ended:
            if known.status in OVER and self._is_settled(known.round_id):
                await self._store.mark_closed(known.round_id, self.chain_now() or self._clock.now())
                self._closed.add(known.round_id)
                self._log.info("round closed", round=known.round_id.hex()[:8], status=known.status.name)
        self._tell_waits(ended, needed)

    def _is_reported_over(self, known: Round) -> bool:
        """Whether a round is over, as known or as a node reports it."""
        return known.status in OVER or any(
            status in OVER for status in self._reported.values(known.round_id, RoundField.STATUS)
        )

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
        return self._compare(endpoint, head, began, await endpoint.client.rounds())

    def _note_reports(self, answer: _Answer) -> None:
        """Note what a node reports: which rounds are over, and changes."""
        name, height, head = answer.endpoint.name, answer.endpoint.height, answer.head
        for told in answer.listed.rounds:
            said = self._said_over.setdefault(told.round_id, set())
            differs = answer.changes.get(told.round_id, {}).keys() - {RoundField.STATUS}
            if told.round_id in answer.odd or differs or told.status not in OVER:
                said.discard(name)
            elif head is not None and head.time >= told.vote_end_time:
                said.add(name)
        for known in (*self.open(), *self._past.values()):
            changes = answer.changes.get(known.round_id, {})
            for field in _EVENT:
                self._reported.note(known.round_id, field, name, changes.get(field), height)
            unknown = answer.listed.unknown.get(known.round_id)
            ended = head is not None and head.time >= known.vote_end_time
            status = unknown.status if unknown is not None and ended else None
            self._reported.note(known.round_id, RoundField.UNKNOWN_STATUS, name, status, height)

    def _compare(self, endpoint: Node, head: BlockHead | None, began: float, listed: RoundList) -> _Answer:
        """A node's list with what differs from what is known; what it reports is noted."""
        told: dict[bytes, Round | UnknownStatus] = {found.round_id: found for found in listed.rounds}
        told |= listed.unknown
        odd, changes = dict(listed.odd), dict[bytes, dict[RoundField, ReportedValue]]()
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
            elif found is not None and (fields := self._changes(known, found, endpoint.height)):
                changes[known.round_id] = fields
        answer = _Answer(endpoint, head, began, listed, odd, changes)
        self._note_reports(answer)
        return answer

    def _oddity(self, known: Round, told: Round | UnknownStatus | None, height: int) -> str | None:
        """Why a round cannot be as a node of this height shows it; None when it can."""
        may_lag = height < self._learnt.get(known.round_id, 0) + _LAG
        if told is None:
            # A finished round may be dropped by its chain; a young one may not have got to this node.
            done = known.status is RoundStatus.FINALIZED or known.round_id in self._closed | self._past.keys()
            return None if done or may_lag else "it is not listed any more"
        if told.created_at_height != known.created_at_height:
            return "it is listed with another beginning than before"
        is_back = isinstance(told, Round) and told.status is RoundStatus.PENDING is not known.status
        if isinstance(told, Round) and is_back and not may_lag:
            return f"it went back from {known.status.name} to {told.status.name}"
        return None

    def _changes(self, known: Round, told: Round | UnknownStatus, height: int) -> dict[RoundField, ReportedValue]:
        """The fields that a node of this height reports differently. A node a few blocks behind the height at which a
        change was learnt may still report what was before; of a round that is no more than known, only its status
        matters.
        """
        changes: dict[RoundField, ReportedValue] = {}
        if known.round_id in self._closed:
            return changes
        is_recent = height < self._changed_at.get(known.round_id, 0) + _LAG
        if known.round_id in self._rounds and not is_recent:
            if told.vote_end_time != known.vote_end_time:
                changes[RoundField.END] = told.vote_end_time
            proposals = changed_proposals(known, told) if isinstance(told, Round) else None
            if proposals is not None:
                changes[RoundField.PROPOSALS] = proposals
        status = changed_status(known.status, told.status) if isinstance(told, Round) else None
        if status is None or (known.round_id in self._past and status in OVER):
            return changes
        is_back = _ORDER[status] < _ORDER[known.status]
        if not (is_back and height < self._learnt.get(known.round_id, 0) + _LAG):
            changes[RoundField.STATUS] = status
        return changes

    def _is_news(self, told: Round) -> bool:
        if any(told.round_id in rounds for rounds in (self._past, self._forgotten, self._frozen)):
            return False
        if told.status in OVER and told.round_id not in self._rounds and told.round_id not in self._ours:
            return False
        return told != self._rounds.get(told.round_id)
