"""The listener beside the recorded chain: heights to come, failed transactions, catch-up, pruned nodes, repetition."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.block_follower import CURSOR_TRIES, PATIENCE_SECONDS, BlockFollower
from helper.chain.block_history import IN_FLIGHT, TRIES
from helper.chain.copy_quorum import ALONE_SECONDS, UNABLE_SECONDS
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.round_registry import RoundRegistry
from helper.errors import ChainError, StoreError
from helper.store.rows import PreparedReveal, SentReveal
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
        self.rounds = RoundRegistry(self.store, self.endpoints, clock=self.clock)
        self.listener = BlockFollower(self.store, self.endpoints, self.rounds, clock=self.clock)

    def put(self, height: int, number: int, code: int = 0) -> None:
        self.node.include(height, reveal(number).to_tx(), included(number, code))

    async def know_rounds(self) -> None:
        await self.endpoints.check()
        await self.rounds.sync()

    async def follow(self) -> None:
        await self.endpoints.check()
        while await self.listener.step():
            pass
        while await self.listener.history.step():
            pass

    @property
    def spent(self) -> list[int]:
        assert all(round_id == ROUND_ID for round_id, _ in self.store.spent)
        return sorted(int.from_bytes(nullifier, "little") for _, nullifier in self.store.spent)


both = pytest.mark.parametrize("rpc", [True, False], ids=["rpc", "rest"])


@both
async def test_follower_requests_each_block_once_up_to_head(rpc: bool) -> None:
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
async def test_follower_failed_transaction_is_not_counted(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=98)
    setting.put(99, 1, code=1)
    setting.put(99, 2)
    await setting.follow()
    assert setting.spent == [2]


@pytest.mark.parametrize(
    ("code", "log", "spent"),
    [
        (0, "", [1]),
        (2, "nullifier already spent: 01", [1]),
        (1, "invalid zero-knowledge proof", []),
    ],
)
async def test_follower_same_transaction_in_two_blocks_is_counted_once(code: int, log: str, spent: list[int]) -> None:
    # sent again while they did not count; a node's index has the last place alone, which once stopped the following
    setting = Setting(rpc=False, cursor=90)
    setting.put(95, 1)
    setting.node.include(98, reveal(1).to_tx(), included(1, code) | {"log": log})
    await setting.follow()
    assert (setting.spent, setting.listener.height) == (spent, 100)
    assert setting.endpoints.usable


async def test_follower_waits_for_index_that_shows_earlier_block() -> None:
    setting = Setting(rpc=False, cursor=90)
    setting.put(95, 1, code=1)
    await setting.endpoints.check()
    await setting.listener.step()
    setting.node.txs[99] = [reveal(1).to_tx()]  # which the index has not heard of
    while await setting.listener.step():
        pass
    assert (setting.spent, setting.listener.height) == ([], 98)
    assert setting.endpoints.usable
    setting.node.txs.pop(99)
    setting.put(99, 1)
    await setting.follow()
    assert (setting.spent, setting.listener.height) == ([1], 100)


@both
async def test_follower_applying_block_twice_changes_nothing(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=90)
    setting.put(95, 1)
    setting.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
    await setting.follow()
    confirmed: list[int] = []
    again = BlockFollower(
        setting.store, setting.endpoints, setting.rounds, clock=setting.clock, on_spent=confirmed.extend
    )
    setting.store.heights = [90]
    while await again.step():
        pass
    assert setting.spent == [1]
    assert confirmed == []
    assert again.height == 100


@both
async def test_follower_catches_up_in_order_in_batches(rpc: bool) -> None:
    setting = Setting(rpc=rpc, height=160, cursor=100)
    for height in range(101, 161, 7):
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
    assert setting.spent == list(range(101, 161, 7))
    assert setting.store.heights == list(range(100, 161))
    assert 1 < most <= IN_FLIGHT


@pytest.mark.parametrize("status", [404, 502])
async def test_follower_unknown_transaction_result_holds_cursor(status: int) -> None:
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


async def test_follower_waits_for_block_execution() -> None:
    setting = Setting(rpc=True, cursor=99)
    error = {"error": {"code": -32603, "message": "Internal error", "data": "could not find results for height #100"}}
    setting.node.faults["block_results"] = lambda _: answer(500, error)
    await setting.endpoints.check()
    assert not await setting.listener.step()
    assert not any("/blocks/100" in path for path in setting.node.asked), "its REST would not know better"
    setting.node.faults.clear()
    await setting.follow()
    assert setting.listener.height == 100


async def test_follower_uses_rest_when_rpc_has_no_block_results() -> None:
    setting = Setting(rpc=True, cursor=98)
    setting.put(99, 1)
    error = {"error": {"code": -32603, "message": "Internal error", "data": "could not find results for height #99"}}
    setting.node.faults["block_results"] = lambda _: answer(500, error)
    await setting.endpoints.check()
    for _ in range(TRIES):
        await setting.listener.step()
    assert (setting.spent, setting.listener.height) == ([1], 100)
    assert setting.listener.stalled is None


async def test_follower_uses_rest_when_rpc_answer_is_invalid() -> None:
    setting = Setting(rpc=True, cursor=98)
    setting.put(99, 1)
    setting.node.faults["block_results"] = lambda _: httpx.Response(500, content=b"<html>")
    await setting.follow()
    assert (setting.spent, setting.listener.height) == ([1], 100)
    assert setting.endpoints.usable, "its REST is as good as before"


@both
async def test_follower_reports_time_of_newest_processed_block(rpc: bool) -> None:
    setting = Setting(rpc=rpc, height=160, cursor=100)
    await setting.endpoints.check()
    assert setting.listener.chain_time is None
    await setting.listener.step()
    assert setting.listener.height == 108
    if rpc:
        assert setting.listener.chain_time is None, "the head's time is not that of a block in the past"
    else:
        assert setting.listener.chain_time == pytest.approx(setting.clock.now() - 52 * 5)
    await setting.follow()
    assert setting.listener.chain_time == pytest.approx(setting.clock.now())


@pytest.mark.rule("R14")
@both
async def test_round_closes_after_its_last_block_is_processed(rpc: bool) -> None:
    setting = Setting(rpc=rpc, cursor=99)
    setting.clock.advance(VOTE_END + 1 - setting.clock.now())
    await setting.endpoints.check()
    await setting.rounds.sync()
    setting.node.rounds = [recorded_round(3)]
    await setting.rounds.sync()
    assert not await setting.rounds.is_closed(ROUND_ID)
    await setting.follow()
    assert await setting.rounds.is_closed(ROUND_ID)


async def test_follower_without_open_rounds_starts_at_head() -> None:
    setting = Setting(rpc=False, height=5000)
    setting.node.rounds = []
    await setting.endpoints.check()
    await setting.rounds.sync()
    assert await setting.listener.step()
    assert setting.listener.height == 5000


@pytest.mark.rule("R12")
async def test_history_of_pruned_node_is_searched_in_windows() -> None:
    setting = Setting(rpc=True, height=5000, cursor=100)
    setting.put(300, 1)
    setting.put(4995, 2)
    setting.node.lowest = 4900
    setting.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
    confirmed: list[int] = []
    setting.listener = BlockFollower(
        setting.store, setting.endpoints, setting.rounds, clock=setting.clock, on_spent=confirmed.extend
    )
    await setting.know_rounds()
    with capture_logs() as logs:
        await setting.follow()
    assert [log for log in logs if log["log_level"] == "error"] == []
    assert confirmed == [11]
    assert (setting.spent, setting.listener.height) == ([1, 2], 5000)
    assert setting.store.read_later == [(2991, 4990), (991, 2990), (101, 990)]
    assert setting.listener.stalled is None
    assert setting.endpoints.usable, "a pruned node is not at fault"


def skipped(logs: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """First height and number of the missed blocks in each log entry."""
    missed = [log for log in logs if log["log_level"] == "error" and log["event"] == "blocks_missed"]
    return [(log["height"], log["count"]) for log in missed]


@pytest.mark.parametrize("cursor", [100, None], ids=["stopped for long", "new database"])
async def test_history_pruned_on_all_nodes_is_skipped_and_logged(cursor: int | None) -> None:
    setting = Setting(rpc=False, height=1000, cursor=cursor)
    setting.node.lowest = 995
    setting.put(997, 3)
    setting.store.ours = {(ROUND_ID, reveal(3).nullifier): 11}
    await setting.endpoints.check()
    await setting.rounds.sync()
    with capture_logs() as logs:
        await setting.follow()
    first = 101 if cursor else recorded_round(1)["created_at_height"]
    assert skipped(logs) == [(first, 995 - first)]
    assert setting.listener.height == 1000
    assert setting.spent == [3]
    assert setting.store.ours == {}, "what was sent after the gap is confirmed"
    assert setting.listener.stalled is None
    assert setting.endpoints.usable, "a pruned node is not at fault"


async def test_history_pruned_during_read_is_logged_once() -> None:
    setting = Setting(rpc=False, height=1000, cursor=100)
    setting.node.lowest = 995
    block = setting.node._block

    def pruning(height: int) -> httpx.Response:
        if height == 995:
            setting.node.lowest = max(setting.node.lowest, 997)
        return block(height)

    setting.node._block = pruning  # type: ignore[method-assign]
    await setting.know_rounds()
    with capture_logs() as logs:
        await setting.follow()
    (left_out,) = skipped(logs)
    assert left_out[0] == 101
    assert setting.listener.height == 1000
    assert setting.store.unread == []


async def test_history_is_read_down_to_oldest_block_of_node() -> None:
    setting = Setting(rpc=False, height=400, cursor=100)
    setting.node.lowest, setting.node.says_lowest = 321, False
    setting.put(321, 3)
    await setting.know_rounds()
    with capture_logs() as logs:
        for _ in range(TRIES - 1):
            with pytest.raises(ChainError):
                await setting.follow()
        assert setting.listener.height == 400
        assert setting.spent == [3]
        assert skipped(logs) == []
        await setting.follow()
    assert skipped(logs) == [(101, 220)]
    assert setting.store.unread == []


async def test_history_waits_for_unreachable_node_that_may_have_blocks() -> None:
    setting = Setting(rpc=False, height=1000, cursor=100)
    setting.node.lowest = 900
    archive = Node(setting.clock, height=1000)
    setting.network.nodes["archive"] = archive
    setting.endpoints = setting.network.endpoints(setting.clock)
    setting.rounds = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
    setting.listener = BlockFollower(setting.store, setting.endpoints, setting.rounds, clock=setting.clock)
    del setting.network.nodes["archive"]
    await setting.know_rounds()
    for _ in range(TRIES - 1):
        with pytest.raises(ChainError):
            await setting.follow()
    assert setting.store.unread == [(101, 899)]
    setting.network.nodes["archive"] = archive
    with capture_logs() as logs:
        await setting.follow()
    assert skipped(logs) == []
    assert setting.store.unread == []


async def test_history_block_with_invalid_answer_is_not_skipped() -> None:
    setting = Setting(rpc=False, height=1000, cursor=100)
    setting.node.faults["/blocks/101"] = lambda _: httpx.Response(200, content=b"<html>")
    await setting.know_rounds()
    for _ in range(TRIES + 3):
        setting.clock.advance(60)
        with pytest.raises(ChainError):
            await setting.follow()
    assert setting.store.unread == [(101, 101)]
    assert setting.endpoints.usable, "shares that are due are still revealed by this node"
    assert (setting.listener.height, setting.listener.stalled) == (1000, 101)
    setting.node.faults.clear()
    setting.clock.advance(60)
    await setting.follow()
    assert setting.store.unread == []
    assert setting.listener.stalled is None


async def test_follower_leaves_unreadable_block_to_history() -> None:
    setting = Setting(rpc=False, height=100, cursor=98)
    setting.put(99, 1)
    setting.put(100, 2)
    setting.node.faults["/tx/" + reveal(1).tx_hash().hex().upper()] = lambda _: answer(404, {"error": "not found"})
    await setting.endpoints.check()
    for _ in range(TRIES - 1):
        assert not await setting.listener.step()
        assert setting.listener.height == 98
    while await setting.listener.step():
        pass
    assert (setting.spent, setting.listener.height) == ([2], 100)
    assert setting.store.unread == [(99, 99)]
    setting.node.faults.clear()
    await setting.follow()
    assert setting.spent == [1, 2]
    assert setting.store.unread == []


@both
async def test_follower_far_behind_reads_head_first_and_history_newest_first(rpc: bool) -> None:
    setting = Setting(rpc=rpc, height=30_000, cursor=100)
    setting.node.faults["tx_search"] = lambda _: answer(500, {"error": {"data": "transaction indexing is disabled"}})
    setting.put(29_995, 1)
    setting.put(29_900, 2)
    setting.put(101, 3)
    await setting.endpoints.check()
    while await setting.listener.step():
        pass
    assert (setting.listener.height, setting.listener.caught_up) == (30_000, True)
    assert setting.spent == [1]
    assert setting.listener.history.blocks_left == 29_890
    for _ in range(12):
        assert await setting.listener.history.step()
    assert setting.spent == [1, 2]
    assert setting.store.unread == [(101, 29_990 - 12 * IN_FLIGHT)]
    assert setting.store.read_later[0] == (29_983, 29_990)
    assert setting.endpoints.fresh_rpc or not rpc, "a node without an index is not set aside"


async def test_history_resumes_after_restart_with_second_gap() -> None:
    setting = Setting(rpc=False, height=400, cursor=100)
    setting.put(150, 1)
    setting.put(450, 2)
    await setting.endpoints.check()
    while await setting.listener.step():
        pass
    await setting.listener.history.step()
    setting.node.height = 600
    setting.clock.advance(1000)
    setting.listener = BlockFollower(setting.store, setting.endpoints, setting.rounds, clock=setting.clock)
    await setting.endpoints.check()
    while await setting.listener.step():
        pass
    assert setting.store.unread == [(101, 382), (401, 590)]
    await setting.follow()
    assert setting.spent == [1, 2]
    assert setting.store.unread == []


@pytest.mark.rule("R8")
async def test_dispatch_wait_for_history_is_bounded() -> None:
    setting = Setting(rpc=False, height=30_000, cursor=100)
    told: list[int] = []
    setting.listener = BlockFollower(
        setting.store, setting.endpoints, setting.rounds, clock=setting.clock, on_block=told.append
    )
    await setting.endpoints.check()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(setting.listener.run)
            while setting.listener.height != 30_000:
                await anyio.sleep(0)
            assert not setting.listener.arrived
            told.clear()
            setting.clock.advance(PATIENCE_SECONDS)
            while not told:
                await anyio.sleep(0)
            assert setting.listener.arrived
            assert setting.listener.history.blocks_left > 0
            group.cancel_scope.cancel()


@pytest.mark.rule("R14")
async def test_round_is_not_closed_before_its_history_is_read() -> None:
    setting = Setting(rpc=False, height=400)
    setting.clock.advance(VOTE_END + 1 - setting.clock.now())
    await setting.know_rounds()
    while await setting.listener.step():
        pass
    setting.node.rounds = [recorded_round(3)]
    await setting.rounds.sync()
    assert setting.listener.chain_time is not None
    assert setting.listener.chain_time >= VOTE_END
    assert not await setting.rounds.is_closed(ROUND_ID)
    revision = setting.rounds.revision
    await setting.follow()
    assert await setting.rounds.is_closed(ROUND_ID)
    assert setting.rounds.revision > revision, "whoever closes rounds looks again"


async def test_history_is_read_by_one_host_and_visible_to_all() -> None:
    setting = Setting(rpc=False, height=400, cursor=100)
    other = BlockFollower(setting.store, setting.endpoints, setting.rounds, clock=setting.clock, mine=lambda: False)
    await setting.endpoints.check()
    for listener in (setting.listener, other):
        while await listener.step():
            pass
    assert not await other.history.step()
    assert other.history.blocks_left == 290
    await setting.follow()
    assert not other.arrived
    assert not await other.history.step()
    assert other.history.blocks_left == 0
    assert other.arrived


def sent(number: int, outcome: str | None = "ACCEPTED", sends: int = 1) -> SentReveal:
    message = reveal(number)
    prepared = PreparedReveal(message.to_tx(), message.tx_hash(), 84, "k10", 90)
    return SentReveal(number, ROUND_ID, message.nullifier, prepared, sends, 90, 90, "node:1317", outcome)


@pytest.mark.rule("R12")
@both
async def test_missed_blocks_check_queries_only_sent_reveals(rpc: bool) -> None:
    setting = Setting(rpc=rpc, height=1000, cursor=100)
    setting.node.faults["tx_search"] = lambda _: answer(500, {"error": {"data": "transaction indexing is disabled"}})
    setting.node.lowest = 995
    setting.store.sent = [sent(1), sent(2), sent(3), sent(4, None), sent(5, None, sends=0), sent(6, "UNAVAILABLE")]
    setting.store.ours = {(ROUND_ID, reveal(number).nullifier): number for number in range(1, 7)}
    for number, code in ((1, 0), (2, 1), (4, 0), (5, 0), (6, 0)):
        setting.put(500, number, code)
        if not code:
            setting.node.spent.add(reveal(number).nullifier)
    confirmed: list[int] = []
    known: list[tuple[bool, list[int]]] = []
    setting.listener = BlockFollower(
        setting.store,
        setting.endpoints,
        setting.rounds,
        clock=setting.clock,
        on_spent=confirmed.extend,
        on_block=lambda _: known.append((setting.listener.arrived, sorted(confirmed))),
    )
    await setting.know_rounds()
    with capture_logs() as logs:
        await setting.follow()
    assert skipped(logs) == [(101, 894)]
    assert sorted(confirmed) == [1, 4]
    assert next(told for arrived, told in known if arrived) == [1, 4], "before anything is sent or proven again"
    asked = " ".join(setting.node.asked)
    named = {n for n in range(1, 7) if reveal(n).nullifier.hex() in asked or reveal(n).tx_hash().hex().upper() in asked}
    assert named == {1, 2, 3, 4}, "what did not leave us is not named"


@pytest.mark.rule("R12")
async def test_missed_blocks_check_queries_spent_nullifiers_later() -> None:
    setting = Setting(rpc=True, height=999, cursor=990)
    setting.node.spent.add(reveal(1).nullifier)
    setting.store.sent = [sent(1, "SPENT"), sent(2, "SPENT"), sent(3)]
    setting.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
    await setting.follow()
    setting.node.height = 1000
    await setting.follow()
    assert setting.spent == [], "all blocks were seen: a node's word is not needed, and confirms nothing"
    setting.store.meta["chain.gap"] = "900"
    setting.listener = BlockFollower(setting.store, setting.endpoints, setting.rounds, clock=setting.clock)
    setting.node.height = 1010
    await setting.follow()
    assert setting.spent == [1]
    assert setting.store.ours == {}
    asked = " ".join(setting.node.asked)
    assert reveal(3).nullifier.hex() not in asked


async def test_history_is_not_skipped_before_sent_reveals_are_checked() -> None:
    setting = Setting(rpc=False, height=1000, cursor=100)
    setting.node.lowest = 995
    setting.put(500, 1)
    setting.store.sent = [sent(1)]
    setting.node.faults["/tx/"] = lambda _: answer(502, {"error": "no consensus"})
    await setting.know_rounds()
    with pytest.raises(ChainError, match="too few nodes answered"):
        await setting.follow()
    assert setting.store.unread == [(101, 994)]
    setting.node.faults.clear()
    setting.clock.advance(5)
    await setting.follow()
    assert (setting.spent, setting.listener.height) == ([1], 1000)


async def test_caught_up_requires_newest_block() -> None:
    setting = Setting(rpc=True, height=160, cursor=100)
    assert not setting.listener.caught_up
    seen: list[tuple[int, bool]] = []
    setting.listener = BlockFollower(
        setting.store,
        setting.endpoints,
        setting.rounds,
        clock=setting.clock,
        on_block=lambda height: seen.append((height, setting.listener.caught_up)),
    )
    await setting.follow()
    assert seen == [(height, height == 160) for height in range(101, 161)]
    assert setting.listener.caught_up
    setting.node.height = 165
    await setting.follow()
    assert seen[-2:] == [(164, False), (165, True)]


async def test_follower_outage_is_not_reported_as_stall() -> None:
    setting = Setting(rpc=True, cursor=90)
    await setting.endpoints.check()
    del setting.network.nodes["node"]
    for _ in range(TRIES + 3):
        await setting.endpoints.check()
        assert not await setting.listener.step()
    assert setting.listener.stalled is None


async def test_follower_run_continues_after_errors() -> None:
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
    assert [log["reason"] for log in logs if log["event"] == "block_follow_failed"] == [
        "no space",
        "RuntimeError('odd')",
    ]


async def test_arrived_is_set_when_head_is_first_reached() -> None:
    setting = Setting(rpc=True, height=160, cursor=100)
    seen: list[tuple[int, bool]] = []
    setting.listener = BlockFollower(
        setting.store,
        setting.endpoints,
        setting.rounds,
        clock=setting.clock,
        on_block=lambda height: seen.append((height, setting.listener.arrived)),
    )
    await setting.follow()
    assert seen == [(height, height == 160) for height in range(101, 161)]
    setting.node.height = 165
    await setting.follow()
    assert seen[-2:] == [(164, True), (165, True)]


async def test_arrived_uses_first_head_not_newest() -> None:
    setting = Setting(rpc=True, height=120, cursor=100)
    await setting.endpoints.check()
    for _ in range(5):
        assert await setting.listener.step()
        setting.node.height += 8  # as many as are read in a step
        await setting.endpoints.check()
    assert (setting.listener.height, setting.listener.caught_up) == (140, False)
    assert setting.listener.arrived


async def test_arrived_is_reported_when_no_block_was_missed() -> None:
    setting = Setting(rpc=True, height=100, cursor=100)
    told: list[int] = []
    setting.listener = BlockFollower(
        setting.store, setting.endpoints, setting.rounds, clock=setting.clock, on_block=told.append
    )
    await setting.follow()
    await setting.follow()
    assert (setting.listener.arrived, told) == (True, [100])


async def test_follower_implausible_head_of_one_node_does_not_move_cursor() -> None:
    setting = Setting(rpc=False, height=100, cursor=98)
    setting.network.nodes["other"] = Node(setting.clock, height=2**60)
    setting.endpoints = setting.network.endpoints(setting.clock)
    setting.rounds = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
    setting.listener = BlockFollower(setting.store, setting.endpoints, setting.rounds, clock=setting.clock)
    await setting.know_rounds()
    await setting.follow()
    assert await setting.store.cursor() == 100


async def test_follower_cursor_far_above_chain_is_moved_back() -> None:
    setting = Setting(rpc=False, height=1000, cursor=2**60)
    setting.put(500, 1)
    setting.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
    await setting.know_rounds()
    with capture_logs() as logs:
        for _ in range(CURSOR_TRIES - 1):
            await setting.follow()
            await setting.follow()
            assert await setting.store.cursor() == 2**60
            setting.node.height += 1
            setting.clock.advance(5)
        await setting.follow()
    events = [log["event"] for log in logs if log["event"].startswith("cursor")]
    assert events == ["cursor_above_chain", "cursor_moved_back"]
    assert setting.listener.height == setting.node.height == await setting.store.cursor()
    assert setting.store.ours == {}, "blocks of open rounds are read again"
    assert setting.store.unread == []


class Pair(Setting):
    """A listener over two nodes or three, with a share of ours that is in no block."""

    def __init__(self, *others: str, rpc: bool, height: int = 100, cursor: int = 98) -> None:
        super().__init__(rpc=rpc, height=height, cursor=cursor)
        self.others = [Node(self.clock, height=height) for _ in others or ("other",)]
        self.network.nodes |= dict(zip(others or ("other",), self.others, strict=True))
        self.endpoints = self.network.endpoints(self.clock, rpc=rpc)
        self.rounds = RoundRegistry(self.store, self.endpoints, clock=self.clock)
        self.store.ours = {(ROUND_ID, reveal(1).nullifier): 11}
        self.listener = BlockFollower(self.store, self.endpoints, self.rounds, clock=self.clock)

    async def try_to_follow(self, seconds: int) -> None:
        """Follow for this many seconds, whatever error comes."""
        for _ in range(seconds):
            with contextlib.suppress(ChainError):
                await self.follow()
            self.clock.advance(1)


@both
async def test_reveal_forged_by_one_of_two_nodes_is_not_confirmed(rpc: bool) -> None:
    setting = Pair(rpc=rpc)
    setting.put(99, 1)
    with capture_logs() as logs:
        await setting.try_to_follow(3 * int(UNABLE_SECONDS))
    assert setting.store.ours != {}
    assert setting.store.spent == []
    assert setting.listener.disputed == 99
    assert [log["height"] for log in logs if log["event"] == "block_disputed"] == [99]
    assert setting.listener.height == 100, "later blocks are followed"
    setting.others[0].include(99, reveal(1).to_tx(), included(1))
    await setting.try_to_follow(1)
    assert setting.store.ours == {}
    assert setting.listener.disputed is None


@both
async def test_reveal_shown_by_two_nodes_is_confirmed_immediately(rpc: bool) -> None:
    setting = Pair(rpc=rpc)
    setting.put(99, 1)
    setting.others[0].include(99, reveal(1).to_tx(), included(1))
    await setting.follow()
    assert setting.store.ours == {}
    blocks = [path for path in setting.others[0].asked if "block_results" in path or "/blocks/1" in path]
    assert not any("100" in path for path in blocks), "a block without reveals is read from one node"
    assert reveal(1).nullifier.hex() not in " ".join(setting.others[0].asked)


@both
async def test_reveal_missing_on_two_of_three_nodes_is_not_confirmed(rpc: bool) -> None:
    setting = Pair("second", "third", rpc=rpc)
    setting.put(99, 1)
    for node in setting.others:
        node.include(99, reveal(2).to_tx(), included(2))
    await setting.follow()
    assert setting.spent == [2]
    assert setting.store.ours != {}
    assert setting.listener.disputed is None


@both
async def test_reveal_wait_for_unreachable_second_node_is_bounded(rpc: bool) -> None:
    setting = Pair(rpc=rpc)
    del setting.network.nodes["other"]
    setting.put(99, 1)
    await setting.try_to_follow(int(ALONE_SECONDS) - 1)
    assert setting.store.ours != {}
    assert setting.listener.stalled is None
    await setting.try_to_follow(3)
    assert setting.store.ours == {}
    assert setting.store.unread == []


async def test_reveal_waits_longer_for_second_node_in_backoff() -> None:
    setting = Pair(rpc=False)
    setting.put(99, 1)
    setting.others[0].faults["/blocks/99"] = lambda _: httpx.Response(500, content=b"<html>")
    await setting.try_to_follow(2 * int(ALONE_SECONDS))
    assert setting.store.ours != {}
    setting.others[0].faults.clear()
    await setting.try_to_follow(int(UNABLE_SECONDS))
    assert setting.store.ours != {}
    assert setting.listener.disputed == 99


async def test_reveals_found_by_search_are_compared_per_block() -> None:
    setting = Pair(rpc=True, height=5000, cursor=100)
    setting.put(300, 1)
    setting.put(400, 2)
    setting.others[0].include(400, reveal(2).to_tx(), included(2))
    await setting.know_rounds()
    await setting.try_to_follow(3)
    assert setting.store.ours != {}
    assert setting.listener.disputed == 300
    setting.others[0].include(300, reveal(1).to_tx(), included(1))
    await setting.try_to_follow(3)
    assert setting.store.ours == {}
    assert setting.spent == [1, 2]


@both
async def test_sent_reveal_spent_on_one_of_two_nodes_is_not_confirmed(rpc: bool) -> None:
    setting = Pair(rpc=rpc, height=1000, cursor=100)
    for node in (setting.node, *setting.others):
        node.lowest = 995
        node.faults["tx_search"] = lambda _: answer(500, {"error": {"data": "transaction indexing is disabled"}})
    setting.store.sent = [sent(1)]
    setting.put(500, 1)
    setting.node.spent.add(reveal(1).nullifier)
    await setting.know_rounds()
    await setting.follow()
    assert setting.store.ours != {}
    setting.store.sent = [sent(1)]
    setting.others[0].spent.add(reveal(1).nullifier)
    setting.others[0].include(500, reveal(1).to_tx(), included(1))
    await setting.listener._sent.bridge(994)
    assert setting.store.ours == {}
