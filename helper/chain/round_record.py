"""State of one round, and the changes of it that nodes report. Pure.

A change takes effect only once enough nodes report it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from helper.chain.agreement import agreed
from helper.chain.models import BlockHead, Proposal, Round, RoundStatus, UnknownStatusRound

CONFIRMING_BLOCKS: Final = 10
"""Blocks for which the only configured node must report the same change."""
ENDED_STATUSES: Final = (RoundStatus.TALLYING, RoundStatus.FINALIZED)
"""The statuses of a round that accepts no more votes."""

# The order in which a round's status moves.
_STATUS_ORDER = {RoundStatus.PENDING: 0, RoundStatus.ACTIVE: 1, RoundStatus.TALLYING: 2, RoundStatus.FINALIZED: 3}

_MAX_LAG_BLOCKS: Final = 3
"""A node up to this many blocks below the height of a change may legitimately not report the change yet."""

ReportedValue = RoundStatus | int | tuple[Proposal, ...]
"""A reported status, `vote_end_time` or list of proposals."""


class RoundField(StrEnum):
    """The fields of a round that one node alone cannot change."""

    END = "vote_end_time"
    STATUS = "status"
    PROPOSALS = "proposals"
    UNKNOWN_STATUS = "unknown status"
    OMISSION = "omission"
    """The node does not list the round; the value is always 1."""


def apply_change(known_round: Round, field: RoundField, value: ReportedValue) -> Round:
    """The round with a confirmed change."""
    if isinstance(value, RoundStatus):
        return replace(known_round, status=value)
    if isinstance(value, tuple):
        return replace(known_round, proposals=value)
    assert field is RoundField.END
    return replace(known_round, vote_end_time=value)


def describe_value(field: RoundField, value: ReportedValue) -> str:
    """Describe a field and its value for messages."""
    if isinstance(value, RoundStatus):
        return f"{field} {value.name}"
    if isinstance(value, tuple):
        return f"{len(value)} {field}" if value else f"no {field}"
    return f"{field} {value}"


@dataclass(frozen=True, slots=True)
class _Report:
    """The value that a node reports, and the node's height when it first did."""

    value: ReportedValue
    since_height: int


