"""Rounds are learnt from the chain, never unlearnt by a single node, and closed only by the chain's own word."""

from __future__ import annotations

from base64 import b64encode
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


OTHER_ID = b"\x07" * 32


def other_round() -> dict[str, Any]:
    return recorded_round(1) | {"vote_round_id": b64encode(OTHER_ID).decode()}


odd_lists = pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([], "it is not listed any more"),
        ([recorded_round(1) | {"status": 4}], "it went back from ACTIVE to PENDING"),
        ([recorded_round(1) | {"status": 5}], "5 is no status of a round"),
        ([recorded_round(1) | {"vote_end_time": VOTE_END + 60}], "it is listed with another end"),
        ([recorded_round(1) | {"created_at_height": 7}], "it is listed with another end or beginning"),
        ([recorded_round(1), recorded_round(1)], "it is listed twice"),
    ],
)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
@odd_lists
async def test_a_round_that_every_node_shows_oddly_is_frozen_and_the_others_go_on(
    told: list[dict[str, Any]], problem: str, hosts: tuple[str, ...]
) -> None:
    setting = Setting(*hosts)
    setting.tell(recorded_round(1), other_round())
    await setting.sync()
    known, kept = setting.book.get(ROUND_ID), setting.store.kept_rounds[ROUND_ID]
    await setting.later()
    setting.tell(*told, other_round())
    with capture_logs() as logs:
        await setting.book.sync()
        await setting.later()
        await setting.book.sync()
    assert [(log["event"], log["log_level"]) for log in logs] == [
        ("round frozen: no node shows it as it should be", "error")
    ]
    assert problem in logs[0]["reason"]
    assert problem in (setting.book.frozen(ROUND_ID) or "")
    assert setting.book.frozen(OTHER_ID) is None
    assert [active.round_id for active in setting.book.active()] == [OTHER_ID]
    assert len(setting.endpoints.fresh) == len(hosts), "no node is set aside for it"
    assert (setting.book.get(ROUND_ID), setting.store.kept_rounds[ROUND_ID]) == (known, kept)
    assert setting.book.open() == setting.book.all(), "its tree stays"

    setting.tell(recorded_round(1), other_round())
    await setting.later()
    with capture_logs() as logs:
        await setting.book.sync()
    assert [log["event"] for log in logs] == ["round no longer frozen"]
    assert setting.book.frozen(ROUND_ID) is None
    assert len(setting.book.active()) == 2


@odd_lists
async def test_the_node_that_shows_a_round_as_it_should_be_is_used(told: list[dict[str, Any]], problem: str) -> None:
    setting = Setting("a", "b")
    await setting.sync()
    known, kept = setting.book.get(ROUND_ID), setting.store.kept_rounds[ROUND_ID]
    await setting.later()
    setting.nodes["a"].rounds = told
    await setting.book.sync()
    assert (setting.book.get(ROUND_ID), setting.store.kept_rounds[ROUND_ID]) == (known, kept)
    assert setting.book.frozen(ROUND_ID) is None
    assert [endpoint.name for endpoint in setting.endpoints.fresh] == ["b:1317"]
    assert problem in str(setting.endpoints.reasons()["a:1317"])
    del setting.network.nodes["b"]
    await setting.later()
    await setting.book.sync()
    assert setting.book.frozen(ROUND_ID) is not None, "nobody speaks for it"
    setting.network.nodes["b"] = setting.nodes["b"]
    await setting.later()
    await setting.book.sync()
    assert setting.book.frozen(ROUND_ID) is None


async def test_a_round_that_was_never_readable_is_frozen_too_with_a_warning() -> None:
    setting = Setting()
    setting.tell(recorded_round(1), other_round() | {"status": 5})
    await setting.endpoints.check()
    with capture_logs() as logs:
        await setting.book.sync()
    assert [log["log_level"] for log in logs if "frozen" in log["event"]] == ["warning"]
    assert setting.book.frozen(OTHER_ID) is not None
    assert setting.book.get(OTHER_ID) is None
    assert [active.round_id for active in setting.book.active()] == [ROUND_ID]


@pytest.mark.rule("R14")
async def test_a_frozen_round_is_not_closed() -> None:
    setting = Setting(now=VOTE_END + 50)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.tell(over() | {"vote_end_time": VOTE_END - 50})
    await setting.later()
    await setting.book.sync()
    setting.book.processed(VOTE_END + 60)
    assert not await setting.book.is_closed(ROUND_ID)
    setting.tell(over())
    await setting.later()
    await setting.book.sync()
    assert await setting.book.is_closed(ROUND_ID)


async def test_a_closed_round_may_be_dropped_by_its_chain() -> None:
    setting = Setting(now=VOTE_END + 50)
    await learn(setting)
    setting.tell(over(2))
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert await setting.book.is_closed(ROUND_ID)
    setting.tell()
    await setting.later()
    await setting.book.sync()
    assert setting.book.frozen(ROUND_ID) is None


async def test_nothing_is_known_when_no_node_gives_a_list() -> None:
    setting = Setting()
    await setting.endpoints.check()
    setting.tell(recorded_round(1) | {"vote_round_id": "eobB"})
    with pytest.raises(ChainUnavailable, match="32 bytes were expected"):
        await setting.book.sync()
    assert not setting.book.synced


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


