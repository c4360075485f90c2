"""Seeds keep all promises, are reproducible, and detect injected faults."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helper.chain.broadcast_outcome import BroadcastOutcome, Verdict
from helper.chain.node import Node
from helper.core import dispatch_order
from helper.reveal import send_policy
from helper.reveal.send_policy import NodeFacts, ProcessFacts, ProveAnew, Send, Step
from helper.reveal.sender import Sender
from helper.store import blocks, shares
from helper.store.messages import SentReveal
from tests.simulation.host import SimClock
from tests.simulation.liar import Lie
from tests.simulation.run import run_seed
from tests.simulation.runner import run_seeds
from tests.simulation.scenario import LiarPlan

SEED_COUNT = 100
"""Number of seeds tested; `make test-full` runs 900 more."""
SEEDS_PER_TEST = 20
MAX_SEARCHED_SEEDS = 25
"""Seeds within which an injected fault must be found."""
MIN_CONFIRMED = 20
"""Average confirmed shares per seed: a simulation in which nothing happens keeps every promise."""


@pytest.mark.parametrize("first", range(0, SEED_COUNT, SEEDS_PER_TEST))
def test_seeds_keep_all_promises(first: int) -> None:
    results = list(run_seeds(range(first, first + SEEDS_PER_TEST), jobs=1))
    assert sum(result.counts["counted"] for result in results) >= MIN_CONFIRMED * SEEDS_PER_TEST
    broken = {result.seed: result.violations for result in results if result.violations}
    assert broken == {}, "reproduce with: python -m tests.simulation --seed N --story"


@pytest.mark.parametrize(
    ("lie", "seed"),
    [(Lie.FALSE_TREE, 4), (Lie.TWIN, 3), (Lie.FALSE_CREATED, 0), (Lie.FALSE_END, 0), (Lie.ONE_HEIGHT, 3)],
)
def test_share_is_accepted_and_counted_while_one_of_two_nodes_lies(lie: Lie, seed: int) -> None:
    result = run_seed(seed, liar=LiarPlan((lie, Lie.SWALLOW), 2))
    assert result.violations == []
    assert result.counts["counted"] >= MIN_CONFIRMED


def test_same_seed_in_two_processes_gives_same_digest() -> None:
    seeds = [3, 4, 5, 33, 57]
    code = (
        "import json, sys; from tests.simulation.run import run_seed\n"
        "print(json.dumps([run_seed(int(seed)).digest for seed in sys.argv[1:]]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, *map(str, reversed(seeds))],  # nothing of one run remains for the next one
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
    )
    digests = [run_seed(seed).digest for seed in seeds]
    assert digests == json.loads(other.stdout)[::-1]
    assert len(set(digests)) == len(seeds), "other seeds run differently"


def finds_violation(promise: str, first: int = 0) -> bool:
    """Return whether any of the searched seeds, starting at `first`, breaks this promise."""
    return any(
        promise in violation
        for seed in range(first, first + MAX_SEARCHED_SEEDS)
        for violation in run_seed(seed).violations
    )


def test_checker_early_reveal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    due_ms = dispatch_order.due_ms
    monkeypatch.setattr(shares, "due_ms", lambda submit_at, now: due_ms(max(0, submit_at - 2), now))
    assert finds_violation("revealed early")


def test_checker_new_proof_instead_of_resend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = send_policy.decide

    def prove_instead_of_resend(reveal: SentReveal, process: ProcessFacts, nodes: Sequence[NodeFacts]) -> Step:
        step = decide(reveal, process, nodes)
        return ProveAnew("a bug") if isinstance(step, Send) and reveal.row.sends else step

    monkeypatch.setattr(send_policy, "decide", prove_instead_of_resend)
    assert finds_violation("proven again too early")


def test_checker_attempt_spent_on_outage_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    handle_outcome = Sender._handle_outcome

    async def charge_lost_reply(self: Sender, reveal: SentReveal, outcome: BroadcastOutcome, endpoint: Node) -> None:
        if outcome.verdict is Verdict.AMBIGUOUS:
            await self._spend_attempt(reveal, outcome)
        else:
            await handle_outcome(self, reveal, outcome, endpoint)

    monkeypatch.setattr(Sender, "_handle_outcome", charge_lost_reply)
    assert finds_violation("an attempt spent without a fault of the share")


def test_checker_confirmation_by_response_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    handle_outcome = Sender._handle_outcome

    async def confirm_accepted_reply(
        self: Sender, reveal: SentReveal, outcome: BroadcastOutcome, endpoint: Node
    ) -> None:
        if outcome.verdict is Verdict.ACCEPTED:
            await self.store.run(blocks.add_spent, [(reveal.round_id, reveal.nullifier)])
        await handle_outcome(self, reveal, outcome, endpoint)

    monkeypatch.setattr(Sender, "_handle_outcome", confirm_accepted_reply)
    assert finds_violation("submitted though never counted")


def test_checker_row_lost_at_restart_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "recover", lambda _tx, _limit: (0, False))
    assert finds_violation("an acknowledged share was not counted", first=8)


def test_checker_spinning_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy_wait(self: SimClock, event: asyncio.Event, until: float) -> None:
        await self.sleep(0.001)

    monkeypatch.setattr(SimClock, "wait", busy_wait)
    assert finds_violation("busy loop")
