"""Store of the queue, with the same interface on SQLite and PostgreSQL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import structlog

from helper.clock import Clock
from helper.core.dispatch_order import DueShare
from helper.core.share import Share, ShareKey, ShareState
from helper.errors import StoreCorrupt, StoreError
from helper.store.action_models import Actor, ImportedShare, RowVersion, ValidatedShare
from helper.store.ledger import LEDGER_KEY, BlockRange, Ledger, parse_ledger
from helper.store.models import (
    DamagedShare,
    EnqueueResult,
    PreparedReveal,
    QueuedShare,
    QueueFilter,
    RoundLike,
    SentReveal,
    SpentNullifier,
    StoredRound,
)
from helper.store.operations import actions as action_operations
from helper.store.operations import blocks, import_, messages, shares
from helper.store.operations import rounds as round_operations
from helper.store.operations.rounds import LEAF_BYTES
from helper.store.queue_reader import QueueReader
from helper.store.table_rows import RoundRow, Row, read_meta_value
from helper.store.transaction import RowReader, is_exclusive, read_round_key
from helper.store.writer_thread import WriterStats, WriterThread

log = structlog.get_logger("helper.store")

P = ParamSpec("P")
T = TypeVar("T")

BATCH_SHARES: Final = 200
"""Maximum number of shares changed per transaction of a longer operation, so that POST requests are not delayed."""
CHECK_BATCH_SHARES: Final = 100
"""Number of shares read per transaction of the background check; it takes a few milliseconds."""


def report_damaged(share: DamagedShare) -> None:
    """Log a row that was quarantined."""
    log.error(
        "damaged_share_quarantined",
        key=share.ref,
        reason="the row is damaged on disk",
        advice="If a wallet posts it again, it is replaced. Other helpers of the round may still reveal it; restore a "
        "backup to reveal it here.",
    )


class Store(QueueReader, ABC):
    """The queue: shares, prepared messages, rounds, trees, spent nullifiers and the audit log.

    All changes are on disk (fsync) when the awaited call returns. A change completes even if its caller is cancelled.
    Every method may raise `StoreError` (no change was stored), and `StoreFull` if the disk is full.

    A method that changes one share returns False (or 0) if the share was confirmed in the meantime, or failed because
    its round was closed. It raises `StoreError` if the transition is not legal from the share's state.

    Args:
        clock: source of the times in history entries.
        writer: runs the operations.
        reader: runs the service's own reads.
        operator_reader: runs the reads of operators, which may take long.
    """

    _first_rank = 0
    """Rank at which this host's order of overdue shares begins."""
    has_found_damage = False
    """Whether a check since the start has found damage other than of quarantined shares."""

    def __init__(self, clock: Clock, writer: WriterThread[Any], reader: RowReader, operator_reader: RowReader) -> None:
        super().__init__(operator_reader)
        self._clock = clock
        self._writer = writer
        self._reader = reader

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)

    async def _run(self, op: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation with these arguments; see `WriterThread.run`."""
        return await self._writer.run(lambda tx: op(tx, *args, **kwargs), is_exclusive=is_exclusive(op))

    # ------------------------------------------------------------------ the database

    @abstractmethod
    async def open(self) -> None:
        """Create or open the database.

        Raises:
            StoreForeign: it belongs to another program or a newer version.
            StoreCorrupt: it is damaged.
            StoreLocked: another process has it open.
        """

    @abstractmethod
    async def close(self) -> None:
        """Complete the operations that were submitted, and close the database."""

    @abstractmethod
    async def wait_for_erasure(self) -> None:
        """Wait until all data deleted before this call is erased from the files."""

    @abstractmethod
    async def verify(self) -> list[str]:
        """Check the entire database, quarantine damaged shares and rebuild damaged indexes.

        Returns:
            Descriptions of the problems that were found, without the quarantined shares.
        """

    @property
    def has_met_damage(self) -> bool:
        """Whether a change failed because the database is damaged, and no check has found damage since the start."""
        return self._writer.has_met_damage and not self.has_found_damage

    @property
    def write_error(self) -> str | None:
        """Reason why the last changes could not be stored, None if they were stored."""
        return self._writer.write_error

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log of a database file; 0 for a shared database."""
        return 0

    @property
    def erasure_pending_seconds(self) -> float:
        """Seconds for which deleted rows have not been erased from a database file; 0 if there are none."""
        return 0.0

    @property
    def stats(self) -> WriterStats:
        """Counters of the writer thread since the start."""
        return self._writer.stats

    async def ping_writer(self) -> None:
        """Return once the writer thread has run, regardless of the state of the disk."""
        with suppress(StoreError):
            await self._writer.run(lambda _tx: None)

    # ------------------------------------------------------------------ other hosts; by default there are none

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may use the same queue."""
        return False

    async def get_sender_host(self) -> str:
        """Return the host that holds the sender lease; "" if none does, or if no other host can use the queue."""
        return ""

    async def has_prover(self) -> bool:
        """Return whether a host that uses the queue proves shares; the only host of a file does."""
        return True

    async def measure_clock_skew(self) -> float:
        """Return the seconds that the database's clock is ahead of this host's; 0 if they are the same clock."""
        return 0.0

    def listen(self, callback: Callable[[str], None]) -> None:
        """Register a callback for notifications of other hosts, called on the event loop. Call this before `open`.

        The notifications are `DUE_NOTIFICATION` and `PREPARED_NOTIFICATION`. A notification is only a wake-up signal
        and may be lost; the payload "" means that some may have been lost.
        """

    # ------------------------------------------------------------------ start-up and maintenance

    async def recover(self) -> int:
        """On start, return every WITNESSED share to RECEIVED with its own due time. Returns how many."""
        return await self._run_batches(shares.requeue_orphaned_batch, self._now_ms(), BATCH_SHARES)

    async def _run_batches(
        self, op: Callable[Concatenate[Any, P], tuple[int, bool]], *args: P.args, **kwargs: P.kwargs
    ) -> int:
        """Run an operation until it returns that no shares are left. Returns the sum of its counts."""
        total, has_more = 0, True
        while has_more:
            changed, has_more = await self._run(op, *args, **kwargs)
            total += changed
        return total

    async def _check_rows(self) -> None:
        after: int | None = 0
        while after is not None:
            after = await self._run(messages.check_batch, self._now_ms(), after, CHECK_BATCH_SHARES)

    # ------------------------------------------------------------------ wallets

    async def enqueue(self, share: Share, nullifier: bytes, *, now: float) -> EnqueueResult:
        """Store a share, in place of its row if that is damaged.

        Args:
            share: as the wallet posted it.
            nullifier: 32 bytes.
            now: Unix seconds.

        Returns:
            QUEUED if it is now on disk. MOVED_UP if it waits and its due time is now the earlier one of this post.
            DUPLICATE if its key is known in any state or its nullifier is spent, CLOSED if another host has closed its
            round; then nothing changes.
        """
        return await self._writer.run(shares.EnqueueOperation(share, nullifier, now))

    async def is_known(self, key: ShareKey) -> bool:
        """Return whether a share with this key was accepted in a round that is not purged."""
        key_rows = await self._reader.fetch("round_key", (key.round_id,))
        if not key_rows:
            return False
        round_key = read_round_key(key_rows[0], self._writer.keys)
        mac = round_key.mac(key)
        return bool(
            await self._reader.fetch("get_share_id", (mac,))
            or await self._reader.fetch("has_tombstone", (round_key.no, mac))
        )

    async def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        """Return whether this nullifier is spent on the chain."""
        key_rows = await self._reader.fetch("round_key", (round_id,))
        return bool(key_rows and await self._reader.fetch("is_spent", (key_rows[0][0], nullifier)))

    # ------------------------------------------------------------------ proving and sending

    async def claim_due(self, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
        """Claim at most `limit` due shares of `rounds`, RECEIVED -> WITNESSED, in order of due time and rank.

        Rows that fail their check are quarantined and never returned.
        """
        return await self._run(shares.claim_due, now=now, limit=limit, rounds=tuple(rounds))

    async def claim_listed(self, ids: Sequence[int], *, now: float) -> list[QueuedShare]:
        """Claim shares returned by `list_due`, RECEIVED -> WITNESSED, in this order.

        Shares that are no longer due are omitted: they may have been confirmed, or claimed by another host.
        """
        return await self._run(shares.claim_listed, now=now, ids=tuple(ids))

    async def list_due(self, round_id: bytes, *, now: float, limit: int, by_rank: bool) -> list[DueShare]:
        """Return the first due shares of a round, without claiming them.

        Args:
            round_id: 32 bytes.
            now: Unix seconds.
            limit: maximum number.
            by_rank: in this helper's own order, else by due time and rank. Hosts begin at different ranks, so that
                they do not claim the same shares. All due shares of the round are read: 20 ms of CPU per 100,000.
        """
        params: dict[str, Any] = {"round_id": round_id, "now_ms": int(now * 1000), "limit": limit}
        rows = (
            await self._reader.fetch("due_by_rank", {**params, "start": self._first_rank})
            if by_rank
            else await self._reader.fetch("due_by_time", params)
        )
        # A damaged index may contain anything; `claim_due` handles it.
        return [DueShare(*row) for row in rows if all(isinstance(value, int) for value in row)]

    async def count_waiting(self) -> dict[bytes, int]:
        """Return the number of shares in RECEIVED by round, due or not; rounds without any are omitted."""
        rows = await self._reader.fetch("counts")
        return {round_id: number for round_id, state, number in rows if state == ShareState.RECEIVED}

    async def count_claiming_hosts(self) -> int:
        """Return the number of hosts that hold claims on shares, at least 1."""
        return 1

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        """Return the earliest due time (unix ms) of the pending shares of `rounds`, None if there are none."""
        wanted, rows = frozenset(rounds), await self._reader.fetch("next_due") if rounds else []
        due_times = [due_ms for round_id, due_ms in rows if round_id in wanted]
        return min((due_ms for due_ms in due_times if isinstance(due_ms, int)), default=None)

    async def requeue(self, share_id: int, *, due_ms: int | None = None, stage: str, note: str) -> bool:
        """WITNESSED or BROADCAST -> RECEIVED without spending an attempt; its message is deleted.

        If `due_ms` is None, its due time is unchanged.
        """
        return await self._run(shares.requeue, share_id, self._now_ms(), due_ms, stage=stage, note=note)

    async def release_claim(self, share_id: int) -> bool:
        """WITNESSED -> RECEIVED with its own due time, after an internal error; no change in any other state."""
        return await self._run(shares.release_claim, share_id, self._now_ms())

    async def record_crash(self, share_id: int, *, due_ms: int, note: str) -> int:
        """WITNESSED -> RECEIVED after a prover worker crashed on it. Returns its crashes so far."""
        return await self._run(shares.record_crash, share_id, self._now_ms(), due_ms, note)

    async def retry(self, share_id: int, *, due_ms: int, stage: str, note: str) -> int:
        """Any working state -> RECEIVED at `due_ms`, spending an attempt. Returns its attempts so far.

        A share that is already RECEIVED (after a crash) remains so; the attempt and the due time are stored.
        """
        return await self._run(shares.retry, share_id, self._now_ms(), due_ms, stage=stage, note=note)

    async def fail(self, share_id: int, *, stage: str, note: str) -> bool:
        """RECEIVED, WITNESSED or BROADCAST -> FAILED. The witness remains until the round is purged."""
        return await self._run(shares.fail, share_id, self._now_ms(), stage=stage, note=note)

    async def prepare(self, share_id: int, prepared: PreparedReveal) -> bool:
        """Store a share's message before it is sent: WITNESSED -> BROADCAST."""
        return await self._run(messages.prepare, share_id, prepared, self._now_ms())

    async def mark_sending(self, share_id: int, *, height: int, endpoint: str, decide_height: int = 0) -> bool:
        """Record that sending starts, before the first byte is sent, and the height of the next decision.

        Returns False if the share is not in BROADCAST or this host may not send it.
        """
        return await self._run(
            messages.mark_sending, share_id, self._now_ms(), height, endpoint, decide_height=decide_height
        )

    async def record_outcome(self, share_id: int, *, outcome: str, decide_height: int = 0) -> None:
        """Record the result of the latest send, if the share is still in BROADCAST and this host may send it."""
        await self._run(messages.record_outcome, share_id, self._now_ms(), outcome, decide_height=decide_height)

    async def get_sent_reveal(self, share_id: int) -> SentReveal | None:
        """Return the stored message of a share in BROADCAST, None if it is in another state."""
        sound = await self._read_sent(await self._reader.fetch("sent_reveal", (share_id,)))
        return sound[0] if sound else None

    async def list_follow_ups(self, *, height: int, limit: int) -> list[int]:
        """Return the ids of shares in BROADCAST whose message needs a decision at this height.

        At most `limit` ids are returned: the longest overdue first, then those claimed first, and last those whose
        nullifier a node reports as spent. The order of arrival is not used, because sending in this order would reveal
        it. The cost depends on the number of results, not on the number of shares in BROADCAST.
        """
        return (await self._list_to_decide("follow_ups", {"height": height, "limit": limit}))[:limit]

    async def list_sent_ahead(self, *, height: int, limit: int) -> list[int]:
        """Return the ids of shares in BROADCAST whose last send was at this height or, as recorded, above it.

        They are those that `list_follow_ups` does not return at this height.
        """
        return await self._list_to_decide("sent_ahead", {"height": height, "limit": limit})

    async def _list_to_decide(self, name: str, params: Mapping[str, int]) -> list[int]:
        rows = await self._read_in_broadcast(name, params)
        return [row[0] for row in sorted(rows, key=_follow_up_sort_key)]

    async def list_unconfirmed(self, *, limit: int = 1000, after_id: int = 0) -> list[SentReveal]:
        """Return the shares in BROADCAST with an id above `after_id`, by id; empty only if there are no more."""
        while rows := await self._read_in_broadcast("unconfirmed", {"limit": limit, "after": after_id}):
            if sound := await self._read_sent(rows):
                return sound
            after_id = rows[-1][1]
        return []

    async def _read_in_broadcast(self, name: str, params: Mapping[str, int]) -> list[Row]:
        try:
            return await self._reader.fetch(name, params)
        except StoreCorrupt:
            # A row is unreadable. The writer quarantines it, so that the others can be read.
            await self._run(messages.check_broadcast_shares, self._now_ms())
            return await self._reader.fetch(name, params)

    async def _read_sent(self, rows: Iterable[Row]) -> list[SentReveal]:
        """Convert rows to messages. The writer quarantines damaged ones, because reads cannot."""
        sound, damaged = messages.read_sent(rows, self._writer.keys.row_check)
        if damaged:
            await self._run(messages.quarantine, damaged, self._now_ms())
        return sound

    # ------------------------------------------------------------------ rounds

    async def save_rounds(self, rounds: Sequence[RoundLike], now: float) -> None:
        """Store rounds as the chain lists them; their closed and alerted marks are unchanged."""
        await self._run(round_operations.save_rounds, tuple(rounds), int(now * 1000))

    async def list_rounds(self) -> list[StoredRound]:
        """Return all stored rounds, the oldest first. A damaged row is omitted until the chain lists the round."""
        rows = [(row[0], RoundRow(*row[1:])) for row in await self._reader.fetch("rounds")]
        return [row.to_stored_round(round_id) for round_id, row in rows if row.is_sound(self._writer.keys.row_check)]

    async def mark_closed(self, round_id: bytes, now: float) -> None:
        """Record that the chain has closed the round; an earlier mark is unchanged."""
        await self._run(round_operations.mark_closed, round_id, int(now * 1000))

    async def mark_alerted(self, round_id: bytes, now: float) -> None:
        """Record that unconfirmed shares of the round were reported; an earlier mark is unchanged."""
        await self._run(round_operations.mark_alerted, round_id, int(now * 1000))

    async def fail_unspent(self, round_id: bytes, *, note: str) -> int:
        """Fail all shares of a closed round that are not confirmed. Returns how many."""
        return await self._run_batches(
            round_operations.fail_unconfirmed_batch, round_id, note, self._now_ms(), BATCH_SHARES
        )

    async def count_unconfirmed(self, round_id: bytes) -> dict[ShareState, int]:
        """Return the number of shares of the round that are not confirmed, by state."""
        return {ShareState(state): n for state, n in await self._reader.fetch("round_counts", (round_id,))}

    async def purge(self, round_id: bytes) -> int:
        """Delete all data of a closed round. Returns the number of shares, including tombstones.

        Failed shares remain only as counts by stage and reason (`list_purged_failures`).
        """
        return await self._run_batches(round_operations.purge_batch, round_id, self._now_ms(), BATCH_SHARES)

    async def delete_old_failure_counts(self) -> int:
        """Delete failure counts of purged rounds that are older than their retention. Returns how many rows."""
        return await self._run(round_operations.delete_old_counts, self._now_ms())

    # ------------------------------------------------------------------ blocks

    async def apply_blocks(
        self, heights: Sequence[BlockRange], spent: Sequence[SpentNullifier], *, now: float
    ) -> list[int]:
        """Record the nullifiers of these blocks as spent, confirm the shares among them, and record the blocks as read.

        Idempotent. Blocks between the greatest one read and these are then unread. Returns the ids of the shares that
        this call confirmed.
        """
        return await self._run(blocks.apply_blocks, tuple(heights), tuple(spent), int(now * 1000))

    async def add_spent(self, spent: Sequence[SpentNullifier]) -> list[int]:
        """Like `apply_blocks`, without a block."""
        return await self._run(blocks.add_spent, tuple(spent), self._now_ms())

    async def list_unspent(self, nullifiers: Iterable[SpentNullifier]) -> list[SpentNullifier]:
        """Return those nullifiers of stored rounds that are not stored as spent, in any order."""
        return await self._run(blocks.list_unspent, tuple(nullifiers))

    async def get_ledger(self) -> Ledger | None:
        """Return which blocks are read, None before the first start."""
        return parse_ledger(await self.get_meta(LEDGER_KEY))

    async def begin_ledger(self, first: int) -> None:
        """Start the ledger: the blocks from `first` on are unread. Nothing changes if there is a ledger."""
        await self._run(blocks.begin_ledger, first)

    async def give_up_blocks(self, last: int) -> None:
        """Record the unread blocks up to `last` as read although they were not, because every node has pruned them."""
        await self._run(blocks.give_up_blocks, last)

    async def move_back(self, last: int, *, first: int) -> None:
        """Forget the blocks above `last`, and record those from `first` to it as unread.

        Nothing changes if no block above `last` was read.
        """
        await self._run(blocks.move_back, last, first)

    async def begin_rescan(self, first: int) -> Ledger:
        """Record the blocks from `first` to the greatest one read as to be read again.

        Blocks before the oldest stored round are omitted, because they contain no reveal of a stored round.
        """
        return await self._run(blocks.rescan, first)

    # ------------------------------------------------------------------ commitment trees

    async def save_leaves(self, round_id: bytes, height: int, start_index: int, leaves: bytes) -> None:
        """Store the leaves that one block appended to a round's tree (n × 32 bytes). Idempotent.

        Raises:
            LeavesMissing: earlier leaves are not stored.
            StoreError: they contradict the stored leaves.
        """
        await self._run(round_operations.save_leaves, round_id, height, start_index, leaves)

    async def load_leaves(self, round_id: bytes) -> tuple[bytes, int]:
        """Return the leaves of a round's tree up to the first gap, and the height of their last block (0 if none)."""
        pieces: list[bytes] = []
        size = last = 0
        for start, height, leaves in await self._reader.fetch("load_leaves", (round_id,)):
            if start != size:
                break
            pieces.append(leaves)
            size += len(leaves) // LEAF_BYTES
            last = height
        return b"".join(pieces), last

    async def save_subtrees(self, round_id: bytes, first_index: int, subtrees: bytes) -> None:
        """Store the inner nodes of complete subtrees (each 1023 × 32 bytes), from subtree `first_index` on."""
        await self._run(round_operations.save_subtrees, round_id, first_index, subtrees)

    async def load_subtrees(self, round_id: bytes) -> bytes:
        """Return the inner nodes of the subtrees 0, 1, … up to the first that is missing."""
        subtrees = await self._reader.fetch("load_subtrees", (round_id,))
        return b"".join(nodes for n, (index, nodes) in enumerate(subtrees) if n == index)

    async def delete_tree(self, round_id: bytes) -> None:
        """Delete the leaves and subtrees of a round."""
        await self._run(round_operations.delete_tree, round_id)

    # ------------------------------------------------------------------ metadata

    async def get_meta(self, key: str) -> str | None:
        """Return a stored text, None if there is none or it is damaged."""
        return read_meta_value(await self._reader.fetch("get_meta", (key,)))

    async def set_meta(self, key: str, value: str) -> None:
        """Store a text."""
        await self._run(blocks.set_meta, key, value)

    # ------------------------------------------------------------------ operator actions

    async def begin_action(self, actor: Actor, name: str, parameters: Mapping[str, Any]) -> int:
        """Record in the audit log that an action begins. Call this before its first change. Returns its number."""
        return await self._run(action_operations.begin_action, actor, name, dict(parameters), self._now_ms())

    async def end_action(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Record the outcome of an action."""
        await self._run(action_operations.end_action, number, dict(outcome), self._now_ms())

    async def retry_failed(
        self, ids: Sequence[int], query: QueueFilter, *, closed: Collection[bytes], note: str, dry_run: bool
    ) -> Counter[str]:
        """FAILED -> RECEIVED at the time of their first attempt with attempts reset, for the shares that match.

        A share that is RECEIVED and waits for a retry is changed in the same way.

        Args:
            ids: row ids; the caller bounds their number.
            query: the filter that they must match.
            closed: closed rounds, in addition to those marked closed; their shares remain failed.
            note: text of the history entry.
            dry_run: only count.

        Returns:
            How many were `retried`, and how many are unchanged because their round is `closed`, or because they were
            `moved` to another machine and the filter is not for this stage.
        """
        return await self._run(
            action_operations.retry_failed,
            tuple(ids),
            query,
            closed=frozenset(closed),
            note=note,
            at_ms=self._now_ms(),
            dry_run=dry_run,
        )

    async def mark_moved(self, versions: Sequence[RowVersion], *, note: str, idle_only: bool) -> Counter[str]:
        """Fail shares that an export moves to another machine (stage `MOVED`), unless their row has changed.

        Args:
            versions: the rows as they were exported.
            note: text of the history entry.
            idle_only: only shares in RECEIVED or FAILED. Set while a helper is running, which may be processing the
                others.

        Returns:
            How many were `moved`, and how many `stayed`.
        """
        return await self._run(action_operations.mark_moved, tuple(versions), note, self._now_ms(), idle_only=idle_only)

    async def import_shares(self, shares: Sequence[ValidatedShare], *, note: str, dry_run: bool) -> list[ImportedShare]:
        """Import shares of another machine's export. No share is due before its `submit_at`.

        Returns:
            The results in the order of `shares`.
        """
        return await self._run(import_.import_shares, tuple(shares), note, self._now_ms(), dry_run=dry_run)


def _follow_up_sort_key(row: Row) -> tuple[int, ...]:
    """Return the sort key of a follow-up. Damaged values sort first; the row check detects them when it is read."""
    return tuple(value if isinstance(value, int) else 0 for value in row[1:])