async def learn(setting: Setting) -> None:
    """Hear of the round while it is active."""
    setting.tell(recorded_round(1))
    await setting.sync()
    await setting.later()


@pytest.mark.rule("R14")
@pytest.mark.parametrize("status", [2, 3])
async def test_closed_by_a_processed_block_and_the_status(status: int) -> None:
    setting = Setting(now=VOTE_END)
    await learn(setting)
    setting.tell(over(status))
    await setting.sync()
    assert not await setting.book.is_closed(ROUND_ID), "no block at the end was processed yet"
    setting.book.processed(VOTE_END - 1)
    assert not await setting.book.is_closed(ROUND_ID)
    setting.book.processed(VOTE_END)
    assert await setting.book.is_closed(ROUND_ID)
    assert setting.store.kept_rounds[ROUND_ID].closed_at == VOTE_END, "by the chain's time"
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
    setting = Setting("a", "b", now=VOTE_END)
    await learn(setting)
    setting.nodes["a"].rounds = [over()]
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert not await setting.book.is_closed(ROUND_ID), "the second still says ACTIVE"
    del setting.network.nodes["b"]
    await setting.later()
    setting.book.processed(VOTE_END + 60)
    with capture_logs() as logs:
        for _ in range(3):
            assert not await setting.book.is_closed(ROUND_ID), "the second cannot be asked"
    assert [(log["endpoint"], log["log_level"]) for log in logs] == [("b:1317", "warning")]
    assert "waits for a second endpoint's word" in logs[0]["event"]
    setting.network.nodes["b"] = setting.nodes["b"]
    setting.nodes["b"].rounds = [over()]
    await setting.later()
    assert await setting.book.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
async def test_a_node_whose_own_blocks_are_before_the_end_closes_nothing() -> None:
    setting = Setting(now=VOTE_END - 70)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.book.processed(VOTE_END + 1)
    assert not await setting.book.is_closed(ROUND_ID)


async def test_closing_asks_for_whole_lists_only() -> None:
    setting = Setting("a", "b", now=VOTE_END)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert await setting.book.is_closed(ROUND_ID)
    asked = setting.nodes["a"].asked + setting.nodes["b"].asked
    assert not any(ROUND_ID.hex() in path for path in asked)


async def test_a_purged_round_is_not_learnt_again() -> None:
    setting = Setting(now=VOTE_END + 50)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.book.forget(ROUND_ID)
    setting.store.kept_rounds.clear()
    await setting.sync()
    assert setting.book.get(ROUND_ID) is None
    assert setting.store.kept_rounds == {}

    after_restart = RoundBook(setting.store, setting.endpoints, clock=setting.clock)
    await after_restart.restore()
    with capture_logs() as logs:
        await after_restart.sync()
        after_restart.processed(VOTE_END + 40)
        assert not await after_restart.is_closed(ROUND_ID)
    found = after_restart.get(ROUND_ID)
    assert found is not None
    assert found.status is RoundStatus.FINALIZED
    assert setting.store.kept_rounds == {}
    assert after_restart.all() == []
    assert logs == []


@pytest.mark.rule("R15")
async def test_a_round_whose_row_was_lost_is_kept_again_while_it_has_shares() -> None:
    setting = Setting(now=VOTE_END + 50)
    setting.store.with_shares = {ROUND_ID}
    setting.tell(over())
    await setting.book.restore()
    await setting.sync()
    assert list(setting.store.kept_rounds) == [ROUND_ID]
    setting.book.processed(VOTE_END + 40)
    assert await setting.book.is_closed(ROUND_ID)


async def test_the_revision_tells_when_a_look_is_worth_it() -> None:
    setting = Setting(now=VOTE_END + 50)
    await setting.sync()
    setting.book.processed(VOTE_END - 6.0)
    before = setting.book.revision
    await setting.sync()
    setting.book.processed(VOTE_END - 1.0)
    assert setting.book.revision == before, "no round is over: nothing can be closed"
    setting.book.processed(VOTE_END + 5.0)
    assert setting.book.revision > before
    before = setting.book.revision
    setting.book.processed(VOTE_END + 10.0)
    assert setting.book.revision > before, "it is not closed yet: every block may bring the word that was missing"
    before = setting.book.revision
    setting.tell(over())
    await setting.sync()
    assert setting.book.revision > before
    assert await setting.book.is_closed(ROUND_ID)
    before = setting.book.revision
    setting.book.processed(VOTE_END + 15.0)
    assert setting.book.revision == before, "when it is purged is a matter of time"


async def test_what_another_host_closed_and_purged_is_taken_over_and_looked_at() -> None:
    setting = Setting(now=VOTE_END + 50)
    await setting.sync()
    other = RoundBook(setting.store, setting.endpoints, clock=setting.clock)
    await other.restore()
    setting.tell(over())
    await setting.sync()
    await other.sync()
    await other.reread()
    before = other.revision
    await other.reread()
    assert other.revision == before, "nothing is new"

    setting.book.processed(VOTE_END + 5.0)
    assert await setting.book.is_closed(ROUND_ID)
    await other.reread()
    assert other.open() == []
    assert other.revision > before, "who closed it may be gone before it told what was not counted"

    setting.store.kept_rounds.clear()
    await other.reread()
    assert other.get(ROUND_ID) is None


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
