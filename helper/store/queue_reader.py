"""What operators may read of a queue, on either database."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Protocol

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.action_rows import Action, PurgedFailures
from helper.store.operations.actions import read_action
from helper.store.records import Column, RoundKeyRow, RoundRow
from helper.store.rows import (
    MINUTES_AHEAD,
    DamagedShare,
    DueAhead,
    FailureGroup,
    HistoryEntry,
    QueueEntry,
    QueueFilter,
    QueueStory,
    RoundOutlook,
    StoredRound,
)
from helper.store.share_listing import ListedShare, Row, conditions, entry_of, list_shares, ref_bounds
from helper.store.transaction import Params, read_fact


class RevealFacts(NamedTuple):
    """A row of the query `reveal_facts`."""

    tx_hash: bytes | None = None
    anchor_height: int | None = None
    circuit: str | None = None
    sends: int = 0
    first_sent_height: int | None = None
    last_sent_height: int | None = None
    last_endpoint: str | None = None
    last_outcome: str | None = None


class RowReader(Protocol):
    """Runs named queries on a database connection that only reads."""

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query.

        Raises:
            StoreError: the database cannot be read.
        """
        ...


class QueueReader:
    """Reads for operators. Results contain no witness field, position or nullifier.

    Every method may raise `StoreError`.

    Args:
        operators: the connection for these reads. They may take long, so the service has another one for its own.
    """

    def __init__(self, operators: RowReader) -> None:
        self._operators = operators

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Number of shares by round and state, tombstones as SUBMITTED. States without shares are left out."""
        found: dict[bytes, dict[ShareState, int]] = {}
        for round_id, state, number in await self._operators.fetch("counts"):
            found.setdefault(round_id, {})[ShareState(state)] = number
        return found

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        """The first `limit` live shares that match, by due time."""
        return await list_shares(self._operators.fetch, query, limit)

    async def show(self, share_ref: str) -> QueueStory | None:
        """Details and history of the share whose reference starts with `share_ref` (at least 6 hex characters).

        Returns None if no share or more than one matches.
        """
        bounds = ref_bounds(share_ref)
        rows = [] if bounds is None else await self._operators.fetch("shares_by_prefix", bounds)
        if len(rows) != 1:
            return None
        share = ListedShare(*rows[0])
        history = tuple(
            HistoryEntry(at_ms, stage, note, bool(counted))
            for at_ms, stage, note, counted in await self._operators.fetch("history", (share.id,))
        )
        entry = entry_of(share)
        rows = await self._operators.fetch("reveal_facts", (share.id,)) if entry.state is ShareState.BROADCAST else []
        reveal = RevealFacts(*rows[0]) if rows else RevealFacts()
        return QueueStory(
            entry=entry,
            received_ms=share.received_ms,
            vote_end_time=share.vote_end_time,
            history=(HistoryEntry(share.received_ms, "accepted", "", counted=False), *history),
            attempts_by_stage=dict(Counter(line.stage for line in history if line.counted)),
            tx_hash=reveal.tx_hash,
            anchor_height=reveal.anchor_height,
            circuit=reveal.circuit,
            sends=reveal.sends,
            first_sent_height=reveal.first_sent_height,
            last_sent_height=reveal.last_sent_height,
            last_endpoint=reveal.last_endpoint,
            last_outcome=reveal.last_outcome,
        )

    async def share_ids(self, ref: str) -> list[int]:
        """Row ids of the live shares whose reference starts with `ref`, at most two; none if it is malformed."""
        bounds = ref_bounds(ref)
        return [] if bounds is None else [row[0] for row in await self._operators.fetch("ids_by_prefix", bounds)]

    async def failed_ids(self, round_id: bytes | None, *, after_id: int, limit: int) -> list[int]:
        """Row ids above `after_id` of failed shares, of one round or of all, ascending. Reads an index only."""
        round_no: int | None = None
        if round_id is not None:
            found = await self._operators.fetch("round_key", (round_id,))
            if not found:
                return []
            round_no = RoundKeyRow(*found[0]).no
        params: dict[str, Column] = {"round_no": round_no, "after": after_id, "limit": limit}
        return [row[0] for row in await self._operators.fetch("failed_ids", params)]

    async def damaged(self) -> list[DamagedShare]:
        """The rows that were set aside because their check failed."""
        found = await self._operators.fetch("damaged")
        return [DamagedShare(ref, round_id, state) for ref, round_id, state in found]

    async def failures(self, *, limit: int) -> list[FailureGroup]:
        """Failed shares grouped by stage and reason, the latest first."""
        return [FailureGroup(*row) for row in await self._operators.fetch("failures", {"limit": limit})]

    async def failed_groups(self, query: QueueFilter, *, limit: int) -> list[FailureGroup]:
        """Failed shares that match a filter, grouped by stage and reason, the latest first."""
        if query.state not in {None, ShareState.FAILED}:
            return []
        params: dict[str, Column] = {**conditions(query), "round_id": query.round_id, "limit": limit}
        return [FailureGroup(*row) for row in await self._operators.fetch("failed_groups", params)]

    async def purged_failures(self) -> list[PurgedFailures]:
        """Failures of rounds that were purged in the last days, by day, stage and reason, the latest day first."""
        return [PurgedFailures(*row) for row in await self._operators.fetch("failed_before")]

    async def due_ahead(self, *, now: float) -> dict[bytes, DueAhead]:
        """Due times of the waiting shares by round; rounds without waiting shares are left out.

        Args:
            now: unix seconds.
        """
        found: dict[bytes, DueAhead] = {}
        for (round_id,) in await self._operators.fetch("all_round_ids"):
            params: dict[str, Column] = {"round_id": round_id, "now_ms": int(now * 1000), "minutes": MINUTES_AHEAD}
            by_minute: dict[int, int] = dict(await self._operators.fetch("due_ahead", params))
            waiting = by_minute.pop(-1, 0)
            if by_minute or waiting:
                minutes = tuple(by_minute.get(minute, 0) for minute in range(MINUTES_AHEAD))
                found[round_id] = DueAhead(minutes, max(0, waiting - sum(minutes)))
        return found

    async def outlook(self, *, now: float) -> list[RoundOutlook]:
        """Per round: its end, its shares by state, and due times of those that wait.

        Args:
            now: unix seconds.
        """
        rows = {row[0]: RoundRow(*row[1:]) for row in await self._operators.fetch("rounds")}
        numbers, ahead = await self.counts(), await self.due_ahead(now=now)
        nothing = DueAhead((0,) * MINUTES_AHEAD, 0)
        return [
            RoundOutlook(
                round_id=round_id,
                status=rows[round_id].status if round_id in rows else None,
                vote_end_time=rows[round_id].vote_end_time if round_id in rows else None,
                counts=numbers.get(round_id, {}),
                ahead=ahead.get(round_id, nothing),
            )
            for (round_id,) in await self._operators.fetch("all_round_ids")
        ]

    async def rounds(self) -> list[StoredRound]:
        """All stored rounds, the oldest first; a damaged row is left out until the chain lists its round again.

        Raises:
            StoreCorrupt: the key of the row checks is damaged.
        """
        key = read_fact(await self._operators.fetch("get_meta", ("key.rows",)))
        if key is None:
            raise StoreCorrupt("the database is damaged: the key of its row checks does not match its own check")
        found = [(row[0], RoundRow(*row[1:])) for row in await self._operators.fetch("rounds")]
        return [row.stored(round_id) for round_id, row in found if row.is_sound(bytes.fromhex(key))]

    async def tree_sizes(self) -> dict[bytes, int]:
        """Number of stored leaves by round."""
        return dict(await self._operators.fetch("tree_sizes"))

    async def rounds_of_spent(self, nullifier: bytes) -> list[bytes]:
        """The rounds in which the chain has counted a nullifier, whoever revealed it."""
        return [row[0] for row in await self._operators.fetch("rounds_of_spent", (nullifier,))]

    async def actions(self, *, limit: int) -> list[Action]:
        """The latest operator actions of the audit log, newest first."""
        return [read_action(row) for row in await self._operators.fetch("actions", (limit,))]
