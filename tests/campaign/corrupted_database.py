"""Creates a database with rows in every table and runs a helper on a copy for `corruption`."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar
from unittest import mock

from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.node_pool import NodePool
from helper.chain.round_registry import RoundRegistry
from helper.core.share import ShareState
from helper.errors import HelperError
from helper.store import blocks, messages, writer_thread
from helper.store.messages import SentReveal
from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.shares import EnqueueOperation, claim_due, fail, recover, retry
from helper.store.sqlite.store import SqliteStore
from helper.store.table_rows import ShareRow
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, FakeNetwork, FakeNode
from tests.unit.chain.tree_fixtures import FakeTree
from tests.unit.store.fixtures import NOW, PostedShare, make_posted_share, make_reveal, retry_as_operator

T = TypeVar("T")

SOON_DUE_AT: Final = int(NOW) + 3
LATER_DUE_AT: Final = int(NOW) + 100
LIST_LIMIT: Final = 1000

WAITING_NUMBERS, LATER_NUMBERS = range(20), range(20, 36)
SENT_NUMBERS, FAILED_NUMBERS, CLAIMED_NUMBERS, CONFIRMED_NUMBERS = (
    range(36, 44),
    range(44, 50),
    range(50, 56),
    range(56, 64),
)
STORED_NUMBERS, NEW_NUMBERS = range(64), range(100, 104)
CHAIN_HEIGHT: Final = 70
"""Newest block of the database; by the time of a restart the chain has one more."""


def create_numbered_share(number: int) -> PostedShare:
    times = {**dict.fromkeys(WAITING_NUMBERS, SOON_DUE_AT), **dict.fromkeys(LATER_NUMBERS, LATER_DUE_AT)}
    return make_posted_share(number, round_id=ROUND_ID, submit_at=times.get(number, 0))


def row_id_of(number: int) -> int:
    """Return the row id of a share: shares are enqueued in order of their numbers."""
    return number + 1


class StoreEnvironment:
    """Dependencies of a store: a clock, and a node that serves the round and its tree."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock(NOW)
        self.node = FakeNode(self.clock, height=100)
        self.endpoints: NodePool = FakeNetwork(a=self.node).create_node_pool(self.clock)
        self.store = SqliteStore(path, clock=self.clock)
        self.rounds = RoundRegistry(self.store, self.endpoints)
        self.trees = CommitmentTreeSync(self.store, self.endpoints, self.rounds)
        self.chain = FakeTree()
        for height in range(60, CHAIN_HEIGHT):
            self.chain.append(height, *range(height * 1000, height * 1000 + 150))
        self.chain.publish_to(self.node)


async def create_database(path: Path) -> None:
    environment = StoreEnvironment(path)
    store = environment.store
    await store.open()
    try:
        await environment.endpoints.probe_all()
        await environment.rounds.sync()
        await environment.trees.sync(100)
        shares = map(create_numbered_share, STORED_NUMBERS)
        await asyncio.gather(
            *(store.run(EnqueueOperation(posted.share, posted.nullifier, now=NOW)) for posted in shares)
        )
        confirmed = [(ROUND_ID, create_numbered_share(number).nullifier) for number in CONFIRMED_NUMBERS]
        await store.run(blocks.apply_blocks, [(CHAIN_HEIGHT, CHAIN_HEIGHT)], confirmed)
        await store.run(blocks.add_spent, [(ROUND_ID, bytes([number]) * 32) for number in range(40)])
        by_nullifier = {create_numbered_share(number).nullifier: number for number in STORED_NUMBERS}
        for queued in await store.run(claim_due, now=NOW, limit=LIST_LIMIT, rounds=[ROUND_ID]):
            number = by_nullifier[queued.nullifier]
            if number in SENT_NUMBERS:
                await store.run(messages.prepare, queued.id, make_reveal(number))
                await store.run(messages.mark_sending, queued.id, height=CHAIN_HEIGHT, endpoint="a")
                await store.run(messages.record_outcome, queued.id, outcome="ACCEPTED")
            elif number in FAILED_NUMBERS:
                await store.run(retry, queued.id, due_ms=int(NOW * 1000), stage="proof", note="the proof failed")
                await store.run(fail, queued.id, stage="proof", note="the proof failed")
    finally:
        await store.close()
        await environment.endpoints.aclose()


