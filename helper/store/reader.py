"""Reading beside the writer: connections that can neither write nor checkpoint, and what operators see.

Each query is one statement, read to its end at once: no read transaction stays open, so the WAL can be truncated.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiosqlite

from helper.core.share import ShareState
from helper.errors import StoreError, StoreForeign
from helper.store.action_rows import Action, FailedBefore
from helper.store.migration.marks import refuse_marked
from helper.store.migration.tables import MOVED, UNFINISHED
from helper.store.operations import action_reads
from helper.store.records import Column, RoundRow
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
from helper.store.share_listing import Fetch, Row, entry_of, list_shares, ref_bounds
from helper.store.sql_files import migrations, queries
from helper.store.sqlite.errors import code_of, translate
from helper.store.sqlite.opening import APPLICATION_ID
from helper.store.transaction import Params

T = TypeVar("T")
_CANNOT_OPEN: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})


class Reader:
    """One connection that only reads, with its own thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._conn: aiosqlite.Connection | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            StoreError: the file can not be read.
        """
        try:
            try:
                self._conn = await _connect(self._path, "mode=ro")
            except sqlite3.OperationalError as error:
                # In a directory that may not be written, SQLite can not share the WAL: without one, none is needed.
                if code_of(error) not in _CANNOT_OPEN or _has_wal(self._path):
                    raise
                self._conn = await _connect(self._path, "mode=ro&immutable=1")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translate(error) from error

    async def close(self) -> None:
        """Disconnect, and end the thread."""
        if self._conn is not None:
            conn, self._conn = self._conn, None
            await conn.close()

    async def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a named query.

        Raises:
            StoreError: the file can not be read.
        """
        return await self.run(queries()[name], params)

    async def run(self, sql: str, params: Params = ()) -> list[Row]:
        """All rows of a statement that only reads."""
        if self._conn is None:
            raise StoreError("the database is not open", advice="Start the helper again.")
        try:
            rows: Iterable[Any] = await self._conn.execute_fetchall(sql, params)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translate(error) from error
        return list(rows)


async def _connect(path: Path, options: str) -> aiosqlite.Connection:
    # What can fail is done before there is a thread: aiosqlite does not wait for the end of one that could not connect,
    # and such a thread may tell an event loop that is closed.
    conn = await asyncio.to_thread(_open_file, f"{path.resolve().as_uri()}?{options}")
    return await aiosqlite.Connection(lambda: conn, iter_chunk_size=64)


def _open_file(uri: str) -> sqlite3.Connection:
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    conn.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        conn.execute("PRAGMA query_only = ON")
        conn.execute("PRAGMA temp_store = MEMORY")
        conn.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        conn.close()
        raise
    return conn


def _has_wal(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"{path}-wal").stat().st_size > 0
    return False


class ReadOnlyQueue:
    """The operators' view of a database file, without the daemon; each call opens the file anew and changes nothing.

    Every method may raise `StoreError`: `StoreForeign` for a file that is not of this version of the helper,
    `StoreMoved` for one whose queue is elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def counts(self) -> dict[bytes, dict[ShareState, int]]:
        """Shares by round and state; SUBMITTED counts tombstones."""
        return await self._with(counts)

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        """The first `limit` live shares that match, by time due."""
        return await self._with(lambda fetch: list_shares(fetch, query, limit))

    async def show(self, share_ref: str) -> QueueStory | None:
        """The whole story of one live share, None when none or more than one has this name."""
        return await self._with(lambda fetch: show(fetch, share_ref))

    async def damaged(self) -> list[DamagedShare]:
        """The rows that were set aside."""
        return await self._with(damaged)

    async def outlook(self, *, now: float) -> list[RoundOutlook]:
        """Every round in sums: its end, its shares by state, when those that wait are due. `now` in unix seconds."""
        return await self._with(lambda fetch: outlook(fetch, int(now * 1000)))

    async def rounds(self) -> list[StoredRound]:
        """All rounds kept, by age on the chain."""
        return await self._with(action_reads.rounds)

    async def tree_sizes(self) -> dict[bytes, int]:
        """How many leaves of each round's tree are kept."""
        return await self._with(action_reads.tree_sizes)

    async def actions(self, *, limit: int) -> list[Action]:
        """The latest acts, newest first."""
        return await self._with(lambda fetch: action_reads.actions(fetch, limit))

    async def failed_groups(self, wanted: QueueFilter, *, limit: int) -> list[FailureGroup]:
        """What failed for good and is not purged yet, by stage and reason."""
        return await self._with(lambda fetch: action_reads.failed_groups(fetch, wanted, limit))

    async def failed_before(self) -> list[FailedBefore]:
        """What had failed in rounds that are purged."""
        return await self._with(action_reads.failed_before)

    async def rounds_of_spent(self, nullifier: bytes) -> list[bytes]:
        """The rounds in which the chain has counted a nullifier, whoever revealed it."""
        return await self._with(lambda fetch: action_reads.rounds_of_spent(fetch, nullifier))

    async def _with(self, ask: Callable[[Fetch], Awaitable[T]]) -> T:
        reader = Reader(self._path)
        await reader.open()
        try:
            ((application,),) = await reader.run("PRAGMA application_id")
            ((version,),) = await reader.run("PRAGMA user_version")
            if (application, version) != (APPLICATION_ID, len(migrations())):
                raise StoreForeign(f"{self._path} is not a database of this version of the helper")
            unfinished, moved = [await reader.fetch("get_meta", (name,)) for name in (UNFINISHED, MOVED)]
            refuse_marked(unfinished, moved, str(self._path))
            return await ask(reader.fetch)
        finally:
            await reader.close()


