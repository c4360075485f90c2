"""Admission of an honest wallet's shares while the helper's node lags and its clock is wrong."""

from __future__ import annotations

import math

import pytest

from helper.errors import ShareRefused
from helper.ingest.admission import AdmissionController
from helper.store.rows import Enqueued
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import Node
from tests.unit.ingest.admission_fixtures import COMMITMENT, POSITION, body
from tests.unit.ingest.test_admission_trees import Harness

pytestmark = pytest.mark.anyio

POLL = 1.0
PATIENCE = 60.0
"""Seconds after which the wallet of this test stops retrying."""


class LaggingNode(Node):
    """A node that is `lag` blocks behind the chain. `origin` is the chain's time of height 0."""

    block = 5.0
    lag = 0.0
    offset = 0.0
    origin = 0.0

    def chain_now(self) -> float:
        """The chain's time; our clock differs by `offset`."""
        return self.clock.now() - self.offset

    def _time(self, height: int) -> float:
        return self.origin + height * self.block

    def follow(self) -> None:
        self.height = math.floor((self.chain_now() - self.origin) / self.block - self.lag)


class Lag(Harness):
    """Admission over a lagging node, with the blocks up to the vote's."""

    def __init__(self, *, block: float, lag: float, offset: float) -> None:
        super().__init__()
        self.clock = FakeClock()
        node = LaggingNode(self.clock)
        node.block, node.lag, node.offset = block, lag, offset
        node.origin = node.chain_now() - 100 * block
        node.tree = {}
        node.leaf_blocks = []
        self.node = node
        self.nodes = [node]
        self.network.nodes = {"a": node}
        self.endpoints = self.network.endpoints(self.clock)
        self.vote_height = math.inf

    async def prepare(self) -> None:
        self.node.follow()
        await self.restart()
        self.trees.wait_next_sync = self.wait_next_sync  # type: ignore[method-assign]

    async def step(self, seconds: float) -> None:
        """Advance the clock and sync as the block follower does."""
        self.clock.advance(seconds)
        self.node.follow()
        if self.node.height >= self.vote_height and not self.node.leaf_blocks:
            self.votes.blocks[0]["height"] = int(self.vote_height)
            self.votes.show(self.node)
        await self.endpoints.check()
        head = self.endpoints.head
        if head is not None:
            await self.rounds.sync(head.height)
            await self.trees.sync(head.height)

    async def wait_next_sync(self, timeout: float) -> bool:
        await self.step(min(timeout, POLL))
        return True

    async def post_until_answered(self, intake: AdmissionController) -> Enqueued | None:
        """Post like a wallet: retry after a 429, never after a 400."""
        began = self.clock.monotonic()
        while self.clock.monotonic() < began + PATIENCE:
            try:
                return await intake.take(body())
            except ShareRefused as refusal:
                if refusal.status != 429:
                    raise
            await self.step(POLL)
        return None


@pytest.mark.parametrize("moment", [0.05, 0.9])
@pytest.mark.parametrize("offset", [-120.0, -30.0, -5.0, -1.0, 0.0, 1.0, 5.0, 30.0, 120.0])
@pytest.mark.parametrize("lag", [0.2, 0.6, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("block", [1.0, 2.0, 6.0])
async def test_intake_never_rejects_honest_share_of_lagging_node(
    block: float, lag: float, offset: float, moment: float
) -> None:
    harness = Lag(block=block, lag=lag, offset=offset)
    await harness.prepare()
    for _ in range(math.ceil(6 * block / POLL)):
        await harness.step(POLL)
    # the vote is in the block that a current node shows now, and the wallet posts a part of a block later
    passed = (harness.node.chain_now() - harness.node.origin) / block
    harness.vote_height = math.floor(passed) + 1
    await harness.step((harness.vote_height + moment - passed) * block)
    answer = await harness.post_until_answered(harness.intake)
    if abs(offset) <= 60:
        assert answer is Enqueued.QUEUED
        assert harness.trees.leaf(harness.shares.kept[0].round_id, POSITION) == COMMITMENT