@dataclass(slots=True)
class RunResult:
    """Result of running a helper on one file.

    Attributes:
        refused: why it did not start, with the advice.
        errors: the store's error by step.
        unhandled: errors that are not the product's own.
        reported_nullifiers: nullifiers of the rows reported as damaged.
        early_claims: shares claimed before their time.
        claimed: shares claimed for a proof, by row.
        repeated_claims: rows claimed twice.
        sent_messages: messages returned for resending, by row.
        damaged_rows: rows that are quarantined.
        failed: names of the failed shares that operators see.
        listed: names of all live shares that operators see.
        responses: result of enqueueing shares again, by number.
        problems: damage that the integrity check could not repair.
        repaired: whether the integrity check changed the result.
        tree: whether the tree equals the chain's.
        counts: the operators' counts, at the start and after the integrity check.
        confirmed: number of tombstones after all shares were confirmed.
    """

    refused: tuple[str, str] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    unhandled: list[str] = field(default_factory=list)
    reported_nullifiers: list[DamagedShare] = field(default_factory=list)
    early_claims: int = 0
    claimed: dict[int, ShareRow] = field(default_factory=dict)
    repeated_claims: int = 0
    sent_messages: dict[int, SentReveal] = field(default_factory=dict)
    damaged_rows: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    listed: list[str] = field(default_factory=list)
    responses: dict[int, EnqueueResult] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    repaired: bool = False
    tree: bool = False
    counts: list[dict[ShareState, int]] = field(default_factory=list)
    confirmed: int = 0

    async def run_step(self, name: str, call: Awaitable[T]) -> T | None:
        """Run one step; record its error and continue."""
        try:
            return await call
        except HelperError as error:
            self.errors[name] = str(error)
        except Exception as error:
            self.unhandled.append(f"{name}: {type(error).__name__}: {error}")
        return None


async def run_helper(path: Path, bit_flip: tuple[int, int] | None = None) -> RunResult:
    """Open a file and run a helper's operations until the shares are confirmed.

    Args:
        path: path of the database.
        bit_flip: an offset and a bit to flip after the start; None for no flip.
    """
    result = RunResult()
    with mock.patch.object(writer_thread, "report_damaged", result.reported_nullifiers.append):
        await _run_until_confirmed(result, path, bit_flip)
    return result


async def _run_until_confirmed(result: RunResult, path: Path, bit_flip: tuple[int, int] | None) -> None:
    env = StoreEnvironment(path)
    try:
        await env.store.open()
    except HelperError as error:
        result.refused = (str(error), error.advice)
        return
    except Exception as error:
        result.unhandled.append(f"open: {type(error).__name__}: {error}")
        return
    try:
        if bit_flip is not None:
            await _flip_bit(env, path, *bit_flip)
        await _start_store(result, env)
        await _process_due(result, env)
        await _read_operator_views(result, env)
        await _retry_and_enqueue(result, env)
        await _run_integrity_check(result, env)
        await _confirm_all(result, env, path)
    finally:
        await result.run_step("close", env.store.close())
        await env.endpoints.aclose()


