"""Operations on single shares: taking in, claiming, moving. They run on the writer thread, inside its transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from helper.errors import StoreError
from helper.schedule import due_ms, rank
from helper.share import TRANSITIONS, Share, ShareState
from helper.store.records import ShareRow, short
from helper.store.rows import Enqueued, QueuedShare
from helper.store.tx import Tx

HISTORY_KEPT: Final = 50
"""Notes kept of one share; older ones go, except those that cost an attempt."""
CLOSED: Final = "closed"
"""The stage at which a share fails that was not counted when its round was closed."""
DUE: Final = "due"
"""What hosts are told when a share comes in that is due soon."""
SOON_MS: Final = 2_000
"""What is due later is found by those who look every second."""
_STAGE_CHARS: Final = 32

_WORKING: Final = frozenset({ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST})
_IN_HAND: Final = frozenset({ShareState.WITNESSED, ShareState.BROADCAST})


@dataclass(frozen=True, slots=True)
class Move:
    """A change of one share's state, and what is told about it.

    Attributes:
        sources: the states from which it is meant; each must be legal in `TRANSITIONS`, or the target itself.
        target: the state that it leads to.
        stage: where it happens.
        note: what is told.
        at_ms: unix milliseconds now.
        due_ms: the new time, None to keep the share's own.
        attempts: attempts to add, or None to begin anew with none.
        crashes: crashes to add.
        proved_height: chain height of a new proof, None to keep.
        by_anyone: also where it is another host that works on the share.
    """

    sources: frozenset[ShareState]
    target: ShareState
    stage: str
    note: str
    at_ms: int
    due_ms: int | None = None
    attempts: int | None = 0
    crashes: int = 0
    proved_height: int | None = None
    by_anyone: bool = False


def enqueue(tx: Tx, share: Share, nullifier: bytes, now: float) -> Enqueued:
    """Keep a share, unless its key is known or its nullifier is spent."""
    tx.beside()
    key = tx.need_round(share.round_id)
    mac = key.mac(share.key)
    if tx.one("is_taken", {"round_no": key.no, "mac": mac, "nullifier": nullifier}) is not None:
        return Enqueued.DUPLICATE
    row = ShareRow(
        round_id=share.round_id,
        id=tx.new_id(),
        round_no=key.no,
        mac=mac,
        share_index=share.share_index,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        tree_position=share.tree_position,
        submit_at=share.submit_at,
        shares_hash=share.shares_hash,
        share_comms=share.share_comms,
        primary_blind=share.primary_blind,
        c1=share.c1,
        c2=share.c2,
        nullifier=nullifier,
        received_ms=int(now * 1000),
        rank=rank(tx.keys.order, mac),
        state=ShareState.RECEIVED.value,
        due_ms=due_ms(share.submit_at, now),
        attempts=0,
        crashes=0,
        proved_height=None,
        stage="accepted",
        note="",
    ).sealed(tx.keys.rows)
    tx.run("add_share", row.columns())
    if row.due_ms <= row.received_ms + SOON_MS:
        tx.tell(DUE)
    tx.count(key.no, ShareState.RECEIVED, 1)
    return Enqueued.QUEUED


def claim_due(tx: Tx, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
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


def _take_back(tx: Tx, at_ms: int, limit: int) -> None:
    """Put back, at their own times, shares of hosts that have not been heard of for too long."""
    note = "the host that worked on it was not heard of"
    change = Move(frozenset({ShareState.WITNESSED}), ShareState.RECEIVED, "proof", note, at_ms, by_anyone=True)
    for share_id in tx.lapsed(limit):
        move(tx, share_id, change)


def _due_row(tx: Tx, share_id: int, now_ms: int) -> ShareRow | None:
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


def _claim(tx: Tx, row: ShareRow) -> QueuedShare:
    claimed = row._replace(state=ShareState.WITNESSED.value, stage="proof", note="taken up")
    rewrite(tx, row, claimed)
    tx.take_up(row.id)
    return claimed.queued()


def move(tx: Tx, share_id: int, change: Move) -> ShareRow | None:
    """Move a share, with a line in its history; the row after it.

    Returns:
        None when the share is not there any more (it was confirmed), is set aside, failed with its round, or is another
        host's.

    Raises:
        StoreError: the share stands in a state from which this move is not meant.
    """
    row = load_for(tx, share_id, change)
    return None if row is None else move_row(tx, row, change)


def move_row(tx: Tx, row: ShareRow, change: Move) -> ShareRow:
    """Move a share whose row `load_for` has given in this transaction; the row after it.

    Raises:
        StoreError: the share stands in a state from which this move is not meant.
    """
    was = check_source(row, change)
    if was is ShareState.BROADCAST and change.target is ShareState.RECEIVED:
        tx.run("drop_reveal", (row.id,))
    moved = row._replace(
        state=change.target.value,
        due_ms=row.due_ms if change.due_ms is None else change.due_ms,
        attempts=0 if change.attempts is None else row.attempts + change.attempts,
        crashes=0 if change.attempts is None else row.crashes + change.crashes,
        proved_height=row.proved_height if change.proved_height is None else change.proved_height,
        stage=short(change.stage, _STAGE_CHARS),
        note=short(change.note),
    )
    moved = rewrite(tx, row, moved)
    _tell(tx, moved, change.at_ms, counted=bool(change.attempts))
    return moved


def check_source(row: ShareRow, change: Move) -> ShareState:
    """The state that a share is in, if the move is meant from it and legal.

    Raises:
        StoreError: it is not; the text names both states.
    """
    was = ShareState(row.state)
    if was not in change.sources or change.target not in TRANSITIONS[was] | {was}:
        raise StoreError(
            f"a share that is {was.name} can not become {change.target.name}",
            advice="This is a fault of the helper: report it.",
        )
    return was


def load_for(tx: Tx, share_id: int, change: Move) -> ShareRow | None:
    """A sound row for a change, None when there is nothing left to change.

    Then it is gone, or set aside; or it failed when its round was closed, which may happen while its proof is made or
    its message sent; or another host has taken it up, or sends it.
    """
    row = load(tx, share_id, change.at_ms)
    if row is None or not (change.by_anyone or _is_ours(tx, row)):
        return None
    if row.state == ShareState.FAILED and row.stage == CLOSED:
        return row if ShareState.FAILED in change.sources else None
    return row


def _is_ours(tx: Tx, row: ShareRow) -> bool:
    """Whether a share is this host's to change: it has its proof in hand, or sends what is proven."""
    return tx.sends() if row.state == ShareState.BROADCAST else tx.holds(row)


