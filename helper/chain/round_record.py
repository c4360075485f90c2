"""State of one round, and its comparison with a node's report. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from helper.chain.models import BlockHead, Round, RoundStatus, UnknownStatusRound
from helper.chain.round_changes import (
    ENDED_STATUSES,
    ReportedChanges,
    ReportedValue,
    RoundField,
    describe_value,
    find_proposals_change,
    find_status_change,
)

# The order in which a round's status moves.
_STATUS_ORDER = {RoundStatus.PENDING: 0, RoundStatus.ACTIVE: 1, RoundStatus.TALLYING: 2, RoundStatus.FINALIZED: 3}

_MAX_LAG_BLOCKS: Final = 3
"""A node up to this many blocks below the height of a change may legitimately not show the change yet."""


@dataclass(slots=True, eq=False)
class RoundRecord:
    """A round that a node has listed or the store contains.

    Attributes:
        round_id: 32 bytes.
        known: the round, None if it was never listed correctly or is purged.
        is_past: whether it was over when first listed; it is held in memory only.
        is_closed: whether the chain has closed it.
        is_purged: whether its data was deleted here.
        has_shares: whether the store had shares of it at the start.
        is_in_store: whether the store contained it when it was last read again.
        status_height: height of the node that reported the present status.
        changed_height: height at which the last change was confirmed.
        over_reporters: names of the nodes that report it as over.
        frozen: why none of its shares may be accepted, revealed or purged, None if they may.
        frozen_shares: number of its waiting shares, 0 while it is not frozen.
        unconfirmed: changes in the last list that are not confirmed.
        reported: the changes that each node reports.
        is_wait_logged: whether the missing confirmation of its end was logged.
    """

    round_id: bytes
    known: Round | None = None
    is_past: bool = False
    is_closed: bool = False
    is_purged: bool = False
    has_shares: bool = False
    is_in_store: bool = False
    status_height: int = 0
    changed_height: int = 0
    over_reporters: set[str] = field(default_factory=set)
    frozen: str | None = None
    frozen_shares: int = 0
    unconfirmed: dict[RoundField, ReportedValue] = field(default_factory=dict)
    reported: ReportedChanges = field(default_factory=ReportedChanges)
    is_wait_logged: bool = False

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
    def is_reported_over(self) -> bool:
        """Whether the round is over, as known or as any node reports."""
        if self.known is not None and self.known.status in ENDED_STATUSES:
            return True
        return any(status in ENDED_STATUSES for status in self.reported.values(RoundField.STATUS))

    def has_ended(self, chain_time: float | None) -> bool:
        """Whether a block at or after the round's end was processed."""
        return chain_time is not None and self.known is not None and self.known.vote_end_time <= chain_time

    def is_update(self, listed: Round) -> bool:
        """Whether the round must be stored as listed."""
        if self.is_past or self.is_purged or self.frozen is not None:
            return False
        if listed.status in ENDED_STATUSES and self.is_foreign:
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
            return f"status went back from {self.known.status.name} to {listed.status.name}"
        return None

    def changes(self, listed: Round | UnknownStatusRound, height: int) -> dict[RoundField, ReportedValue]:
        """The fields of the known round that a node at this height lists differently.

        A node a few blocks below the height of a change may still list the previous value. Of rounds that were over
        when first listed, only the status is compared.
        """
        assert self.known is not None
        changes: dict[RoundField, ReportedValue] = {}
        if self.is_closed:
            return changes
        if not self.is_past and height >= self.changed_height + _MAX_LAG_BLOCKS:
            if listed.vote_end_time != self.known.vote_end_time:
                changes[RoundField.END] = listed.vote_end_time
            proposals = find_proposals_change(self.known, listed) if isinstance(listed, Round) else None
            if proposals is not None:
                changes[RoundField.PROPOSALS] = proposals
        status = find_status_change(self.known.status, listed.status) if isinstance(listed, Round) else None
        if status is None or (self.is_past and status in ENDED_STATUSES):
            return changes
        is_back = _STATUS_ORDER[status] < _STATUS_ORDER[self.known.status]
        if not (is_back and height < self.status_height + _MAX_LAG_BLOCKS):
            changes[RoundField.STATUS] = status
        return changes

    def note_over(self, node: str, listed: Round, head: BlockHead | None, *, is_consistent: bool) -> None:
        """Record whether a node reports the round as over.

        Args:
            node: the node's name.
            listed: the round as the node lists it.
            head: the node's newest block before the request, None before the first.
            is_consistent: whether the node lists at most the status differently.
        """
        if not is_consistent or listed.status not in ENDED_STATUSES:
            self.over_reporters.discard(node)
        elif head is not None and head.time >= listed.vote_end_time:
            self.over_reporters.add(node)

    def note_changes(self, node: str, changes: dict[RoundField, ReportedValue], height: int) -> None:
        """Replace the changes that a node at this height reports."""
        for changed in RoundField:
            self.reported.record(changed, node, changes.get(changed), height)

    def note_confirmed(self, changed: RoundField, height: int) -> None:
        """Record that a change was confirmed at a height."""
        self.changed_height = height
        self.unconfirmed.pop(changed, None)
        self.reported.forget(changed)
        if changed is RoundField.END:
            self.over_reporters.clear()

    def mark_purged(self) -> None:
        """Drop the round except its purged mark. A round that was over when first listed remains known."""
        self.is_purged, self.has_shares = True, False
        self.known = self.known if self.is_past else None
        self.over_reporters.clear()
        self.unconfirmed.clear()
        self.reported = ReportedChanges()

    def describe_unconfirmed(self, changed: RoundField, value: ReportedValue) -> str:
        """Describe an unconfirmed change for messages."""
        if changed is RoundField.END and self.known is not None:
            return f"vote_end_time {value} reported and not confirmed; {self.known.vote_end_time} is known"
        status = f"; {self.known.status.name} is known" if changed is RoundField.STATUS and self.known else ""
        return f"{describe_value(changed, value)} reported and not confirmed{status}"
