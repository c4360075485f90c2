"""A database with something in every table, and the life of a helper on a copy of it: what `corruption` compares."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.core.share import ShareState
from helper.errors import HelperError
from helper.store.rows import DamagedShare, Enqueued, QueuedShare, QueueFilter, SentReveal
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, Network, Node
from tests.unit.chain.tree_fixtures import Chain
from tests.unit.store.fixtures import NOW, Posted, operator_retry, posted, reveal

T = TypeVar("T")

SOON: Final = int(NOW) + 3
LATER: Final = int(NOW) + 100
EVERYTHING: Final = 1000

WAITING, HELD = range(20), range(20, 36)
SENT, FAILED, TAKEN_UP, CONFIRMED = range(36, 44), range(44, 50), range(50, 56), range(56, 64)
ALL, NEW = range(64), range(100, 104)
HEIGHT: Final = 70
"""The newest block of the database; the chain has one more by the time of a restart."""


def share(number: int) -> Posted:
    """The share with this number, at its time."""
    times = {**dict.fromkeys(WAITING, SOON), **dict.fromkeys(HELD, LATER)}
    return posted(number, round_id=ROUND_ID, submit_at=times.get(number, 0))


def row_of(number: int) -> int:
    """The row of the share with this number: they are handed in one after another."""
    return number + 1


class Around:
    """What a store lives among: a clock, and a node that tells the round and its tree."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock(NOW)
        self.node = Node(self.clock, height=100)
        self.endpoints: NodePool = Network(a=self.node).endpoints(self.clock)
        self.named: list[DamagedShare] = []
        self.store = SqliteStore(path, clock=self.clock, on_damaged=self.named.append)
        self.rounds = RoundRegistry(self.store, self.endpoints, clock=self.clock)
        self.trees = CommitmentTreeSync(self.store, self.endpoints, self.rounds)
        self.chain = Chain()
        for height in range(60, HEIGHT):
            self.chain.append(height, *range(height * 1000, height * 1000 + 150))
        self.chain.show(self.node)


async def make(path: Path) -> None:
    """Write the database that is copied."""
    around = Around(path)
    store = around.store
    await store.open()
    try:
        await around.endpoints.check()
        await around.rounds.sync()
        await around.trees.sync(100)
        shares = map(share, ALL)
        await asyncio.gather(*(store.enqueue(one.share, one.nullifier, now=NOW) for one in shares))
        await store.apply_block(HEIGHT, [(ROUND_ID, share(number).nullifier) for number in CONFIRMED], now=NOW)
        await store.add_spent([(ROUND_ID, bytes([number]) * 32) for number in range(40)])
        by_nullifier = {share(number).nullifier: number for number in ALL}
        for queued in await store.claim_due(now=NOW, limit=EVERYTHING, rounds=[ROUND_ID]):
            number = by_nullifier[queued.nullifier]
            if number in SENT:
                await store.prepare(queued.id, reveal(number))
                await store.mark_sending(queued.id, height=HEIGHT, endpoint="a")
                await store.record_outcome(queued.id, outcome="ACCEPTED")
            elif number in FAILED:
                await store.retry(queued.id, due_ms=int(NOW * 1000), stage="proof", note="the proof failed")
                await store.fail(queued.id, stage="proof", note="the proof failed", spend_attempt=True)
    finally:
        await store.close()
        await around.endpoints.aclose()


@dataclass(slots=True)
class Life:
    """What came of one helper's life on one file.

    Attributes:
        refused: why it did not start, with the advice.
        errors: what the store said at which step.
        unhandled: errors that are none of the house.
        named: the rows that were told to be damaged.
        early: shares handed out before their time.
        claimed: shares handed out for a proof, by row.
        again: rows handed out twice.
        sent: messages handed out to be sent again, by row.
        aside: rows that are set aside.
        failed: names of the failed shares that operators see.
        listed: names of all live shares that operators see.
        answers: what became of shares handed in again, by number.
        problems: what the background check could not mend.
        mended: whether the background check changed what was found.
        tree: whether the tree came to be the chain's.
        counts: the operators' counts, at the start and after the background check.
        confirmed: how many shares were buried when the chain counted them all.
    """

    refused: tuple[str, str] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    unhandled: list[str] = field(default_factory=list)
    named: list[DamagedShare] = field(default_factory=list)
    early: int = 0
    claimed: dict[int, QueuedShare] = field(default_factory=dict)
    again: int = 0
    sent: dict[int, SentReveal] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    listed: list[str] = field(default_factory=list)
    answers: dict[int, Enqueued] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    mended: bool = False
    tree: bool = False
    counts: list[dict[ShareState, int]] = field(default_factory=list)
    confirmed: int = 0

    async def step(self, name: str, call: Awaitable[T]) -> T | None:
        """One call; its error is noted and ends nothing."""
        try:
            return await call
        except HelperError as error:
            self.errors[name] = str(error)
        except Exception as error:
            self.unhandled.append(f"{name}: {type(error).__name__}: {error}")
        return None


