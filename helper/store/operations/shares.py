"""Operations on single shares: taking in, claiming, and their ways from there.

They run on the writer thread, inside its transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from helper.core.schedule import due_ms, rank
from helper.core.share import Share, ShareState
from helper.store.operations.transitions import Transition, load, move, rewrite
from helper.store.records import ShareRow, seal_all
from helper.store.rows import Enqueued, QueuedShare
from helper.store.transaction import Name, Transaction
from helper.store.write_jobs import BatchOperation

DUE: Final = "due"
"""What hosts are told when a share comes in that is due soon."""
SOON_MS: Final = 2_000
"""What is due later is found by those who look every second."""

_RECEIVED: Final = ShareState.RECEIVED.value
_WORKING: Final = frozenset({ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST})
_IN_HAND: Final = frozenset({ShareState.WITNESSED, ShareState.BROADCAST})


@dataclass(slots=True, eq=False)
class EnqueueOperation(BatchOperation):
    """A share to be kept.

    Attributes:
        share: what was posted.
        nullifier: 32 bytes.
        now: unix seconds.
    """

    share: Share
    nullifier: bytes
    now: float

    @classmethod
    def do_all(cls, tx: Transaction, operations: Sequence[EnqueueOperation]) -> list[Enqueued]:
        """Keep all that are new; what became of each, in their order."""
        return enqueue_all(tx, operations)


def enqueue(tx: Transaction, share: Share, nullifier: bytes, now: float) -> Enqueued:
    """Keep a share; see `enqueue_all`."""
    return enqueue_all(tx, [EnqueueOperation(share, nullifier, now)])[0]


def enqueue_all(tx: Transaction, arrivals: Sequence[EnqueueOperation]) -> list[Enqueued]:
    """Keep shares, unless their key is known or their nullifier spent, or their round was closed by another host.

    What becomes of each is what would if they came one after the other; it takes one look and one statement for many.
    """
    tx.beside()
    names = [_name(tx, one) for one in arrivals]
    taken = tx.are_taken(names)
    outcomes, rows = [], []
    here: set[bytes | tuple[int, bytes]] = set()
    for place, (one, (round_no, mac, nullifier)) in enumerate(zip(arrivals, names, strict=True)):
        if place in taken or mac in here or (round_no, nullifier) in here:
            outcomes.append(Enqueued.DUPLICATE)
        elif tx.is_over(round_no):
            outcomes.append(Enqueued.CLOSED)
        else:
            here |= {mac, (round_no, nullifier)}
            rows.append(_row(tx, one, round_no, mac))
            outcomes.append(Enqueued.QUEUED)
    tx.add_shares(seal_all(tx.keys.rows, rows))
    if any(row.due_ms <= row.received_ms + SOON_MS for row in rows):
        tx.tell(DUE)
    for round_no, number in Counter(row.round_no for row in rows).items():
        tx.count(round_no, ShareState.RECEIVED, number)
    return outcomes


def _name(tx: Transaction, one: EnqueueOperation) -> Name:
    key = tx.need_round(one.share.round_id)
    return key.no, key.mac(one.share.key), one.nullifier


def _row(tx: Transaction, one: EnqueueOperation, round_no: int, mac: bytes) -> ShareRow:
    """The row of a new share, without its check."""
    share = one.share
    return ShareRow(  # most of it by place: by name it would take twice as long
        share.round_id,
        tx.new_id(),
        round_no,
        mac,
        share.share_index,
        share.proposal_id,
        share.vote_decision,
        share.tree_position,
        share.submit_at,
        share.shares_hash,
        share.share_comms,
        share.primary_blind,
        share.c1,
        share.c2,
        one.nullifier,
        int(one.now * 1000),
        rank(tx.keys.order, mac),
        _RECEIVED,
        due_ms(share.submit_at, one.now),
        attempts=0,
        crashes=0,
        proved_height=None,
        stage="accepted",
        note="",
    )


def claim_due(tx: Transaction, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
    """Take up what is due, in order of time and rank over all these rounds."""
    now_ms = int(now * 1000)
    _take_back(tx, now_ms, limit)
    claimed: list[QueuedShare] = []
    seen: set[int] = set()
    going = True
    while going and len(claimed) < limit:
        due: list[tuple[int, int, int]] = []
        for round_id in rounds:
            key = tx.round_key(round_id)
            if key is not None:
                params = {"round_no": key.no, "now_ms": now_ms, "limit": limit - len(claimed)}
                for at_ms, place, share_id in tx.all("due_shares", params):
                    if isinstance(at_ms, int) and isinstance(place, int):
                        due.append((at_ms, place, share_id))
                    else:
                        tx.index_is_wrong()
        # No share twice, not even where a damaged index names it twice.
        ids = dict.fromkeys(share_id for _, _, share_id in sorted(due))
        fresh = [share_id for share_id in ids if share_id not in seen][: limit - len(claimed)]
        seen.update(fresh)
        rows = [row for share_id in fresh if (row := _due_row(tx, share_id, now_ms)) is not None]
        claimed += [_claim(tx, row) for row in rows]
        going = len(rows) < len(fresh)  # some were set aside: there may be others behind them
    return claimed


def _take_back(tx: Transaction, at_ms: int, limit: int) -> None:
    """Put back, at their own times, shares of hosts that have not been heard of for too long."""
    note = "the host that worked on it was not heard of"
    change = Transition(frozenset({ShareState.WITNESSED}), ShareState.RECEIVED, "proof", note, at_ms, by_anyone=True)
    for share_id in tx.lapsed(limit):
        move(tx, share_id, change)


def _due_row(tx: Transaction, share_id: int, now_ms: int) -> ShareRow | None:
    """The row that the index calls due, None when it was set aside."""
    row = load(tx, share_id, now_ms)
    if row is None:
        if tx.one("is_set_aside", (share_id,)) is None:
            tx.index_is_wrong()
        return None
    if row.due_ms > now_ms or row.state != ShareState.RECEIVED:
        tx.index_is_wrong()
        return None
    return row


def _claim(tx: Transaction, row: ShareRow) -> QueuedShare:
    claimed = row._replace(state=ShareState.WITNESSED.value, stage="proof", note="taken up")
    rewrite(tx, row, claimed)
    tx.acquire_claim(row.id)
    return claimed.queued()


# ---------------------------------------------------------------------- transitions


def requeue(share_id: int, at_ms: int, due_ms: int | None, stage: str, note: str) -> Callable[[Transaction], bool]:
    """WITNESSED or BROADCAST -> RECEIVED without spending an attempt."""
    change = Transition(_IN_HAND, ShareState.RECEIVED, stage, note, at_ms, due_ms)
    return lambda tx: move(tx, share_id, change) is not None


def record_crash(share_id: int, at_ms: int, due_ms: int, note: str) -> Callable[[Transaction], int]:
    """WITNESSED -> RECEIVED, counting a crash; the operation returns the crashes so far."""
    change = Transition(frozenset({ShareState.WITNESSED}), ShareState.RECEIVED, "proof", note, at_ms, due_ms, crashes=1)

    def op(tx: Transaction) -> int:
        row = move(tx, share_id, change)
        return 0 if row is None else row.crashes

    return op


def retry(share_id: int, at_ms: int, due_ms: int, stage: str, note: str) -> Callable[[Transaction], int]:
    """Any working state -> RECEIVED, spending an attempt; the operation returns the attempts so far."""
    change = Transition(_WORKING, ShareState.RECEIVED, stage, note, at_ms, due_ms, attempts=1)

    def op(tx: Transaction) -> int:
        row = move(tx, share_id, change)
        return 0 if row is None else row.attempts

    return op


def fail(share_id: int, at_ms: int, stage: str, note: str, *, spend_attempt: bool) -> Callable[[Transaction], bool]:
    """Any working state -> FAILED."""
    change = Transition(_WORKING, ShareState.FAILED, stage, note, at_ms, attempts=int(spend_attempt))
    return lambda tx: move(tx, share_id, change) is not None


def release_claim(tx: Transaction, share_id: int, at_ms: int) -> bool:
    """WITNESSED -> RECEIVED; no change in any other state."""
    row = load(tx, share_id, at_ms)
    if row is None or row.state != ShareState.WITNESSED:
        return False
    change = Transition(_IN_HAND, ShareState.RECEIVED, "proof", "put back after an error of the helper", at_ms)
    return move(tx, share_id, change) is not None


def recover_some(tx: Transaction, at_ms: int, limit: int) -> int:
    """Return some WITNESSED shares to RECEIVED; 0 if there are no more."""
    note = "the helper was started again"
    change = Transition(_IN_HAND, ShareState.RECEIVED, "restart", note, at_ms, by_anyone=True)
    ids = tx.orphaned_claims(limit)
    if not ids and tx.one("is_any_hidden", {"state": ShareState.WITNESSED.value}) == (1,):
        # only a start puts these back: one that is not found now would wait for the next start
        tx.index_is_wrong()
    return sum(move(tx, share_id, change) is not None for share_id in ids)
