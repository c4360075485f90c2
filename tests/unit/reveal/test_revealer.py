"""One share's proof: what it is made from, what is kept, and what a failure of the prover costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import ShareState
from helper.errors import HelperError, ProofFailed, ProverDied, ProverTimeout
from tests.support.fakes import ANCHOR, ROUND, START, make_share, nullifier_of, until
from tests.support.queue_pipeline import Line, open_line


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


async def test_the_message_on_disk_is_the_share_under_the_newest_verified_root(line: Line) -> None:
    await line.prepared(1)
    ((message, tx_hash, anchor, circuit, height),) = line.rows(
        "SELECT message, tx_hash, anchor_height, circuit, height FROM reveals"
    )
    share = make_share(1)
    assert RevealMessage.from_tx(message) == RevealMessage(
        nullifier=nullifier_of(share.primary_blind),
        enc_share=share.c1 + share.c2,
        proposal_id=1,
        vote_decision=1,
        proof=b"proof of 1",
        round_id=ROUND,
        anchor_height=ANCHOR.height,
    )
    assert (tx_hash, anchor, circuit) == (RevealMessage.from_tx(message).tx_hash(), ANCHOR.height, "k10")
    assert height == line.height
    assert line.row(1, "state, attempts, proved_height") == (ShareState.BROADCAST, 0, line.height)
    assert line.nodes.posts == [], "sending is somebody else's work"


@pytest.mark.rule("R11")
@pytest.mark.parametrize("size", [0, 1])
async def test_a_tree_that_is_behind_costs_nothing_and_is_looked_at_again_soon(line: Line, size: int) -> None:
    if size == 0:
        line.trees.newest = None
    await line.put(1000 if size else 1)
    assert not await line.revealer.prove(await line.claim())
    position = 1000 if size else 1
    expected = (ShareState.RECEIVED, 0, 0, (START + 2) * 1000)
    assert line.row(position, "state, attempts, crashes, due_ms") == expected
    assert line.prover.begun == []


@pytest.mark.rule("R11")
@pytest.mark.parametrize("error", [ProverTimeout("no proof within 60 s"), ProofFailed("the circuit refused")])
async def test_a_timeout_or_a_failure_costs_one_attempt(line: Line, error: HelperError) -> None:
    line.prover.failures[1] = [error]
    await line.put(1)
    assert not await line.revealer.prove(await line.claim())
    assert line.row(1, "state, attempts, due_ms") == (ShareState.RECEIVED, 1, (START + 2) * 1000)


@pytest.mark.rule("R11")
@pytest.mark.parametrize("wrong", ["root", "nullifier"])
async def test_a_proof_of_another_statement_is_never_kept(line: Line, wrong: str) -> None:
    await line.put(1)
    queued = await line.claim()
    if wrong == "root":
        line.prover.root = b"\xff" * 32
    else:
        queued = type(queued)(queued.id, make_share(2), queued.nullifier, queued.state, queued.due_ms, 0, 0, None)
    assert not await line.revealer.prove(queued)
    assert line.row(1, "state, attempts") == (ShareState.RECEIVED, 1)
    assert line.rows("SELECT count(*) FROM reveals") == [(0,)]


@pytest.mark.rule("R11")
async def test_the_death_of_a_worker_costs_nothing_twice_and_then_an_attempt_each_time(line: Line) -> None:
    line.prover.failures[1] = [ProverDied("killed")] * 6
    await line.put(1)
    told = []
    for _ in range(6):
        assert not await line.revealer.prove(await line.claim())
        row = line.row(1, "state, crashes, attempts, due_ms")
        assert row is not None
        told.append((*row[:3], row[3] // 1000 - int(line.clock.now())))
        line.clock.advance(max(0, told[-1][3]))
    received = ShareState.RECEIVED
    assert told == [
        (received, 1, 0, 0),
        (received, 2, 0, 0),
        (received, 3, 1, 2),
        (received, 4, 2, 4),
        (received, 5, 3, 8),
        (received, 6, 4, 16),
    ]


async def test_a_share_whose_worker_died_is_taken_up_by_nobody_before_its_attempt_is_counted(line: Line) -> None:
    line.prover.failures[1] = [ProverDied("killed")] * 3
    seen: list[object] = []
    line.store.after["crash 3"] = lambda: seen.append(line.row(1, "state, attempts, due_ms"))
    async with line.running():
        await line.put(1)
        await until(lambda: line.row(1, "attempts") == (1,))
        await line.settle()
        assert seen == [(ShareState.RECEIVED, 0, (START + 2) * 1000)], "not due in between"
        assert len(line.prover.begun) == 3
        assert line.processor.proving == 0


@pytest.mark.rule("R12")
async def test_a_share_that_was_counted_during_its_proof_has_nothing_to_send(line: Line) -> None:
    await line.put(1)
    queued = await line.claim()
    await line.count_on_chain(1)
    assert not await line.revealer.prove(queued)
    assert line.row(1) is None


async def test_lateness_is_measured_from_the_second_that_the_wallet_chose_and_only_once(line: Line) -> None:
    line.prover.failures[1] = [ProofFailed("the circuit refused")]
    await line.put(1, submit_at=START + 5)
    line.clock.advance(5.25)
    assert not await line.revealer.prove(await line.claim())
    line.clock.advance(2)
    assert await line.revealer.prove(await line.claim())
    assert line.stats.lateness_start.summary()["max_ms"] == 250.0
    assert line.stats.lateness_start.count == 1
    assert line.stats.counts["proven"] == 1
    assert line.stats.proving.seconds(line.clock.monotonic() + 100) == 0, "no proof is under way"
