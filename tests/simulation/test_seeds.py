"""A thousand seeds hold, a seed plays the same each time, and the judge is not blind: planted bugs are found."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helper.chain.node import Node
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.verdicts import Outcome, Verdict
from helper.core import schedule
from helper.reveal import broadcaster, resend_policy
from helper.reveal.broadcaster import Broadcaster
from helper.reveal.resend_policy import Next
from helper.store.operations import shares
from helper.store.rows import SentReveal
from helper.store.sqlite.store import SqliteStore
from tests.simulation.host import SimClock
from tests.simulation.run import run_seed
from tests.simulation.runner import play

SEEDS = 1000
"""Of those that `make simulation` plays: what CI has time for."""
BATCH = 50
ENOUGH = 25
"""Seeds in which a planted bug must be found."""
LEAST = 20
"""Shares that a seed counts on average: a simulation in which nothing happens holds every promise."""


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_seeds_hold(first: int) -> None:
    results = list(play(range(first, first + BATCH), jobs=1))
    assert sum(result.counts["counted"] for result in results) >= LEAST * BATCH
    broken = {result.seed: result.broken for result in results if result.broken}
    assert broken == {}, "see it with: python -m tests.simulation --seed N --story"


def test_a_seed_plays_the_same_each_time_to_the_letter() -> None:
    code = (
        "from tests.simulation.run import run_seed\n"
        "told = [[run_seed(seed).digest for seed in (3, 4, 5, 33, 57)] for _ in range(2)]\n"
        "assert told[0] == told[1]\n"
        "print(told[0])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashing},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
        ).stdout
        for hashing in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(set(json.loads(told[0].replace(b"'", b'"')))) == 5, "and other seeds play otherwise"


def found(promise: str, first: int = 0) -> bool:
    """Whether any of some seeds, from the first on, breaks this promise."""
    return any(promise in told for seed in range(first, first + ENOUGH) for told in run_seed(seed).broken)


def test_shares_revealed_a_little_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    due_ms = schedule.due_ms
    monkeypatch.setattr(shares, "due_ms", lambda submit_at, now: due_ms(max(0, submit_at - 2), now))
    assert found("revealed early")


def test_a_new_proof_in_the_place_of_the_same_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    next_step = resend_policy.next_step

    def hasty(**known: object) -> Next:
        step = next_step(**known)  # type: ignore[arg-type]  # passed on as it came
        return Next.PROVE if step is Next.SEND and known["sends"] else step

    monkeypatch.setattr(broadcaster, "next_step", hasty)
    assert found("proven anew too soon")


def test_an_attempt_spent_on_an_outage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Broadcaster._handle_outcome

    async def harsh(
        self: Broadcaster, reveal: SentReveal, message: RevealMessage, outcome: Outcome, endpoint: Node
    ) -> None:
        if outcome.verdict is Verdict.AMBIGUOUS:
            await self._spend(reveal, outcome)
        else:
            await answered(self, reveal, message, outcome, endpoint)

    monkeypatch.setattr(Broadcaster, "_handle_outcome", harsh)
    assert found("an attempt spent for nothing")


def test_success_on_an_answer_instead_of_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Broadcaster._handle_outcome

    async def credulous(
        self: Broadcaster, reveal: SentReveal, message: RevealMessage, outcome: Outcome, endpoint: Node
    ) -> None:
        if outcome.verdict is Verdict.ACCEPTED:
            await self._store.add_spent([(reveal.round_id, reveal.nullifier)])
        await answered(self, reveal, message, outcome, endpoint)

    monkeypatch.setattr(Broadcaster, "_handle_outcome", credulous)
    assert found("submitted though never counted")


def test_a_row_that_a_restart_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgetful(self: SqliteStore) -> int:
        return 0

    monkeypatch.setattr(SqliteStore, "recover", forgetful)
    assert found("an acknowledged share was not counted", first=40)


def test_a_loop_that_spins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def restless(self: SimClock, event: asyncio.Event, until: float) -> None:
        await self.sleep(0.001)

    monkeypatch.setattr(SimClock, "wait", restless)
    assert found("somebody spins")
