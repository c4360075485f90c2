"""Admission with the real round registry and tree sync: duplicates after the round, restarts, lagging nodes."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import anyio
import pytest

from helper.chain.round_registry import RoundRegistry
from helper.core.refusals import PauseReason, TemporaryRefusal
from helper.errors import ShareRefused
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import ShareValidator
from helper.store.models import EnqueueResult
from tests.unit.chain.fakes import VOTE_END, record_block, recorded_round
from tests.unit.chain.tree_fixtures import FakeTree, TreeEnvironment
from tests.unit.ingest.admission_fixtures import (
    COMMITMENT,
    POSITION,
    ROUND_ID,
    FakeChecks,
    FakeStore,
    create_body,
    parse_share,
)


class Harness(TreeEnvironment):
    """Admission over one node, whose tree has the share's commitment at its position."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = FakeStore()
        self.pause: str | None = None
        self.start_intake()
        self.votes = FakeTree()
        self.votes.append(60, 1, 2, int.from_bytes(COMMITMENT, "little"))
        self.votes.publish_to(*self.nodes)

    def start_intake(self) -> None:
        self.intake = AdmissionController(
            store=self.shares,
            rounds=self.rounds,
            trees=self.trees,
            validator=ShareValidator(FakeChecks()),
            clock=self.clock,
            wake=lambda _due: None,
            get_pause_reason=lambda: self.pause,
            get_round_pause_reason=lambda _: None,
        )

    async def sync(self) -> None:
        await self.endpoints.probe_all()
        if self.nodes[0].rounds[0]["status"] in (2, 3):
            record_block(self.rounds, VOTE_END)
        await self.rounds.sync(self.nodes[0].height)
        await self.trees.sync(self.nodes[0].height)

    async def restart(self) -> None:
        self.rounds = RoundRegistry(self.store, self.endpoints)
        await self.rounds.restore()
        await self.recreate_trees()
        self.start_intake()

    def set_status(self, status: int) -> None:
        self.nodes[0].rounds = [recorded_round(1) | {"status": status}]

    async def post(self, **changes: Any) -> EnqueueResult:
        return await self.intake.admit(create_body(**changes))

    async def expect_refusal(self, **changes: Any) -> tuple[int, str]:
        try:
            outcome = await self.post(**changes)
        except TemporaryRefusal as refusal:
            return 503, str(refusal)
        except ShareRefused as refusal:
            return refusal.status, f"{refusal.field}: {refusal}"
        raise AssertionError(outcome)


@pytest.fixture
async def harness() -> Harness:
    harness = Harness()
    await harness.endpoints.probe_all()
    await harness.sync()
    return harness


@pytest.mark.rule("R10", "N11")
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("status", [2, 3])
async def test_admission_after_round_accepts_duplicates_and_refuses_new(
    harness: Harness, *, restarted: bool, status: int
) -> None:
    assert await harness.post() is EnqueueResult.QUEUED
    harness.set_status(status)
    await harness.sync()
    if restarted:
        await harness.restart()
        await harness.sync()
    assert await harness.post(submit_at=0) is EnqueueResult.DUPLICATE
    assert await harness.expect_refusal(tree_position=1) == (
        (400, "vote_round_id: the round is not active")
        if restarted
        else (400, "tree_position: has a different vote commitment")
    )
    assert await harness.expect_refusal(tree_position=99) == (400, "vote_round_id: the round is not active")
    harness.shares.known_keys.clear()
    assert await harness.expect_refusal() == (400, "vote_round_id: the round is not active")


@pytest.mark.rule("R10")
async def test_admission_restart_without_node_recognizes_duplicates(harness: Harness) -> None:
    assert await harness.post() is EnqueueResult.QUEUED
    harness.network.nodes.clear()
    await harness.restart()
    harness.pause = PauseReason.STARTING
    assert await harness.post(submit_at=0) is EnqueueResult.DUPLICATE
    assert (await harness.expect_refusal(enc_share=create_body_share(1)))[0] == 503
    assert len(harness.shares.shares) == 1


def create_body_share(index: int) -> dict[str, Any]:
    share: dict[str, Any] = parse_ciphertext(create_body())
    return {**share, "share_index": index}


def parse_ciphertext(raw: bytes) -> dict[str, Any]:
    share = parse_share(raw)
    return {"c1": b64encode(share.c1).decode(), "c2": b64encode(share.c2).decode()}


async def test_admission_waits_for_leaf_of_next_sync(harness: Harness) -> None:
    harness.votes.append(101, int.from_bytes(COMMITMENT, "little"))
    results: list[EnqueueResult] = []

    async def post() -> None:
        results.append(await harness.post(tree_position=POSITION + 1))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(post)
            await anyio.wait_all_tasks_blocked()
            before = len(harness.nodes[0].requests)
            harness.clock.advance(1)
            await anyio.wait_all_tasks_blocked()
            assert (results, len(harness.nodes[0].requests)) == ([], before), "it causes no request"
            harness.votes.publish_to(*harness.nodes)
            await harness.sync()
    assert results == [EnqueueResult.QUEUED]


async def test_admission_lagging_node_is_temporary(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0

    async def behind(*_arguments: object) -> None:
        """Scheduled syncs while the node's height does not advance."""
        nonlocal waits
        waits += 1
        harness.clock.advance(0.6)
        harness.nodes[0].age += 0.6
        await harness.sync()

    harness.clock.advance(8)
    harness.nodes[0].age = 8
    monkeypatch.setattr(harness.trees, "wait_for_news", behind)
    assert (await harness.expect_refusal(tree_position=99))[0] == 503
    assert waits == 6, "within 3.5 s"
    assert ROUND_ID in {known.round_id for known in harness.rounds.active_rounds()}
