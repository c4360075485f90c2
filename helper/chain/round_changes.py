"""Changes of a round that take effect only once enough nodes report them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from helper.chain.models import Proposal, Round, RoundStatus

CONFIRMING_NODES: Final = 2
"""Nodes that must report the same change where at least as many are configured."""
CONFIRMING_BLOCKS: Final = 10
"""Blocks for which the only configured node must report the same change."""
ENDED_STATUSES: Final = (RoundStatus.TALLYING, RoundStatus.FINALIZED)
"""The statuses of a round that accepts no more votes."""

ReportedValue = RoundStatus | int | tuple[Proposal, ...]
"""A reported status, `vote_end_time` or list of proposals."""


class RoundField(StrEnum):
    """The fields of a round that one node alone cannot change."""

    END = "vote_end_time"
    STATUS = "status"
    PROPOSALS = "proposals"
    UNKNOWN_STATUS = "unknown status"


def find_status_change(known: RoundStatus, reported: RoundStatus) -> RoundStatus | None:
    """The status that a node reports as a change, None if it reports none.

    A pending round becomes active immediately, because wallets do not retry a refused share. For an active round, the
    status is reduced to TALLYING, so that nodes a few blocks apart report the same change.
    """
    if reported is known or reported is RoundStatus.PENDING:
        return None
    if (known, reported) == (RoundStatus.PENDING, RoundStatus.ACTIVE):
        return None
    return RoundStatus.TALLYING if reported in ENDED_STATUSES and known not in ENDED_STATUSES else reported


def find_proposals_change(known: Round, reported: Round) -> tuple[Proposal, ...] | None:
    """Reported proposals that differ from the known ones, or None."""
    return reported.proposals if known.proposals and reported.proposals != known.proposals else None


def apply_change(known: Round, field: RoundField, value: ReportedValue) -> Round:
    """The round with a confirmed change."""
    if isinstance(value, RoundStatus):
        return replace(known, status=value)
    if isinstance(value, tuple):
        return replace(known, proposals=value)
    assert field is RoundField.END
    return replace(known, vote_end_time=value)


def revert_changes(known: Round | None, reported: Round) -> Round:
    """The reported round with the known values of all fields that need a confirmation."""
    if known is None:
        return reported
    is_change = find_status_change(known.status, reported.status) is not None or reported.status is RoundStatus.PENDING
    return replace(
        reported,
        vote_end_time=known.vote_end_time,
        status=known.status if is_change else reported.status,
        proposals=known.proposals if find_proposals_change(known, reported) is not None else reported.proposals,
    )


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


class ReportedChanges:
    """Reported changes of one round by field and node. Held in memory only; a restart starts over."""

    def __init__(self) -> None:
        self._reports: dict[RoundField, dict[str, _Report]] = {}

    def record(self, field: RoundField, node: str, value: ReportedValue | None, height: int) -> None:
        """Record that a node at a height reports this value; None means no change."""
        if value is None:
            self._reports.get(field, {}).pop(node, None)
            return
        reports = self._reports.setdefault(field, {})
        known = reports.get(node)
        if known is None or known.value != value:
            reports[node] = _Report(value, height)

    def values(self, field: RoundField) -> list[ReportedValue]:
        """The unconfirmed values that nodes report for a field."""
        return [report.value for report in self._reports.get(field, {}).values()]

    def forget(self, field: RoundField) -> None:
        """Drop all reports about a field."""
        self._reports.pop(field, None)

    def find_confirmed(
        self, field: RoundField, heights: Mapping[str, int], *, blocks: int = CONFIRMING_BLOCKS
    ) -> ReportedValue | None:
        """The value that enough nodes report, or None.

        None as well if the nodes report more than one value.

        Args:
            field: the field of the round.
            heights: the present height of every configured node, by name.
            blocks: blocks for which the only configured node must have reported it.
        """
        reports = {node: report for node, report in self._reports.get(field, {}).items() if node in heights}
        if len(heights) < CONFIRMING_NODES:
            lasting_values = [r.value for node, r in reports.items() if heights[node] >= r.since_height + blocks]
            return lasting_values[0] if lasting_values else None
        agreed = [v for v, count in Counter(r.value for r in reports.values()).items() if count >= CONFIRMING_NODES]
        return agreed[0] if len(agreed) == 1 else None
