"""Block follower and history reader: catch-up, failed transactions, pruned nodes, restarts, node quorum."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain.block_reader import CONCURRENT_BLOCKS, BlockReader, BlockReading
from helper.chain.chain_data import RoundStatus
from helper.chain.follower import MAX_START_WAIT_SECONDS, RESET_HEADS, BlockFollower
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.round_registry import RoundRegistry
from helper.errors import ChainError, StoreError
from helper.store import blocks
from helper.store.blocks import begin_rescan
from helper.store.ledger import BlockRange, Ledger, Rescan, count_heights, find_unread
from helper.store.messages import SentReveal
from helper.store.table_rows import RevealRow
from helper.store.transaction import Transaction
from tests.support.fakes import wait_until
from tests.unit.chain.fakes import (
    CHAIN_ID,
    ROUND_ID,
    VOTE_END,
    ChainStore,
    FakeNode,
    create_network,
    json_response,
    recorded_round,
)


def reveal(number: int) -> RevealMessage:
    return RevealMessage(number.to_bytes(32, "little"), b"\x02" * 64, 1, 0, b"\x03" * 100, ROUND_ID, 84)


def reveal_result(number: int, code: int = 0) -> dict[str, Any]:
    attributes = [
        {"key": "vote_round_id", "value": ROUND_ID.hex()},
        {"key": "share_nullifier", "value": reveal(number).nullifier.hex()},
    ]
    return {"code": code, "log": "", "events": [{"type": "reveal_share", "attributes": attributes}]}


class Environment:
    """A block follower with one node."""

    def __init__(self, *, rpc: bool, height: int = 100, cursor: int | None = None) -> None:
        self.clock, self.network, _ = create_network("node")
        self.node = self.network.nodes["node"]
        self.node.height = height
        self.store = ChainStore(self.clock, None if cursor is None else Ledger(1, cursor))
        self.configure_nodes(rpc=rpc)

    def configure_nodes(self, *others: str, rpc: bool) -> list[FakeNode]:
        """Start a process with one node, and with others of the same height."""
        added = [FakeNode(self.clock, height=self.node.height) for _ in others]
        self.network.nodes |= dict(zip(others, added, strict=True))
        self.endpoints = self.network.create_node_pool(self.clock, rpc=rpc, chain_id=CHAIN_ID)
        self.rounds = RoundRegistry(self.store, self.endpoints)
        self.restart()
        return added

    def restart(self, **callbacks: Any) -> None:
        """Create the follower of a restarted process."""
        self.follower = BlockFollower(self.store, self.endpoints, self.rounds, **callbacks)

    def add_reveal(self, height: int, number: int, code: int = 0) -> None:
        self.node.add_transaction(height, reveal(number).to_tx(), reveal_result(number, code))

    async def sync_rounds(self) -> None:
        await self.endpoints.probe_all()
        await self.rounds.sync()

    async def read_new(self) -> None:
        await self.endpoints.probe_all()
        while await self.follower.read_new():
            pass

    async def follow(self) -> None:
        await self.read_new()
        await self.follower.check_sent()
        while await self.follower.read_gaps():
            pass

    @property
    def ledger(self) -> Ledger:
        ledger = self.store.ledger
        assert ledger is not None
        return ledger

    @property
    def unread(self) -> list[BlockRange]:
        return list(self.ledger.unread)

    @property
    def rescan(self) -> Rescan:
        assert self.ledger.rescan is not None
        return self.ledger.rescan

    @property
    def left(self) -> int:
        """Number of blocks of the rescan that are not read yet."""
        return count_heights(find_unread(self.ledger, self.rescan.first, self.rescan.last))

    @property
    def spent(self) -> list[int]:
        assert all(round_id == ROUND_ID for round_id, _ in self.store.spent)
        return sorted(int.from_bytes(nullifier, "little") for _, nullifier in self.store.spent)


WAIT_SECONDS = 40
"""Seconds after which nothing may have changed: a block waits without limit."""

both_transports = pytest.mark.parametrize("rpc", [True, False], ids=["rpc", "rest"])


@both_transports
async def test_follower_requests_each_block_once_up_to_head(rpc: bool) -> None:
    env = Environment(rpc=rpc, cursor=98)
    await env.follow()
    assert env.follower.height == 100
    before = len(env.node.requests)
    await env.follow()
    new_requests = env.node.requests[before:]
    assert not any("block_results" in path or path.endswith(("/100", "/101")) for path in new_requests)
    env.add_reveal(101, 7)
    env.node.height = 101
    before = len(env.node.requests)
    await env.follow()
    blocks = [path for path in env.node.requests[before:] if "block_results" in path or "/blocks/1" in path]
    assert len(blocks) == 1
    assert env.spent == [7]


@both_transports
async def test_follower_failed_transaction_is_not_counted(rpc: bool) -> None:
    env = Environment(rpc=rpc, cursor=98)
    env.add_reveal(99, 1, code=1)
    env.add_reveal(99, 2)
    await env.follow()
    assert env.spent == [2]


@pytest.mark.parametrize(
    ("code", "log", "spent"),
    [
        (0, "", [1]),
        (2, "nullifier already spent: 01", [1]),
        (1, "invalid zero-knowledge proof", []),
    ],
)
async def test_follower_same_transaction_in_two_blocks_is_counted_once(code: int, log: str, spent: list[int]) -> None:
    # The transaction was resent after it failed. The index has only the last block, which once stopped the follower.
    env = Environment(rpc=False, cursor=90)
    env.add_reveal(95, 1)
    env.node.add_transaction(98, reveal(1).to_tx(), reveal_result(1, code) | {"log": log})
    await env.follow()
    assert (env.spent, env.follower.height) == (spent, 100)
    assert env.endpoints.has_usable_node


async def test_block_waits_while_index_reports_earlier_block() -> None:
    env = Environment(rpc=False, cursor=90)
    env.add_reveal(95, 1, code=1)
    env.node.txs[99] = [reveal(1).to_tx()]  # The index does not have it yet.
    await env.follow()
    assert (env.spent, env.unread) == ([], [(99, 99)])
    assert env.endpoints.has_usable_node
    env.node.txs.pop(99)
    env.add_reveal(99, 1)
    env.clock.advance(1)
    await env.follow()
    assert (env.spent, env.unread) == ([1], [])
    assert env.follower.counted_height == 99


NO_RESULTS = {"error": {"code": -32603, "message": "Internal error", "data": "could not find results for height #99"}}


@pytest.mark.parametrize("response", [json_response(500, NO_RESULTS), httpx.Response(500, content=b"<html>")])
async def test_follower_uses_rest_when_rpc_has_no_valid_block_results(response: httpx.Response) -> None:
    env = Environment(rpc=True, cursor=98)
    env.add_reveal(99, 1)
    env.node.faults["block_results"] = lambda _: response
    await env.endpoints.probe_all()
    for _ in range(3):
        await env.follow()
        env.clock.advance(1)
    assert (env.spent, env.follower.height) == ([1], 100)
    assert env.follower.stalled_height is None
    assert env.endpoints.has_usable_node, "REST of the node remains usable"


@pytest.mark.rule("R14")
@both_transports
async def test_round_closes_after_its_last_block_is_processed(rpc: bool) -> None:
    env = Environment(rpc=rpc, cursor=99)
    env.clock.advance(VOTE_END + 1 - env.clock.now())
    await env.sync_rounds()
    env.node.rounds = [recorded_round(3)]
    await env.rounds.sync()
    assert not await env.rounds.is_closed(ROUND_ID)
    await env.follow()
    assert await env.rounds.is_closed(ROUND_ID)


async def test_follower_without_open_rounds_starts_at_head() -> None:
    env = Environment(rpc=False, height=5000)
    env.node.rounds = []
    await env.sync_rounds()
    await env.follow()
    assert (env.follower.height, env.follower.gap_count) == (5000, 0)


def missed_ranges(logs: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """First height and number of the missed blocks in each log entry."""
    missed = [log for log in logs if log["log_level"] == "error" and log["event"] == "blocks_missed"]
    return [(log["height"], log["count"]) for log in missed]


@pytest.mark.parametrize("cursor", [100, None], ids=["long downtime", "new database"])
async def test_history_pruned_on_all_nodes_is_skipped_and_logged(cursor: int | None) -> None:
    env = Environment(rpc=False, height=1000, cursor=cursor)
    env.node.lowest_height = 995
    env.add_reveal(997, 3)
    env.store.add_share(3, reveal(3).nullifier)
    await env.sync_rounds()
    with capture_logs() as logs:
        await env.follow()
    first = 101 if cursor else recorded_round(1)["created_at_height"]
    assert missed_ranges(logs) == [(first, 995 - first)]
    assert env.follower.height == 1000
    assert env.spent == [3]
    assert env.store.unconfirmed == [], "reveals sent after the gap are confirmed"
    assert env.follower.stalled_height is None
    assert env.endpoints.has_usable_node, "a pruned node is not at fault"


async def test_history_waits_for_unreachable_node_that_may_have_blocks() -> None:
    env = Environment(rpc=False, height=1000, cursor=100)
    env.node.lowest_height = 900
    (archive,) = env.configure_nodes("archive", rpc=False)
    del env.network.nodes["archive"]
    await env.sync_rounds()
    with capture_logs() as logs:
        await env.follow()
        assert (env.follower.height, env.unread) == (100, [])
        requests = len(env.node.requests)
        await env.follow()
        assert len(env.node.requests) <= requests + 2, "no block is requested while a second node is missing"
        env.network.nodes["archive"] = archive
        await env.follow()
    assert missed_ranges(logs) == []
    assert env.unread == [(101, 899)], "only one node has the older blocks"


@both_transports
@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, content=b"<html>"),
        json_response(500, {"code": 13, "message": "height 101: database is closed", "details": []}),
    ],
)
async def test_history_block_with_invalid_response_is_not_skipped(rpc: bool, response: httpx.Response) -> None:
    env = Environment(rpc=rpc, height=1000, cursor=100)
    rpc_error = json_response(500, {"error": {"message": "Internal error", "data": "height 101: database is closed"}})
    env.node.faults |= {"/blocks/101": lambda _: response, "block_results": lambda _: rpc_error}
    await env.sync_rounds()
    for _ in range(11):
        await env.follow()
        env.clock.advance(60)
    assert env.unread == [(101, 101)]
    assert env.endpoints.has_usable_node, "due shares are still revealed through this node"
    assert (env.follower.height, env.follower.stalled_height) == (1000, 101)
    env.clock.advance(300)
    env.node.faults.clear()
    env.clock.advance(60)
    await env.follow()
    assert env.unread == []
    assert env.follower.stalled_height is None


@both_transports
async def test_follower_far_behind_reads_head_first_and_history_newest_first(rpc: bool) -> None:
    env = Environment(rpc=rpc, height=30_000, cursor=100)
    env.add_reveal(29_995, 1)
    env.add_reveal(29_900, 2)
    env.add_reveal(101, 3)
    await env.read_new()
    assert (env.follower.height, env.follower.is_caught_up) == (30_000, True)
    assert env.spent == [1]
    assert env.follower.gap_count == 29_892
    for _ in range(12):
        assert await env.follower.read_gaps()
    assert env.spent == [1, 2]
    assert env.unread == [(101, 29_992 - 12 * CONCURRENT_BLOCKS)]


async def test_history_resumes_after_restart_with_second_gap() -> None:
    env = Environment(rpc=False, height=400, cursor=100)
    env.add_reveal(150, 1)
    env.add_reveal(450, 2)
    await env.read_new()
    await env.follower.read_gaps()
    env.node.height = 600
    env.clock.advance(1000)
    env.restart()
    await env.read_new()
    assert env.unread == [(101, 384), (401, 592)]
    await env.follow()
    assert env.spent == [1, 2]
    assert env.unread == []


@pytest.mark.rule("R8")
async def test_dispatch_wait_for_history_is_bounded() -> None:
    env = Environment(rpc=False, height=30_000, cursor=100)
    reported: list[int] = []
    env.restart(on_block=reported.append)
    await env.endpoints.probe_all()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(env.follower.run)
            await wait_until(lambda: env.follower.height == 30_000)
            assert not env.follower.is_ready
            reported.clear()
            env.clock.advance(MAX_START_WAIT_SECONDS)
            await env.endpoints.probe_all()
            await wait_until(lambda: reported)
            assert env.follower.is_ready
            assert env.follower.gap_count > 0
            group.cancel_scope.cancel()


@pytest.mark.rule("R14")
@pytest.mark.parametrize("first_status", [RoundStatus.PENDING, RoundStatus.ACTIVE])
async def test_round_is_not_closed_before_its_history_is_read(first_status: RoundStatus) -> None:
    env = Environment(rpc=False, height=400)
    env.node.rounds = [recorded_round(first_status)]
    env.clock.advance(VOTE_END + 1 - env.clock.now())
    await env.sync_rounds()
    while await env.follower.read_new():
        pass
    env.node.rounds = [recorded_round(3)]
    await env.rounds.sync()
    assert (env.rounds.chain_now() or 0) >= VOTE_END
    assert not await env.rounds.is_closed(ROUND_ID)
    revision = env.rounds.revision
    await env.follow()
    assert await env.rounds.is_closed(ROUND_ID)
    assert env.rounds.revision > revision, "round closing checks again"


async def test_history_is_read_by_one_host_and_visible_to_all() -> None:
    env = Environment(rpc=False, height=400, cursor=100)
    other = BlockFollower(env.store, env.endpoints, env.rounds, is_leader=lambda: False)
    await env.endpoints.probe_all()
    for listener in (env.follower, other):
        while await listener.read_new():
            pass
    assert not await other.read_gaps()
    assert other.gap_count == 292
    await env.follow()
    assert not other.is_ready
    assert not await other.read_gaps()
    assert other.gap_count == 0
    assert other.is_ready


def sent_reveal(number: int, outcome: str | None = "ACCEPTED", sends: int = 1) -> SentReveal:
    message = reveal(number)
    row = RevealRow(number, message.to_tx(), message.tx_hash(), 84, "k10", 90, sends, 90, 90, "node:1317", outcome)
    return SentReveal(row, ROUND_ID, message.nullifier)


@pytest.mark.rule("R12")
@both_transports
async def test_sent_reveal_check_queries_only_sent_reveals(rpc: bool) -> None:
    env = Environment(rpc=rpc, height=1000, cursor=100)
    env.node.lowest_height = 995
    for each in (
        sent_reveal(1),
        sent_reveal(2),
        sent_reveal(3),
        sent_reveal(4, None),
        sent_reveal(5, None, sends=0),
        sent_reveal(6, "UNAVAILABLE"),
    ):
        env.store.add_sent(each)
    for number, code in ((1, 0), (2, 1), (4, 0), (5, 0), (6, 0)):
        env.add_reveal(500, number, code)
        if not code:
            env.node.spent_nullifiers.add(reveal(number).nullifier)
    confirmed: list[int] = []
    known: list[tuple[bool, list[int]]] = []
    env.restart(
        on_confirmed=confirmed.extend,
        on_block=lambda _: known.append((env.follower.is_ready, sorted(confirmed))),
    )
    await env.sync_rounds()
    with capture_logs() as logs:
        await env.follow()
    assert missed_ranges(logs) == [(101, 894)]
    assert sorted(confirmed) == [1, 4]
    assert next(reported for is_head_reached, reported in known if is_head_reached) == [1, 4], (
        "before anything is sent or proven again"
    )
    requests = " ".join(env.node.requests)
    named = {
        n for n in range(1, 7) if reveal(n).nullifier.hex() in requests or reveal(n).tx_hash().hex().upper() in requests
    }
    assert named == {1, 2, 3, 4}, "unsent nullifiers are not queried"


@pytest.mark.rule("R12")
@both_transports
async def test_find_counted_queries_only_due_messages_of_other_machine(rpc: bool) -> None:
    env = Environment(rpc=rpc, height=1000, cursor=990)
    now_ms = int(env.clock.now() * 1000)
    await env.endpoints.probe_all()
    for number in (1, 3):
        env.add_reveal(500, number, 0)
        env.node.spent_nullifiers.add(reveal(number).nullifier)
    reveals = [replace(sent_reveal(1), due_ms=now_ms), replace(sent_reveal(2), due_ms=now_ms)]
    waiting = replace(sent_reveal(3), due_ms=now_ms + 1000)

    assert await env.follower.find_counted([*reveals, waiting]) == [(ROUND_ID, reveal(1).nullifier)]

    requests = " ".join(env.node.requests)
    assert waiting.nullifier.hex() not in requests
    assert waiting.row.tx_hash.hex().upper() not in requests

    env.node.faults[""] = lambda _: json_response(502, {"error": "no consensus"})
    assert await env.follower.find_counted(reveals) == [], "too few nodes respond"


@pytest.mark.rule("R12")
async def test_sent_reveal_check_queries_spent_nullifiers() -> None:
    env = Environment(rpc=True, height=1000, cursor=990)
    env.node.spent_nullifiers.add(reveal(1).nullifier)
    for each in [sent_reveal(1, "SPENT"), sent_reveal(2, "SPENT"), sent_reveal(3)]:
        env.store.add_sent(each)
    await env.follow()
    assert env.spent == [1]
    assert env.store.unconfirmed == [2, 3]
    requests = " ".join(env.node.requests)
    assert reveal(3).nullifier.hex() not in requests


@pytest.mark.parametrize("others", [(), ("other",)])
async def test_history_is_not_skipped_before_sent_reveals_are_checked(others: tuple[str, ...]) -> None:
    env = Environment(rpc=False, height=1000, cursor=100)
    nodes = [env.node, *env.configure_nodes(*others, rpc=False)]
    for node in nodes:
        node.lowest_height = 995
        node.add_transaction(500, reveal(1).to_tx(), reveal_result(1))
    env.store.add_sent(sent_reveal(1))
    nodes[-1].faults["/tx/"] = lambda _: json_response(502, {"error": "no consensus"})
    await env.sync_rounds()
    with pytest.raises(ChainError, match="too few nodes responded"):
        await env.follow()
    assert env.unread == [(101, 994)]
    nodes[-1].faults.clear()
    env.clock.advance(5)
    await env.follow()
    assert (env.spent, env.follower.height) == ([1], 1000)


async def test_caught_up_requires_newest_block() -> None:
    env = Environment(rpc=True, height=160, cursor=100)
    assert not env.follower.is_caught_up
    calls: list[tuple[int, bool]] = []
    env.restart(
        on_block=lambda height: calls.append((height, env.follower.is_caught_up)),
    )
    await env.follow()
    assert list(dict.fromkeys(calls)) == [(100, False), (160, True)], "the newest blocks are read first"
    env.node.height = 165
    await env.follow()
    assert calls[-1] == (165, True)


async def test_follower_outage_is_not_reported_as_stall() -> None:
    env = Environment(rpc=True, cursor=90)
    await env.endpoints.probe_all()
    del env.network.nodes["node"]
    for _ in range(8 + 3):
        await env.endpoints.probe_all()
        assert not await env.follower.read_new()
    assert env.follower.stalled_height is None


async def test_follower_run_continues_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Environment(rpc=True, cursor=98)
    apply = blocks.apply_blocks
    failures = [StoreError("no space"), RuntimeError("unexpected")]

    def failing(tx: Transaction, *args: Any) -> list[int]:
        if failures:
            raise failures.pop(0)
        return apply(tx, *args)

    monkeypatch.setattr(blocks, "apply_blocks", failing)
    await env.endpoints.probe_all()
    with anyio.fail_after(10), capture_logs() as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(env.follower.run)
            while env.follower.height != 100:
                await anyio.wait_all_tasks_blocked()
                env.clock.advance(10)
                await env.endpoints.probe_all()
            group.cancel_scope.cancel()
    reported = [(log["event"], log.get("reason")) for log in logs if log["event"].startswith("block_follow")]
    assert reported == [
        ("block_follow_failed", "no space"),
        ("block_follow_failed", "RuntimeError('unexpected')"),
        ("block_follow_recovered", None),
    ]


async def test_head_reached_uses_first_head_not_newest() -> None:
    env = Environment(rpc=True, height=120, cursor=100)
    for _ in range(3):
        await env.endpoints.probe_all()
        assert await env.follower.read_new()
        await env.follower.read_gaps()
        env.node.height += 8
    assert (env.follower.height, env.follower.is_ready) == (136, True)


async def test_head_reached_is_reported_when_no_block_was_missed() -> None:
    env = Environment(rpc=True, height=100, cursor=100)
    reported: list[int] = []
    env.restart(on_block=reported.append)
    await env.follow()
    await env.follow()
    assert (env.follower.is_ready, reported) == (True, [100])


async def test_follower_cursor_far_above_chain_is_moved_back() -> None:
    env = Environment(rpc=False, height=1000, cursor=2**60)
    env.add_reveal(500, 1)
    env.store.add_share(1, reveal(1).nullifier)
    await env.rounds.restore()
    await env.sync_rounds()
    other_rounds = RoundRegistry(env.store, env.endpoints)
    other = BlockFollower(env.store, env.endpoints, other_rounds, is_leader=lambda: False)
    await other_rounds.restore()
    await other_rounds.sync()
    await other.read_gaps()
    env.node.rounds = [recorded_round(3)]
    with capture_logs() as logs:
        for _ in range(RESET_HEADS - 1):
            await env.follow()
            await env.follow()
            assert env.follower.height == 2**60
            env.node.height += 1
            env.clock.advance(5)
        await env.follow()
    events = [log["event"] for log in logs if log["event"].startswith("cursor")]
    assert events == ["cursor_above_chain", "cursor_moved_back"]
    assert env.follower.height == env.node.height == env.follower.height
    assert env.store.unconfirmed == [], "blocks of open rounds are read again"
    assert env.unread == []
    await env.rounds.sync()
    await other.read_gaps()
    await other_rounds.sync()
    for rounds in (env.rounds, other_rounds):  # of another host too
        assert [known.status for known in rounds.all_rounds()] == [RoundStatus.FINALIZED], "rounds are followed again"


class NodePairEnvironment(Environment):
    """A block follower with two or three nodes, and a share of this helper that is in no block."""

    def __init__(self, *others: str, rpc: bool, height: int = 100, cursor: int = 98) -> None:
        super().__init__(rpc=rpc, height=height, cursor=cursor)
        self.others = self.configure_nodes(*others or ("other",), rpc=rpc)
        self.nodes = (self.node, *self.others)
        self.store.add_share(1, reveal(1).nullifier)

    @property
    def is_confirmed(self) -> bool:
        return self.store.unconfirmed == []

    def add_to_others(self, height: int, number: int) -> None:
        """Add a reveal to a block of the other nodes."""
        for node in self.others:
            node.add_transaction(height, reveal(number).to_tx(), reveal_result(number))

    async def follow_for(self, seconds: int) -> None:
        """Follow for this many seconds, ignoring errors."""
        for _ in range(seconds):
            await self.follow()
            self.clock.advance(1)


@both_transports
async def test_reveal_forged_by_one_of_two_nodes_is_not_confirmed(rpc: bool) -> None:
    env = NodePairEnvironment(rpc=rpc)
    env.add_reveal(99, 1)
    with capture_logs() as logs:
        await env.follow_for(3 * WAIT_SECONDS)
    assert not env.is_confirmed
    assert env.store.spent == set()
    assert env.follower.disputed_height == 99
    assert [log["height"] for log in logs if log["event"] == "block_disputed"] == [99]
    assert env.follower.height == 100, "later blocks are read"
    env.add_to_others(99, 1)
    await env.follow_for(3 * WAIT_SECONDS // 4)
    assert env.is_confirmed
    assert env.follower.disputed_height is None


@both_transports
async def test_reveal_reported_by_two_nodes_is_confirmed_immediately(rpc: bool) -> None:
    env = NodePairEnvironment(rpc=rpc)
    env.add_reveal(99, 1)
    env.add_to_others(99, 1)
    await env.follow()
    assert env.is_confirmed
    blocks = [path for path in env.others[0].requests if "block_results" in path or path.endswith(("/99", "/100"))]
    assert len(blocks) == 2, "one request for each block, also for an empty one"
    assert reveal(1).nullifier.hex() not in " ".join(env.others[0].requests)


@both_transports
async def test_reveal_missing_on_two_of_three_nodes_is_not_confirmed(rpc: bool) -> None:
    env = NodePairEnvironment("second", "third", rpc=rpc)
    env.add_reveal(99, 1)
    env.add_to_others(99, 2)
    await env.follow()
    assert env.spent == [2]
    assert not env.is_confirmed
    assert env.follower.disputed_height is None


async def test_chain_time_needs_two_nodes() -> None:
    env = NodePairEnvironment(rpc=False)
    await env.follow()
    del env.network.nodes["node"]
    env.others[0].age = -60
    env.clock.advance(5)
    await env.follow()
    assert env.rounds.chain_now() == pytest.approx(env.clock.now() - 5), "one node alone moves no time"


@pytest.mark.rule("R14")
@both_transports
@pytest.mark.parametrize(("disputed", "is_closed"), [(99, False), (100, False), (101, True), (104, True)])
async def test_disputed_block_keeps_only_rounds_open_that_had_not_ended(
    rpc: bool, disputed: int, is_closed: bool
) -> None:
    env = NodePairEnvironment(rpc=rpc)
    env.add_reveal(disputed, 1)
    env.clock.advance(VOTE_END - env.clock.now())
    await env.sync_rounds()
    for node in env.nodes:
        node.rounds = [recorded_round(3)]
    await env.rounds.sync()
    await env.follow()
    for node in env.nodes:
        node.height += 5
    env.clock.advance(25)
    await env.follow()
    assert env.follower.disputed_height == disputed
    assert env.unread == [(disputed, disputed)]
    assert env.rounds.chain_now() == env.clock.now()
    assert await env.rounds.is_closed(ROUND_ID) is is_closed


@both_transports
async def test_block_waits_for_unreachable_second_node_without_limit(rpc: bool) -> None:
    env = NodePairEnvironment(rpc=rpc)
    del env.network.nodes["other"]
    env.add_reveal(99, 1)
    await env.follow_for(WAIT_SECONDS)
    assert not env.is_confirmed
    assert env.follower.stalled_height is None
    env.network.nodes["other"] = env.others[0]
    env.add_to_others(99, 1)
    await env.follow()
    assert env.is_confirmed
    assert env.unread == []


async def test_low_height_of_one_node_moves_nothing_back() -> None:
    env = NodePairEnvironment("second", "third", rpc=True, height=1000, cursor=1000)
    env.others[1].height = 600
    await env.sync_rounds()
    await env.follow()
    del env.network.nodes["second"]
    for _ in range(2 * RESET_HEADS):
        for node in env.nodes:
            node.height += 1
        env.clock.advance(5)
        await env.follow()
    assert env.ledger == Ledger(1, 1000)
    env.network.nodes["second"] = env.others[0]
    env.others[0].lowest_height = 900  # the blocks that were read are on one node now
    await env.follow()
    assert env.ledger == Ledger(1, 1020)


@both_transports
@pytest.mark.parametrize("count", [1, 2])
async def test_block_invented_above_the_chain_confirms_nothing(rpc: bool, count: int) -> None:
    env = NodePairEnvironment(*["second", "third"][:count], rpc=rpc)
    env.node.height = 185
    env.add_reveal(150, 1)
    env.add_reveal(120, 2)
    env.add_to_others(120, 2)
    for _ in range(5):
        await env.follow_for(WAIT_SECONDS)
        assert env.follower.height == env.others[0].height
        for node in env.nodes:
            node.height += 5
    for node in env.others:
        node.height = 160
    await env.follow_for(WAIT_SECONDS)
    assert not env.is_confirmed
    assert env.spent == [2], "the blocks of the chain are read, and none is skipped"


@both_transports
async def test_rescan_finds_reveals_of_blocks_that_a_node_served_empty(rpc: bool) -> None:
    env = NodePairEnvironment(rpc=rpc, cursor=80)
    env.add_to_others(95, 1)
    await env.follow()
    assert not env.is_confirmed, "the first node served an empty block"
    assert env.follower.disputed_height == 95, "an empty block is compared too"

    await env.store.run(begin_rescan, 90)
    await env.follow_for(3)
    assert not env.is_confirmed
    assert env.unread == [(95, 95)], "a disputed block stops no other"

    env.add_reveal(95, 1)
    with capture_logs() as logs:
        await env.follow_for(5)
    assert env.is_confirmed
    assert env.follower.disputed_height is None
    assert [log["height"] for log in logs if log["event"] == "rescan_finished"] == [100]


@both_transports
async def test_rescan_of_pruned_blocks_reports_them_and_reads_the_others(rpc: bool) -> None:
    env = NodePairEnvironment(rpc=rpc)
    env.add_reveal(90, 1)
    env.add_to_others(90, 1)
    await env.follow()
    for node, lowest in ((env.node, 80), (env.others[0], 70)):
        node.lowest_height = lowest
    await env.store.run(begin_rescan, 60)
    await env.follow_for(3)
    assert env.is_confirmed
    assert env.rescan == Rescan(60, 100, added=1, confirmed=1, pruned=((60, 69),))
    assert env.unread == [(70, 79)], "only one node has them"
    assert env.follower.stalled_height is None


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500, content=b"<html>"),
        json_response(500, {"code": 13, "message": "internal error", "details": []}),
        json_response(404, {"code": 5, "message": "no route", "details": []}),
    ],
)
async def test_rescan_waits_for_a_second_copy_of_an_empty_block(response: httpx.Response) -> None:
    env = NodePairEnvironment(rpc=False)
    await env.follow()
    env.others[0].faults["/blocks/100"] = lambda _: response
    await env.store.run(begin_rescan, 100)
    await env.follow_for(WAIT_SECONDS)
    assert env.left == 1
    env.others[0].faults.clear()
    await env.follow_for(10)
    assert env.left == 0


@both_transports
async def test_sent_reveal_spent_on_one_of_two_nodes_is_not_confirmed(rpc: bool) -> None:
    env = NodePairEnvironment(rpc=rpc, height=1000, cursor=100)
    for node in env.nodes:
        node.lowest_height = 995
    env.store.add_sent(sent_reveal(1))
    env.add_reveal(500, 1)
    env.node.spent_nullifiers.add(reveal(1).nullifier)
    await env.sync_rounds()
    await env.follow()
    assert not env.is_confirmed
    env.others[0].spent_nullifiers.add(reveal(1).nullifier)
    env.add_to_others(500, 1)
    await env.follower._confirm(lambda _: True, must_respond=True)
    assert env.is_confirmed


@both_transports
@pytest.mark.parametrize(("outcome", "seconds_to_end"), [("SPENT", 60), ("ROUND_CLOSED", 0)])
async def test_share_that_two_nodes_report_as_spent_ten_blocks_later_is_confirmed(
    rpc: bool, outcome: str, seconds_to_end: int
) -> None:
    env = NodePairEnvironment(rpc=rpc, height=1000, cursor=1000)
    await env.sync_rounds()
    env.clock.advance(VOTE_END - seconds_to_end - env.clock.now())
    await env.follow()
    env.store.add_sent(sent_reveal(1, outcome))
    check = env.follower._check_spent
    assert await check(1000) == []
    for node, height, confirmed in ((env.node, 1010, []), (env.others[0], 1020, [1])):
        node.spent_nullifiers.add(reveal(1).nullifier)
        node.add_transaction(500, reveal(1).to_tx(), reveal_result(1))
        assert await check(height - 1) == []
        assert await check(height) == confirmed


@both_transports
async def test_questions_about_sent_reveals_delay_no_new_block(rpc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_answer(*_: object) -> bool:
        asked.set()
        await anyio.sleep_forever()
        return True

    env, asked = NodePairEnvironment(rpc=rpc, height=1000, cursor=998), asyncio.Event()
    await env.sync_rounds()
    env.store.add_sent(sent_reveal(1, "SPENT"))
    for node in env.endpoints.nodes:
        monkeypatch.setattr(node.client, "tx", never_answer)
        if node.rpc is not None:
            monkeypatch.setattr(node.rpc, "is_spent", never_answer)
    following = asyncio.create_task(env.follower.run())
    await env.endpoints.probe_all()
    async with asyncio.timeout(10):
        await asked.wait()
    for fake in env.nodes:
        fake.height = 1003
    await env.endpoints.probe_all()
    await wait_until(lambda: env.follower.height == 1003)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_old_block_that_one_honest_node_has_lengthens_no_wait_for_new_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read_and_note(reader: BlockReader, height: int, **options: Any) -> BlockReading:
        reading = await read(reader, height, **options)
        reasons.append(reading.reason)
        return reading

    async def return_late(_: bytes) -> None:
        raise TimeoutError  # as if the reader had waited

    read, reasons = BlockReader.read, list[str]()
    monkeypatch.setattr(BlockReader, "read", read_and_note)
    env = Environment(rpc=False, height=100, cursor=50)
    archive, pruned = env.configure_nodes("archive", "pruned", rpc=False)
    pruned.lowest_height = 90
    for node in (env.node, archive, pruned):
        node.add_transaction(60, reveal(1).to_tx(), reveal_result(1))
        node.add_transaction(101, reveal(2).to_tx(), reveal_result(2))
    monkeypatch.setattr(env.endpoints.nodes[0].client, "tx", return_late)
    await env.sync_rounds()
    for _ in range(4):
        await env.follow()
        env.clock.advance(200)
    assert env.unread == [(60, 60)]
    assert "block 60: not read within 160 s" in reasons[-1]
    for node in (env.node, archive, pruned):
        node.height = 101
    await env.read_new()
    assert env.spent == [2]
    assert reasons[-1] == "node:1317: block 101: not read within 20 s"