@dataclass(slots=True, eq=False)
class RoundRecord:
    """A round that a node has listed or the store contains.

    Attributes:
        round_id: 32 bytes.
        known: the round, None if it was never listed correctly or is purged. While it is not agreed, it has what any
            node lists.
        is_agreed: whether every field of the round was agreed. Until then the round is not stored.
        earliest_end: the earliest end that a node lists while the round is not agreed.
        is_past: whether it had ended when first listed; it is held in memory only.
        is_closed: whether the chain has closed it.
        is_purged: whether its data was deleted here.
        has_shares: whether the store had shares of it at the start.
        is_in_store: whether the store contained it when it was last read again.
        status_height: height of the node that reported the present status.
        changed_height: height at which the last change was confirmed.
        end_reporters: names of the nodes that report it as ended.
        frozen: why none of its shares may be accepted, revealed or purged, None if they may.
        frozen_shares: number of its unconfirmed shares, 0 while it is not frozen.
        unconfirmed: changes in the last list that are not confirmed.
        is_wait_logged: whether the missing confirmation of its end was logged.
    """

    round_id: bytes
    known: Round | None = None
    is_agreed: bool = True
    earliest_end: int | None = None
    is_past: bool = False
    is_closed: bool = False
    is_purged: bool = False
    has_shares: bool = False
    is_in_store: bool = False
    status_height: int = 0
    changed_height: int = 0
    end_reporters: set[str] = field(default_factory=set)
    frozen: str | None = None
    frozen_shares: int = 0
    unconfirmed: dict[RoundField, ReportedValue] = field(default_factory=dict)
    is_wait_logged: bool = False
    _reports: dict[tuple[RoundField, str], _Report] = field(default_factory=dict)  # by field and node

    @property
    def stored(self) -> Round | None:
        """The round as stored, None if it is not stored."""
        return None if self.is_past else self.known

    @property
    def order(self) -> tuple[int, bytes]:
        """Sort key of rounds, oldest first."""
        return 0 if self.known is None else self.known.created_at_height, self.round_id

    @property
    def is_open(self) -> bool:
        """Whether the round is stored and not closed."""
        return self.stored is not None and not self.is_closed

    @property
    def is_foreign(self) -> bool:
        """Whether the round is neither stored nor purged and has no shares."""
        return self.stored is None and not self.is_purged and not self.has_shares

    @property
    def is_needed(self) -> bool:
        """Whether the record contains more than what nodes have reported."""
        is_marked = self.is_closed or self.is_purged or self.is_in_store
        return self.known is not None or self.has_shares or is_marked or self.frozen is not None

    @property
    def is_reported_ended(self) -> bool:
        """Whether the round has ended, as known or as any node reports."""
        if self.known is not None and self.known.status in ENDED_STATUSES:
            return True
        statuses = [report.value for (changed, _), report in self._reports.items() if changed is RoundField.STATUS]
        return any(status in ENDED_STATUSES for status in statuses)

    def is_new(self, listed: Round) -> bool:
        """Whether the round as a node lists it must be agreed before it is stored."""
        if self.is_closed or self.is_purged or (listed.status in ENDED_STATUSES and self.is_foreign):
            return False
        return self.stored is None or not self.is_agreed or self.stored.status is RoundStatus.PENDING

    def drop_listing(self) -> None:
        """Forget a round that is not agreed and that no node lists any more."""
        self.known, self.is_agreed, self.earliest_end = None, True, None

    def has_ended(self, chain_time: float | None) -> bool:
        """Whether a block at or after the round's end was processed."""
        return chain_time is not None and self.known is not None and self.known.vote_end_time <= chain_time

    def is_update(self, listed: Round) -> bool:
        """Whether the round must be stored as listed."""
        if self.stored is None or not self.is_agreed or self.is_past or self.is_purged or self.frozen is not None:
            return False
        return listed != self.known

    def invalid_reason(self, listed: Round | UnknownStatusRound | None, height: int) -> str | None:
        """Why a node's listing of the round is invalid, or None."""
        assert self.known is not None
        may_lag = height < self.status_height + _MAX_LAG_BLOCKS
        if listed is None:
            # The chain may drop a finished round; a node that lags may not have a new one yet.
            done = self.known.status is RoundStatus.FINALIZED or self.is_closed or self.is_past
            return None if done or may_lag else "no longer listed"
        if listed.created_at_height != self.known.created_at_height:
            return "listed with a different created_at_height"
        is_back = isinstance(listed, Round) and listed.status is RoundStatus.PENDING is not self.known.status
        if isinstance(listed, Round) and is_back and not may_lag:
            return f"status regressed from {self.known.status.name} to {listed.status.name}"
        return None

    def changes(self, listed: Round | UnknownStatusRound, height: int) -> dict[RoundField, ReportedValue]:
        """The fields of the known round that a node at this height lists differently.

        A node a few blocks below the height of a change may still list the previous value. Of rounds that had
        ended when first listed, only the status is compared.
        """
        assert self.known is not None
        changes: dict[RoundField, ReportedValue] = {}
        if self.is_closed:
            return changes
        if not self.is_past and height >= self.changed_height + _MAX_LAG_BLOCKS:
            if listed.vote_end_time != self.known.vote_end_time:
                changes[RoundField.END] = listed.vote_end_time
            proposals = _find_proposals_change(self.known, listed) if isinstance(listed, Round) else None
            if proposals is not None:
                changes[RoundField.PROPOSALS] = proposals
        status = _find_status_change(self.known.status, listed.status) if isinstance(listed, Round) else None
        if status is None or (self.is_past and status in ENDED_STATUSES):
            return changes
        is_back = _STATUS_ORDER[status] < _STATUS_ORDER[self.known.status]
        if not (is_back and height < self.status_height + _MAX_LAG_BLOCKS):
            changes[RoundField.STATUS] = status
        return changes

    def note_ended(self, node: str, listed: Round, head: BlockHead | None, *, is_consistent: bool) -> None:
        """Record whether a node reports the round as ended.

        Args:
            node: the node's name.
            listed: the round as the node lists it.
            head: the node's newest block before the request, None before the first.
            is_consistent: whether the node lists at most the status differently.
        """
        if not is_consistent or listed.status not in ENDED_STATUSES:
            self.end_reporters.discard(node)
        elif head is not None and head.time >= listed.vote_end_time:
            self.end_reporters.add(node)

    def note_changes(self, node: str, changes: dict[RoundField, ReportedValue], height: int) -> None:
        """Replace the changes that a node at this height reports. In memory only; a restart starts over."""
        for changed in RoundField:
            value, last_report = changes.get(changed), self._reports.get((changed, node))
            if value is None:
                self._reports.pop((changed, node), None)
            elif last_report is None or last_report.value != value:
                self._reports[changed, node] = _Report(value, height)

    def find_confirmed(
        self, changed: RoundField, heights: Mapping[str, int], needed: int, *, blocks: int = CONFIRMING_BLOCKS
    ) -> ReportedValue | None:
        """The value that enough nodes report, or None.

        None as well if the nodes report more than one value.

        Args:
            changed: the field of the round.
            heights: the present height of every configured node, by name.
            needed: see `agreement.needed_nodes`.
            blocks: blocks for which the only configured node must have reported it.
        """
        reports = {
            node: report for (name, node), report in self._reports.items() if name is changed and node in heights
        }
        if len(heights) == 1:
            lasting_values = [r.value for node, r in reports.items() if heights[node] >= r.since_height + blocks]
            return lasting_values[0] if lasting_values else None
        return agreed({node: report.value for node, report in reports.items()}, needed)

    def revert_changes(self, listed: Round) -> Round:
        """The listed round with the known values of all fields that need a confirmation."""
        stored = self.stored
        assert stored is not None
        is_change = (
            _find_status_change(stored.status, listed.status) is not None or listed.status is RoundStatus.PENDING
        )
        # Nothing depends on whether a closed round is tallied or finalized.
        is_finalized = self.is_closed and (stored.status, listed.status) == ENDED_STATUSES
        return replace(
            listed,
            vote_end_time=stored.vote_end_time,
            status=stored.status if is_change and not is_finalized else listed.status,
            proposals=stored.proposals if _find_proposals_change(stored, listed) is not None else listed.proposals,
        )

    def note_confirmed(self, changed: RoundField, height: int) -> None:
        """Record that a change was confirmed at a height."""
        self.changed_height = height
        self.unconfirmed.pop(changed, None)
        self._reports = {key: report for key, report in self._reports.items() if key[0] is not changed}
        if changed is RoundField.END:
            self.end_reporters.clear()

    def mark_purged(self) -> None:
        """Drop the round except its purged mark. A round that had ended when first listed remains known."""
        self.is_purged, self.has_shares = True, False
        self.known = self.known if self.is_past else None
        self.end_reporters.clear()
        self.unconfirmed.clear()
        self._reports.clear()

    def describe_unconfirmed(self, changed: RoundField, value: ReportedValue) -> str:
        """Describe an unconfirmed change for messages."""
        if changed is RoundField.END and self.known is not None:
            return f"vote_end_time {value} reported but not confirmed; known: {self.known.vote_end_time}"
        status = f"; known: {self.known.status.name}" if changed is RoundField.STATUS and self.known else ""
        return f"{describe_value(changed, value)} reported but not confirmed{status}"


def _find_status_change(known_status: RoundStatus, reported: RoundStatus) -> RoundStatus | None:
    """The status that a node reports as a change, None if it reports none.

    A pending round becomes active immediately, because wallets do not retry a refused share. For an active round, the
    status is reduced to TALLYING, so that nodes a few blocks apart report the same change.
    """
    if reported is known_status or reported is RoundStatus.PENDING:
        return None
    if (known_status, reported) == (RoundStatus.PENDING, RoundStatus.ACTIVE):
        return None
    return RoundStatus.TALLYING if reported in ENDED_STATUSES and known_status not in ENDED_STATUSES else reported


def _find_proposals_change(known_round: Round, reported: Round) -> tuple[Proposal, ...] | None:
    """Reported proposals that differ from the known ones, or None."""
    return reported.proposals if known_round.proposals and reported.proposals != known_round.proposals else None
