"""What every store does. The service knows this protocol only; `sqlite.py` is the one that ships.

All changes are on disk (fsync) when the awaited call returns, and go on to their end when the caller is
cancelled. Every method may raise `StoreError` (nothing was kept), and `StoreFull` when there is no space.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from helper.core.share import Share, ShareKey, ShareState
from helper.store.action_rows import FailedBefore
from helper.store.block_ranges import BlockRange
from helper.store.rows import (
    DamagedShare,
    DueAhead,
    Enqueued,
    FailureGroup,
    HistoryEntry,
    PreparedReveal,
    ProposalLike,
    QueuedShare,
    QueueEntry,
    QueueFilter,
    QueueStory,
    RoundLike,
    SentReveal,
    Spent,
    StoredRound,
)

__all__ = [
    "ChainStore",
    "DamagedShare",
    "DueAhead",
    "Enqueued",
    "FailureGroup",
    "HistoryEntry",
    "Outlook",
    "PreparedReveal",
    "ProposalLike",
    "Queue",
    "QueueEntry",
    "QueueFilter",
    "QueueStory",
    "QueuedShare",
    "RoundLike",
    "SentReveal",
    "Spent",
    "Store",
    "StoredRound",
    "WalletStore",
    "WorkStore",
]


class Queue(Protocol):
    """What operators may look at, on a running daemon or on the file alone."""

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state; SUBMITTED counts tombstones. States without shares are left out."""
        ...

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        """The first `limit` live shares that match, by time due."""
        ...

    async def show(self, share_ref: str) -> QueueStory | None:
        """The whole story of the one live share whose name begins with `share_ref` (6 hex characters on).

        None when there is none or more than one.
        """
        ...

    async def damaged(self) -> list[DamagedShare]:
        """The rows that were set aside."""
        ...

    async def failed_groups(self, wanted: QueueFilter, *, limit: int) -> list[FailureGroup]:
        """What failed for good and is not purged yet, by stage and reason, the latest first."""
        ...

    async def failed_before(self) -> list[FailedBefore]:
        """What had failed in rounds that were purged in the last days, by day, stage and reason."""
        ...

    async def rounds_of_spent(self, nullifier: bytes) -> list[bytes]:
        """The rounds in which the chain has counted a nullifier, whoever revealed it."""
        ...


class Outlook(Protocol):
    """What is told of the whole queue from second to second: sums only."""

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state."""
        ...

    async def due_ahead(self, *, now: float) -> dict[bytes, DueAhead]:
        """When the waiting shares of each round are due; rounds without any are left out."""
        ...

    async def failures(self, *, limit: int) -> list[FailureGroup]:
        """What failed for good, by stage and reason, the latest first."""
        ...


class WalletStore(Protocol):
    """What intake and the wallets' routes need."""

    async def enqueue(self, share: Share, nullifier: bytes, *, now: float) -> Enqueued:
        """Keep a share; DUPLICATE when its key is known (also failed or confirmed), CLOSED when another host has closed
        its round: nothing changes.
        """
        ...

    async def is_known(self, key: ShareKey) -> bool:
        """Whether a share with this key was ever taken, since its round is kept."""
        ...

    async def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        """Whether the chain has counted this nullifier."""
        ...


