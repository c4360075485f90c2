"""Operations on shares: enqueue, claim, requeue, retry, fail, release, recover, and an operator's retries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from helper.core.dispatch_order import due_ms, rank
from helper.core.share import UNCONFIRMED_STATES, Share, ShareState
from helper.store.blocks import delete_share
from helper.store.messages import restore_message
from helper.store.models import MOVED, EnqueueResult, QueueFilter
from helper.store.table_rows import RevealRow, Row, ShareRow, add_row_checks, encode_witness, is_sound
from helper.store.transaction import ShareIdentity, StoredShare, TakenShare, Transaction
from helper.store.transitions import (
    Transition,
    apply_transition,
    apply_transition_to_batch,
    apply_transition_to_row,
    load_row,
    update_row,
)

DUE_NOTIFICATION: Final = "due"
"""Notification to hosts that a share that is due soon was enqueued."""
NOTIFY_WITHIN_MS: Final = 2_000
"""Shares due later need no notification: the dispatchers poll every second."""

HEALED_NOTE: Final = "posted again; replaced a damaged row"
LOST_MESSAGE_DELAY_MS: Final = 60_000
"""Delay of a new proof if the message is damaged too: about ten blocks, as before the first new proof."""

_MAX_KEYS_COMPARED: Final = 16
"""Maximum number of shares with one nullifier whose keys are compared: a false node may have served many positions."""
_RECEIVED: Final = ShareState.WAITING.value
IDLE_STATES: Final = frozenset({ShareState.WAITING, ShareState.FAILED})
_IN_PROGRESS: Final = frozenset({ShareState.PROVING, ShareState.SENT})


@dataclass(slots=True, eq=False)
class EnqueueOperation:
    """Store a share, in place of its row if that is damaged. The writer stores all that wait, with `enqueue_all`.

    QUEUED if it is now on disk. MOVED_UP if it waits and its due time is now the earlier one of this post. DUPLICATE if
    its key is known in any state or its nullifier is spent, CLOSED if its round is closed; then nothing
    changes.

    The same share at another position of the tree is another one until its nullifier is spent: a false node may have
    served its leaf at the position that was posted first, and it can be proven only at the other.
    """

    share: Share
    nullifier: bytes
    now: float

    def __call__(self, tx: Transaction) -> EnqueueResult:
        """Store only this share."""
        return enqueue_all(tx, [self])[0]


def enqueue_all(tx: Transaction, operations: Sequence[EnqueueOperation]) -> list[EnqueueResult]:
    """Store shares, unless the key is known, the nullifier is spent, or the round is closed.

    A share whose row is damaged is stored in place of it: a damaged row is never processed, so the share would be lost
    on this host although the wallet has posted it again. A known share that waits gets the earlier due time: another
    client that has seen it may have posted it first, with the latest one, and could reveal it anyway. The results
    equal those of enqueueing the shares one by one, but many shares need only one query and one statement, one more
    query if any of them is known, and two for each whose nullifier is queued under another key.
    """
    tx.lock_shared()
    identities = [_identify(tx, operation) for operation in operations]
    taken = find_known_shares(tx, identities)
    damaged, waiting = _find_known(tx, operations, taken)
    outcomes: list[EnqueueResult] = []
    rows: list[ShareRow] = []
    messages: list[tuple[ShareRow, RevealRow]] = []
    in_batch: dict[bytes, int] = {}  # by mac: index of the row in `rows`
    for index, (operation, identity) in enumerate(zip(operations, identities, strict=True)):
        mac = identity[1]
        row: ShareRow | None = None
        outcome = EnqueueResult.DUPLICATE
        if mac not in in_batch:
            if index in damaged:
                row, message = _create_replacement(tx, operation, identity, damaged[index])
                if row is not None and message is not None:
                    messages.append((row, message))
            elif index in waiting:
                row = _replace_waiting(tx, waiting[index], operation)
            elif index not in taken:
                row, outcome = _create_new(tx, operation, identity), EnqueueResult.CLOSED
        elif (at := in_batch.get(mac)) is not None and _moves_up(operation, rows[at], taken.get(index)):
            rows[at] = _move_up(rows[at], operation)
            outcome = EnqueueResult.MOVED_UP
        if row is not None:
            in_batch[mac] = len(rows)
            rows.append(row)
            outcome = EnqueueResult.MOVED_UP if index in waiting else EnqueueResult.QUEUED
        outcomes.append(outcome)
    tx.add_shares(add_row_checks(tx.keys.row_check, rows))
    if not rows:
        # Otherwise known shares would get their responses faster than new ones, by the time of a sync.
        tx.force_sync()
    for row, message in messages:
        restore_message(tx, row, message)
    notify_until_ms = max(int(operation.now * 1000) for operation in operations) + NOTIFY_WITHIN_MS
    if any(row.due_ms <= notify_until_ms for row in rows):
        tx.notify(DUE_NOTIFICATION)
    for round_no, number in Counter(row.round_no for row in rows).items():
        tx.adjust_count(round_no, ShareState.WAITING, number)
    return outcomes


def find_known_shares(tx: Transaction, identities: Sequence[ShareIdentity]) -> dict[int, TakenShare]:
    """Return the identities that are known or spent, by index.

    A live share with the same nullifier is the same one only if its key is too; a damaged index can hide that.
    """
    taken = tx.find_taken(identities)
    for index, known in [*taken.items()]:
        round_no, mac, nullifier = identities[index]
        if known.id_by_mac is None and not known.is_confirmed:
            ids = [share_id for share_id, *_ in tx.find_shares_by_nullifier([(round_no, nullifier)])]
            if all(stored.row.mac != mac for stored in tx.read_stored_shares(ids[:_MAX_KEYS_COMPARED])):
                del taken[index]
    return taken


def _create_new(tx: Transaction, operation: EnqueueOperation, identity: ShareIdentity) -> ShareRow | None:
    """Return the row of a new share, None if its round is closed."""
    if tx.is_round_closed(identity[0]):
        return None
    now_ms, due = int(operation.now * 1000), due_ms(operation.share.submit_at, operation.now)
    return create_row(tx, operation.share, identity, received_ms=now_ms, due_at_ms=due)


def _find_known(
    tx: Transaction, operations: Sequence[EnqueueOperation], taken: Mapping[int, TakenShare]
) -> tuple[dict[int, int], dict[int, ShareRow]]:
    """Return the known shares that these posts change, by index of the post. Reads them with one query.

    Returns:
        The ids of damaged rows, and the rows of shares that wait and are posted again with an earlier due time.
    """
    ids = {
        index: known.id_by_mac
        for index, known in taken.items()
        if known.id_by_mac is not None and not known.is_confirmed
    }
    stored = {share.row.id: share for share in tx.read_stored_shares(sorted(set(ids.values())))} if ids else {}
    damaged: dict[int, int] = {}
    earlier: dict[int, list[int]] = {}
    for index, share_id in ids.items():
        share = stored.get(share_id)
        if share is not None and share.is_damaged(tx.keys.row_check):
            damaged[index] = share_id
        elif share is not None and _is_earlier(operations[index], share.row):
            earlier.setdefault(share_id, []).append(index)
    waiting: dict[int, ShareRow] = {}
    for share_id in sorted(earlier):  # locked in order of id, as by hosts that claim them
        row = load_row(tx, share_id)
        if row is not None and not tx.is_round_closed(row.round_no):
            waiting |= {index: row for index in earlier[share_id] if _is_earlier(operations[index], row)}
    return damaged, waiting


def _is_earlier(operation: EnqueueOperation, row: ShareRow) -> bool:
    """Return whether a share waits for its first attempt, and this post of it has an earlier due time."""
    due = due_ms(operation.share.submit_at, operation.now)
    return row.state == _RECEIVED and not row.attempts and due < row.submit_at * 1000


def _moves_up(operation: EnqueueOperation, row: ShareRow, known: TakenShare | None) -> bool:
    """Return whether a post moves up an earlier one of its batch. One whose nullifier is spent does not."""
    is_confirmed = known is not None and known.is_confirmed
    return not is_confirmed and not row.note and _is_earlier(operation, row)


def _move_up(row: ShareRow, operation: EnqueueOperation) -> ShareRow:
    submit_at = operation.share.submit_at
    return row.with_submit_at(submit_at)._replace(due_ms=due_ms(submit_at, operation.now))


def _replace_waiting(tx: Transaction, row: ShareRow, operation: EnqueueOperation) -> ShareRow:
    """Delete a waiting share. Returns the row to store in place of it: with the due time of this post."""
    delete_share(tx, row.id, row.round_no, row.state)
    return _move_up(row, operation)._replace(id=tx.allocate_id())


def _create_replacement(
    tx: Transaction, operation: EnqueueOperation, identity: ShareIdentity, damaged_id: int
) -> tuple[ShareRow | None, RevealRow | None]:
    """Delete the damaged row of a share.

    A message that may have been sent is kept if it passes its own check: the same bytes are then sent again, by the
    same rules as before.

    Returns:
        The row to store in place of it, and the message that is due again. (None, None) if the round is closed, or
        another host has replaced the row.
    """
    round_no, now_ms = identity[0], int(operation.now * 1000)
    row = None if tx.is_round_closed(round_no) else tx.get_share(damaged_id)
    is_quarantined = tx.fetch_one("is_quarantined", (damaged_id,)) is not None
    if row is None or not StoredShare(row, is_quarantined).is_damaged(tx.keys.row_check):
        return None, None
    message, is_lost = _read_sent_message(tx, row)
    tx.quarantine(damaged_id, row.to_damaged_share())  # reports it, unless it was reported before
    delete_share(tx, damaged_id, round_no, row.state)
    due = due_ms(operation.share.submit_at, operation.now)
    due = max(due, now_ms + LOST_MESSAGE_DELAY_MS) if is_lost else due
    new_row = create_row(tx, operation.share, identity, received_ms=now_ms, due_at_ms=due)
    new_row = new_row._replace(note=HEALED_NOTE, proved_height=None if message is None else message.height)
    return new_row, message if operation.share.submit_at * 1000 <= now_ms else None


def _read_sent_message(tx: Transaction, row: ShareRow) -> tuple[RevealRow | None, bool]:
    """Return the message of a damaged row if a send was started, and whether such a message may be lost.

    The chain has refused the message of a failed share, or it was not confirmed in time, so it is not sent again.
    """
    if row.state == ShareState.FAILED:
        return None, False
    columns = tx.fetch_one("reveal", (row.id,))
    if columns is None:
        return None, row.state == ShareState.SENT
    reveal = RevealRow(*columns)
    if not is_sound(tx.keys.row_check, reveal):
        return None, True
    return (reveal if reveal.sends else None), False


def _identify(tx: Transaction, operation: EnqueueOperation) -> ShareIdentity:
    key = tx.ensure_round(operation.share.round_id)
    return key.no, key.mac(operation.share.key), operation.nullifier


def create_row(tx: Transaction, share: Share, identity: ShareIdentity, *, received_ms: int, due_at_ms: int) -> ShareRow:
    """Return the row of a new share in WAITING, without its check."""
    round_no, mac, nullifier = identity
    return ShareRow(  # mostly positional, because keyword arguments take twice as long
        share.round_id,
        tx.allocate_id(),
        round_no,
        mac,
        encode_witness(share, nullifier, received_ms),
        rank(tx.keys.rank, mac),
        _RECEIVED,
        due_at_ms,
        attempts=0,
        crashes=0,
        proved_height=None,
        stage="accepted",
        note="",
    )


def claim_due(tx: Transaction, *, now: float, limit: int, rounds: Collection[bytes]) -> list[ShareRow]:
    """Claim at most `limit` due shares of `rounds`, WAITING -> PROVING, in order of due time and rank.

    Rows that fail their check are quarantined and never returned.
    """
    now_ms = int(now * 1000)
    _requeue_expired(tx, limit)
    claimed: list[ShareRow] = []
    tried: set[int] = set()
    incomplete = True
    while incomplete and len(claimed) < limit:
        due: list[Row] = []
        for round_id in sorted(rounds):
            key = tx.round_key(round_id)
            if key is not None:
                params = {"round_no": key.no, "now_ms": now_ms, "limit": limit - len(claimed)}
                # Values of a damaged index may have another type; the integrity check finds them.
                due += [row for row in tx.fetch_all("due_shares", params) if all(isinstance(v, int) for v in row)]
        ids = dict.fromkeys(share_id for _, _, share_id in sorted(due))
        untried = [share_id for share_id in ids if share_id not in tried][: limit - len(claimed)]
        tried.update(untried)
        found = _claim(tx, untried, now_ms)
        claimed += found
        incomplete = len(found) < len(untried)  # rows were quarantined: other due shares take their places
    return claimed


def claim_listed(tx: Transaction, ids: Sequence[int], *, now: float) -> list[ShareRow]:
    """Claim shares returned by `Store.list_due`, WAITING -> PROVING, in this order.

    Shares that are no longer due are omitted: they may have been confirmed, or claimed by another host.
    """
    _requeue_expired(tx, len(ids))
    return _claim(tx, ids, int(now * 1000))


def _requeue_expired(tx: Transaction, limit: int) -> None:
    note = "the claim of its host expired"
    change = Transition(frozenset({ShareState.PROVING}), ShareState.WAITING, "proof", note, ignore_claim=True)
    for share_id in tx.expired_claims(limit):
        apply_transition(tx, share_id, change)


def _claim(tx: Transaction, ids: Sequence[int], now_ms: int) -> list[ShareRow]:
    """Claim those of these shares that are sound and due, in this order."""
    # Read in order of id, so that hosts that claim the same shares do not wait for each other's row locks in a cycle.
    rows = {share_id: load_row(tx, share_id) for share_id in sorted(ids)}
    claimed: list[ShareRow] = []
    for share_id in ids:
        row = rows[share_id]
        if row is not None and row.due_ms <= now_ms and row.state == ShareState.WAITING:
            new_row = row._replace(state=ShareState.PROVING.value, stage="proof", note="claimed")
            claimed.append(update_row(tx, row, new_row))
            tx.acquire_claim(share_id)
    return claimed


# ---------------------------------------------------------------------- transitions


def requeue(tx: Transaction, share_id: int, *, due_ms: int | None = None, stage: str, note: str) -> bool:
    """PROVING or SENT -> WAITING without spending an attempt; its message is deleted.

    If `due_ms` is None, its due time is unchanged.
    """
    change = Transition(_IN_PROGRESS, ShareState.WAITING, stage, note, due_ms)
    return apply_transition(tx, share_id, change) is not None


def record_crash(tx: Transaction, share_id: int, *, due_ms: int, note: str) -> int:
    """PROVING -> WAITING after a prover worker crashed on it. Returns its crashes so far."""
    change = Transition(frozenset({ShareState.PROVING}), ShareState.WAITING, "proof", note, due_ms, crashes=1)
    row = apply_transition(tx, share_id, change)
    return 0 if row is None else row.crashes


def retry(tx: Transaction, share_id: int, *, due_ms: int, stage: str, note: str) -> int:
    """Any working state -> WAITING at `due_ms`, spending an attempt. Returns its attempts so far.

    A share that is already WAITING (after a crash) remains so; the attempt and the due time are stored.
    """
    change = Transition(UNCONFIRMED_STATES, ShareState.WAITING, stage, note, due_ms, attempts=1)
    row = apply_transition(tx, share_id, change)
    return 0 if row is None else row.attempts


def fail(tx: Transaction, share_id: int, *, stage: str, note: str) -> bool:
    """WAITING, PROVING or SENT -> FAILED. The witness remains until the round is purged."""
    change = Transition(UNCONFIRMED_STATES, ShareState.FAILED, stage, note)
    return apply_transition(tx, share_id, change) is not None


def release_claim(tx: Transaction, share_id: int) -> bool:
    """PROVING -> WAITING with its own due time, after an internal error; no change in any other state."""
    row = load_row(tx, share_id)
    if row is None or row.state != ShareState.PROVING:
        return False
    change = Transition(_IN_PROGRESS, ShareState.WAITING, "proof", "released after an internal error")
    return apply_transition(tx, share_id, change) is not None


def recover(tx: Transaction, limit: int) -> tuple[int, bool]:
    """On start, return up to `limit` PROVING shares to WAITING with their own due times."""
    change = Transition(_IN_PROGRESS, ShareState.WAITING, "restart", "the helper was restarted", ignore_claim=True)
    return apply_transition_to_batch(tx, tx.orphaned_claims(limit), change)


# ---------------------------------------------------------------------- retries


def retry_failed(
    tx: Transaction,
    ids: Sequence[int],
    query: QueueFilter,
    *,
    closed: Collection[bytes],
    note: str,
    dry_run: bool,
) -> Counter[str]:
    """FAILED -> WAITING at the time of their first attempt with attempts reset, for the shares that match.

    A share that is WAITING and waits for a retry is changed in the same way.

    The caller bounds the number of shares, so that wallets never wait long. Shares of `closed` rounds, and of those
    marked closed, remain failed. With `dry_run`, they are only counted.

    Returns:
        How many were `retried`, and how many are unchanged because their round is `closed`, or because they were
        `moved` to another machine and the filter is not for this stage.
    """
    tx.lock_shared()
    counts: Counter[str] = Counter()
    for share_id in ids:
        row = load_row(tx, share_id)
        if row is None or not _can_be_retried(row) or not matches_filter(row, query):
            continue
        if row.round_id in closed or tx.is_round_closed(row.round_no):
            counts["closed"] += 1
            continue
        if row.is_moved and query.stage != MOVED:  # the other machine reveals it
            counts["moved"] += 1
            continue
        if not dry_run:
            requeue_failed(tx, row, "operator", note)
        counts["retried"] += 1
    return counts


def _can_be_retried(row: ShareRow) -> bool:
    return row.state == ShareState.FAILED or (row.state == ShareState.WAITING and row.attempts > 0)


def requeue_failed(
    tx: Transaction, row: ShareRow, stage: str, note: str, *, proved_height: int | None = None
) -> ShareRow:
    """Make a share WAITING at the time of its first attempt, with attempts reset and without its message.

    The row is sound, FAILED or waiting for a retry, and was read in this transaction. `proved_height` is that of a
    proof on another machine. Returns the new row.
    """
    change = Transition(
        IDLE_STATES,
        ShareState.WAITING,
        stage,
        note,
        due_ms=min(row.due_ms, row.first_due_ms),
        attempts=None,
        proved_height=proved_height,
        ignore_claim=True,
    )
    requeued = apply_transition_to_row(tx, row, change)
    tx.execute("drop_reveal", (row.id,))
    return requeued


def matches_filter(row: ShareRow, query: QueueFilter) -> bool:
    """Return whether a sound row matches a filter."""
    return (
        query.round_id in (None, row.round_id)
        and query.state in (None, row.state)
        and query.stage in (None, row.stage)
        and (query.due_before_ms is None or row.due_ms < query.due_before_ms)
    )
