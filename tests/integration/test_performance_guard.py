"""A guard of what the figures rest on, by ratios: of CPU time to a yardstick, of steps in a great queue to a small one.

The figures themselves are `make bench`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path
from unittest.mock import Mock, patch

import orjson
from structlog.testing import capture_logs

import proofs
from bench.fill_database import fill, opened, shares, transaction
from devnet import ballot
from devnet.ballot import Ballot
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import ShareValidator
from helper.store.operations.chain_facts import apply_block
from helper.store.operations.messages import mark_sending, prepare, record_outcome
from helper.store.operations.shares import EnqueueOperation, claim_due, enqueue, enqueue_all
from helper.store.rows import Enqueued, PreparedReveal
from helper.store.sqlite.store import SqliteStore
from helper.store.sqlite.transaction import SqliteTransaction
from tests.unit.ingest.admission_fixtures import END, ROUND_ID, FakeChain, FakeClock

VOTES = 8
ROUNDS, MOST_ROUNDS = 5, 20
"""Times that both sides are taken, in turns: the quickest of each counts. More where the machine is busy."""
TAKING = 1.5
"""What taking a share costs beside the yardstick, in CPU: 1.43 to 1.55 in three processes of twelve rounds each, on a
machine whose neighbours make one and the same round cost up to twice as much."""
TOGETHER = 64
"""Shares of one batch, as many as there are connections when it is measured."""
STATEMENTS = 2 / TOGETHER
"""Statements that one of these takes: a look for all, and all rows at once."""
LOSS = 1 / 0.7
SMALL, GREAT = 100, 4_000
"""Shares that wait."""
FEW, MANY = 20, 400
"""Shares that await their confirmation."""
DUE = 1_800_000_000


def test_taking_a_share_costs_what_it_did(tmp_path: Path) -> None:
    _, public = proofs.elgamal_keygen(b"speed")
    seal = partial(ballot.seal, round_id=ROUND_ID, ea_pk=public, weight=100, dice=random.Random(1))
    votes = [seal(proposal_id=1, vote_decision=1) for _ in range(VOTES)]
    bodies = [
        json.dumps(ballot.post_body(vote, share, position, END - 100)).encode()
        for position, vote in enumerate(votes)
        for share in vote.shares
    ]
    ours, theirs, ratio = [], [], inf
    for number in range(MOST_ROUNDS):
        theirs.append(yardstick(bodies))
        with capture_logs():
            ours.append(asyncio.run(taking(tmp_path / f"{number}.db", votes, bodies)))
        ratio = min(ours) / min(theirs)
        if number >= ROUNDS and ratio < TAKING * LOSS:
            break

    assert ratio < TAKING * LOSS


async def taking(path: Path, votes: Sequence[Ballot], bodies: Sequence[bytes]) -> float:
    """CPU seconds of taking these shares, all at once, from the body to the disk."""
    leaves = {(ROUND_ID, position): vote.commitment for position, vote in enumerate(votes)}
    chain = FakeChain(FakeClock(), leaves=leaves)
    store = SqliteStore(path)
    await store.open()
    intake = AdmissionController(
        store=store,
        rounds=chain.registry,
        trees=chain.trees,
        checker=ShareValidator(proofs),
        clock=chain.clock,
        wake=lambda _due: None,
        paused=lambda: None,
        round_paused=lambda _round_id: None,
    )
    began = time.process_time()
    answers = await asyncio.gather(*map(intake.take, bodies))
    spent = time.process_time() - began
    await store.close()
    assert set(answers) == {Enqueued.QUEUED}
    return spent


def yardstick(bodies: Sequence[bytes]) -> float:
    """CPU seconds of something that is like it: reading, hashing, a row each in a database."""
    with closing(sqlite3.connect(":memory:")) as conn:
        conn.execute("CREATE TABLE rows (name BLOB UNIQUE, body BLOB)")
        began = time.process_time()
        for body in bodies:
            read = orjson.loads(body)
            comms = hashlib.blake2b(body).digest()[:31] + b"\0"
            for _ in range(4):
                comms = proofs.poseidon(comms, comms)
            text = json.dumps(read).encode()
            conn.execute("INSERT INTO rows VALUES (?, ?)", (hashlib.sha256(text).digest(), text))
        conn.commit()
        return time.process_time() - began


def test_shares_that_come_together_take_few_statements(tmp_path: Path) -> None:
    with opened(tmp_path / "queue.db") as database, transaction(database) as tx:
        coming = [EnqueueOperation(*one, now=1.0) for one in shares(ROUND_ID, 0, 3 * TOGETHER, DUE)]
        enqueue_all(tx, coming[:1])  # which makes the round's key
        few = statements(tx, lambda: enqueue_all(tx, coming[TOGETHER : 2 * TOGETHER]))
        again = statements(tx, lambda: enqueue_all(tx, coming[TOGETHER : 2 * TOGETHER]))
        odd = statements(tx, lambda: enqueue_all(tx, coming[2 * TOGETHER : -1]))

    assert few / TOGETHER <= STATEMENTS
    assert again == few / 2, "none of them is put in a second time"
    assert odd <= 2 * 6, "a few sizes of statements do for every number"


def test_work_in_a_great_queue_takes_as_many_steps_as_in_a_small_one(tmp_path: Path) -> None:
    small, great = steps(tmp_path / "small.db", SMALL, FEW), steps(tmp_path / "great.db", GREAT, MANY)

    assert {name: great[name] / small[name] < LOSS for name in small} == dict.fromkeys(small, True), (small, great)


def steps(path: Path, waiting: int, awaiting: int) -> dict[str, int]:
    """Steps of SQLite's machine for what happens to one share, and for a block, with so many others."""
    fill(path, ROUND_ID, waiting, due=DUE)
    with opened(path) as database:
        with transaction(database) as tx:
            await_confirmation(tx, waiting, awaiting)
        tx = database.tx
        ((new, nullifier),) = shares(ROUND_ID, waiting + awaiting, waiting + awaiting + 1, DUE)
        with transaction(database):
            found = {"taken in": counted(tx, lambda: enqueue(tx, new, nullifier, DUE - 10.0))}
        with transaction(database):
            found["claimed"] = counted(tx, lambda: claim_due(tx, now=DUE + 1e6, limit=4, rounds=[ROUND_ID]))
        found["asked for the next"] = counted(tx, lambda: tx.all("next_due", (ROUND_ID,)))
        found["a block"] = counted(tx, lambda: tx.all("follow_ups", {"height": 101, "limit": 64}))
        found["told ahead"] = counted(
            tx, lambda: tx.all("due_ahead", {"round_id": ROUND_ID, "now_ms": (DUE - 7200) * 1000, "minutes": 60})
        )
        spent = tx.all("unconfirmed", {"after": 0, "limit": 1})[0][14]
        with transaction(database):
            found["confirmed"] = counted(tx, lambda: apply_block(tx, 101, [(ROUND_ID, spent)], DUE * 1000))
    return found


def await_confirmation(tx: SqliteTransaction, first: int, number: int) -> None:
    """Put in shares whose messages were sent at height 100."""
    for share, nullifier in shares(ROUND_ID, first, first + number, DUE - 1_000_000):
        enqueue(tx, share, nullifier, 1.0)
    for queued in claim_due(tx, now=DUE - 500_000.0, limit=number, rounds=[ROUND_ID]):
        prepare(tx, queued.id, PreparedReveal(b"m" * 5_000, b"h" * 32, 99, "k10", 99), DUE * 1000)
        mark_sending(tx, queued.id, DUE * 1000, 100, "node")
        record_outcome(tx, queued.id, DUE * 1000, "ACCEPTED")


def statements(tx: SqliteTransaction, work: Callable[[], object]) -> int:
    """The statements that this runs."""
    conn = tx.conn
    with patch.object(tx, "conn", Mock(wraps=conn)) as counting:
        work()
    return len(counting.method_calls)


def counted(tx: SqliteTransaction, work: Callable[[], object]) -> int:
    """The steps that this takes."""
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1

    tx.conn.set_progress_handler(step, 1)
    try:
        work()
    finally:
        tx.conn.set_progress_handler(None, 0)
    return taken
