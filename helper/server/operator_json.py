"""Documents of the responses to queries of the operator API. Pure.

Each record is a class of its own, so that a new column is not shown unintentionally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from helper.chain.chain_data import Round, RoundAuthentication, RoundStatus
from helper.core.json_records import HEX_32, fact
from helper.core.share import ShareState
from helper.observability.queue_snapshot import SOURCE, ShareCounts, Source, enum_name
from helper.store.audit_log import ActionRow
from helper.store.ledger import Ledger, Rescan, count_heights, find_unread
from helper.store.models import FailedShares, QueueEntry, ShareDetails, StoredRound, TransactionRow

Counts = Mapping[bytes, Mapping[ShareState, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareList:
    """`queue list`."""

    source: Source = fact(SOURCE)
    shares: Sequence[QueueEntry] = fact("Matching shares in order of due time, up to the limit.")
    failed: Sequence[FailedShares] | None = fact(
        "With --state failed: failures by stage and reason, latest first.", optional=True
    )


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """An event."""

    at: float = fact("Time in Unix seconds.")
    stage: str = fact("Stage of the event.")
    note: str = fact("Text of the event.")
    counted: bool = fact("Whether the event spent an attempt.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHistory(QueueEntry):
    """`queue show`: all details of one share except its witness."""

    source: Source = fact(SOURCE)
    received: float = fact("Time of arrival in Unix seconds.")
    vote_end_time: int | None = fact("End of the round in Unix seconds; null if the round is unknown.")
    cannot_count: bool = fact(
        "Whether `submit_at` is the end of the round, which is too late for the chain to count the share."
    )
    next_attempt: float | None = fact(
        "Unix seconds of the next attempt; null if none is scheduled before the round ends."
    )
    attempts_by_stage: Mapping[str, int] = fact("Number of attempts spent by stage.")
    history: Sequence[HistoryRow] = fact("Events, oldest first.")
    transaction: TransactionRow | None = fact("The stored transaction, if it may have been sent; otherwise null.")


class KnownRound(NamedTuple):
    """A round as a helper, or its database file, knows it. `frozen_reason` is None if it is not frozen."""

    round: Round | StoredRound
    tree_size: int
    is_closed: bool
    frozen_reason: str | None = None
    authentication: RoundAuthentication = RoundAuthentication.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """A round and its shares."""

    round: str = fact("Round id, hex.", pattern=HEX_32)
    status: str = fact("Status on the chain: pending, active, tallying or finalized.")
    ends: int = fact("End of the round in Unix seconds.")
    created_at_height: int = fact("Height of the block that created the round.")
    tree_size: int = fact("Number of stored leaves of the round's tree.")
    closed: bool = fact("Whether the chain has closed the round.")
    frozen: str | None = fact("Why the round is frozen; null if it is not.")
    left: float = fact("Seconds until the end; 0 after it.")
    authentication: RoundAuthentication = fact(
        "Whether a trusted key signed the round in the published voting configuration. unknown: there is no"
        " configuration yet, its trusted keys are not known, or no helper is running."
    )
    shares: ShareCounts = fact("Number of shares by state.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundList:
    """`rounds`."""

    source: Source = fact(SOURCE)
    now: float = fact("Current time in Unix seconds: the chain's, or this machine's if no helper is running.")
    rounds: Sequence[RoundRow] = fact("Rounds in order of their end, latest first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionList:
    """`queue audit`."""

    source: Source = fact(SOURCE)
    actions: Sequence[ActionRow] = fact("Operator actions, latest first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RescanState:
    """`chain rescan`."""

    source: Source = fact(SOURCE)
    first: int | None = fact(
        "First block of the rescan; null if it has no blocks. It is not below the oldest stored round.",
        serialization_alias="from",
    )
    last: int | None = fact("Last block of the rescan; null if it has no blocks.", serialization_alias="to")
    blocks: int = fact("Number of blocks of the rescan.")
    left: int = fact("Number of blocks that are not read yet.")
    read: int = fact("Number of blocks read.")
    pruned: int = fact("Number of blocks that could not be read, because every node has pruned them.")
    added: int = fact("Number of nullifiers found that were not stored before.")
    confirmed: int = fact("Number of this queue's shares that were confirmed by them.")
    pruned_blocks: Sequence[tuple[int, int]] = fact("The pruned blocks, as pairs of first and last height.")


def describe_share(details: ShareDetails, *, source: Source) -> ShareHistory:
    """`queue show`."""
    entry, end = details.entry, details.vote_end_time
    is_scheduled = entry.state == ShareState.WAITING.json_name and (end is None or entry.due < end)
    return ShareHistory(
        **asdict(entry),
        source=source,
        received=details.received_ms / 1000,
        vote_end_time=end,
        cannot_count=entry.submit_at == end,
        next_attempt=entry.due if is_scheduled else None,
        attempts_by_stage=details.attempts_by_stage,
        history=[
            HistoryRow(event.at_ms / 1000, event.stage, event.note, event.spent_attempt) for event in details.history
        ],
        transaction=details.transaction,
    )


def list_rounds(rounds: Iterable[KnownRound], counts: Counts, *, now: float, source: Source) -> RoundList:
    """`rounds`: each round with its counts, the latest end first; `now` in Unix seconds."""
    rows = [
        RoundRow(
            round=each.round.round_id.hex(),
            status=enum_name(RoundStatus, each.round.status),
            ends=each.round.vote_end_time,
            created_at_height=each.round.created_at_height,
            tree_size=each.tree_size,
            closed=each.is_closed,
            frozen=each.frozen_reason,
            left=max(0.0, round(each.round.vote_end_time - now, 3)),
            authentication=each.authentication,
            shares=ShareCounts.of(counts.get(each.round.round_id, {})),
        )
        for each in sorted(rounds, key=lambda each: (-each.round.vote_end_time, each.round.round_id))
    ]
    return RoundList(source=source, now=round(now, 3), rounds=rows)


def describe_rescan(ledger: Ledger, rescan: Rescan, *, source: Source) -> RescanState:
    """`chain rescan`: the state of a rescan of blocks."""
    blocks = max(0, rescan.last - rescan.first + 1)
    left, pruned = count_heights(find_unread(ledger, rescan.first, rescan.last)), count_heights(rescan.pruned)
    return RescanState(
        source=source,
        first=rescan.first if blocks else None,
        last=rescan.last if blocks else None,
        blocks=blocks,
        left=left,
        read=blocks - left - pruned,
        pruned=pruned,
        added=rescan.added,
        confirmed=rescan.confirmed,
        pruned_blocks=[(heights[0], heights[1]) for heights in rescan.pruned],
    )