# ---------------------------------------------------------------------- what operators see


async def counts(fetch: Fetch) -> dict[bytes, dict[ShareState, int]]:
    """Shares by round and state."""
    found: dict[bytes, dict[ShareState, int]] = {}
    for round_id, state, number in await fetch("counts", ()):
        found.setdefault(round_id, {})[ShareState(state)] = number
    return found


async def show(fetch: Fetch, ref: str) -> QueueStory | None:
    """One share's whole story."""
    bounds = ref_bounds(ref)
    rows = [] if bounds is None else await fetch("shares_by_prefix", bounds)
    if len(rows) != 1:
        return None
    share_id, received_ms, vote_end_time = rows[0][-3:]
    history = tuple(
        HistoryEntry(at_ms, stage, note, bool(counted))
        for at_ms, stage, note, counted in await fetch("history", (share_id,))
    )
    entry = entry_of(rows[0])
    facts = await fetch("reveal_facts", (share_id,)) if entry.state is ShareState.BROADCAST else []
    tx_hash, anchor_height, circuit, sends, first, last, endpoint, outcome = (
        facts[0] if facts else (None, None, None, 0, None, None, None, None)
    )
    return QueueStory(
        entry=entry,
        received_ms=received_ms,
        vote_end_time=vote_end_time,
        history=(HistoryEntry(received_ms, "accepted", "", counted=False), *history),
        attempts_by_stage=dict(Counter(line.stage for line in history if line.counted)),
        tx_hash=tx_hash,
        anchor_height=anchor_height,
        circuit=circuit,
        sends=sends,
        first_sent_height=first,
        last_sent_height=last,
        last_endpoint=endpoint,
        last_outcome=outcome,
    )


async def damaged(fetch: Fetch) -> list[DamagedShare]:
    """The rows that were set aside."""
    return [DamagedShare(ref, round_id, state) for ref, round_id, state in await fetch("damaged", ())]


async def due_ahead(fetch: Fetch, now_ms: int) -> dict[bytes, DueAhead]:
    """When the waiting shares of each round are due."""
    found: dict[bytes, DueAhead] = {}
    for (round_id,) in await fetch("all_round_ids", ()):
        params: dict[str, Column] = {"round_id": round_id, "now_ms": now_ms, "minutes": MINUTES_AHEAD}
        by_minute: dict[int, int] = dict(await fetch("due_ahead", params))
        waiting = by_minute.pop(-1, 0)
        if by_minute or waiting:
            minutes = tuple(by_minute.get(minute, 0) for minute in range(MINUTES_AHEAD))
            found[round_id] = DueAhead(minutes, max(0, waiting - sum(minutes)))
    return found


async def outlook(fetch: Fetch, now_ms: int) -> list[RoundOutlook]:
    """Every round in sums."""
    told = {row[0]: RoundRow(*row[1:]) for row in await fetch("rounds", ())}
    numbers, ahead = await counts(fetch), await due_ahead(fetch, now_ms)
    nothing = DueAhead((0,) * MINUTES_AHEAD, 0)
    return [
        RoundOutlook(
            round_id=round_id,
            status=told[round_id].status if round_id in told else None,
            vote_end_time=told[round_id].vote_end_time if round_id in told else None,
            counts=numbers.get(round_id, {}),
            ahead=ahead.get(round_id, nothing),
        )
        for (round_id,) in await fetch("all_round_ids", ())
    ]


async def failures(fetch: Fetch, limit: int) -> list[FailureGroup]:
    """What failed for good, the latest first."""
    return [FailureGroup(*row) for row in await fetch("failures", {"limit": limit})]
