"""Store of the queue, with the same interface on SQLite and PostgreSQL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import structlog

from helper.clock import Clock
from helper.core.dispatch_order import DueShare
from helper.core.share import ShareKey, ShareState
from helper.errors import RESTORE_ADVICE, HelperError, StoreCorrupt, StoreError
from helper.store import messages
from helper.store.ledger import LEDGER_KEY, Ledger, parse_ledger
from helper.store.messages import SentReveal
from helper.store.models import StoredRound
from helper.store.queue_reader import QueueReader
from helper.store.rounds import LEAF_BYTES, delete_old_failure_counts
from helper.store.table_rows import Row, read_meta_value, read_rounds
from helper.store.transaction import RowReader, read_round_key
from helper.store.writer_thread import WriterThread

log = structlog.get_logger("helper.store")

P = ParamSpec("P")
T = TypeVar("T")

BATCH_SHARES: Final = 200
"""Maximum number of shares changed per transaction of a longer operation, so that POST requests are not delayed."""
CHECK_BATCH_SHARES: Final = 100
"""Number of shares read per transaction of the background check; it takes a few milliseconds."""

# The restart is for a share that a damaged index hid at the start: the next one requeues it.
DAMAGE_ADVICE: Final = (
    f"Check the disk for errors, and restart the helper. If the problem is found again, {RESTORE_ADVICE}"
)
FIRST_CHECK_SECONDS: Final = 60.0
"""Seconds until the first check, which runs early because a damaged share may be due soon."""
CHECK_SECONDS: Final = 3600.0
"""Seconds between two checks. The checks are needed because a damaged index could hide a share."""


class Store(QueueReader, ABC):
    """The queue: shares, prepared messages, rounds, trees, spent nullifiers and the audit log.

    Changes are operations: functions over a transaction, which `run` runs. One that changes a share returns False (or
    0) if the share was confirmed in the meantime, or failed because its round was closed. It raises `StoreError` if the
    transition is not legal from the share's state. The other methods read, and may raise `StoreError`.

    Args:
        writer: runs the operations.
        reader: runs the service's own reads.
        operator_reader: runs the reads of operators, which may take long.
    """

    _first_rank = 0
    """Rank at which this host's order of overdue shares begins."""
    has_found_damage = False
    """Whether a check since the start has found damage other than of quarantined shares."""

    def __init__(self, writer: WriterThread[Any], reader: RowReader, operator_reader: RowReader) -> None:
        super().__init__(operator_reader)
        self._writer = writer
        self._reader = reader

    async def run(self, op: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation with these arguments: `await store.run(shares.claim_due, now=now, limit=10, rounds=ids)`.

        All its changes are on disk (fsync) when this returns. It completes even if the caller is cancelled.

        Raises:
            StoreError: no change was stored, as far as known.
            StoreFull: the disk is full.
        """
        return await self._writer.run(op, *args, **kwargs)

    async def run_batches(
        self, op: Callable[Concatenate[Any, int, P], tuple[int, bool]], *args: P.args, **kwargs: P.kwargs
    ) -> int:
        """Run an operation on `BATCH_SHARES` shares at a time, until it returns that none are left.

        Returns:
            The sum of its counts.
        """
        total, has_more = 0, True
        while has_more:
            changed, has_more = await self.run(op, BATCH_SHARES, *args, **kwargs)
            total += changed
        return total

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

    def renew_claims_while(self, can_prove: Callable[[], bool]) -> None:
        """Let other hosts take the shares that this one has claimed while it cannot prove. Call this before `open`."""

    async def _check_rows(self) -> None:
        after: int | None = 0
        while after is not None:
            after = await self.run(messages.check_batch, after, CHECK_BATCH_SHARES)

    # ------------------------------------------------------------------ reads of the service

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

    async def list_due(self, round_id: bytes, *, now: float, limit: int, by_rank: bool) -> list[DueShare]:
        """Return the first due shares of a round, by due time and rank, without claiming them.

        With `by_rank`, they are in this helper's own order. Hosts begin at different ranks, so that they do not claim
        the same shares. All due shares of the round are then read: 20 ms of CPU per 100,000.
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
        """Return the number of shares in WAITING by round, due or not; rounds without any are omitted."""
        rows = await self._reader.fetch("counts")
        return {round_id: number for round_id, state, number in rows if state == ShareState.WAITING}

    async def count_claiming_hosts(self) -> int:
        """Return the number of hosts that hold claims on shares, at least 1."""
        return 1

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        """Return the earliest due time (unix ms) of the pending shares of `rounds`, None if there are none."""
        wanted, rows = frozenset(rounds), await self._reader.fetch("next_due") if rounds else []
        due_times = [due_ms for round_id, due_ms in rows if round_id in wanted]
        return min((due_ms for due_ms in due_times if isinstance(due_ms, int)), default=None)

    async def get_sent_reveal(self, share_id: int) -> SentReveal | None:
        """Return the stored message of a share in SENT, None if it is in another state."""
        sound = await self._read_sent(await self._reader.fetch("sent_reveal", (share_id,)))
        return sound[0] if sound else None

    async def list_follow_ups(self, *, height: int, limit: int) -> list[int]:
        """Return the ids of shares in SENT whose message needs a decision at this height.

        At most `limit` ids are returned: the longest overdue first, then those claimed first, and last those whose
        nullifier a node reports as spent. The order of arrival is not used, because sending in this order would reveal
        it. The cost depends on the number of results, not on the number of shares in SENT.
        """
        return (await self._list_to_decide("follow_ups", {"height": height, "limit": limit}))[:limit]

    async def list_doubtful_waits(self, *, height: int, greatest: int, limit: int) -> list[int]:
        """Return the ids of shares in SENT that wait for a height above this one, if heights may be false.

        Their last send was at this height or, as recorded, above it; or the height that they wait for is at most
        `greatest`, which a node reports; or their nullifier is reported as spent. `list_follow_ups` does not return
        them at this height.
        """
        return await self._list_to_decide("doubtful_waits", {"height": height, "greatest": greatest, "limit": limit})

    async def _list_to_decide(self, name: str, params: Mapping[str, int]) -> list[int]:
        rows = await self._read_in_broadcast(name, params)
        return [row[0] for row in sorted(rows, key=_follow_up_sort_key)]

    async def list_unconfirmed(
        self, *, limit: int = 1000, after_id: int = 0, sent_by: int = messages.NO_LIMIT
    ) -> list[SentReveal]:
        """Return the shares in SENT with an id above `after_id`, by id; empty only if there are no more.

        Omits those whose message was first sent above the height `sent_by`.
        """
        params = {"limit": limit, "sent_by": sent_by}
        while rows := await self._read_in_broadcast("unconfirmed", {**params, "after": after_id}):
            if sound := await self._read_sent(rows):
                return sound
            after_id = rows[-1][1]
        return []

    async def _read_in_broadcast(self, name: str, params: Mapping[str, int]) -> list[Row]:
        try:
            return await self._reader.fetch(name, params)
        except StoreCorrupt:
            # A row is unreadable. The writer quarantines it, so that the others can be read.
            await self.run(messages.check_broadcast_shares)
            return await self._reader.fetch(name, params)

    async def _read_sent(self, rows: Iterable[Row]) -> list[SentReveal]:
        """Convert rows to messages. The writer quarantines damaged ones, because reads cannot."""
        sound, damaged = messages.read_sent(rows, self._writer.keys.row_check)
        if damaged:
            await self.run(messages.quarantine, damaged)
        return sound

    async def list_rounds(self) -> list[StoredRound]:
        """Return all stored rounds, the oldest first. A damaged row is omitted until the chain lists the round."""
        return read_rounds(await self._reader.fetch("rounds"), self._writer.keys.row_check)

    async def count_unconfirmed(self, round_id: bytes) -> dict[ShareState, int]:
        """Return the number of shares of the round that are not confirmed, by state."""
        rows = await self._reader.fetch("counts")
        return {ShareState(state): n for of, state, n in rows if of == round_id and state != ShareState.CONFIRMED}

    async def get_ledger(self) -> Ledger | None:
        """Return which blocks are read, None before the first start."""
        return parse_ledger(await self.get_meta(LEDGER_KEY))

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

    async def load_subtrees(self, round_id: bytes) -> bytes:
        """Return the inner nodes of the subtrees 0, 1, … up to the first that is missing."""
        subtrees = await self._reader.fetch("load_subtrees", (round_id,))
        return b"".join(nodes for n, (index, nodes) in enumerate(subtrees) if n == index)

    async def get_meta(self, key: str) -> str | None:
        """Return a stored text, None if there is none or it is damaged."""
        return read_meta_value(await self._reader.fetch("get_meta", (key,)))


def _follow_up_sort_key(row: Row) -> tuple[int, ...]:
    """Return the sort key of a follow-up. Damaged values sort first; the row check detects them when it is read."""
    return tuple(value if isinstance(value, int) else 0 for value in row[1:])


async def run_maintenance(store: Store, *, is_responsible: Callable[[], bool], clock: Clock) -> None:
    """Check the database every hour, and within a minute after damage was met, until cancelled.

    A failed check is logged and repeated the next time. Exactly one host of a cluster is responsible.
    """
    due = clock.monotonic()
    while True:
        await clock.sleep(FIRST_CHECK_SECONDS)
        if not is_responsible() or (clock.monotonic() < due and not store.has_met_damage):
            continue
        due = clock.monotonic() + CHECK_SECONDS
        try:
            await store.run(delete_old_failure_counts)
            for problem in await store.verify():
                log.error("database_damaged", reason=problem, advice=DAMAGE_ADVICE)
        except HelperError as error:
            log.error("database_check_failed", error=str(error), advice=error.advice)