def load(tx: Tx, share_id: int, at_ms: int) -> ShareRow | None:
    """A sound row, None when there is none; a damaged one is set aside and counts as none."""
    row = tx.live(share_id)
    if row is not None and not row.is_sound(tx.keys.rows):
        tx.set_aside(share_id, row.damaged(), at_ms)
        return None
    return row


def rewrite(tx: Tx, was: ShareRow, row: ShareRow) -> ShareRow:
    """Write a changed row, if it still stands where it was read; the row with its check. The schema knows the moves.

    Raises:
        StoreError: it does not.
    """
    row = row.sealed(tx.keys.rows)
    changed = tx.run(
        "change_share",
        {
            "id": row.id,
            "was": was.state,
            "state": row.state,
            "due_ms": row.due_ms,
            "attempts": row.attempts,
            "crashes": row.crashes,
            "proved_height": row.proved_height,
            "stage": row.stage,
            "note": row.note,
            "row_check": row.row_check,
        },
    )
    if changed != 1:
        raise StoreError(f"share {row.id} changed under the writer: a second program writes to this file")
    if was.state != row.state:
        tx.count(row.round_no, was.state, -1)
        tx.count(row.round_no, row.state, 1)
    if was.state == ShareState.WITNESSED:
        tx.lay_down(row.id)
    return row


def _tell(tx: Tx, row: ShareRow, at_ms: int, *, counted: bool) -> None:
    """Add a line to a share's history, and drop what is too old."""
    told = tx.one(
        "add_history",
        {"id": row.id, "at_ms": at_ms, "stage": row.stage, "note": row.note, "counted": int(counted)},
    )
    if told is not None and told[0] > HISTORY_KEPT:
        tx.run("trim_history", (row.id, told[0] - HISTORY_KEPT))


# ---------------------------------------------------------------------- the moves


def back(share_id: int, at_ms: int, due_ms: int | None, stage: str, note: str) -> Callable[[Tx], bool]:
    """WITNESSED or BROADCAST -> RECEIVED without an attempt."""
    change = Move(_IN_HAND, ShareState.RECEIVED, stage, note, at_ms, due_ms)
    return lambda tx: move(tx, share_id, change) is not None


def crash(share_id: int, at_ms: int, due_ms: int, note: str) -> Callable[[Tx], int]:
    """WITNESSED -> RECEIVED, one crash more; the crashes so far."""
    change = Move(frozenset({ShareState.WITNESSED}), ShareState.RECEIVED, "proof", note, at_ms, due_ms, crashes=1)

    def op(tx: Tx) -> int:
        row = move(tx, share_id, change)
        return 0 if row is None else row.crashes

    return op


def again(share_id: int, at_ms: int, due_ms: int, stage: str, note: str) -> Callable[[Tx], int]:
    """-> RECEIVED, one attempt more; the attempts so far."""
    change = Move(_WORKING, ShareState.RECEIVED, stage, note, at_ms, due_ms, attempts=1)

    def op(tx: Tx) -> int:
        row = move(tx, share_id, change)
        return 0 if row is None else row.attempts

    return op


def give_up(share_id: int, at_ms: int, stage: str, note: str, *, spend_attempt: bool) -> Callable[[Tx], bool]:
    """-> FAILED."""
    change = Move(_WORKING, ShareState.FAILED, stage, note, at_ms, attempts=int(spend_attempt))
    return lambda tx: move(tx, share_id, change) is not None


def revive(share_id: int, at_ms: int, due_ms: int | None, note: str) -> Callable[[Tx], bool]:
    """FAILED -> RECEIVED with all attempts back; a message of old is dropped."""
    change = Move(frozenset({ShareState.FAILED}), ShareState.RECEIVED, "operator", note, at_ms, due_ms, attempts=None)

    def op(tx: Tx) -> bool:
        if move(tx, share_id, change) is None:
            return False
        tx.run("drop_reveal", (share_id,))
        return True

    return op


def release(tx: Tx, share_id: int, at_ms: int) -> bool:
    """WITNESSED -> RECEIVED; a share that stands elsewhere stays."""
    row = load(tx, share_id, at_ms)
    if row is None or row.state != ShareState.WITNESSED:
        return False
    change = Move(_IN_HAND, ShareState.RECEIVED, "proof", "put back after an error of the helper", at_ms)
    return move(tx, share_id, change) is not None


def recover_some(tx: Tx, at_ms: int, limit: int) -> int:
    """Put back some WITNESSED shares; 0 when there are no more."""
    note = "the helper was started again"
    change = Move(_IN_HAND, ShareState.RECEIVED, "restart", note, at_ms, by_anyone=True)
    ids = tx.left_behind(limit)
    if not ids and tx.one("is_any_hidden", {"state": ShareState.WITNESSED.value}) == (1,):
        # only a start puts these back: one that is not found now would wait for the next start
        tx.index_is_wrong()
    return sum(move(tx, share_id, change) is not None for share_id in ids)
