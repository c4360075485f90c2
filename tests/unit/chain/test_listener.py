"""The listener beside the recorded chain: heights to come, failed transactions, catch-up, pruned nodes, repetition."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.listener import IN_FLIGHT, TRIES, Listener
from helper.chain.message import RevealMessage
from helper.errors import ChainError, StoreError
from helper.rounds import RoundBook
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, VOTE_END, MemoryStore, Network, Node, answer, recorded_round


def reveal(number: int) -> RevealMessage:
    return RevealMessage(number.to_bytes(32, "little"), b"\x02" * 64, 1, 0, b"\x03" * 100, ROUND_ID, 84)


def included(number: int, code: int = 0) -> dict[str, Any]:
    attributes = [
        {"key": "vote_round_id", "value": ROUND_ID.hex()},
        {"key": "share_nullifier", "value": reveal(number).nullifier.hex()},
    ]
    return {"code": code, "log": "", "events": [{"type": "reveal_share", "attributes": attributes}]}


class Setting:
    """A listener over one node."""

    def __init__(self, *, rpc: bool, height: int = 100, cursor: int | None = None) -> None:
        self.clock = FakeClock()
        self.node = Node(self.clock, height=height)
        self.network = Network(node=self.node)
        self.endpoints = self.network.endpoints(self.clock, rpc=rpc)
        self.store = MemoryStore()
        if cursor is not None:
            self.store.heights.append(cursor)
        self.rounds = RoundBook(self.store, self.endpoints, clock=self.clock)
        self.listener = Listener(self.store, self.endpoints, self.rounds, clock=self.clock)

    def put(self, height: int, number: int, code: int = 0) -> None:
        self.node.include(height, reveal(number).to_tx(), included(number, code))

    async def follow(self) -> None:
        await self.endpoints.check()
        while await self.listener.step():
            pass

    @property
    def spent(self) -> list[int]:
        assert all(round_id == ROUND_ID for round_id, _ in self.store.spent)
        return sorted(int.from_bytes(nullifier, "little") for _, nullifier in self.store.spent)


both = pytest.mark.parametrize("rpc", [True, False], ids=["rpc", "rest"])


@both
async def test_one_question_a_block_and_none_beyond_the_head(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=98)
    await setting.follow()
    assert setting.listener.height == 100
    before = len(setting.node.asked)
    await setting.follow()
    asked = setting.node.asked[before:]
    assert not any("block_results" in path or path.endswith(("/100", "/101")) for path in asked)
    setting.put(101, 7)
    setting.node.height = 101
    before = len(setting.node.asked)
    await setting.follow()
    blocks = [path for path in setting.node.asked[before:] if "block_results" in path or "/blocks/1" in path]
    assert len(blocks) == 1
    assert setting.spent == [7]


@both
async def test_failed_transactions_do_not_count(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=98)
    setting.put(99, 1, code=1)
    setting.put(99, 2)
    await setting.follow()
    assert setting.spent == [2]


@both
async def test_a_block_applied_twice_changes_nothing(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=90)
    setting.put(95, 1)
    setting.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
    await setting.follow()
    confirmed: list[int] = []
    again = Listener(setting.store, setting.endpoints, setting.rounds, clock=setting.clock, on_spent=confirmed.extend)
    setting.store.heights = [90]
    while await again.step():
        pass
    assert setting.spent == [1]
    assert confirmed == []
    assert again.height == 100


@both
async def test_catches_up_in_order_a_few_at_a_time(rpc: bool) -> None:
    setting = Setting(rpc=rpc, height=400, cursor=100)
    for height in range(101, 401, 7):
        setting.put(height, height)
    await setting.endpoints.check()
    flying, most = 0, 0
    handle = setting.node.handle

    async def counted(request: httpx.Request) -> httpx.Response:
        nonlocal flying, most
        if "block" not in request.url.path:
            return await handle(request)
        flying += 1
        most = max(most, flying)
        await anyio.sleep(0)
        response = await handle(request)
        flying -= 1
        return response

    setting.node.handle = counted  # type: ignore[method-assign]
    while await setting.listener.step():
        pass
    assert setting.spent == list(range(101, 401, 7))
    assert setting.store.heights == list(range(100, 401))
    assert 1 < most <= IN_FLIGHT


@pytest.mark.parametrize("status", [404, 502])
async def test_a_reveal_whose_fate_is_unknown_holds_the_cursor(status: int) -> None:
    setting = Setting(rpc=False, cursor=98)
    setting.put(99, 1)
    setting.node.faults["/tx/"] = lambda _: answer(status, {"error": "tx not found"})
    await setting.endpoints.check()
    if status == 404:
        assert not await setting.listener.step()
    else:
        with pytest.raises(ChainError):
            await setting.listener.step()
    assert setting.listener.height == 98
    assert setting.store.heights == [98]
    assert setting.spent == []
    setting.node.faults.clear()
    setting.clock.advance(1)
    await setting.follow()
    assert (setting.spent, setting.listener.height) == ([1], 100)


async def test_a_block_shown_before_it_is_executed_waits() -> None:
    setting = Setting(rpc=True, cursor=99)
    error = {"error": {"code": -32603, "message": "Internal error", "data": "could not find results for height #100"}}
    setting.node.faults["block_results"] = lambda _: answer(500, error)
    await setting.endpoints.check()
    assert not await setting.listener.step()
    assert not any("/blocks/100" in path for path in setting.node.asked), "its REST would not know better"
    setting.node.faults.clear()
    await setting.follow()
    assert setting.listener.height == 100


async def test_a_node_without_block_results_is_read_by_rest_after_some_tries() -> None:
    setting = Setting(rpc=True, cursor=98)
    setting.put(99, 1)
    error = {"error": {"code": -32603, "message": "Internal error", "data": "could not find results for height #99"}}
    setting.node.faults["block_results"] = lambda _: answer(500, error)
    await setting.endpoints.check()
    for _ in range(TRIES):
        await setting.listener.step()
    assert (setting.spent, setting.listener.height) == ([1], 100)
    assert setting.listener.stalled is None


async def test_without_its_rpc_a_node_is_read_by_rest() -> None:
    setting = Setting(rpc=True, cursor=98)
    setting.put(99, 1)
    setting.node.faults["block_results"] = lambda _: httpx.Response(500, content=b"<html>")
    await setting.follow()
    assert (setting.spent, setting.listener.height) == ([1], 100)
    assert setting.endpoints.usable, "its REST is as good as before"


@both
async def test_the_time_of_the_newest_processed_block(rpc: bool) -> None:
    setting = Setting(rpc=rpc, height=400, cursor=100)
    await setting.endpoints.check()
    assert setting.listener.chain_time is None
    await setting.listener.step()
    assert setting.listener.height == 108
    if rpc:
        assert setting.listener.chain_time is None, "the head's time is not that of a block in the past"
    else:
        assert setting.listener.chain_time == pytest.approx(setting.clock.now() - 292 * 5)
    await setting.follow()
    assert setting.listener.chain_time == pytest.approx(setting.clock.now())


@pytest.mark.rule("R14")
@both
async def test_a_round_closes_when_its_last_block_was_processed(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=99)
    setting.clock.advance(VOTE_END + 1 - setting.clock.now())
    setting.node.rounds = [recorded_round(3)]
    await setting.endpoints.check()
    await setting.rounds.sync()
    assert not await setting.rounds.is_closed(ROUND_ID)
    await setting.follow()
    assert await setting.rounds.is_closed(ROUND_ID)


async def test_begins_at_the_head_when_no_round_is_open() -> None:
    setting = Setting(rpc=False, height=5000)
    setting.node.rounds = []
    await setting.endpoints.check()
    await setting.rounds.sync()
    assert await setting.listener.step()
    assert setting.listener.height == 5000


@pytest.mark.rule("R12")
async def test_a_pruned_gap_is_bridged_by_search() -> None:
    setting = Setting(rpc=True, height=5000, cursor=100)
    setting.put(300, 1)
    setting.put(4995, 2)
    setting.node.lowest = 4900
    setting.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
    confirmed: list[int] = []
    setting.listener = Listener(
        setting.store, setting.endpoints, setting.rounds, clock=setting.clock, on_spent=confirmed.extend
    )
    await setting.endpoints.check()
    await setting.rounds.sync()
    with capture_logs() as logs:
        for _ in range(TRIES - 1):
            with pytest.raises(ChainError, match="height 101 is not available"):
                await setting.listener.step()
        assert setting.listener.stalled is None
        await setting.listener.step()
    assert [log["height"] for log in logs if log["log_level"] == "error"] == [101]
    assert confirmed == [11]
    await setting.follow()
    assert (setting.spent, setting.listener.height) == ([1, 2], 5000)
    assert setting.listener.stalled is None
    assert setting.endpoints.usable, "a pruned node is not at fault"


async def test_a_pruned_gap_without_a_search_is_reported_and_tried_for_ever() -> None:
    setting = Setting(rpc=False, height=1000, cursor=100)
    setting.node.lowest = 900
    await setting.endpoints.check()
    for _ in range(TRIES + 3):
        with pytest.raises(ChainError):
            await setting.listener.step()
    assert setting.listener.stalled == 101
    assert setting.listener.height == 100
    setting.node.lowest = 1
    await setting.follow()
    assert setting.listener.height == 1000
    assert not setting.listener.stalled


async def test_an_outage_is_not_a_stall() -> None:
    setting = Setting(rpc=True, cursor=90)
    await setting.endpoints.check()
    del setting.network.nodes["node"]
    for _ in range(TRIES + 3):
        await setting.endpoints.check()
        assert not await setting.listener.step()
    assert setting.listener.stalled is None


async def test_running_survives_errors() -> None:
    setting = Setting(rpc=True, cursor=98)
    apply = setting.store.apply_block
    failures = [StoreError("no space"), RuntimeError("odd")]

    async def failing(height: int, spent: Any, *, now: float) -> list[int]:
        if failures:
            raise failures.pop(0)
        return await apply(height, spent, now=now)

    setting.store.apply_block = failing  # type: ignore[method-assign]
    await setting.endpoints.check()
    with anyio.fail_after(10), capture_logs() as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(setting.listener.run)
            while setting.listener.height != 100:
                await anyio.wait_all_tasks_blocked()
                setting.clock.advance(10)
                await setting.endpoints.check()
            group.cancel_scope.cancel()
    assert [log["reason"] for log in logs if "not followed" in log["event"]] == ["no space", "RuntimeError('odd')"]