class WorkStore(Protocol):
    """What the processor and the reveal need.

    A method that changes one share returns False (or 0) when the share was confirmed meanwhile, or failed when its
    round was closed, and raises StoreError when the share stands in a state from which the move is not legal.
    """

    async def claim_due(self, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
        """Take up at most `limit` due shares of `rounds`, RECEIVED -> WITNESSED, in order of time and rank.

        A row that fails its check is set aside and never returned.
        """
        ...

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        """The earliest due time among the waiting shares of `rounds`, None when none waits."""
        ...

    async def put_back(self, share_id: int, *, due_ms: int | None = None, stage: str, note: str) -> bool:
        """WITNESSED or BROADCAST -> RECEIVED without an attempt, its message dropped.

        `due_ms` None keeps the time that it has.
        """
        ...

    async def release(self, share_id: int) -> bool:
        """WITNESSED -> RECEIVED at its own time, for work that ended in an error of ours; else nothing."""
        ...

    async def record_crash(self, share_id: int, *, due_ms: int, note: str) -> int:
        """A prover worker died over it: WITNESSED -> RECEIVED. Returns its crashes so far."""
        ...

    async def retry(self, share_id: int, *, due_ms: int, stage: str, note: str) -> int:
        """-> RECEIVED at `due_ms` with an attempt spent, from any working state. Returns its attempts so far.

        A share that is RECEIVED already (a crash put it back) stays so, with the attempt and the time.
        """
        ...

    async def fail(self, share_id: int, *, stage: str, note: str, spend_attempt: bool) -> bool:
        """Give a share up: RECEIVED, WITNESSED or BROADCAST -> FAILED. Its witness stays until the purge."""
        ...

    async def requeue(self, share_id: int, *, due_ms: int | None = None, note: str) -> bool:
        """An operator's retry: FAILED -> RECEIVED with all attempts back; `due_ms` None keeps its time."""
        ...

    async def prepare(self, share_id: int, prepared: PreparedReveal) -> bool:
        """Keep the message of a share before it is sent: WITNESSED -> BROADCAST."""
        ...

    async def mark_sending(self, share_id: int, *, height: int, endpoint: str) -> bool:
        """Note that sending begins, before the first byte leaves. False: not in BROADCAST, or not ours to send."""
        ...

    async def record_outcome(self, share_id: int, *, outcome: str) -> None:
        """Note what the latest send came to; nothing when it is not in BROADCAST any more, or not ours to send."""
        ...

    async def sent_reveal(self, share_id: int) -> SentReveal | None:
        """The kept message of one share in BROADCAST, None when it is not there any more."""
        ...

    async def follow_ups(self, *, height: int, limit: int) -> list[int]:
        """Shares in BROADCAST with something to do about their message after the block at `height`, by
        `helper.reveal.resend_policy.next_step`: at most `limit` ids, those first for which it has been so the longest,
        and among equals those first that were claimed first: nothing goes out in the order in which it came in.

        What it costs depends on what it finds, not on how many shares are in BROADCAST.
        """
        ...

    async def unconfirmed(self, *, limit: int = 1000, after_id: int = 0) -> list[SentReveal]:
        """The shares in BROADCAST with an id above `after_id`, by id."""
        ...


class ChainStore(Protocol):
    """What follows the chain: rounds, trees, spent nullifiers."""

    async def save_rounds(self, rounds: Sequence[RoundLike], now: float) -> None:
        """Keep the rounds as the chain tells them; marks of closing and alerting stand."""
        ...

    async def rounds(self) -> list[StoredRound]:
        """All rounds kept, by age on the chain."""
        ...

    async def mark_closed(self, round_id: bytes, now: float) -> None:
        """Note that the chain has closed the round; the first time stands."""
        ...

    async def mark_alerted(self, round_id: bytes, now: float) -> None:
        """Note that unsubmitted shares of the round were reported; the first time stands."""
        ...

    async def close_unspent(self, round_id: bytes, *, note: str) -> int:
        """Fail all shares of a closed round that are not confirmed. Returns how many."""
        ...

    async def unsubmitted(self, round_id: bytes) -> dict[ShareState, int]:
        """Shares of the round that are not confirmed, by state."""
        ...

    async def purge(self, round_id: bytes) -> int:
        """Erase everything of a closed round. Returns how many shares (with tombstones) went.

        Of those that had failed, stage and reason are counted, and nothing else is kept.
        """
        ...

    async def apply_block(self, height: int, spent: Sequence[Spent], *, now: float) -> list[int]:
        """Take in a block: nullifiers become spent, our shares among them confirmed, the cursor moves to it.

        Idempotent; the cursor never goes back. Returns the ids of the shares confirmed by this call.
        """
        ...

    async def add_spent(self, spent: Sequence[Spent]) -> list[int]:
        """The same without moving the cursor."""
        ...

    async def cursor(self) -> int | None:
        """The height that was reached: every block up to it was applied, or is in `unread_blocks`."""
        ...

    async def skip_to(self, height: int, *, first: int) -> None:
        """Move the cursor to `height` without reading; the blocks passed over are recorded as unread.

        Nothing changes if the cursor is at `height` or beyond. In a database without a cursor, the blocks from `first`
        on are recorded.
        """
        ...

    async def apply_unread(self, first: int, last: int, spent: Sequence[Spent], *, now: float) -> list[int]:
        """Apply the nullifiers of the unread blocks from `first` to `last`, and record these blocks as read.

        Idempotent; the cursor does not move. Returns the ids of the shares confirmed by this call.
        """
        ...

    async def unread_blocks(self) -> list[BlockRange]:
        """The ranges of blocks up to the cursor that are not read yet, ascending and disjoint."""
        ...

    async def save_leaves(self, round_id: bytes, height: int, start_index: int, leaves: bytes) -> None:
        """Keep the leaves that one block appended to a round's tree (n × 32 bytes). Idempotent.

        Raises:
            StoreError: they contradict what is kept, or leave a gap.
        """
        ...

    async def load_leaves(self, round_id: bytes) -> tuple[bytes, int]:
        """All leaves of a round's tree, and the height of the last block among them (0 for none)."""
        ...

    async def save_subtrees(self, round_id: bytes, first_index: int, subtrees: bytes) -> None:
        """Keep inner nodes of complete subtrees (each 1023 × 32 bytes), from subtree `first_index` on."""
        ...

    async def load_subtrees(self, round_id: bytes) -> bytes:
        """Inner nodes of the subtrees 0, 1, … up to the first that is missing."""
        ...

    async def drop_tree(self, round_id: bytes) -> None:
        """Forget the leaves and subtrees of a round."""
        ...

    async def get_meta(self, key: str) -> str | None:
        """A remembered text."""
        ...

    async def set_meta(self, key: str, value: str) -> None:
        """Remember a text."""
        ...


class Store(Queue, WalletStore, WorkStore, ChainStore, Protocol):
    """All of it."""

    async def open(self) -> None:
        """Make or open the file.

        Raises:
            StoreForeign: it is another program's, or a newer version's.
            StoreCorrupt: it is damaged.
            StoreLocked: another daemon has it open.
        """
        ...

    async def close(self) -> None:
        """Finish what is under way and let go of the file."""
        ...

    async def recover(self) -> int:
        """On start: every WITNESSED share back to RECEIVED at its own time. Returns how many."""
        ...

    async def sweep(self) -> int:
        """Forget what is kept of purged rounds' failures beyond its days."""
        ...
