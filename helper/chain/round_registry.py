"""Registry of the chain's voting rounds; decides whether a round is closed.

A single node cannot change what is known, and it cannot introduce a round: at its first listing, a round is stored once
its fields are agreed (`helper.chain.agreement`). Until then it is held in memory, with what any node lists, so that its
shares are accepted and revealed: both are harmless if the node is false. Nothing is refused for good on its account,
and it is never closed or purged.

A round that one node lists or omits alone is no statement about other nodes. If a node moves a round to an earlier
status, reports another height of creation or returns invalid data for it, the stored state is unchanged, and the node
goes into backoff if another usable node reports the round as known. If none does, or enough nodes omit it, the round is
*frozen*: none of its shares is accepted, revealed or purged until a node reports it correctly. Other rounds are not
affected.

A different `vote_end_time`, status or list of proposals takes effect once two nodes report it, or once the only
configured node has reported it for ten blocks (a status that matches a processed block after the end: immediately).
Until then the round is not frozen: a due share is still revealed, because the chain refuses a reveal outside the round,
while a missed reveal is lost. Only shares whose validity depends on the difference are not accepted.

A round is closed only by the chain: a block at or after the round's end was processed, and two nodes (one if only one
is configured) report the round as being tallied or finalized. A status that this version does not know counts as closed
after the end too, once it is confirmed like a changed end. It freezes the round, but does not retain its witnesses
indefinitely (docs/decisions/0016-round-changes.md).

A round that had ended when it was first listed has no shares here. It is held in memory so that its shares are rejected
as posted to an inactive round, but it is never stored, closed, reported or purged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from helper.chain.agreement import RoundFacts, Said, agreed, agreed_round
from helper.chain.models import BlockHead, Proposal, Round, RoundList, RoundStatus, UnknownStatusRound
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.chain.round_record import (
    CONFIRMING_BLOCKS,
    ENDED_STATUSES,
    ReportedValue,
    RoundField,
    RoundRecord,
    apply_change,
    describe_value,
)
from helper.core.share import ShareState
from helper.errors import ChainError, ChainResponseError, WrongChain
from helper.store.store import Store

_UNCONFIRMED_STATES = (ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST)

MAX_PAST_ROUNDS = 4096
"""Maximum number of rounds in memory that had ended when first listed, because a node can list any number of them."""

# How log events name the fields.
_EVENT_NAMES = {RoundField.END: "end", RoundField.STATUS: "status", RoundField.PROPOSALS: "proposals"}

# Seconds of chain time after a round's end in which nodes may legitimately differ about its status.
_STATUS_GRACE_SECONDS = 60

_CHAIN_ID_KEY = "chain_id"


@dataclass(frozen=True, slots=True)
class _RoundsReport:
    """A node's list of rounds, compared with the known rounds.

    Attributes:
        head: its newest block before the request; None before the first.
        invalid: why a listed round is not plausible, by round id.
        omitted: known rounds that the node does not list although it should. This is no statement about other nodes.
        changes: fields whose listed value differs from the known one, by round id.
    """

    node: Node
    head: BlockHead | None
    round_list: RoundList
    invalid: dict[bytes, str]
    omitted: frozenset[bytes]
    changes: dict[bytes, dict[RoundField, ReportedValue]]

    @property
    def differences(self) -> dict[bytes, str]:
        """All differences from the known rounds, as text, by round id."""
        changes = {
            round_id: "listed with " + ", ".join(describe_value(field, value) for field, value in fields.items())
            for round_id, fields in self.changes.items()
        }
        return {**changes, **dict.fromkeys(self.omitted, "no longer listed"), **self.invalid}


class RoundRegistry:
    """All rounds that the chain has listed, and the chain's id.

    Attributes:
        is_synced: whether the list of rounds was read since the start.
        revision: increases with every event after which a round may be closed or purged: a processed block while a
            round has ended and is not closed, and a round that is new, changed, frozen, unfrozen or closed by another
            host.
    """

    def __init__(self, store: Store, node_pool: NodePool) -> None:
        self._store = store
        self._node_pool = node_pool
        self._clock = node_pool.clock
        self._log = structlog.get_logger("helper.chain")
        self._records: dict[bytes, RoundRecord] = {}  # those that had ended when first listed are in listing order
        self._stored: list[RoundRecord] = []  # the stored rounds, oldest first
        self._chain_time: float | None = None
        self._complete_from = 0
        self._chain_time_at = 0.0  # monotonic time at which that block was processed
        self._chain_id_stored = False
        self.is_synced = False
        self.revision = 0

    async def restore(self) -> None:
        """Load the rounds, their closed marks and the chain's id from the store.

        Raises:
            WrongChain: the store belongs to another chain than the configured one.
        """
        chain_id = await self._store.get_meta(_CHAIN_ID_KEY)
        if chain_id is not None and self._node_pool.is_chain_id_agreed and self._node_pool.chain_id != chain_id:
            raise WrongChain(
                f"the database belongs to chain {chain_id}, not {self._node_pool.chain_id}",
                advice="Use a separate database for this chain ([helper] db_path), or correct [chain] chain_id.",
            )
        if chain_id is not None:
            self._node_pool.chain_id, self._node_pool.is_chain_id_agreed = chain_id, True
        self._chain_id_stored = chain_id is not None
        for row in await self._store.list_rounds():
            proposals = tuple(Proposal(number, tuple(options)) for number, options in row.proposals)
            status = RoundStatus(row.status)
            self._insert_round(Round(row.round_id, status, row.vote_end_time, proposals, row.created_at_height))
            self._record(row.round_id).is_closed = row.closed_at is not None
        for round_id in await self._store.count_shares():
            self._record(round_id).has_shares = True

    async def reload_from_store(self) -> None:
        """Apply what other hosts have stored: closed and purged rounds, and confirmed ends.

        Raises:
            StoreError: the rounds could not be read.
        """
        rows = {row.round_id: row for row in await self._store.list_rounds()}
        for record in list(self._stored):
            if (record.is_in_store or record.is_closed) and record.round_id not in rows:
                self.forget(record.round_id)
        for record in self._records.values():
            record.is_in_store = False
        for row in rows.values():
            record = self._record(row.round_id)
            record.is_in_store = True
            if row.closed_at is not None and not record.is_closed:
                # The host that closed it may stop before it reports or purges the round, and no further block would
                # make this host check it.
                record.is_closed = True
                self.revision += 1
            known_round = record.stored
            if known_round is not None and known_round.vote_end_time != row.vote_end_time:
                changed = replace(known_round, vote_end_time=row.vote_end_time)
                self._insert_round(changed)
                self._note_change(record, known_round, RoundField.END, self._node_pool.agreed_height or 0)
                self.revision += 1

    def get(self, round_id: bytes) -> Round | None:
        """The round, None if the chain has not listed it. Includes frozen rounds and those that had already ended."""
        return self._find(round_id).known

    def frozen_reason(self, round_id: bytes) -> str | None:
        """Why no share of the round may be accepted, revealed or purged now, None if they may.

        Also covers rounds that were only ever listed with invalid data.
        """
        return self._find(round_id).frozen

    def unconfirmed_end(self, round_id: bytes) -> int | None:
        """A changed `vote_end_time` that is reported but not confirmed, None if there is none."""
        record = self._find(round_id)
        end = record.unconfirmed.get(RoundField.END)
        return end if isinstance(end, int) else record.earliest_end

    def has_unconfirmed_status(self, round_id: bytes) -> bool:
        """Whether a changed status of the round is reported but not confirmed.

        Also true if the only known status is not confirmed.
        """
        record = self._find(round_id)
        if not record.is_agreed and record.known is not None:
            return record.known.status is not RoundStatus.ACTIVE
        return not self._is_end_confirmed(record) if record.is_past else RoundField.STATUS in record.unconfirmed

    def has_unconfirmed_proposals(self, round_id: bytes) -> bool:
        """Whether changed proposals of the round are reported but not confirmed."""
        record = self._find(round_id)
        return not record.is_agreed or RoundField.PROPOSALS in record.unconfirmed

    def latest_end(self, known_round: Round) -> int:
        """The later of the round's known end and an unconfirmed one, in Unix seconds."""
        return max(known_round.vote_end_time, self.unconfirmed_end(known_round.round_id) or 0)

    def unconfirmed_reports(self) -> dict[bytes, str]:
        """Reports of nodes that are not accepted, as text, by round id.

        These are unconfirmed changes and the reasons why rounds are frozen.
        """
        records = self._records.values()
        changes = {
            record.round_id: "; ".join(record.describe_unconfirmed(*change) for change in record.unconfirmed.items())
            for record in records
            if record.unconfirmed
        }
        waiting = {record.round_id: "listed, but not agreed yet" for record in records if not record.is_agreed}
        frozen = {record.round_id: record.frozen for record in records if record.frozen is not None}
        return {**changes, **waiting, **frozen}

    def frozen_shares(self) -> dict[bytes, int]:
        """Number of unconfirmed shares by frozen round, as of the last sync."""
        return {record.round_id: record.frozen_shares for record in self._records.values() if record.frozen_shares}

    def all_rounds(self) -> list[Round]:
        """Every stored round, and those that are not agreed yet, oldest first."""
        return [known_round for record in self._stored if (known_round := record.stored) is not None]

    def active_rounds(self) -> list[Round]:
        """The open rounds that accept votes, oldest first, without frozen ones."""
        return [
            r for r in self.open_rounds() if r.status is RoundStatus.ACTIVE and self.frozen_reason(r.round_id) is None
        ]

    def open_rounds(self) -> list[Round]:
        """The rounds that are not closed, oldest first."""
        return [known_round for record in self._stored if record.is_open and (known_round := record.stored) is not None]

    def forget(self, round_id: bytes) -> None:
        """Remove a purged round. After a restart it counts as ended when first listed."""
        record = self._record(round_id)
        record.mark_purged()
        self._stored = [other for other in self._stored if other is not record]

    def record_block(self, block_time: float, *, complete_from: int = 0) -> None:
        """Record that the block follower has reached a block.

        Args:
            block_time: the block's time in Unix seconds.
            complete_from: the lowest height from which every block up to this one was processed. Earlier blocks may be
                unread, so rounds that were created before it are not closed.
        """
        is_new = block_time != self._chain_time
        if is_new:
            self._chain_time = block_time
            self._chain_time_at = self._clock.monotonic()
        if is_new or complete_from != self._complete_from:
            self._complete_from = complete_from
            if any(known_round.vote_end_time <= block_time for known_round in self.open_rounds()):
                self.revision += 1

    def chain_now(self) -> float | None:
        """The chain's time in Unix seconds, None before the first block.

        It is the time of the newest processed block plus the monotonic time since then; the wall clock is not used.
        """
        if self._chain_time is None:
            return None
        return self._chain_time + self._clock.monotonic() - self._chain_time_at

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain has closed the round. False while it is frozen.

        May request the rounds of additional nodes if the round has ended and this is not confirmed yet.

        Raises:
            StoreError: the closed mark could not be stored.
        """
        if self._find(round_id).frozen is not None:
            return False
        if not self._find(round_id).is_closed:
            await self._confirm_closings()
        return self._find(round_id).is_closed

    async def sync(self, head: int = 0) -> None:
        """Read the list of rounds from the nodes and store what is new.

        Args:
            head: the height that the responding node should have reached.

        Raises:
            ChainUnavailable: no node returned a list.
            StoreError: the rounds could not be stored.
        """
        report, invalid = await self._fetch_best(head)
        await self._store_chain_id()
        await self._freeze(invalid)
        self._note_unconfirmed(report.changes)
        await self._close_unreadable()
        self._add_past_rounds(report.round_list.rounds)
        # Only `_confirm_changes` changes fields that need a confirmation.
        listed = [(self._record(reported.round_id), reported) for reported in report.round_list.rounds]
        updates = [(r, r.revert_changes(reported)) for r, reported in listed if r.stored is not None and r.is_agreed]
        await self._save([update for record, update in updates if record.is_update(update)], report.node.height)
        self._records = {round_id: record for round_id, record in self._records.items() if record.is_needed}
        self.is_synced = True

    async def _save(self, rounds: list[Round], height: int) -> None:
        """Store rounds as a node at this height lists them, or with a confirmed change."""
        if rounds:
            await self._store.save_rounds(rounds, self._clock.now())
        for reported in rounds:
            record = self._record(reported.round_id)
            known_round = record.stored if record.is_agreed else None
            record.is_agreed, record.earliest_end = True, None
            if known_round is None or known_round.status is not reported.status:
                record.status_height = height
                self._log.info(
                    "round_updated", round=reported.round_id.hex()[:8], status=reported.status.name, height=height
                )
            self._insert_round(reported)
            self.revision += 1

    def _find(self, round_id: bytes) -> RoundRecord:
        """The record of a round; an empty record that is not stored if there is none."""
        return self._records.get(round_id) or RoundRecord(round_id)

    def _record(self, round_id: bytes) -> RoundRecord:
        """The record of a round; created if there is none."""
        record = self._records[round_id] = self._find(round_id)
        return record

    def _known(self) -> list[RoundRecord]:
        """The records of known rounds.

        Stored rounds come first, oldest first, then those that had ended when first listed.
        """
        return [*self._stored, *(record for record in self._records.values() if record.is_past)]

    def _insert_round(self, stored: Round) -> None:
        """Record a round as stored."""
        record = self._record(stored.round_id)
        if record.stored is None:
            self._stored.append(record)
        record.known, record.is_past = stored, False
        self._stored.sort(key=lambda other: other.order)

    async def _fetch_best(self, head: int) -> tuple[_RoundsReport, dict[bytes, str]]:
        """Return the list of the node with the fewest differences, and why rounds are frozen, by round id.

        The first list without differences is returned immediately. Nodes whose differences this list contradicts go
        into backoff. Changes that enough nodes report are applied before the responses are compared.
        """
        reports = await self._node_pool.call_until(self._fetch_report, is_enough=self._is_enough, min_height=head)
        changed = await self._agree_new_rounds(reports)
        while changed or await self._confirm_changes():
            reports = [self._create_report(r.node, r.head, r.round_list) for r in reports]
            changed = False
        best = min(reports, key=lambda report: len(report.differences))
        best.node.health.failures = 0
        for report in reports:
            if report.node.height > best.node.height and not report.invalid:
                continue  # The best response may be from before the block with the change.
            wrong = {
                round_id: reason
                for round_id, reason in report.differences.items()
                if round_id not in best.differences and round_id not in report.omitted
            }
            for round_id, reason in list(wrong.items())[:1]:
                error = ChainResponseError(f"rounds: round {round_id.hex()[:8]}: {reason}")
                self._node_pool.record_error(report.node, error)
        needed = self._node_pool.needed
        omitted = {
            round_id: best.differences[round_id]
            for round_id in best.omitted
            if agreed({report.node.name: round_id in report.omitted for report in reports}, needed)
        }
        return best, {**omitted, **best.invalid}

    def _is_enough(self, report: _RoundsReport) -> bool:
        """Whether one response suffices.

        It must have no differences, no round that is not agreed, and none that only this node reports as ended.
        """
        if report.differences or any(not record.is_agreed for record in self._stored):
            return False
        listed = [(self._find(reported.round_id), reported) for reported in report.round_list.rounds]
        return not any(
            record.is_new(reported)
            or (reported.status in ENDED_STATUSES and record.is_foreign and not self._is_end_confirmed(record))
            for record, reported in listed
        )

    def _is_end_confirmed(self, record: RoundRecord) -> bool:
        """Whether enough nodes report that the round has ended."""
        return len(record.end_reporters) >= self._node_pool.needed

    async def _agree_new_rounds(self, reports: list[_RoundsReport]) -> bool:
        """Store new rounds of which every field is agreed; hold the others in memory with what any node lists.

        Covers rounds that one node listed as ended when they were first listed and that another node lists as open.
        Returns whether a round was stored.
        """
        said: dict[bytes, dict[str, Said[Round]]] = {}
        for report in reports:
            for reported in report.round_list.rounds:
                said.setdefault(reported.round_id, {})[report.node.name] = Said(report.node.height, reported)
        complete = []
        for round_id, statements in said.items():
            record, listed = self._record(round_id), [fact for _, fact in statements.values()]
            is_over = record.is_past and self._is_end_confirmed(record)
            if is_over or not any(record.is_new(reported) for reported in listed):
                continue
            facts = agreed_round(statements, self._node_pool.needed, known=RoundFacts(), height=0)
            merged = _merge_listings(listed, facts)
            if facts.is_complete:
                complete += [merged] if merged != record.known or not record.is_agreed else []
            elif record.frozen is None and (merged != record.known or record.is_agreed):
                self._insert_round(merged)
                record.is_agreed, record.earliest_end = False, min(reported.vote_end_time for reported in listed)
                self.revision += 1
        for record in [record for record in self._stored if not record.is_agreed and record.round_id not in said]:
            record.drop_listing()
            self._stored.remove(record)
        await self._save(complete, max(report.node.height for report in reports))
        return bool(complete)

    async def _confirm_changes(self) -> bool:
        """Apply the changes that enough nodes report. Returns whether there was one."""
        heights = {node.name: node.height for node in self._node_pool.nodes}
        changed = False
        for record in [record for record in self._known() if record.is_open or record.is_past]:
            for field in (RoundField.END, RoundField.STATUS, RoundField.PROPOSALS):
                value = record.find_confirmed(
                    field, heights, self._node_pool.needed, blocks=self._blocks_needed(record, field)
                )
                if value is None or record.known is None:
                    continue
                known_round, height = record.known, max(heights.values())
                await self._save([apply_change(known_round, field, value)], height)
                self._note_change(record, known_round, field, height)
                changed = True
        return changed

    def _blocks_needed(self, record: RoundRecord, field: RoundField) -> int:
        """Blocks for which the only configured node must report a change.

        None are needed for a status after the round's end: a processed block already proves that the round has ended.
        """
        return 0 if field is RoundField.STATUS and record.has_ended(self._chain_time) else CONFIRMING_BLOCKS

    def _note_change(self, record: RoundRecord, before: Round, field: RoundField, height: int) -> None:
        """Record that a change was confirmed at a height and stored."""
        record.note_confirmed(field, height)
        if field is RoundField.STATUS or record.known is None:
            return
        is_end = field is RoundField.END
        reason = f"vote_end_time is {record.known.vote_end_time}, was {before.vote_end_time}" if is_end else None
        self._log.warning(
            "round_end_changed" if is_end else "round_proposals_changed",
            round=record.round_id.hex()[:8],
            height=height,
            reason=reason or describe_value(field, record.known.proposals),
        )

    def _note_unconfirmed(self, changes: dict[bytes, dict[RoundField, ReportedValue]]) -> None:
        """Replace the unconfirmed changes; each is logged once."""
        for record in self._records.values():
            fields = changes.get(record.round_id, {})
            for field, value in fields.items():
                if record.unconfirmed.get(field) != value:
                    # At the end of a round, nodes report it before the follower has processed that block.
                    head = self._node_pool.last_head
                    is_expected = field is RoundField.STATUS and record.has_ended(None if head is None else head.time)
                    log = self._log.info if is_expected else self._log.warning
                    log(
                        f"round_{_EVENT_NAMES[field]}_unconfirmed",
                        round=record.round_id.hex()[:8],
                        reason=record.describe_unconfirmed(field, value),
                    )
            for field in record.unconfirmed.keys() - fields.keys():
                self._log.info(f"round_{_EVENT_NAMES[field]}_report_withdrawn", round=record.round_id.hex()[:8])
            if fields.keys() != record.unconfirmed.keys():
                self.revision += 1
            record.unconfirmed = dict(fields)

    async def _close_unreadable(self) -> None:
        """Close ended rounds that enough nodes omit or report with the same unknown status.

        Without this, such a round would be frozen for good, and its data never purged.
        """
        heights = {node.name: node.height for node in self._node_pool.nodes}
        for record in [record for record in self._stored if record.is_open]:
            is_due = record.is_agreed and record.has_ended(self._chain_time) and not record.unconfirmed
            if not is_due or not self._is_read(record):
                continue
            status = record.find_confirmed(RoundField.UNKNOWN_STATUS, heights, self._node_pool.needed)
            if status is None and record.find_confirmed(RoundField.OMISSION, heights, self._node_pool.needed) is None:
                continue
            await self._mark_closed(record)
            record.frozen, record.frozen_shares = None, 0
            reason = "ended and no longer listed" if status is None else f"ended with unknown status {status}"
            self._log.warning("round_closed", round=record.round_id.hex()[:8], reason=reason)

    def _is_read(self, record: RoundRecord) -> bool:
        """Whether every block since the round's creation was processed, so that no confirmed share is missed."""
        return record.known is not None and record.known.created_at_height >= self._complete_from - 1

    async def _mark_closed(self, record: RoundRecord) -> None:
        await self._store.mark_closed(record.round_id, self.chain_now() or self._clock.now())
        record.is_closed = True
        self.revision += 1

    async def _freeze(self, invalid: dict[bytes, str]) -> None:
        """Freeze the rounds that no usable node reports correctly, and unfreeze all others."""
        for record in self._records.values():
            if record.frozen is not None and record.round_id not in invalid:
                self._log.info("round_unfrozen", round=record.round_id.hex()[:8])
                record.frozen, record.frozen_shares = None, 0
                self.revision += 1
        for round_id, reason in invalid.items():
            record = self._record(round_id)
            if record.frozen is None:
                log = self._log.warning if record.stored is None else self._log.error
                log("round_frozen", round=round_id.hex()[:8], reason=reason)
                self.revision += 1
            record.frozen = reason
        counts = await self._store.count_shares() if invalid else {}
        for round_id in invalid:
            shares = counts.get(round_id, {})
            self._record(round_id).frozen_shares = sum(shares.get(state, 0) for state in _UNCONFIRMED_STATES)

    def _add_past_rounds(self, listed: list[Round]) -> None:
        """Add rounds that had ended when first listed; in memory only."""
        for reported in listed:
            record = self._record(reported.round_id)
            if reported.status in ENDED_STATUSES and record.is_foreign and record.frozen is None:
                if not record.is_past:
                    self._records[reported.round_id] = self._records.pop(reported.round_id)
                record.known, record.is_past = reported, True
        past = [record for record in self._records.values() if record.is_past]
        for record in past[: max(0, len(past) - MAX_PAST_ROUNDS)]:
            record.known, record.is_past = None, False

    @property
    def has_stored_state(self) -> bool:
        """Whether the database has seen a chain; false for a new one."""
        return self._chain_id_stored or bool(self._records)

    async def _store_chain_id(self) -> None:
        """Store the chain's id, so that the database is never used for another chain."""
        if not self._chain_id_stored and self._node_pool.chain_id is not None and self._node_pool.is_chain_id_agreed:
            await self._store.set_meta(_CHAIN_ID_KEY, self._node_pool.chain_id)
            self._chain_id_stored = True

    async def _confirm_closings(self) -> None:
        """Close the rounds that ended before a block that the follower has processed."""
        ended = [
            record
            for record in self._stored
            if record.is_open
            and record.is_agreed
            and record.is_reported_ended
            and record.frozen is None
            and record.has_ended(self._chain_time)
            and self._is_read(record)
        ]
        if not ended:
            return
        for node in self._node_pool.usable_nodes:
            if all(self._is_end_confirmed(record) for record in ended):
                break
            if all(node.name in record.end_reporters for record in ended):
                continue
            try:
                await self._fetch_report(node)
            except ChainError as error:
                self._node_pool.record_error(node, error)
        await self._confirm_changes()
        for record in ended:
            if record.known is not None and record.known.status in ENDED_STATUSES and self._is_end_confirmed(record):
                await self._mark_closed(record)
                self._log.info("round_closed", round=record.round_id.hex()[:8], status=record.known.status.name)
        self._log_unconfirmed_ends(ended)

    def _log_unconfirmed_ends(self, ended: list[RoundRecord]) -> None:
        """Log once per round which nodes do not confirm yet that it has ended."""
        for record in ended:
            is_late = self._chain_time is not None and record.has_ended(self._chain_time - _STATUS_GRACE_SECONDS)
            if is_late and not self._is_end_confirmed(record) and not record.is_wait_logged:
                record.is_wait_logged = True
                self._log.warning(
                    "round_closing_unconfirmed",
                    round=record.round_id.hex()[:8],
                    reason="too few nodes report that the round has ended",
                    endpoint=", ".join(e.name for e in self._node_pool.nodes if e.name not in record.end_reporters),
                )

    async def _fetch_report(self, node: Node) -> _RoundsReport:
        """Read a node's rounds and compare them with the known ones."""
        return self._create_report(node, node.health.head, await node.client.rounds())

    def _note_reports(self, report: _RoundsReport) -> None:
        """Record which rounds a node reports as ended, and its changes."""
        name, height, head = report.node.name, report.node.height, report.head
        for reported in report.round_list.rounds:
            differs = report.changes.get(reported.round_id, {}).keys() - {RoundField.STATUS}
            is_consistent = reported.round_id not in report.invalid and not differs
            self._record(reported.round_id).note_ended(name, reported, head, is_consistent=is_consistent)
        listed = {reported.round_id for reported in report.round_list.rounds} | report.round_list.invalid.keys()
        for record in self._known():
            if not (record.is_open or record.is_past) or record.known is None or not record.is_agreed:
                continue
            changes = dict(report.changes.get(record.round_id, {}))
            unknown = report.round_list.unknown_status.get(record.round_id)
            if head is not None and head.time >= record.known.vote_end_time:
                if unknown is not None:
                    changes[RoundField.UNKNOWN_STATUS] = unknown.status
                elif record.round_id not in listed:
                    changes[RoundField.OMISSION] = 1
            record.note_changes(name, changes, height)

    def _create_report(self, node: Node, head: BlockHead | None, round_list: RoundList) -> _RoundsReport:
        """Compare a node's list with the known rounds, and record its reports."""
        by_id: dict[bytes, Round | UnknownStatusRound] = {reported.round_id: reported for reported in round_list.rounds}
        by_id |= round_list.unknown_status
        invalid, changes = dict(round_list.invalid), dict[bytes, dict[RoundField, ReportedValue]]()
        omitted = set[bytes]()
        for round_id, unknown in round_list.unknown_status.items():
            record = self._record(round_id)
            if not (record.is_closed or record.is_past or record.is_purged):
                invalid[round_id] = f"status {unknown.status} is unknown to this version"
        for record in self._known():
            if record.round_id in round_list.invalid:
                continue
            reported = by_id.get(record.round_id)
            if not record.is_agreed:
                continue
            reason = record.invalid_reason(reported, node.height)
            if reason is not None and reported is None:
                omitted.add(record.round_id)
            elif reason is not None:
                invalid[record.round_id] = reason
            elif reported is not None and (fields := record.changes(reported, node.height)):
                changes[record.round_id] = fields
        report = _RoundsReport(node, head, round_list, invalid, frozenset(omitted), changes)
        self._note_reports(report)
        return report


def _merge_listings(listed: list[Round], facts: RoundFacts) -> Round:
    """A round with the agreed fields; the others are such that no leaf, share or reveal is missed."""
    options: dict[int, set[int]] = {}
    for proposal in (proposal for reported in listed for proposal in reported.proposals):
        options.setdefault(proposal.id, set()).update(proposal.options)
    proposals = tuple(Proposal(number, tuple(sorted(options[number]))) for number in options)
    status = facts.status
    if status in {None, RoundStatus.PENDING} and any(reported.status is RoundStatus.ACTIVE for reported in listed):
        status = RoundStatus.ACTIVE  # a rejected share is lost, and an early acceptance does no harm
    heights, ends = [r.created_at_height for r in listed], [r.vote_end_time for r in listed]
    return Round(
        listed[0].round_id,
        listed[0].status if status is None else status,
        max(ends) if facts.vote_end_time is None else facts.vote_end_time,
        proposals if facts.proposals is None else facts.proposals,
        min(heights) if facts.created_at_height is None else facts.created_at_height,
    )
