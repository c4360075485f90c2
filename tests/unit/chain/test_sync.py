"""The follower's questions come with blocks, never with shares, and no error ends it."""

from __future__ import annotations

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry
from helper.chain.sync import ChainFollower
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, MemoryStore, Network, Node


class Setting:
    """A follower over one node."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.node = Node(self.clock, height=100)
        self.endpoints = Network(node=self.node).endpoints(self.clock)
        self.store = MemoryStore()
        self.rounds = RoundRegistry(self.store, self.endpoints, clock=self.clock)
        self.trees = CommitmentTreeSync(self.store, self.endpoints, self.rounds)
        self.follower = ChainFollower(endpoints=self.endpoints, rounds=self.rounds, trees=self.trees)

    def syncs(self) -> int:
        return sum(path.endswith("/rounds") for path in self.node.asked)

    async def poll(self) -> bool:
        self.clock.advance(1)
        await self.endpoints.check()
        return await self.follower.tick()


async def test_follower_syncs_on_each_block_and_once_after() -> None:
    setting = Setting()
    assert await setting.follower.tick(), "nothing is known yet, nothing is wrong"
    assert not setting.follower.ready
    assert await setting.poll()
    assert setting.follower.ready
    assert setting.trees.size(ROUND_ID) == 3
    assert setting.syncs() == 1
    assert await setting.follower.tick()
    assert setting.syncs() == 1, "not before a poll has passed"
    for _ in range(5):
        assert await setting.poll()
    assert setting.syncs() == 2
    setting.node.height += 1
    assert await setting.poll()
    assert setting.syncs() == 3


async def test_follower_errors_are_logged_once_and_do_not_end_it() -> None:
    setting = Setting()
    setting.node.faults["/rounds"] = lambda _: httpx.Response(500, content=b"<html>")
    with capture_logs() as logs:
        assert not await setting.poll()
        setting.clock.advance(60)
        assert not await setting.poll()
        setting.node.faults.clear()
        setting.clock.advance(60)
        assert await setting.poll()
    events = [log["event"] for log in logs if log["event"].startswith("chain_sync")]
    assert events == ["chain_sync_failed", "chain_sync_recovered"]
    assert setting.follower.ready


async def test_chain_follower_runs_until_cancelled() -> None:
    setting = Setting()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(setting.follower.run)
            await setting.follower.wait_ready()
            setting.node.height = 105
            while setting.trees.synced_height < 105:
                await anyio.wait_all_tasks_blocked()
                setting.clock.advance(1)
            group.cancel_scope.cancel()


async def test_follower_probe_without_block_skips_sync_but_failed_sync_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting, looks, probes = Setting(), list[bool](), list[int]()
    tick = setting.follower.tick

    async def counted() -> bool:
        looks.append(await tick())
        return looks[-1]

    monkeypatch.setattr(setting.follower, "tick", counted)
    setting.endpoints.on_probe(lambda head: probes.append(head.height if head is not None else 0))

    async def second() -> None:
        setting.clock.advance(1)
        await anyio.wait_all_tasks_blocked()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(setting.follower.run)
            while setting.syncs() < 2:  # with the block, and once after it
                await second()
            done, probed = len(looks), len(probes)
            for _ in range(5):
                await second()
            assert len(probes) > probed
            assert len(looks) == done
            setting.node.faults["/rounds"] = lambda _: httpx.Response(500, content=b"<html>")
            setting.node.height += 1
            while looks[-1]:
                await second()
            setting.node.faults.clear()
            while setting.trees.synced_height != setting.node.height:
                await second()
            group.cancel_scope.cancel()


async def test_wait_next_sync_returns_after_next_scheduled_sync() -> None:
    setting = Setting()
    await setting.poll()
    await setting.poll()
    released: list[bool] = []

    async def wait() -> None:
        released.append(await setting.trees.wait_next_sync(30))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            before = setting.syncs()
            await setting.poll()
            await anyio.wait_all_tasks_blocked()
            assert setting.syncs() == before, "in step with the newest block: nothing was asked"
            assert released == []
            setting.node.height += 1
            await setting.poll()
    assert released == [True]