async def _flip_bit(env: StoreEnvironment, path: Path, at: int, bit: int) -> None:
    """Flip a bit under an open store and clear its caches."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    await env.store._writer.run(lambda tx: tx.conn.execute("PRAGMA shrink_memory").fetchall())


async def _start_store(result: RunResult, env: StoreEnvironment) -> None:
    env.chain.append(CHAIN_HEIGHT, 7, 8, 9)
    env.chain.publish_to(env.node)
    await result.run_step("recover", env.store.run_batches(recover))
    await result.run_step("rounds", env.rounds.restore())
    await result.run_step("trees", env.trees.restore())
    await env.endpoints.probe_all()
    await result.run_step("sync rounds", env.rounds.sync())
    await result.run_step("sync trees", env.trees.sync(100))
    anchor = env.trees.anchor(ROUND_ID)
    result.tree = anchor is not None and (anchor.height, anchor.root) == (CHAIN_HEIGHT, env.chain.tree.root())


async def _process_due(result: RunResult, env: StoreEnvironment, now: float = SOON_DUE_AT) -> None:
    """Process all shares due at a time, and check that none is due before."""
    active = [share_row.round_id for share_row in env.rounds.active_rounds()]
    for moment in (now - 0.1, now):
        while claimed := await result.run_step(
            "claim", env.store.run(claim_due, now=moment, limit=LIST_LIMIT, rounds=active)
        ):
            for queued in claimed:
                result.early_claims += queued.share.submit_at > moment
                result.repeated_claims += queued.id in result.claimed
                result.claimed[queued.id] = queued
    await result.run_step("next due", env.store.next_due_ms([ROUND_ID]))
    result.sent_messages.update(
        {
            message.share_id: message
            for message in await result.run_step("unconfirmed", env.store.list_unconfirmed()) or []
        }
    )


async def _read_operator_views(result: RunResult, env: StoreEnvironment) -> None:
    entries = await result.run_step("list", env.store.list_shares(QueueFilter(), LIST_LIMIT)) or []
    result.listed = [entry.ref for entry in entries]
    result.failed = {entry.ref for entry in entries if entry.state == "failed"}
    for entry in entries:
        await result.run_step("show", env.store.get_share_details(entry.ref))
    counts = await result.run_step("counts", env.store.count_shares())
    result.counts.append((counts or {}).get(ROUND_ID, {}))
    await result.run_step("unsubmitted", env.store.count_unconfirmed(ROUND_ID))
    await result.run_step("damaged", env.store.list_damaged())


async def _retry_and_enqueue(result: RunResult, env: StoreEnvironment) -> None:
    """Retry failed shares, and post all old and some new shares."""
    rows = map(row_id_of, FAILED_NUMBERS)
    await asyncio.gather(*(result.run_step("retry", retry_as_operator(env.store, row)) for row in rows))
    posted_shares = {number: create_numbered_share(number) for number in (*NEW_NUMBERS, *STORED_NUMBERS)}
    responses = await asyncio.gather(
        *(
            result.run_step("enqueue", env.store.run(EnqueueOperation(posted.share, posted.nullifier, now=NOW)))
            for posted in posted_shares.values()
        )
    )
    result.responses = {
        number: response for number, response in zip(posted_shares, responses, strict=True) if response is not None
    }


async def _run_integrity_check(result: RunResult, env: StoreEnvironment) -> None:
    """Run the integrity check and process what is due after it."""
    before = await env.store._check_integrity()
    result.problems = await result.run_step("verify", env.store.verify()) or []
    result.repaired = before != result.problems
    await result.run_step("list after the check", env.store.list_shares(QueueFilter(), LIST_LIMIT))
    await _process_due(result, env)
    await _process_due(result, env, LATER_DUE_AT)


async def _confirm_all(result: RunResult, env: StoreEnvironment, path: Path) -> None:
    result.damaged_rows = await _read_damaged_rows(path)
    block = [(ROUND_ID, create_numbered_share(number).nullifier) for number in (*STORED_NUMBERS, *NEW_NUMBERS)]
    applying = env.store.run(blocks.apply_blocks, [(CHAIN_HEIGHT + 1, CHAIN_HEIGHT + 1)], block)
    result.confirmed = len(await result.run_step("apply block", applying) or [])


async def _read_damaged_rows(path: Path) -> set[int]:
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as conn:
        try:
            return {row[0] for row in conn.execute("SELECT share_id FROM damaged")}
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return set()