async def live(path: Path, flip: tuple[int, int] | None = None) -> Life:
    """Start on a file and do all that a helper does, to the end of the shares.

    Args:
        path: the database.
        flip: an offset and a bit that flips right after the start, None for none.
    """
    around, life = Around(path), Life()
    life.named = around.named
    try:
        await around.store.open()
    except HelperError as error:
        life.refused = (str(error), error.advice)
        return life
    except Exception as error:
        life.unhandled.append(f"open: {type(error).__name__}: {error}")
        return life
    try:
        if flip is not None:
            await _strike(around, path, *flip)
        await _start(life, around)
        await _work(life, around)
        await _look(life, around)
        await _retry_and_take_in(life, around)
        await _check(life, around)
        await _end(life, around, path)
    finally:
        await life.step("close", around.store.close())
        await around.endpoints.aclose()
    return life


async def _strike(around: Around, path: Path, at: int, bit: int) -> None:
    """Flip a bit under a store that runs, and let it forget what it has read."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    await around.store._writer.run(lambda tx: tx.conn.execute("PRAGMA shrink_memory").fetchall())


async def _start(life: Life, around: Around) -> None:
    around.chain.append(HEIGHT, 7, 8, 9)
    around.chain.show(around.node)
    await life.step("recover", around.store.recover())
    await life.step("rounds", around.rounds.restore())
    await life.step("trees", around.trees.restore())
    await around.endpoints.check()
    await life.step("sync rounds", around.rounds.sync())
    await life.step("sync trees", around.trees.sync(100))
    anchor = around.trees.anchor(ROUND_ID)
    life.tree = anchor is not None and (anchor.height, anchor.root) == (HEIGHT, around.chain.tree.root())


async def _work(life: Life, around: Around, now: float = SOON) -> None:
    """All that is due at a time, and nothing a moment before it."""
    active = [one.round_id for one in around.rounds.active()]
    for moment in (now - 0.1, now):
        while claimed := await life.step("claim", around.store.claim_due(now=moment, limit=EVERYTHING, rounds=active)):
            for queued in claimed:
                life.early += queued.share.submit_at > moment
                life.again += queued.id in life.claimed
                life.claimed[queued.id] = queued
    await life.step("next due", around.store.next_due_ms([ROUND_ID]))
    life.sent.update({one.share_id: one for one in await life.step("unconfirmed", around.store.unconfirmed()) or []})


async def _look(life: Life, around: Around) -> None:
    """What operators see."""
    entries = await life.step("list", around.store.list_shares(QueueFilter(), EVERYTHING)) or []
    life.listed = [entry.ref for entry in entries]
    life.failed = {entry.ref for entry in entries if entry.state is ShareState.FAILED}
    for entry in entries:
        await life.step("show", around.store.show(entry.ref))
    counts = await life.step("counts", around.store.counts())
    life.counts.append((counts or {}).get(ROUND_ID, {}))
    await life.step("unsubmitted", around.store.unsubmitted(ROUND_ID))
    await life.step("damaged", around.store.damaged())


async def _retry_and_take_in(life: Life, around: Around) -> None:
    """An operator has the failed shares tried again; wallets post everything again, and new shares."""
    rows = map(row_of, FAILED)
    await asyncio.gather(*(life.step("retry", operator_retry(around.store, row)) for row in rows))
    handed_in = {number: share(number) for number in (*NEW, *ALL)}
    answers = await asyncio.gather(
        *(life.step("enqueue", around.store.enqueue(one.share, one.nullifier, now=NOW)) for one in handed_in.values())
    )
    life.answers = {number: answer for number, answer in zip(handed_in, answers, strict=True) if answer is not None}


async def _check(life: Life, around: Around) -> None:
    """The background check, and the work after it."""
    before = await around.store._integrity()
    life.problems = await life.step("verify", around.store.verify()) or []
    life.mended = before != life.problems
    await _work(life, around)
    await _work(life, around, LATER)


async def _end(life: Life, around: Around, path: Path) -> None:
    """The chain counts every share."""
    life.aside = await _set_aside(path)
    block = [(ROUND_ID, share(number).nullifier) for number in (*ALL, *NEW)]
    life.confirmed = len(await life.step("apply block", around.store.apply_block(HEIGHT + 1, block, now=NOW)) or [])


async def _set_aside(path: Path) -> set[int]:
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as conn:
        try:
            return {row[0] for row in conn.execute("SELECT share_id FROM damaged")}
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return set()
