"""Taking over shares that another machine's export carries: each as it stood there, none that is known here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from helper.schedule import rank
from helper.share import ShareState
from helper.store.act_base import Checked
from helper.store.act_rows import Carried
from helper.store.chainfacts import kept_round
from helper.store.moves import rewrite
from helper.store.records import Column, RevealRow, ShareRow, short
from helper.store.rows import HistoryEntry
from helper.store.tx import RoundKey, Tx

STAGE: Final = "import"
_STAGE_CHARS: Final = 32


def take_over_some(tx: Tx, carried: Sequence[Checked], note: str, at_ms: int, *, dry: bool) -> Counter[str]:
    """Keep shares that are not known here.

    Args:
        carried: they have been checked as a wallet's are.
        note: what their histories are told.
        at_ms: unix milliseconds now.
        dry: only count.

    Returns:
        How many were `taken`, and how many left: `known` (live or confirmed here), `spent` (counted by the chain),
        of a `closed` round, or of one that the chain has not told us of (`unknown`): it could never be purged.
    """
    tx.beside()
    counts: Counter[str] = Counter()
    for one, nullifier in carried:
        counts[_take_over(tx, one, nullifier, note, at_ms, dry=dry)] += 1
    return counts


def _take_over(tx: Tx, one: Carried, nullifier: bytes, note: str, at_ms: int, *, dry: bool) -> str:
    key = tx.round_key(one.share.round_id)
    told = None if key is None else kept_round(tx, key.no)
    if key is None or told is None:
        return "unknown"
    if told.closed_ms is not None:
        return "closed"
    if tx.one("is_spent", (key.no, nullifier)) is not None:
        return "spent"
    if tx.are_taken([(key.no, key.mac(one.share.key), nullifier)]):
        return "known"
    if not dry:
        row = _row(tx, key, one, nullifier)
        tx.add_shares([row])
        tx.count(key.no, ShareState.RECEIVED, 1)
        for line in one.history:
            _tell(tx, row.id, line)
        _tell(tx, row.id, HistoryEntry(at_ms, STAGE, note, counted=False))
        _bring(tx, row, one, at_ms)
    return "taken"


def _row(tx: Tx, key: RoundKey, one: Carried, nullifier: bytes) -> ShareRow:
    """The share's row as it begins: received."""
    share, mac = one.share, key.mac(one.share.key)
    return ShareRow(
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
        received_ms=one.received_ms,
        rank=rank(tx.keys.order, mac),
        state=ShareState.RECEIVED.value,
        # Whatever a file says: never before its own time.
        due_ms=max(one.due_ms, share.submit_at * 1000),
        attempts=one.attempts,
        crashes=one.crashes,
        proved_height=one.proved_height,
        stage=short(one.stage, _STAGE_CHARS),
        note=short(one.note),
    ).sealed(tx.keys.rows)


def _bring(tx: Tx, row: ShareRow, one: Carried, at_ms: int) -> None:
    """Bring a share to where it stood by legal moves."""
    if one.state is ShareState.FAILED:
        rewrite(tx, row, row._replace(state=ShareState.FAILED.value))
    elif one.state is ShareState.BROADCAST and one.reveal is not None and may_have_been_sent(one, at_ms):
        row = rewrite(tx, row, row._replace(state=ShareState.WITNESSED.value))
        _keep_reveal(tx, row.id, one)
        rewrite(tx, row, row._replace(state=ShareState.BROADCAST.value))


def may_have_been_sent(one: Carried, at_ms: int) -> bool:
    """Whether a carried message is gone on with: its sending was begun, and its time has come here too.

    Any other is dropped, and its share proven anew at its time: nothing of it left the other machine.
    """
    return one.reveal is not None and one.reveal.sends > 0 and one.share.submit_at * 1000 <= at_ms


def _keep_reveal(tx: Tx, share_id: int, one: Carried) -> None:
    assert one.reveal is not None
    prepared = one.reveal.prepared
    kept = RevealRow(
        share_id=share_id,
        message=prepared.message,
        tx_hash=prepared.tx_hash,
        anchor_height=prepared.anchor_height,
        circuit=prepared.circuit,
        height=prepared.height,
        sends=one.reveal.sends,
        first_sent_height=one.reveal.first_sent_height,
        last_sent_height=one.reveal.last_sent_height,
        last_endpoint=one.reveal.last_endpoint,
        last_outcome=one.reveal.last_outcome,
    ).sealed(tx.keys.rows)
    tx.run("carry_reveal", tuple(kept))


def _tell(tx: Tx, share_id: int, line: HistoryEntry) -> None:
    told: dict[str, Column] = {
        "id": share_id,
        "at_ms": line.at_ms,
        "stage": short(line.stage, _STAGE_CHARS),
        "note": short(line.note),
        "counted": int(line.counted),
    }
    tx.one("add_history", told)
