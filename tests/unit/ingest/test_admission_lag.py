"""Admission of an honest wallet's shares with a lagging node and a skewed clock."""

from __future__ import annotations

import math

import pytest

from helper.core.refusals import TemporaryRefusal
from helper.ingest.admission import AdmissionController
from helper.store.models import EnqueueResult
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import FakeNode
from tests.unit.ingest.admission_fixtures import COMMITMENT, POSITION, create_body
from tests.unit.ingest.test_admission_trees import Harness

pytestmark = pytest.mark.anyio

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
"""Seconds after which the wallet of this test stops retrying."""


class LaggingNode(FakeNode):
    """A node that is `lag` blocks behind the chain. `origin` is the chain's time of height 0."""

    block_seconds = 5.0
    lag_seconds = 0.0
    offset = 0.0
    origin = 0.0

    def chain_now(self) -> float:
        """The chain's time; the local clock differs by `offset`."""
        return self.clock.now() - self.offset

    def _time(self, height: int) -> float:
        return self.origin + height * self.block_seconds

    def follow(self) -> None:
        self.height = math.floor((self.chain_now() - self.origin) / self.block_seconds - self.lag_seconds)


class LagSimulation(Harness):
    """Admission over a lagging node, with the blocks up to the vote's."""

    def __init__(self, *, block: float, lag: float, offset: float) -> None:
        super().__init__()
        self.clock = FakeClock()
        node = LaggingNode(self.clock)
        node.block_seconds, node.lag_seconds, node.offset = block, lag, offset
        node.origin = node.chain_now() - 100 * block
        node.tree = {}
        node.leaf_blocks = []
        self.node = node
        self.nodes = [node]
        self.network.nodes = {"a": node}
        self.endpoints = self.network.create_node_pool(self.clock)
        self.vote_height = math.inf

    async def prepare(self) -> None:
        self.node.follow()
        await self.restart()
        self.trees.wait_next_sync = self.wait_next_sync  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """Advance the clock and sync as the block follower does."""
        self.clock.advance(seconds)
        self.node.follow()
        if self.node.height >= self.vote_height and not self.node.leaf_blocks:
            self.votes.blocks[0]["height"] = int(self.vote_height)
            self.votes.publish_to(self.node)
        await self.endpoints.probe_all()
        head = self.endpoints.head
        if head is not None:
            await self.rounds.sync(head.height)
            await self.trees.sync(head.height)

    async def wait_next_sync(self, timeout: float) -> bool:
        await self.advance(min(timeout, POLL_SECONDS))
        return True

    async def post_until_answered(self, intake: AdmissionController) -> EnqueueResult | None:
        """Post like a wallet: retry after a temporary refusal, never after a 400."""
        started_at = self.clock.monotonic()
        while self.clock.monotonic() < started_at + PATIENCE_SECONDS:
            try:
                return await intake.admit(create_body())
            except TemporaryRefusal:
                pass
            await self.advance(POLL_SECONDS)
        return None


@pytest.mark.parametrize("moment", [0.05, 0.9])
@pytest.mark.parametrize("offset", [-120.0, -30.0, -5.0, -1.0, 0.0, 1.0, 5.0, 30.0, 120.0])
@pytest.mark.parametrize("lag", [0.2, 0.6, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("block", [1.0, 2.0, 6.0])
async def test_admission_never_rejects_honest_share_with_lagging_node(
    block: float, lag: float, offset: float, moment: float
) -> None:
    harness = LagSimulation(block=block, lag=lag, offset=offset)
    await harness.prepare()
    for _ in range(math.ceil(6 * block / POLL_SECONDS)):
        await harness.advance(POLL_SECONDS)
    # A current node reports the vote's block now; the wallet posts `moment` of a block interval later.
    passed = (harness.node.chain_now() - harness.node.origin) / block
    harness.vote_height = math.floor(passed) + 1
    await harness.advance((harness.vote_height + moment - passed) * block)
    response = await harness.post_until_answered(harness.intake)
    if abs(offset) <= 60:
        assert response is EnqueueResult.QUEUED
        assert harness.trees.leaf(harness.shares.shares[0].round_id, POSITION) == COMMITMENT
