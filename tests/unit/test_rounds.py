"""Rounds are learnt from the chain, never unlearnt by a single node, and closed only by the chain's own word."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from helper.chain.failover import Endpoints
from helper.chain.models import RoundStatus
from helper.errors import ChainUnavailable, WrongChain
from helper.rounds import RoundBook
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, VOTE_END, MemoryStore, Network, Node, recorded_round


class Setting:
    """A book over one node or two."""

    def __init__(self, *hosts: str, now: float = VOTE_END - 100, **settings: Any) -> None:
        self.clock = FakeClock(now)
        self.nodes = {host: Node(self.clock) for host in hosts or ("a",)}
        self.network = Network(**self.nodes)
        self.endpoints: Endpoints = self.network.endpoints(self.clock, **settings)
        self.store = MemoryStore()
        self.book = RoundBook(self.store, self.endpoints, clock=self.clock)

    def tell(self, *rounds: dict[str, Any]) -> None:
        for node in self.nodes.values():
            node.rounds = list(rounds)

    async def sync(self) -> None:
        await self.endpoints.check()
        await self.book.sync()

    async def later(self, blocks: int = 10) -> None:
        """Blocks pass, and rests are over."""
        self.clock.advance(blocks * 5)
        for node in self.nodes.values():
            node.height += blocks
        await self.endpoints.check()


async def test_learns_and_keeps_and_restores() -> None:
    setting = Setting()
    assert setting.book.get(ROUND_ID) is None
    assert not setting.book.synced
    await setting.sync()
    found = setting.book.get(ROUND_ID)
    assert found is not None
    assert setting.book.synced
    assert setting.book.active() == [found]
    assert found.proposals[1].options == (0, 1)

    after_restart = RoundBook(setting.store, setting.endpoints, clock=setting.clock)
    await after_restart.restore()
    again = after_restart.get(ROUND_ID)
    assert again is not None
    assert (again.status, again.vote_end_time, again.created_at_height) == (RoundStatus.ACTIVE, VOTE_END, 55)
    assert [(p.id, p.options) for p in again.proposals] == [(1, (0, 1)), (2, (0, 1))]


async def test_status_moves_forward() -> None:
    setting = Setting()
    for status in (4, 1, 2, 3):
        setting.tell(recorded_round(1) | {"status": status})
        await setting.sync()
        found = setting.book.get(ROUND_ID)
        assert found is not None
        assert found.status == status
        assert setting.store.kept_rounds[ROUND_ID].status == status
    assert setting.book.active() == []


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([], "is not listed any more"),
        ([recorded_round(1) | {"status": 4}], "went back from ACTIVE to PENDING"),
        ([recorded_round(1) | {"vote_end_time": VOTE_END - 50}], "with another end or beginning"),
        ([recorded_round(1) | {"created_at_height": 7}], "with another end or beginning"),
        ([recorded_round(1), recorded_round(1)], "listed twice"),
    ],
)
async def test_a_node_cannot_make_us_forget(told: list[dict[str, Any]], problem: str) -> None:
    setting = Setting("a", "b")
    await setting.sync()
    known, kept = setting.book.get(ROUND_ID), setting.store.kept_rounds[ROUND_ID]
    await setting.later()
    setting.nodes["a"].rounds = told
    with capture_logs() as logs:
        await setting.book.sync()
    assert setting.book.get(ROUND_ID) == known
    assert setting.store.kept_rounds[ROUND_ID] == kept
    assert [endpoint.name for endpoint in setting.endpoints.fresh] == ["b:1317"]
    assert [log["endpoint"] for log in logs] == ["a:1317"]
    assert problem in logs[0]["reason"]


async def test_with_one_node_that_contradicts_itself_nothing_is_believed() -> None:
    setting = Setting()
    await setting.sync()
    await setting.later()
    setting.tell()
    with pytest.raises(ChainUnavailable, match="is not listed any more"):
        await setting.book.sync()
    assert len(setting.book.active()) == 1


async def test_a_node_that_is_a_little_behind_is_honest() -> None:
    setting = Setting("a", "b")
    setting.nodes["a"].rounds = [recorded_round(1) | {"status": 2}]
    await setting.sync()
    setting.nodes["b"].rounds = [recorded_round(1)]
    del setting.network.nodes["a"]
    await setting.sync()
    found = setting.book.get(ROUND_ID)
    assert found is not None
    assert found.status is RoundStatus.TALLYING
    assert [endpoint.name for endpoint in setting.endpoints.fresh] == ["b:1317"]


def over(status: int = 3) -> dict[str, Any]:
    return recorded_round(3) | {"status": status}


@pytest.mark.rule("R14")
@pytest.mark.parametrize("status", [2, 3])
async def test_closed_by_a_processed_block_and_the_status(status: int) -> None:
    setting = Setting(now=VOTE_END + 50)
    setting.tell(over(status))
    await setting.sync()
    assert not await setting.book.is_closed(ROUND_ID), "no block at the end was processed yet"
    setting.book.processed(VOTE_END - 1)
    assert not await setting.book.is_closed(ROUND_ID)
    setting.book.processed(VOTE_END)
    assert await setting.book.is_closed(ROUND_ID)
    assert setting.store.kept_rounds[ROUND_ID].closed_at == VOTE_END + 50
    assert setting.book.open() == []

    after_restart = RoundBook(setting.store, setting.endpoints, clock=setting.clock)
    await after_restart.restore()
    assert await after_restart.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
@pytest.mark.parametrize("status", [1, 4])
async def test_our_clock_alone_closes_nothing(status: int) -> None:
    setting = Setting(now=VOTE_END + 10**6)
    setting.tell(recorded_round(1) | {"status": status})
    await setting.sync()
    setting.book.processed(VOTE_END + 10**6)
    assert not await setting.book.is_closed(ROUND_ID)
    assert not await setting.book.is_closed(b"\x11" * 32), "an unknown round is not a closed one"


@pytest.mark.rule("R14")
async def test_two_endpoints_must_agree_where_two_are_configured() -> None:
    setting = Setting("a", "b", now=VOTE_END + 50)
    setting.nodes["a"].rounds = [over()]
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert not await setting.book.is_closed(ROUND_ID), "the second still says ACTIVE"
    del setting.network.nodes["b"]
    await setting.later()
    assert not await setting.book.is_closed(ROUND_ID), "the second cannot be asked"
    setting.network.nodes["b"] = setting.nodes["b"]
    setting.nodes["b"].rounds = [over()]
    await setting.later()
    assert await setting.book.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
async def test_a_node_whose_own_blocks_are_before_the_end_closes_nothing() -> None:
    setting = Setting(now=VOTE_END - 20)
    setting.tell(over())
    await setting.sync()
    setting.book.processed(VOTE_END + 1)
    assert not await setting.book.is_closed(ROUND_ID)


async def test_closing_asks_for_whole_lists_only() -> None:
    setting = Setting("a", "b", now=VOTE_END + 50)
    setting.tell(over())
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert await setting.book.is_closed(ROUND_ID)
    asked = setting.nodes["a"].asked + setting.nodes["b"].asked
    assert not any(ROUND_ID.hex() in path for path in asked)


async def test_a_purged_round_is_not_learnt_again() -> None:
    setting = Setting(now=VOTE_END + 50)
    setting.tell(over())
    await setting.sync()
    setting.book.forget(ROUND_ID)
    setting.store.kept_rounds.clear()
    await setting.sync()
    assert setting.book.get(ROUND_ID) is None
    assert setting.store.kept_rounds == {}


async def test_the_chain_of_a_database_is_remembered() -> None:
    setting = Setting()
    await setting.sync()
    assert setting.store.meta == {"chain_id": "svote-1"}

    elsewhere = Network(a=Node(setting.clock, chain_id="other-9")).endpoints(setting.clock)
    book = RoundBook(setting.store, elsewhere, clock=setting.clock)
    await book.restore()
    await elsewhere.check()
    assert elsewhere.reasons()["a:1317"] == "it serves chain other-9, not svote-1"

    configured = Network(a=Node(setting.clock)).endpoints(setting.clock, chain_id="other-9")
    with pytest.raises(WrongChain, match="the database is of chain svote-1, not other-9"):
        await RoundBook(setting.store, configured, clock=setting.clock).restore()
