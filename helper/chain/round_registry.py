"""Registry of the chain's voting rounds; decides whether a round is closed.

A single node cannot change what is known. If a node omits a round, moves it to an earlier status or returns invalid
data for it, the stored state is unchanged, and the node goes into backoff if another fresh node shows the round as
known. If none does, the round is *frozen*: none of its shares is accepted, revealed or purged until a node shows it
correctly. Other rounds are not affected.

A different `vote_end_time`, status or list of proposals takes effect once two nodes report it, or once the only
configured node has reported it for ten blocks (a status that matches a processed block after the end: immediately).
Until then the round is not frozen: a due share is still revealed, because the chain refuses a reveal outside the round,
while a missed reveal is lost. Only shares whose validity depends on the difference are not accepted.

A round is closed only by the chain: a block at or after the round's end was processed, and two nodes (one if only one
is configured) report the round as being tallied or finalized. A status that this version does not know counts as closed
after the end too, once it is confirmed like a changed end. It freezes the round, but does not retain its witnesses
indefinitely (docs/decisions/0016-round-changes.md).

A round that was over when it was first listed has no shares here. It is remembered so that a wallet learns that it is
not active, but it is never stored, closed, reported or purged.
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
"""Maximum number of remembered rounds that were over when first listed. A node can list any number of them."""

# A node up to this many blocks below the height of a change may legitimately not show the change yet.
_LAG = 3

# How log events name the fields.
_EVENT = {RoundField.END: "end", RoundField.STATUS: "status", RoundField.PROPOSALS: "proposals"}

# Seconds of chain time after a round's end in which nodes may legitimately differ about its status.
_GRACE = 60

_CHAIN_ID = "chain_id"


@dataclass(frozen=True, slots=True)
class _Answer:
    """A node's list of rounds, compared with the known rounds.

    Attributes:
        endpoint: the node.
        head: its newest block before the request; None before the first.
        began: when the request was sent, monotonic seconds.
        listed: the list.
        invalid: why a listed round is not plausible, by round id.
        changes: fields whose listed value differs from the known one, by round id.
    """

    endpoint: Node
    head: BlockHead | None
    began: float
    listed: RoundList
    invalid: dict[bytes, str]
    changes: dict[bytes, dict[RoundField, ReportedValue]]

    @property
    def differences(self) -> dict[bytes, str]:
        """All differences from the known rounds, as text, by round id."""
        changes = {
            round_id: "listed with " + ", ".join(describe(field, value) for field, value in fields.items())
            for round_id, fields in self.changes.items()
        }
        return {**changes, **self.invalid}


class RoundRegistry:
    """All rounds that the chain has listed, and the chain's id.

    Attributes:
        synced: whether the list of rounds was read since the start.
        observation: the last valid answer with the list of rounds.
        revision: increases with every event after which a round may be closed or purged: a processed block while a
            round is over and not closed, and a round that is new, changed, frozen, unfrozen or closed by another host.
    """

    def __init__(self, store: Store, endpoints: NodePool, *, clock: Clock) -> None:
        self._store = store
        self._endpoints = endpoints
        self._clock = clock
        self._log = structlog.get_logger("helper.chain")
        self._rounds: dict[bytes, Round] = {}  # oldest first
        self._status_heights: dict[bytes, int] = {}  # height of the node that reported the present status
        self._closed: set[bytes] = set()
        self._reported_over: dict[bytes, set[str]] = {}  # names of the nodes that report the round as over
        self._past: dict[bytes, Round] = {}  # over when first listed
        self._purged: set[bytes] = set()
        self._with_shares: set[bytes] = set()  # rounds with stored shares
        self._frozen: dict[bytes, str] = {}
        self._frozen_shares: dict[bytes, int] = {}  # waiting shares of frozen rounds
        self._unconfirmed: dict[bytes, dict[RoundField, ReportedValue]] = {}  # reported, not confirmed
        self._changed_at: dict[bytes, int] = {}  # height at which the last change was confirmed
        self._reported = ReportedChanges()
        self.observation: Observation | None = None
        self._stored_ids: set[bytes] = set()  # rounds in the store at the last `reread`
        self._waits_logged: set[bytes] = set()  # rounds whose missing confirmation was logged
        self._chain_time: float | None = None
        self._complete_from = 0
        self._chain_time_at = 0.0  # monotonic time at which that block was processed
        self._chain_id_stored = False
        self.synced = False
        self.revision = 0

    async def restore(self) -> None:
        """Load the rounds, their closed marks and the chain's id from the store.

        Raises:
            WrongChain: the store belongs to another chain than the configured one.
        """
        chain_id = await self._store.get_meta(_CHAIN_ID)
        if chain_id is not None and self._endpoints.chain_id not in (None, chain_id):
            raise WrongChain(
                f"the database belongs to chain {chain_id}, not {self._endpoints.chain_id}",
                advice="Use a separate database for this chain ([helper] db_path), or correct [chain] chain_id.",
            )
        self._endpoints.chain_id = self._endpoints.chain_id or chain_id
        self._chain_id_stored = chain_id is not None
        for row in await self._store.rounds():
            proposals = tuple(Proposal(number, "", tuple(options)) for number, options in row.proposals)
            status = RoundStatus(row.status)
            self._put(Round(row.round_id, status, row.vote_end_time, proposals, row.created_at_height))
            if row.closed_at is not None:
                self._closed.add(row.round_id)
        self._with_shares = set(await self._store.counts())

    async def reread(self) -> None:
        """Apply what other hosts have stored: closed and purged rounds, and confirmed ends.

        Raises:
            StoreError: the rounds could not be read.
        """
        rows = await self._store.rounds()
        stored = {row.round_id: row.closed_at for row in rows}
        for round_id in ((self._stored_ids | self._closed) & self._rounds.keys()) - stored.keys():
            self.forget(round_id)
        closed = {round_id for round_id, closed_at in stored.items() if closed_at is not None}
        if not closed <= self._closed:
            # The host that closed it may stop before it reports or purges the round, and no further block would make
            # this host check it.
            self.revision += 1
        self._closed |= closed
        for row in rows:
            known = self._rounds.get(row.round_id)
            if known is not None and known.vote_end_time != row.vote_end_time:
                changed = replace(known, vote_end_time=row.vote_end_time)
                self._put(changed)
                self._note_change(known, RoundField.END, changed, self._endpoints.newest_height)
                self.revision += 1
        self._stored_ids = set(stored)

    def get(self, round_id: bytes) -> Round | None:
        """The round, None if the chain has not listed it. Includes frozen rounds and rounds over when first listed."""
        return self._rounds.get(round_id) or self._past.get(round_id)

    def frozen(self, round_id: bytes) -> str | None:
        """Why no share of the round may be accepted, revealed or purged now, None if they may.

        Also covers rounds that were only ever listed with invalid data.
        """
        return self._frozen.get(round_id)

    def unconfirmed_end(self, round_id: bytes) -> int | None:
        """A changed `vote_end_time` that is reported and not confirmed, None if there is none."""
        end = self._unconfirmed.get(round_id, {}).get(RoundField.END)
        return end if isinstance(end, int) else None

    def has_unconfirmed_status(self, round_id: bytes) -> bool:
        """Whether a changed status, or the only known status, of the round is reported and not confirmed."""
        if round_id in self._past:
            return not self._is_settled(round_id)
        return RoundField.STATUS in self._unconfirmed.get(round_id, {})

    def has_unconfirmed_proposals(self, round_id: bytes) -> bool:
        """Whether changed proposals of the round are reported and not confirmed."""
        return RoundField.PROPOSALS in self._unconfirmed.get(round_id, {})

    def latest_end(self, known: Round) -> int:
        """The later of the round's known end and an unconfirmed one, in unix seconds."""
        return max(known.vote_end_time, self.unconfirmed_end(known.round_id) or 0)

    def unconfirmed(self) -> dict[bytes, str]:
        """Reports of nodes that are not accepted, as text, by round id: changes, and why rounds are frozen."""
        changes = {
            round_id: "; ".join(self._describe_unconfirmed(round_id, field, value) for field, value in fields.items())
            for round_id, fields in self._unconfirmed.items()
        }
        return {**changes, **self._frozen}

    def frozen_shares(self) -> dict[bytes, int]:
        """Number of unconfirmed shares of each frozen round that has any, as of the last sync."""
        return dict(self._frozen_shares)

    def all(self) -> list[Round]:
        """Every stored round, oldest first."""
        return list(self._rounds.values())

    def active(self) -> list[Round]:
        """The open rounds that accept votes, oldest first, without frozen ones."""
        active = [known for known in self.open() if known.status is RoundStatus.ACTIVE]
        return [known for known in active if known.round_id not in self._frozen]

    def open(self) -> list[Round]:
        """The rounds that are not closed, oldest first."""
        return [known for known in self.all() if known.round_id not in self._closed]

    def forget(self, round_id: bytes) -> None:
        """Remove a purged round. After a restart it counts as over when first listed."""
        self._purged.add(round_id)
        self._rounds.pop(round_id, None)
        self._with_shares.discard(round_id)
        self._reported_over.pop(round_id, None)
        self._unconfirmed.pop(round_id, None)
        for field in RoundField:
            self._reported.forget(round_id, field)

    def processed(self, block_time: float, *, complete_from: int = 0) -> None:
        """Record that the block follower has reached a block.

        Args:
            block_time: the block's time in unix seconds.
            complete_from: the lowest height from which every block up to this one was processed. Earlier blocks may be
                unread, so rounds that were created before it are not closed.
        """
        is_new = block_time != self._chain_time
        if is_new:
            self._chain_time = block_time
            self._chain_time_at = self._clock.monotonic()
        if is_new or complete_from != self._complete_from:
            self._complete_from = complete_from
            if any(known.vote_end_time <= block_time for known in self.open()):
                self.revision += 1

    def chain_now(self) -> float | None:
        """The chain's time in unix seconds, None before the first block.

        It is the time of the newest processed block plus the monotonic time since then; the wall clock is not used.
        """
        if self._chain_time is None:
            return None
        return self._chain_time + self._clock.monotonic() - self._chain_time_at

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain has closed the round. False while it is frozen.

        May request the rounds of further nodes if the round is over and that is not confirmed yet.

        Raises:
            StoreError: the closed mark could not be stored.
        """
        if round_id in self._frozen:
            return False
        if round_id not in self._closed:
            await self._confirm_closings()
        return round_id in self._closed

    async def sync(self, head: int = 0) -> None:
        """Read the list of rounds from the nodes and store what is new.

        Args:
            head: the height that the answering node should have reached.

        Raises:
            ChainUnavailable: no node returned a list.
            StoreError: the rounds could not be stored.
        """
        answer = await self._fetch(head)
        await self._store_chain_id()
        await self._freeze(answer.invalid)
        self._note_unconfirmed(answer.changes)
        await self._close_unknown()
        self._add_past(answer.listed.rounds)
        # Only `_confirm_changes` changes fields that need a confirmation.
        listed = [without_changes(self._rounds.get(reported.round_id), reported) for reported in answer.listed.rounds]
        await self._save([reported for reported in listed if self._is_update(reported)], answer.endpoint.height)
        if answer.head is not None:
            self.observation = next_observation(self.observation, answer.endpoint.name, answer.head, answer.began)
        self.synced = True

    async def _save(self, rounds: list[Round], height: int) -> None:
        """Store rounds as a node at this height lists them, or with a confirmed change."""
        if rounds:
            await self._store.save_rounds(rounds, self._clock.now())
        for reported in rounds:
            known = self._rounds.get(reported.round_id)
            if known is None or known.status is not reported.status:
                self._status_heights[reported.round_id] = height
                self._log.info(
                    "round_updated", round=reported.round_id.hex()[:8], status=reported.status.name, height=height
                )
            self._put(reported)
            self.revision += 1

    def _put(self, reported: Round) -> None:
        known = {**self._rounds, reported.round_id: reported}.values()
        ordered = sorted(known, key=lambda round_: (round_.created_at_height, round_.round_id))
        self._rounds = {round_.round_id: round_ for round_ in ordered}

    async def _fetch(self, head: int) -> _Answer:
        """Return the list of the first node without differences, else of the node with the fewest.

        Nodes whose differences this list contradicts go into backoff. Changes that enough nodes report are applied
        before the answers are compared.
        """
        answers = await self._endpoints.ask(self._ask, enough=self._is_enough, min_height=head)
        changed = await self._reopen(answers)
        while changed or await self._confirm_changes():
            answers = [self._compare(a.endpoint, a.head, a.began, a.listed) for a in answers]
            changed = False
        best = min(answers, key=lambda answer: len(answer.differences))
        best.endpoint.health.failures = 0
        for answer in answers:
            if answer.endpoint.height > best.endpoint.height and not answer.invalid:
                continue  # The best answer may be from before the block with the change.
            wrong = {k: reason for k, reason in answer.differences.items() if k not in best.differences}
            for round_id, reason in list(wrong.items())[:1]:
                error = ChainAnswerError(f"rounds: round {round_id.hex()[:8]}: {reason}")
                self._endpoints.failed(answer.endpoint, error)
        return best

    def _is_enough(self, answer: _Answer) -> bool:
        """Whether one answer suffices: it has no differences and no new round that only this node reports as over."""
        new = [
            reported.round_id
            for reported in answer.listed.rounds
            if reported.status in OVER and self._is_foreign(reported.round_id)
        ]
        return not answer.differences and all(self._is_settled(round_id) for round_id in new)

    def _is_foreign(self, round_id: bytes) -> bool:
        """Whether the round is neither stored nor purged and has no shares."""
        return not any(round_id in rounds for rounds in (self._rounds, self._with_shares, self._purged))

    def _is_settled(self, round_id: bytes) -> bool:
        """Whether enough nodes report the round as over."""
        needed = min(CONFIRMING_NODES, len(self._endpoints.all))
        return len(self._reported_over.get(round_id, ())) >= needed

    async def _reopen(self, answers: list[_Answer]) -> bool:
        """Store rounds that one node first listed as over and another lists as open. Returns whether there are any."""
        over = {reported.round_id for answer in answers for reported in answer.listed.rounds if reported.status in OVER}
        reopened: dict[bytes, Round] = {}
        for answer in answers:
            for reported in answer.listed.rounds:
                doubtful = reported.round_id in over | self._past.keys() and not self._is_settled(reported.round_id)
                if reported.status not in OVER and doubtful and self._is_foreign(reported.round_id):
                    reopened.setdefault(reported.round_id, reported)
        for round_id in reopened:
            self._past.pop(round_id, None)
        await self._save(list(reopened.values()), max(answer.endpoint.height for answer in answers))
        return bool(reopened)

    async def _confirm_changes(self) -> bool:
        """Apply the changes that enough nodes report. Returns whether there was one."""
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
        """Blocks for which the only configured node must report a change.

        None are needed for a status after the round's end: a processed block already shows that the round has ended.
        """
        return 0 if field is RoundField.STATUS and self._has_ended(known) else CONFIRMING_BLOCKS

    def _has_ended(self, known: Round) -> bool:
        """Whether a block at or after the round's end was processed."""
        return self._chain_time is not None and known.vote_end_time <= self._chain_time

    async def _take_change(self, known: Round, field: RoundField, changed: Round, height: int) -> None:
        """Store a change that was confirmed at a height."""
        self._past.pop(known.round_id, None)
        await self._save([changed], height)
        self._note_change(known, field, changed, height)

    def _note_change(self, known: Round, field: RoundField, changed: Round, height: int) -> None:
        """Record that a change was confirmed at a height and stored."""
        round_id = known.round_id
        self._changed_at[round_id] = height
        self._unconfirmed.get(round_id, {}).pop(field, None)
        self._reported.forget(round_id, field)
        if field is RoundField.END:
            self._reported_over.pop(round_id, None)
        if field is not RoundField.STATUS:
            is_end = field is RoundField.END
            reason = f"vote_end_time is {changed.vote_end_time}, was {known.vote_end_time}" if is_end else None
            self._log.warning(
                "round_end_changed" if is_end else "round_proposals_changed",
                round=round_id.hex()[:8],
                height=height,
                reason=reason or describe(field, changed.proposals),
            )

    def _describe_unconfirmed(self, round_id: bytes, field: RoundField, value: ReportedValue) -> str:
        known = self.get(round_id)
        if field is RoundField.END and known is not None:
            return f"vote_end_time {value} reported and not confirmed; {known.vote_end_time} is known"
        status = f"; {known.status.name} is known" if field is RoundField.STATUS and known is not None else ""
        return f"{describe(field, value)} reported and not confirmed{status}"

    def _note_unconfirmed(self, changes: dict[bytes, dict[RoundField, ReportedValue]]) -> None:
        """Replace the unconfirmed changes; each is logged once."""
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
        """Close rounds past their end whose unknown status enough nodes report."""
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
                "round_closed", round=known.round_id.hex()[:8], reason=f"past its end with unknown status {status}"
            )

    async def _freeze(self, invalid: dict[bytes, str]) -> None:
        """Freeze the rounds that no fresh node shows correctly, and unfreeze all others."""
        for round_id, reason in invalid.items():
            if round_id not in self._frozen:
                log = self._log.error if round_id in self._rounds else self._log.warning
                log("round_frozen", round=round_id.hex()[:8], reason=reason)
        for round_id in self._frozen.keys() - invalid.keys():
            self._log.info("round_unfrozen", round=round_id.hex()[:8])
        if invalid.keys() != self._frozen.keys():
            self.revision += 1
        self._frozen = dict(invalid)
        counts = await self._store.counts() if invalid else {}
        waiting = {r: sum(counts.get(r, {}).get(state, 0) for state in _WAITING) for r in invalid}
        self._frozen_shares = {round_id: number for round_id, number in waiting.items() if number}

    def _add_past(self, listed: list[Round]) -> None:
        """Remember, in memory only, rounds that were over when first listed."""
        for reported in listed:
            others = (self._rounds, self._with_shares, self._purged, self._frozen)
            if reported.status in OVER and not any(reported.round_id in rounds for rounds in others):
                self._past[reported.round_id] = reported
        while len(self._past) > MAX_PAST_ROUNDS:
            del self._past[next(iter(self._past))]
        known = (self._rounds, self._with_shares, self._frozen, self._past)
        for round_id in [r for r in self._reported_over if not any(r in rounds for rounds in known)]:
            del self._reported_over[round_id]

    async def _store_chain_id(self) -> None:
        """Store the chain's id, so that the database is never used for another chain."""
        if not self._chain_id_stored and self._endpoints.chain_id is not None:
            await self._store.set_meta(_CHAIN_ID, self._endpoints.chain_id)
            self._chain_id_stored = True

    async def _confirm_closings(self) -> None:
        """Close the rounds that ended before a block that the follower has processed."""
        over = [r for r in self.open() if self._is_reported_over(r) and r.round_id not in self._frozen]
        read = [r for r in over if r.created_at_height >= self._complete_from - 1]
        ended = [r for r in read if self._has_ended(r)]
        if not ended:
            return
        needed = min(CONFIRMING_NODES, len(self._endpoints.all))
        for endpoint in self._endpoints.fresh:
            if all(len(self._reported_over.get(known.round_id, ())) >= needed for known in ended):
                break
            if all(endpoint.name in self._reported_over.get(known.round_id, ()) for known in ended):
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
                self.revision += 1
                self._log.info("round_closed", round=known.round_id.hex()[:8], status=known.status.name)
        self._log_waiting(ended, needed)

    def _is_reported_over(self, known: Round) -> bool:
        """Whether the round is over, as known or as any node reports."""
        return known.status in OVER or any(
            status in OVER for status in self._reported.values(known.round_id, RoundField.STATUS)
        )

    def _log_waiting(self, ended: list[Round], needed: int) -> None:
        """Log once per round which nodes do not confirm yet that it is over."""
        for known in ended:
            reporters = self._reported_over.get(known.round_id, set())
            late = self._chain_time is not None and self._chain_time >= known.vote_end_time + _GRACE
            if late and len(reporters) < needed and known.round_id not in self._waits_logged:
                self._waits_logged.add(known.round_id)
                self._log.warning(
                    "round_closing_unconfirmed",
                    round=known.round_id.hex()[:8],
                    reason="too few nodes report the round as over",
                    endpoint=", ".join(e.name for e in self._endpoints.all if e.name not in reporters),
                )

    async def _ask(self, endpoint: Node) -> _Answer:
        """Read a node's rounds and compare them with the known ones."""
        head, began = endpoint.health.head, self._clock.monotonic()
        return self._compare(endpoint, head, began, await endpoint.client.rounds())

    def _note_reports(self, answer: _Answer) -> None:
        """Record which rounds a node reports as over, and its changes."""
        name, height, head = answer.endpoint.name, answer.endpoint.height, answer.head
        for reported in answer.listed.rounds:
            reporters = self._reported_over.setdefault(reported.round_id, set())
            differs = answer.changes.get(reported.round_id, {}).keys() - {RoundField.STATUS}
            if reported.round_id in answer.invalid or differs or reported.status not in OVER:
                reporters.discard(name)
            elif head is not None and head.time >= reported.vote_end_time:
                reporters.add(name)
        for known in (*self.open(), *self._past.values()):
            changes = answer.changes.get(known.round_id, {})
            for field in _EVENT:
                self._reported.note(known.round_id, field, name, changes.get(field), height)
            unknown = answer.listed.unknown.get(known.round_id)
            ended = head is not None and head.time >= known.vote_end_time
            status = unknown.status if unknown is not None and ended else None
            self._reported.note(known.round_id, RoundField.UNKNOWN_STATUS, name, status, height)

    def _compare(self, endpoint: Node, head: BlockHead | None, began: float, listed: RoundList) -> _Answer:
        """Compare a node's list with the known rounds, and record its reports."""
        by_id: dict[bytes, Round | UnknownStatus] = {reported.round_id: reported for reported in listed.rounds}
        by_id |= listed.unknown
        invalid, changes = dict(listed.invalid), dict[bytes, dict[RoundField, ReportedValue]]()
        for round_id, unknown in listed.unknown.items():
            if round_id not in self._closed | self._past.keys() | self._purged:
                invalid[round_id] = f"status {unknown.status} is unknown to this version"
        for known in (*self._rounds.values(), *self._past.values()):
            reported = by_id.get(known.round_id)
            if known.round_id in listed.invalid:
                continue
            reason = self._invalid_reason(known, reported, endpoint.height)
            if reason is not None:
                invalid[known.round_id] = reason
            elif reported is not None and (fields := self._changes(known, reported, endpoint.height)):
                changes[known.round_id] = fields
        answer = _Answer(endpoint, head, began, listed, invalid, changes)
        self._note_reports(answer)
        return answer

    def _invalid_reason(self, known: Round, reported: Round | UnknownStatus | None, height: int) -> str | None:
        """Why a round cannot be as a node at this height reports it, None if it can."""
        may_lag = height < self._status_heights.get(known.round_id, 0) + _LAG
        if reported is None:
            # The chain may drop a finished round; a node that lags may not have a new one yet.
            done = known.status is RoundStatus.FINALIZED or known.round_id in self._closed | self._past.keys()
            return None if done or may_lag else "no longer listed"
        if reported.created_at_height != known.created_at_height:
            return "listed with a different created_at_height"
        is_back = isinstance(reported, Round) and reported.status is RoundStatus.PENDING is not known.status
        if isinstance(reported, Round) and is_back and not may_lag:
            return f"status went back from {known.status.name} to {reported.status.name}"
        return None

    def _changes(self, known: Round, reported: Round | UnknownStatus, height: int) -> dict[RoundField, ReportedValue]:
        """The fields that a node at this height reports differently.

        A node a few blocks below the height of a change may still report the previous value. Of rounds that were over
        when first listed, only the status is compared.
        """
        changes: dict[RoundField, ReportedValue] = {}
        if known.round_id in self._closed:
            return changes
        is_recent = height < self._changed_at.get(known.round_id, 0) + _LAG
        if known.round_id in self._rounds and not is_recent:
            if reported.vote_end_time != known.vote_end_time:
                changes[RoundField.END] = reported.vote_end_time
            proposals = changed_proposals(known, reported) if isinstance(reported, Round) else None
            if proposals is not None:
                changes[RoundField.PROPOSALS] = proposals
        status = changed_status(known.status, reported.status) if isinstance(reported, Round) else None
        if status is None or (known.round_id in self._past and status in OVER):
            return changes
        is_back = _ORDER[status] < _ORDER[known.status]
        if not (is_back and height < self._status_heights.get(known.round_id, 0) + _LAG):
            changes[RoundField.STATUS] = status
        return changes

    def _is_update(self, reported: Round) -> bool:
        if any(reported.round_id in rounds for rounds in (self._past, self._purged, self._frozen)):
            return False
        if (
            reported.status in OVER
            and reported.round_id not in self._rounds
            and reported.round_id not in self._with_shares
        ):
            return False
        return reported != self._rounds.get(reported.round_id)
