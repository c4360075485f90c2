"""Chain follower: syncs on new blocks, error handling, waiting for a sync."""

from __future__ import annotations

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.scheduled_sync import ChainSync
from tests.unit.chain.fakes import ROUND_ID
from tests.unit.chain.tree_fixtures import TreeEnvironment


class Environment(TreeEnvironment):
    """A chain follower with one node, or several."""

    def __init__(self, *others: str) -> None:
        super().__init__("node", *others)
        self.node = self.nodes[0]
        self.follower = ChainSync(node_pool=self.endpoints, rounds=self.rounds, trees=self.trees)

    def count_syncs(self) -> int:
        return sum(path.endswith("/rounds") for path in self.node.requests)

    async def poll(self) -> bool:
        self.clock.advance(1)
        await self.endpoints.probe_all()
        return await self.follower.sync_once()


async def test_follower_syncs_on_each_block_and_once_after() -> None:
    env = Environment()
    assert await env.follower.sync_once(), "nothing is known yet and there is no error"
    assert not env.follower.is_ready
    assert await env.poll()
    assert env.follower.is_ready
    assert env.trees.last_size(ROUND_ID) == 3
    assert env.count_syncs() == 1
    assert await env.follower.sync_once()
    assert env.count_syncs() == 1, "not before the poll interval has passed"
    for _ in range(5):
        assert await env.poll()
    assert env.count_syncs() == 2
    env.node.height += 1
    assert await env.poll()
    assert env.count_syncs() == 3


@pytest.mark.parametrize("others", [("stuck",), ("stuck", "silent")])
async def test_blocks_of_one_node_are_followed_while_the_agreed_height_stands_still(others: tuple[str, ...]) -> None:
    """The other node reports one height with current times, so it is never stale."""
    env = Environment(*others)
    env.network.nodes.pop("silent", None)
    for _ in range(3):
        assert await env.poll()
    before = env.count_syncs()
    for number in range(1, 11):
        env.node.height += 1
        for _ in range(5):
            assert await env.poll()
        assert env.endpoints.agreed_height == 100
        assert env.count_syncs() >= before + number, "it is asked in one of two syncs for each block"
    for _ in range(5):
        await env.poll()
    settled = env.count_syncs()
    for _ in range(5):
        await env.poll()
    assert env.count_syncs() == settled <= before + 2 * 10


async def test_follower_errors_are_logged_once_and_do_not_end_it() -> None:
    env = Environment()
    env.node.faults["/rounds"] = lambda _: httpx.Response(500, content=b"<html>")
    with capture_logs() as logs:
        assert not await env.poll()
        env.clock.advance(60)
        assert not await env.poll()
        env.node.faults.clear()
        env.node.syncing = True
        env.node.height += 1
        env.clock.advance(60)
        assert await env.poll(), "there is nothing to do without a node in sync"
        events = [log["event"] for log in logs if log["event"].startswith("chain_sync")]
        assert events == ["chain_sync_failed"], "nothing was synchronized yet"
        env.node.syncing = False
        assert await env.poll()
    events = [log["event"] for log in logs if log["event"].startswith("chain_sync")]
    assert events == ["chain_sync_failed", "chain_sync_recovered"]
    assert env.follower.is_ready


async def test_round_without_tree_does_not_delay_the_start() -> None:
    env = Environment()
    env.node.tree |= {"root": bytes(32).hex()}
    assert not await env.poll()
    assert env.follower.is_ready, "other rounds may follow, and known shares are recognized"


@pytest.mark.parametrize(("path", "route"), [("/rounds", "rounds"), ("/commitment-tree/", "tree")])
async def test_route_that_fails_for_30_seconds_is_overdue(path: str, route: str) -> None:
    env = Environment()
    await env.poll()
    await env.poll()
    env.clock.advance(300)
    assert env.follower.find_overdue_routes() == [], "no new block: no sync is due"
    env.node.faults[path] = lambda _: httpx.Response(500, content=b"<html>")
    env.node.height += 1
    for _ in range(31):
        assert env.follower.find_overdue_routes() == []
        assert not await env.poll()
    assert env.follower.find_overdue_routes() == [route]
    env.node.faults.clear()
    env.clock.advance(30)  # the longest backoff of a tree
    assert await env.poll()
    assert env.follower.find_overdue_routes() == []


async def test_chain_sync_runs_until_cancelled() -> None:
    env = Environment()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(env.follower.run)
            await env.follower.wait_ready()
            env.node.height = 105
            while env.follower.synced_height < 105:
                await anyio.wait_all_tasks_blocked()
                env.clock.advance(1)
            group.cancel_scope.cancel()


async def test_follower_probe_without_block_skips_sync_but_failed_sync_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env, checks, probes = Environment(), list[bool](), list[int]()
    tick = env.follower.sync_once

    async def counted() -> bool:
        checks.append(await tick())
        return checks[-1]

    monkeypatch.setattr(env.follower, "sync_once", counted)
    env.endpoints.subscribe_to_probes(lambda head: probes.append(head.height if head is not None else 0))

    async def advance_second() -> None:
        env.clock.advance(1)
        await anyio.wait_all_tasks_blocked()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(env.follower.run)
            while env.count_syncs() < 2:  # with the block and once after it
                await advance_second()
            check_count, probe_count = len(checks), len(probes)
            for _ in range(5):
                await advance_second()
            assert len(probes) > probe_count
            assert len(checks) == check_count
            env.node.faults["/rounds"] = lambda _: httpx.Response(500, content=b"<html>")
            env.node.height += 1
            while checks[-1]:
                await advance_second()
            env.node.faults.clear()
            while env.follower.synced_height != env.node.height:
                await advance_second()
            group.cancel_scope.cancel()
