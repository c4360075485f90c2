"""Rounds are learnt from the chain, never unlearnt by a single node, and closed only by the chain's own word."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from structlog.testing import capture_logs

from helper.chain import round_registry
from helper.chain.models import RoundStatus
from helper.chain.node_pool import NodePool
from helper.chain.round_changes import CONFIRMING_BLOCKS
from helper.chain.round_registry import RoundRegistry
from helper.errors import ChainUnavailable, WrongChain
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, VOTE_END, MemoryStore, Network, Node, recorded_round


class Setting:
    """A book over one node or two."""

    def __init__(self, *hosts: str, now: float = VOTE_END - 100, **settings: Any) -> None:
        self.clock = FakeClock(now)
        self.nodes = {host: Node(self.clock) for host in hosts or ("a",)}
        self.network = Network(**self.nodes)
        self.endpoints: NodePool = self.network.endpoints(self.clock, **settings)
        self.store = MemoryStore()
        self.book = RoundRegistry(self.store, self.endpoints, clock=self.clock)

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


async def test_registry_stores_and_restores_rounds() -> None:
    setting = Setting()
    assert setting.book.get(ROUND_ID) is None
    assert not setting.book.synced
    await setting.sync()
    found = setting.book.get(ROUND_ID)
    assert found is not None
    assert setting.book.synced
    assert setting.book.active() == [found]
    assert found.proposals[1].options == (0, 1)

    after_restart = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
    await after_restart.restore()
    again = after_restart.get(ROUND_ID)
    assert again is not None
    assert (again.status, again.vote_end_time, again.created_at_height) == (RoundStatus.ACTIVE, VOTE_END, 55)
    assert [(p.id, p.options) for p in again.proposals] == [(1, (0, 1)), (2, (0, 1))]


async def test_registry_status_moves_forward() -> None:
    setting = Setting()
    for status in (4, 1, 2, 3):
        setting.tell(recorded_round(1) | {"status": status})
        await setting.sync()
        await setting.later(CONFIRMING_BLOCKS)
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
        ([], "no longer listed"),
        ([recorded_round(1) | {"status": 4}], "status went back from ACTIVE to PENDING"),
        ([recorded_round(1) | {"status": 5}], "status 5 is unknown to this version"),
        ([recorded_round(1) | {"created_at_height": 7}], "listed with a different created_at_height"),
        ([recorded_round(1), recorded_round(1)], "listed twice"),
    ],
)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
@odd_lists
async def test_round_invalid_on_all_nodes_is_frozen_alone(
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
    assert [(log["event"], log["log_level"]) for log in logs] == [("round_frozen", "error")]
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
    assert [log["event"] for log in logs] == ["round_unfrozen"]
    assert setting.book.frozen(ROUND_ID) is None
    assert len(setting.book.active()) == 2


@odd_lists
async def test_registry_uses_node_with_correct_round(told: list[dict[str, Any]], problem: str) -> None:
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


async def test_round_never_readable_is_frozen_with_warning() -> None:
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
async def test_frozen_round_is_not_closed() -> None:
    setting = Setting(now=VOTE_END + 50)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.tell(over() | {"created_at_height": 7})
    await setting.later()
    await setting.book.sync()
    setting.book.processed(VOTE_END + 60)
    assert not await setting.book.is_closed(ROUND_ID)
    setting.tell(over())
    await setting.later()
    await setting.book.sync()
    assert await setting.book.is_closed(ROUND_ID)


async def test_closed_round_may_be_omitted_by_chain() -> None:
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


async def test_registry_sync_without_valid_list_raises() -> None:
    setting = Setting()
    await setting.endpoints.check()
    setting.tell(recorded_round(1) | {"vote_round_id": "eobB"})
    with pytest.raises(ChainUnavailable, match="32 bytes were expected"):
        await setting.book.sync()
    assert not setting.book.synced


async def test_registry_accepts_slightly_lagging_node() -> None:
    setting = Setting("a", "b")
    await setting.sync()
    setting.tell(recorded_round(1) | {"status": 2})
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
async def test_round_closes_by_processed_block_and_status(status: int) -> None:
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

    after_restart = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
    await after_restart.restore()
    assert await after_restart.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
@pytest.mark.parametrize("status", [1, 4])
async def test_round_is_not_closed_by_local_clock(status: int) -> None:
    setting = Setting(now=VOTE_END + 10**6)
    setting.tell(recorded_round(1) | {"status": status})
    await setting.sync()
    setting.book.processed(VOTE_END + 10**6)
    assert not await setting.book.is_closed(ROUND_ID)
    assert not await setting.book.is_closed(b"\x11" * 32), "an unknown round is not a closed one"


@pytest.mark.rule("R14")
async def test_round_closing_requires_two_nodes_if_configured() -> None:
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
    assert logs[0]["event"] == "round_closing_unconfirmed"
    setting.network.nodes["b"] = setting.nodes["b"]
    setting.nodes["b"].rounds = [over()]
    await setting.later()
    assert await setting.book.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
async def test_round_is_not_closed_by_node_before_end() -> None:
    setting = Setting(now=VOTE_END - 70)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.book.processed(VOTE_END + 1)
    assert not await setting.book.is_closed(ROUND_ID)


async def test_round_closing_requests_whole_lists_only() -> None:
    setting = Setting("a", "b", now=VOTE_END)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert await setting.book.is_closed(ROUND_ID)
    asked = setting.nodes["a"].asked + setting.nodes["b"].asked
    assert not any(ROUND_ID.hex() in path for path in asked)


async def test_purged_round_is_not_stored_again() -> None:
    setting = Setting(now=VOTE_END + 50)
    await learn(setting)
    setting.tell(over())
    await setting.sync()
    setting.book.forget(ROUND_ID)
    setting.store.kept_rounds.clear()
    await setting.sync()
    assert setting.book.get(ROUND_ID) is None
    assert setting.store.kept_rounds == {}

    after_restart = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
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
async def test_round_with_lost_row_is_stored_again_if_it_has_shares() -> None:
    setting = Setting(now=VOTE_END + 50)
    setting.store.with_shares = {ROUND_ID}
    setting.tell(over())
    await setting.book.restore()
    await setting.sync()
    assert list(setting.store.kept_rounds) == [ROUND_ID]
    setting.book.processed(VOTE_END + 40)
    assert await setting.book.is_closed(ROUND_ID)


async def test_revision_increases_when_round_may_close() -> None:
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


async def test_reread_applies_rounds_closed_and_purged_by_other_host() -> None:
    setting = Setting(now=VOTE_END + 50)
    await setting.sync()
    other = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
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


async def test_registry_stores_chain_id() -> None:
    setting = Setting()
    await setting.sync()
    assert setting.store.meta == {"chain_id": "svote-1"}

    elsewhere = Network(a=Node(setting.clock, chain_id="other-9")).endpoints(setting.clock)
    book = RoundRegistry(setting.store, elsewhere, clock=setting.clock)
    await book.restore()
    await elsewhere.check()
    assert elsewhere.reasons()["a:1317"] == "serves chain other-9, not svote-1"

    configured = Network(a=Node(setting.clock)).endpoints(setting.clock, chain_id="other-9")
    with pytest.raises(WrongChain, match="the database belongs to chain svote-1, not other-9"):
        await RoundRegistry(setting.store, configured, clock=setting.clock).restore()


def moved(end: int, status: int = 1) -> dict[str, Any]:
    return recorded_round(status) | {"vote_end_time": end}


EARLIER, LATER = VOTE_END - 60, VOTE_END + 600


def known_end(book: RoundRegistry) -> int:
    known = book.get(ROUND_ID)
    assert known is not None
    return known.vote_end_time


@pytest.mark.parametrize("end", [EARLIER, LATER])
async def test_end_reported_by_two_nodes_is_applied_and_stored(end: int) -> None:
    setting = Setting("a", "b")
    await learn(setting)
    revision = setting.book.revision
    setting.tell(moved(end))
    with capture_logs() as logs:
        await setting.sync()
    assert [log["event"] for log in logs if log["event"].startswith("round_end")] == ["round_end_changed"]
    assert known_end(setting.book) == end
    assert setting.book.unconfirmed() == {}
    assert setting.book.frozen(ROUND_ID) is None
    assert setting.book.revision > revision
    assert setting.store.kept_rounds[ROUND_ID].vote_end_time == end
    assert len(setting.endpoints.fresh) == 2

    after_restart = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
    await after_restart.restore()
    assert known_end(after_restart) == end


@pytest.mark.parametrize("end", [EARLIER, LATER])
async def test_end_reported_by_only_node_is_applied_after_ten_blocks(end: int) -> None:
    setting = Setting()
    await learn(setting)
    setting.tell(moved(end))
    with capture_logs() as logs:
        for _ in range(CONFIRMING_BLOCKS):
            await setting.sync()
            assert known_end(setting.book) == VOTE_END
            assert setting.book.unconfirmed_end(ROUND_ID) == end
            assert str(end) in setting.book.unconfirmed()[ROUND_ID]
            known = setting.book.get(ROUND_ID)
            assert known is not None
            assert setting.book.active() == [known], "due shares are still revealed"
            assert setting.book.latest_end(known) == max(end, VOTE_END)
            await setting.later(1)
        await setting.sync()
    events = [log["event"] for log in logs if log["event"].startswith("round_end")]
    assert events == ["round_end_unconfirmed", "round_end_changed"]
    assert known_end(setting.book) == end
    assert setting.store.kept_rounds[ROUND_ID].vote_end_time == end
    assert setting.book.unconfirmed() == {}


async def test_end_reported_by_one_of_two_nodes_is_not_applied() -> None:
    setting = Setting("a", "b")
    await learn(setting)
    setting.nodes["a"].rounds = [moved(EARLIER)]
    for _ in range(2 * CONFIRMING_BLOCKS):
        await setting.sync()
        assert known_end(setting.book) == VOTE_END
        assert setting.book.unconfirmed() == {}
        await setting.later(1)
    assert "listed with vote_end_time" in str(setting.endpoints.reasons()["a:1317"])
    del setting.network.nodes["b"]
    await setting.later(5)
    await setting.sync()
    assert setting.book.unconfirmed_end(ROUND_ID) == EARLIER
    setting.network.nodes["b"] = setting.nodes["b"]
    setting.nodes["a"].rounds = [recorded_round(1)]
    await setting.later()
    with capture_logs() as logs:
        await setting.sync()
    assert "round_end_report_withdrawn" in [log["event"] for log in logs]
    assert setting.book.unconfirmed() == {}


async def test_end_report_of_only_node_restarts_when_value_changes() -> None:
    setting = Setting()
    await learn(setting)
    for number in range(3 * CONFIRMING_BLOCKS):
        setting.tell(moved(LATER + number // 5))
        await setting.sync()
        await setting.later(1)
    assert known_end(setting.book) == VOTE_END


async def test_end_of_slightly_lagging_node_is_not_reported() -> None:
    setting = Setting("a", "b")
    await learn(setting)
    setting.tell(moved(LATER))
    await setting.sync()
    setting.tell(recorded_round(1))
    await setting.sync()
    assert known_end(setting.book) == LATER
    assert setting.book.unconfirmed() == {}
    assert setting.store.kept_rounds[ROUND_ID].vote_end_time == LATER


async def test_end_confirmed_by_other_host_is_applied() -> None:
    setting = Setting("a", "b")
    await learn(setting)
    other = RoundRegistry(setting.store, setting.endpoints, clock=setting.clock)
    await other.restore()
    setting.tell(moved(LATER))
    await setting.sync()
    await other.reread()
    assert known_end(other) == LATER


@pytest.mark.rule("R14")
async def test_round_closes_at_changed_end_once_confirmed() -> None:
    setting = Setting(now=VOTE_END)
    await learn(setting)
    setting.tell(moved(VOTE_END + 20, status=3))
    await setting.sync()
    setting.book.processed(VOTE_END + 40)
    assert not await setting.book.is_closed(ROUND_ID), "the end is not confirmed"
    await setting.later(CONFIRMING_BLOCKS)
    await setting.sync()
    assert await setting.book.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
async def test_round_with_unknown_status_closes_after_its_end_once_confirmed(hosts: tuple[str, ...]) -> None:
    setting = Setting(*hosts, now=VOTE_END - 120)
    await learn(setting)
    setting.tell(recorded_round(1) | {"status": 5})
    await setting.later(1)
    await setting.sync()
    setting.book.processed(VOTE_END - 5)
    assert setting.book.active() == []
    assert "status 5 is unknown" in setting.book.unconfirmed()[ROUND_ID]
    await setting.later(10)
    await setting.sync()
    assert not await setting.book.is_closed(ROUND_ID), "no block at the end was processed"
    setting.book.processed(VOTE_END + 1)
    await setting.later(4)
    if len(hosts) == 1:
        await setting.sync()
        assert setting.book.frozen(ROUND_ID) is not None, "one node, and not for ten blocks since the end"
        await setting.later(CONFIRMING_BLOCKS)
    revision = setting.book.revision
    with capture_logs() as logs:
        await setting.sync()
    assert [log["event"] for log in logs] == ["round_closed"]
    assert setting.book.revision > revision, "retention looks at it"
    assert setting.book.frozen(ROUND_ID) is None
    assert await setting.book.is_closed(ROUND_ID)
    assert setting.store.kept_rounds[ROUND_ID].closed_at is not None
    await setting.sync()
    assert setting.book.frozen(ROUND_ID) is None
    assert setting.book.active() == []


@pytest.mark.rule("R14")
async def test_unknown_status_of_one_of_two_nodes_does_not_close() -> None:
    setting = Setting("a", "b", now=VOTE_END + 50)
    await learn(setting)
    setting.nodes["a"].rounds = [recorded_round(1) | {"status": 5}]
    setting.book.processed(VOTE_END + 60)
    for _ in range(3):
        await setting.later()
        await setting.sync()
        assert not await setting.book.is_closed(ROUND_ID)
    assert setting.store.kept_rounds[ROUND_ID].closed_at is None


def status_of(book: RoundRegistry) -> RoundStatus:
    known = book.get(ROUND_ID)
    assert known is not None
    return known.status


@pytest.mark.parametrize("status", [2, 3])
async def test_status_reported_by_one_of_two_nodes_is_not_applied(status: int) -> None:
    setting = Setting("a", "b")
    await learn(setting)
    setting.nodes["a"].rounds = [recorded_round(1) | {"status": status}]
    for _ in range(2 * CONFIRMING_BLOCKS):
        await setting.sync()
        await setting.later(1)
    assert status_of(setting.book) is RoundStatus.ACTIVE
    assert len(setting.book.active()) == 1
    assert not setting.book.has_unconfirmed_status(ROUND_ID), "a second node contradicts it"
    assert "listed with status TALLYING" in str(setting.endpoints.reasons()["a:1317"])
    del setting.network.nodes["b"]
    await setting.later(5)
    await setting.sync()
    assert status_of(setting.book) is RoundStatus.ACTIVE
    assert setting.book.has_unconfirmed_status(ROUND_ID)
    assert "status TALLYING" in setting.book.unconfirmed()[ROUND_ID]
    assert setting.book.frozen(ROUND_ID) is None
    setting.tell(recorded_round(1))
    await setting.later(5)
    await setting.sync()
    assert setting.book.unconfirmed() == {}
    assert len(setting.book.active()) == 1


async def test_status_reported_by_only_node_is_applied_after_ten_blocks() -> None:
    setting = Setting(now=VOTE_END - 3600)
    await learn(setting)
    setting.tell(recorded_round(1) | {"status": 2})
    for _ in range(CONFIRMING_BLOCKS):
        await setting.sync()
        assert status_of(setting.book) is RoundStatus.ACTIVE
        assert setting.book.has_unconfirmed_status(ROUND_ID)
        await setting.later(1)
    await setting.sync()
    assert status_of(setting.book) is RoundStatus.TALLYING
    assert setting.store.kept_rounds[ROUND_ID].status == RoundStatus.TALLYING
    assert not setting.book.has_unconfirmed_status(ROUND_ID)


@pytest.mark.parametrize("status", [2, 3])
async def test_round_reported_active_again_by_two_nodes_is_active(status: int) -> None:
    setting = Setting("a", "b")
    setting.tell(recorded_round(1) | {"status": status})
    setting.store.with_shares = {ROUND_ID}
    await setting.book.restore()
    await setting.sync()
    assert status_of(setting.book) in (RoundStatus.TALLYING, RoundStatus.FINALIZED)
    await setting.later()
    setting.tell(recorded_round(1))
    await setting.sync()
    assert status_of(setting.book) is RoundStatus.ACTIVE
    assert len(setting.book.active()) == 1
    assert setting.book.frozen(ROUND_ID) is None
    assert setting.store.kept_rounds[ROUND_ID].status == RoundStatus.ACTIVE


async def test_round_listed_over_by_one_of_two_nodes_is_stored_as_active() -> None:
    setting = Setting("a", "b")
    setting.nodes["a"].rounds = [recorded_round(1) | {"status": 3}]
    await setting.sync()
    assert status_of(setting.book) is RoundStatus.ACTIVE
    assert len(setting.book.active()) == 1


async def test_round_listed_over_is_unconfirmed_until_second_node_answers() -> None:
    setting = Setting("a", "b")
    setting.nodes["a"].rounds = [recorded_round(1) | {"status": 3}]
    b = setting.network.nodes.pop("b")
    await setting.sync()
    assert setting.book.has_unconfirmed_status(ROUND_ID)
    setting.network.nodes["b"] = b
    await setting.later()
    await setting.sync()
    assert len(setting.book.active()) == 1


async def test_frozen_round_with_waiting_shares_is_reported() -> None:
    setting = Setting()
    await learn(setting)
    setting.store.with_shares = {ROUND_ID}
    setting.tell()
    await setting.sync()
    assert setting.book.frozen_shares() == {ROUND_ID: 1}
    setting.tell(recorded_round(1))
    await setting.later()
    await setting.sync()
    assert setting.book.frozen_shares() == {}


def with_proposals(number: int) -> dict[str, Any]:
    told = recorded_round(1)
    return told | {"proposals": told["proposals"][:number]}


def proposal_ids(book: RoundRegistry) -> list[int]:
    known = book.get(ROUND_ID)
    assert known is not None
    return [proposal.id for proposal in known.proposals]


@pytest.mark.parametrize("number", [0, 1])
async def test_proposals_reported_by_one_of_two_nodes_are_not_applied(number: int) -> None:
    setting = Setting("a", "b")
    await learn(setting)
    setting.nodes["a"].rounds = [with_proposals(number)]
    for _ in range(2 * CONFIRMING_BLOCKS):
        await setting.sync()
        await setting.later(1)
    assert proposal_ids(setting.book) == [1, 2]
    assert setting.book.active() != []
    del setting.network.nodes["b"]
    await setting.later(5)
    await setting.sync()
    assert proposal_ids(setting.book) == [1, 2]
    assert setting.book.has_unconfirmed_proposals(ROUND_ID)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
async def test_proposals_change_once_confirmed(hosts: tuple[str, ...]) -> None:
    setting = Setting(*hosts)
    await learn(setting)
    setting.tell(with_proposals(1))
    await setting.sync()
    if len(hosts) == 1:
        assert proposal_ids(setting.book) == [1, 2]
        await setting.later(CONFIRMING_BLOCKS)
        await setting.sync()
    assert proposal_ids(setting.book) == [1]
    assert not setting.book.has_unconfirmed_proposals(ROUND_ID)


async def test_proposals_of_round_without_any_are_applied_immediately() -> None:
    setting = Setting("a", "b")
    setting.tell(with_proposals(0))
    await setting.sync()
    assert proposal_ids(setting.book) == []
    setting.tell(recorded_round(1))
    await setting.sync()
    assert proposal_ids(setting.book) == [1, 2]


async def test_rounds_listed_as_over_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_registry, "MAX_PAST_ROUNDS", 3)
    setting = Setting()
    for start in range(1, 9):
        ids = [bytes([start + number]) * 32 for number in range(4)]
        setting.tell(recorded_round(1), *(over() | {"vote_round_id": b64encode(one).decode()} for one in ids))
        await setting.sync()
        await setting.later(1)

    assert len(setting.book._past) <= 3
    assert len(setting.book._reported_over) <= 4
    assert [one.round_id for one in setting.book.all()] == [ROUND_ID]
    assert set(setting.store.kept_rounds) == {ROUND_ID}
