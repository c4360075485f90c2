"""Reads the live shares of a queue for an export, page by page, while helpers may use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from helper.core.share import ShareState
from helper.store.db_copy.endpoint import CopyEndpoint, LiveShare
from helper.store.exported_shares import ExportedShare, RowVersion
from helper.store.models import HistoryEntry, QueueFilter
from helper.store.shares import matches_filter
from helper.store.table_rows import CHAIN_ID_KEY, is_sound, read_meta_value, read_rounds


class ExportedQueue:
    """The live shares of a queue that match a filter.

    Args:
        refs: prefixes of references, at least one of which must match; empty for any.

    Attributes:
        chain_id: id of the shares' chain, None if it is not known yet.
        round_ends: Unix seconds at which voting ends, by round.
        skipped: number of shares that the last `read` left out, by reason: `closed` round, already `moved`, or
            `damaged`. Damaged shares are included even if they do not match.
    """

    def __init__(self, source: CopyEndpoint, query: QueueFilter, refs: Collection[str] = ()) -> None:
        self.source = source
        self._query = query
        self._refs = tuple(refs)
        self._row_key = source.read_row_key()
        rounds = read_rounds(source.fetch_all("rounds"), self._row_key)
        self._closed = {stored.round_id for stored in rounds if stored.closed_at is not None}
        self.chain_id = read_meta_value(source.fetch_all("get_meta", (CHAIN_ID_KEY,)))
        self.round_ends = {stored.round_id: stored.vote_end_time for stored in rounds}
        self.skipped: Counter[str] = Counter()

    def read(self) -> Iterator[tuple[ExportedShare, RowVersion]]:
        """Yield the shares whose rows were stored before this call, each with the version of its row."""
        self.skipped.clear()
        ((last,),) = self.source.fetch_all("last_share_id")
        quarantined = self.source.read_quarantined()
        for live in self.source.read_shares():
            if live.id > last:  # a share whose row was replaced may have been yielded before
                return
            row = live.share
            if live.id in quarantined or not is_sound(self._row_key, row):
                self.skipped["damaged"] += 1
            elif not matches_filter(row, self._query) or not row.mac.hex().startswith(self._refs or ""):
                continue
            elif row.round_id in self._closed or row.is_moved:
                self.skipped["closed" if row.round_id in self._closed else "moved"] += 1
            else:
                yield self._export_share(live), (live.id, row.row_check)

    def _export_share(self, live: LiveShare) -> ExportedShare:
        row, state = live.share, ShareState(live.share.state)
        reveal = live.reveal if state is ShareState.SENT else None
        if reveal is not None and not is_sound(self._row_key, reveal):
            reveal = None
        if reveal is None and state in {ShareState.SENT, ShareState.PROVING}:
            state = ShareState.WAITING  # without a message, the importing machine proves it again
        return ExportedShare(
            share=row.share,
            received_ms=row.received_ms,
            state=state,
            due_ms=row.due_ms,
            attempts=row.attempts,
            crashes=row.crashes,
            proved_height=row.proved_height,
            stage=row.stage,
            note=row.note,
            history=tuple(
                HistoryEntry(at_ms, stage, note, bool(counted)) for _, at_ms, stage, note, counted in live.history
            ),
            reveal=None if reveal is None else reveal._replace(share_id=0, decide_height=0, row_check=b""),
        )
