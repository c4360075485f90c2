"""Round registry: new rounds, changes confirmed by one or two nodes, frozen rounds, closing."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from structlog.testing import capture_logs

from helper.chain import round_registry
from helper.chain.chain_data import Round, RoundStatus
from helper.chain.round_registry import RoundRegistry
from helper.errors import ChainUnavailable, ConfigError
from helper.store import rounds
from helper.store.blocks import apply_blocks
from helper.store.ledger import Ledger
from tests.unit.chain.fakes import (
    CHAIN_ID,
    ROUND_ID,
    VOTE_END,
    ChainStore,
    FakeNetwork,
    FakeNode,
    create_network,
    record_block,
    recorded_round,
)


class Environment:
    """A round registry with one or two nodes."""

    def __init__(self, *hosts: str, now: float = VOTE_END - 100, **settings: Any) -> None:
        self.clock, self.network, self.endpoints = create_network(*hosts or ("a",), now=now, **settings)
        self.nodes = dict(self.network.nodes)
        self.store = ChainStore(self.clock)
        self.registry = RoundRegistry(self.store, self.endpoints)

    def set_rounds(self, *rounds: dict[str, Any]) -> None:
        for node in self.nodes.values():
            node.rounds = list(rounds)

    @property
    def known(self) -> Round:
        return known_round(self.registry)

    @property
    def active(self) -> list[bytes]:
        return [known.round_id for known in self.registry.active_rounds()]

    async def restore_registry(self) -> RoundRegistry:
        """Return the registry of another host, or of this one after a restart."""
        registry = RoundRegistry(self.store, self.endpoints)
        await registry.restore()
        return registry

    async def sync(self) -> None:
        """Synchronize until each node has been asked first."""
        await self.endpoints.probe_all()
        for _ in range(2 * len(self.nodes) - 1):
            await self.registry.sync()

    async def advance_blocks(self, blocks: int = 10) -> None:
        """Advance by enough blocks to end all backoffs."""
        self.clock.advance(blocks * 5)
        for node in self.nodes.values():
            node.height += blocks
        await self.endpoints.probe_all()

    async def sync_later(self, blocks: int = 10) -> None:
        await self.advance_blocks(blocks)
        await self.sync()

    async def list_rounds(self, *rounds: dict[str, Any]) -> None:
        """List these rounds on all nodes, and synchronize."""
        self.set_rounds(*rounds)
        await self.sync()

    async def list_rounds_later(self, *rounds: dict[str, Any], blocks: int = 10) -> None:
        self.set_rounds(*rounds)
        await self.sync_later(blocks)


def known_round(registry: RoundRegistry) -> Round:
    known = registry.get(ROUND_ID)
    assert known is not None
    return known


async def sync_new(*hosts: str, **settings: Any) -> Environment:
    """Synchronize for the first time: the recorded round is active."""
    env = Environment(*hosts, **settings)
    await env.sync()
    return env


async def sync_active(*hosts: str, **settings: Any) -> Environment:
    """The same, ten blocks before the next sync."""
    env = await sync_new(*hosts, **settings)
    await env.advance_blocks()
    return env


async def sync_ended(status: int = 3) -> Environment:
    """Synchronize while the round is active, and again after its end."""
    env = await sync_active(now=VOTE_END + 50)
    await env.list_rounds(closed_round_json(status))
    return env


async def test_registry_stores_and_restores_rounds() -> None:
    env = Environment()
    assert env.registry.get(ROUND_ID) is None
    assert not env.registry.is_synced
    await env.sync()
    assert env.registry.is_synced
    assert env.registry.active_rounds() == [env.known]
    assert env.known.proposals[1].options == (0, 1)

    again = known_round(await env.restore_registry())
    assert (again.status, again.vote_end_time, again.created_at_height) == (RoundStatus.ACTIVE, VOTE_END, 55)
    assert [(p.id, p.options) for p in again.proposals] == [(1, (0, 1)), (2, (0, 1))]


async def test_registry_status_moves_forward() -> None:
    env = Environment()
    for status in (4, 1, 2, 3):
        await env.list_rounds(recorded_round(1) | {"status": status})
        assert env.known.status == status
        assert env.store.stored_rounds[ROUND_ID].status == status
    assert env.registry.active_rounds() == []


OTHER_ID = b"\x07" * 32


def other_round() -> dict[str, Any]:
    return recorded_round(1) | {"vote_round_id": b64encode(OTHER_ID).decode()}


invalid_lists = pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ([], "no longer listed"),
        ([recorded_round(1) | {"status": 5}], "status 5 is unknown to this version"),
        ([recorded_round(1) | {"created_at_height": 7}], "listed with a different created_at_height"),
        ([recorded_round(1), recorded_round(1)], "listed twice"),
    ],
)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
@invalid_lists
async def test_round_invalid_on_all_nodes_is_frozen_alone(
    listed: list[dict[str, Any]], problem: str, hosts: tuple[str, ...]
) -> None:
    env = Environment(*hosts)
    await env.list_rounds(recorded_round(1), other_round())
    known, stored = env.registry.get(ROUND_ID), env.store.stored_rounds[ROUND_ID]
    await env.advance_blocks()
    env.set_rounds(*listed, other_round())
    with capture_logs() as logs:
        await env.sync()
        await env.sync_later()
    assert [(log["event"], log["log_level"]) for log in logs] == [("round_frozen", "error")]
    assert problem in logs[0]["reason"]
    assert problem in (env.registry.frozen_reason(ROUND_ID) or "")
    assert env.registry.frozen_reason(OTHER_ID) is None
    assert env.active == [OTHER_ID]
    assert len(env.endpoints.usable_nodes) == len(hosts), "no node is put into backoff"
    assert (env.registry.get(ROUND_ID), env.store.stored_rounds[ROUND_ID]) == (known, stored)
    assert env.registry.open_rounds() == env.registry.all_rounds(), "the tree is kept"

    env.set_rounds(recorded_round(1), other_round())
    await env.advance_blocks()
    with capture_logs() as logs:
        await env.sync()
    assert [log["event"] for log in logs] == ["round_unfrozen"]
    assert env.registry.frozen_reason(ROUND_ID) is None
    assert len(env.registry.active_rounds()) == 2


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other")])
@invalid_lists
async def test_one_false_list_changes_nothing_and_is_reported(
    listed: list[dict[str, Any]], problem: str, hosts: tuple[str, ...]
) -> None:
    env = await sync_new(*hosts)
    known, stored = env.registry.get(ROUND_ID), env.store.stored_rounds[ROUND_ID]
    await env.advance_blocks()
    env.nodes["liar"].rounds = listed
    await env.sync()
    assert len(env.endpoints.usable_nodes) == len(hosts), "what else it reports may be right"
    assert env.registry.unconfirmed_reports() == {ROUND_ID: f"{problem} by liar:1317"}
    env.network.nodes = {"liar": env.nodes["liar"]}
    await env.sync_later()
    assert (env.registry.get(ROUND_ID), env.store.stored_rounds[ROUND_ID]) == (known, stored)
    assert env.registry.frozen_reason(ROUND_ID) is None


async def test_list_of_a_node_that_stopped_before_a_round_does_not_freeze_it() -> None:
    env = await sync_new("liar", "honest", "stopped")
    height = env.nodes["stopped"].height
    del env.network.nodes["stopped"]
    env.clock.advance(100)
    env.nodes["honest"].height += 20  # the false node reports one height, with the current time
    created = {"created_at_height": height + 5}
    await env.list_rounds(recorded_round(1), other_round() | created)
    assert OTHER_ID in env.store.stored_rounds
    env.nodes["liar"].rounds = [recorded_round(1)]
    await env.sync()
    assert env.registry.frozen_reason(OTHER_ID) is None
    assert env.active == [ROUND_ID, OTHER_ID]


async def test_node_that_stopped_before_a_change_does_not_undo_it() -> None:
    env = await sync_new("liar", "honest", "stopped")
    del env.network.nodes["stopped"]
    env.clock.advance(100)
    env.nodes["honest"].height += 20  # the false node reports one height, with the current time
    await env.list_rounds(round_json_ending_at(VOTE_END + 3600))
    assert env.known.vote_end_time == VOTE_END + 3600
    env.nodes["liar"].rounds = [recorded_round(1)]
    await env.sync()
    assert env.known.vote_end_time == VOTE_END + 3600


async def test_round_that_one_node_lists_alone_is_not_stored_and_accuses_no_other_node() -> None:
    env = await sync_new("liar", "honest")
    extra = bytes([9]) * 32
    env.nodes["liar"].rounds = [recorded_round(1), recorded_round(1) | {"vote_round_id": b64encode(extra).decode()}]
    for _ in range(3):
        await env.sync_later()
        assert len(env.endpoints.usable_nodes) == 2
        assert env.store.stored_rounds.keys() == {ROUND_ID}
        assert env.registry.unconfirmed_reports() == {extra: "listed, but not agreed yet"}
        assert env.registry.frozen_reason(ROUND_ID) is None
        assert [env.registry.is_doubted(round_id) for round_id in (ROUND_ID, extra)] == [False, True]
    record_block(env.registry, VOTE_END + 1)
    assert not await env.registry.is_closed(extra)
    assert env.registry.open_rounds() == env.registry.agreed_rounds() == env.registry.all_rounds()[:1]
    await env.list_rounds_later(recorded_round(1))
    assert (env.registry.get(extra), env.registry.unconfirmed_reports()) == (None, {})


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other")])
async def test_round_that_one_node_hides_is_listed_by_another_within_two_syncs(hosts: tuple[str, ...]) -> None:
    env = await sync_new(*hosts)
    for name, node in env.nodes.items():
        node.rounds = [recorded_round(1)] if name == "liar" else [recorded_round(1), other_round()]
    for _ in range(3):  # after the two syncs of a block, and the first one of the next
        await env.registry.sync()
    assert {known.round_id for known in env.registry.active_rounds()} == {ROUND_ID, OTHER_ID}
    assert (OTHER_ID in env.store.stored_rounds) is (len(hosts) > 2)


def invented_rounds(number: int, **fields: Any) -> list[dict[str, Any]]:
    ids = [b64encode(bytes([255, *each.to_bytes(2), *bytes(29)])).decode() for each in range(number)]
    return [recorded_round(1) | fields | {"vote_round_id": each} for each in ids]


async def test_rounds_that_are_not_agreed_are_limited_and_crowd_out_no_other() -> None:
    env = await sync_new("liar", "honest")
    env.nodes["liar"].rounds = [*invented_rounds(500, created_at_height=1), recorded_round(1)]
    env.nodes["honest"].rounds = [recorded_round(1), other_round()]
    await env.sync_later()
    env.nodes["liar"].rounds = [*invented_rounds(1000, created_at_height=1)[500:], recorded_round(1)]
    await env.sync()
    assert len(env.registry.unconfirmed_reports()) == len(env.registry._records) - 1 == round_registry.MAX_HELD_ROUNDS
    assert [known.round_id for known in env.registry.active_rounds()[:1]] == [ROUND_ID], "the agreed ones come first"
    assert env.registry.get(OTHER_ID) is not None
    assert [known.round_id for known in env.registry.open_rounds()] == [ROUND_ID]


FALSE_FIELDS: list[dict[str, Any]] = [
    {"vote_end_time": VOTE_END - 600},
    {"vote_end_time": VOTE_END + 86_400},
    {"proposals": []},
    {"created_at_height": 1055},
    {"created_at_height": 1},
    {"status": 2},
    {"status": 3},
    {"status": 4},
]


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other")])
@pytest.mark.parametrize("false", FALSE_FIELDS)
async def test_round_is_stored_as_agreed_at_its_first_listing(hosts: tuple[str, ...], false: dict[str, Any]) -> None:
    env = Environment(*hosts)
    env.store.set_ledger(Ledger(200, 300))
    env.nodes["liar"].rounds = [recorded_round(1) | false]
    await env.sync()
    is_agreed = len(hosts) > 2 or "status" in false
    known = env.known
    assert env.active == [ROUND_ID], "votes are accepted"
    assert {proposal.id for proposal in known.proposals} == {1, 2}
    assert (ROUND_ID in env.store.stored_rounds) is is_agreed
    if not is_agreed:
        assert not env.registry.view(ROUND_ID).are_proposals_agreed
        assert not env.registry.view(ROUND_ID).is_end_agreed
        assert known.created_at_height <= 55
        assert env.store.ledger == Ledger(200, 300), "no block is read on the word of one node"
    env.set_rounds(recorded_round(1))
    await env.advance_blocks()
    await env.registry.sync()
    stored = env.store.stored_rounds[ROUND_ID]
    assert (stored.status, stored.vote_end_time, stored.created_at_height) == (1, VOTE_END, 55)
    assert stored.proposals == ((1, (0, 1)), (2, (0, 1)))
    assert env.registry.unconfirmed_reports() == {}
    assert env.store.ledger == Ledger(55, 54)


async def test_round_that_is_listed_while_the_other_node_is_silent_is_active() -> None:
    env = Environment("a", "b")
    silent = env.network.nodes.pop("b")
    await env.sync()
    assert len(env.registry.active_rounds()) == 1
    assert not env.registry.is_synced, "the follower must not begin without the rounds that are not agreed yet"
    assert env.store.stored_rounds == {}
    env.network.nodes["b"] = silent
    await env.advance_blocks()
    await env.registry.sync()
    assert env.store.stored_rounds.keys() == {ROUND_ID}


async def test_round_never_readable_is_frozen_with_warning() -> None:
    env = Environment()
    env.set_rounds(recorded_round(1), other_round() | {"status": 5})
    await env.endpoints.probe_all()
    with capture_logs() as logs:
        await env.registry.sync()
    assert [log["log_level"] for log in logs if "frozen" in log["event"]] == ["warning"]
    assert env.registry.frozen_reason(OTHER_ID) is not None
    assert env.registry.get(OTHER_ID) is None
    assert env.active == [ROUND_ID]


@pytest.mark.rule("R14")
async def test_frozen_round_is_not_closed() -> None:
    env = await sync_ended()
    env.set_rounds(closed_round_json() | {"created_at_height": 7})
    await env.advance_blocks()
    await env.registry.sync()
    record_block(env.registry, VOTE_END + 60)
    assert not await env.registry.is_closed(ROUND_ID)
    env.set_rounds(closed_round_json())
    await env.advance_blocks()
    await env.registry.sync()
    assert await env.registry.is_closed(ROUND_ID)


async def test_closed_round_may_be_omitted_by_chain() -> None:
    env = await sync_ended(2)
    record_block(env.registry, VOTE_END + 40)
    assert await env.registry.is_closed(ROUND_ID)
    env.set_rounds()
    await env.advance_blocks()
    await env.registry.sync()
    assert env.registry.frozen_reason(ROUND_ID) is None


async def test_closed_round_is_followed_to_finalized_without_warnings() -> None:
    env = Environment(now=VOTE_END + 50)
    with capture_logs() as logs:
        await env.sync()
        await env.advance_blocks()
        await env.list_rounds(closed_round_json(2))
        record_block(env.registry, VOTE_END + 40)
        assert await env.registry.is_closed(ROUND_ID)
        assert env.registry.all_rounds()[0].status is RoundStatus.TALLYING
        env.set_rounds(closed_round_json(3))
        await env.advance_blocks()
        await env.registry.sync()
    assert env.registry.all_rounds()[0].status is RoundStatus.FINALIZED
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == []
    after_restart = await env.restore_registry()
    assert after_restart.all_rounds()[0].status is RoundStatus.FINALIZED
    assert await after_restart.is_closed(ROUND_ID)


async def test_registry_sync_without_valid_list_raises() -> None:
    env = Environment()
    await env.endpoints.probe_all()
    env.set_rounds(recorded_round(1) | {"vote_round_id": "eobB"})
    with pytest.raises(ChainUnavailable, match="expected 32 bytes"):
        await env.registry.sync()
    assert not env.registry.is_synced


def closed_round_json(status: int = 3) -> dict[str, Any]:
    return recorded_round(3) | {"status": status}


@pytest.mark.rule("R14")
@pytest.mark.parametrize("status", [2, 3])
async def test_round_closes_by_processed_block_and_status(status: int) -> None:
    env = await sync_active(now=VOTE_END)
    await env.list_rounds(closed_round_json(status))
    assert not await env.registry.is_closed(ROUND_ID), "no block at the end was processed yet"
    record_block(env.registry, VOTE_END - 1)
    assert not await env.registry.is_closed(ROUND_ID)
    record_block(env.registry, VOTE_END)
    assert await env.registry.is_closed(ROUND_ID)
    assert env.store.stored_rounds[ROUND_ID].closed_at == VOTE_END, "according to the chain's time"
    assert env.registry.open_rounds() == []

    after_restart = await env.restore_registry()
    assert await after_restart.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
@pytest.mark.parametrize("status", [1, 4])
async def test_round_is_not_closed_by_local_clock(status: int) -> None:
    env = Environment(now=VOTE_END + 10**6)
    await env.list_rounds(recorded_round(1) | {"status": status})
    record_block(env.registry, VOTE_END + 10**6)
    assert not await env.registry.is_closed(ROUND_ID)
    assert not await env.registry.is_closed(b"\x11" * 32), "an unknown round is not closed"


@pytest.mark.rule("R14")
async def test_round_closing_requires_two_nodes_if_configured() -> None:
    env = await sync_active("a", "b", now=VOTE_END)
    env.nodes["a"].rounds = [closed_round_json()]
    record_block(env.registry, VOTE_END + 40)
    await env.sync()
    assert not await env.registry.is_closed(ROUND_ID), "the second node still reports ACTIVE"
    del env.network.nodes["b"]
    await env.advance_blocks()
    record_block(env.registry, VOTE_END + 60)
    with capture_logs() as logs:
        for _ in range(3):
            await env.sync()
            assert not await env.registry.is_closed(ROUND_ID), "the second node cannot be queried"
    warnings = [(log["event"], log["endpoint"]) for log in logs if log["event"] == "round_closing_unconfirmed"]
    assert warnings == [("round_closing_unconfirmed", "b:1317")]
    env.network.nodes["b"] = env.nodes["b"]
    env.nodes["b"].rounds = [closed_round_json()]
    await env.sync_later()
    assert await env.registry.is_closed(ROUND_ID)


async def test_round_closing_requests_only_round_lists() -> None:
    env = await sync_active("a", "b", now=VOTE_END)
    await env.list_rounds(closed_round_json())
    record_block(env.registry, VOTE_END + 40)
    assert await env.registry.is_closed(ROUND_ID)
    requests = env.nodes["a"].requests + env.nodes["b"].requests
    assert not any(ROUND_ID.hex() in path for path in requests)


async def test_purged_round_is_not_stored_again() -> None:
    env = await sync_ended()
    env.registry.forget(ROUND_ID)
    await env.store.run_batches(rounds.purge, ROUND_ID)
    await env.sync()
    assert env.registry.get(ROUND_ID) is None
    assert env.store.stored_rounds == {}

    after_restart = await env.restore_registry()
    with capture_logs() as logs:
        await after_restart.sync()
        record_block(after_restart, VOTE_END + 40)
        assert not await after_restart.is_closed(ROUND_ID)
    assert known_round(after_restart).status is RoundStatus.FINALIZED
    assert env.store.stored_rounds == {}
    assert after_restart.all_rounds() == []
    assert logs == []


@pytest.mark.rule("R15")
async def test_round_with_lost_row_is_stored_again_if_it_has_shares() -> None:
    env = Environment(now=VOTE_END + 50)
    env.nodes["a"].rounds = [closed_round_json()]
    env.store.add_share(1)
    await env.sync()
    assert list(env.store.stored_rounds) == [ROUND_ID]
    record_block(env.registry, VOTE_END + 40)
    assert await env.registry.is_closed(ROUND_ID)


async def test_revision_increases_when_round_may_close() -> None:
    env = await sync_new(now=VOTE_END + 50)
    record_block(env.registry, VOTE_END - 6.0)
    before = env.registry.revision
    await env.sync()
    record_block(env.registry, VOTE_END - 1.0)
    assert env.registry.revision == before, "no round has ended: nothing can be closed"
    record_block(env.registry, VOTE_END + 5.0)
    assert env.registry.revision > before
    before = env.registry.revision
    record_block(env.registry, VOTE_END + 10.0)
    assert env.registry.revision > before, "not closed yet: any block may bring the missing report"
    before = env.registry.revision
    await env.list_rounds(closed_round_json())
    assert env.registry.revision > before
    assert await env.registry.is_closed(ROUND_ID)
    before = env.registry.revision
    record_block(env.registry, VOTE_END + 15.0)
    assert env.registry.revision == before, "the purge depends on time only"


async def test_reread_applies_rounds_closed_and_purged_by_other_host() -> None:
    env = await sync_new(now=VOTE_END + 50)
    other = await env.restore_registry()
    await env.list_rounds(closed_round_json())
    await other.sync()
    await other.reload_from_store()
    before = other.revision
    await other.reload_from_store()
    assert other.revision == before, "nothing changes"

    record_block(env.registry, VOTE_END + 5.0)
    assert await env.registry.is_closed(ROUND_ID)
    await other.reload_from_store()
    assert other.open_rounds() == []
    assert other.revision > before, "the host that closed it may stop before it reports unconfirmed shares"

    await env.store.run_batches(rounds.purge, ROUND_ID)
    await other.reload_from_store()
    assert other.get(ROUND_ID) is None


@pytest.mark.parametrize("fault", ["DELETE FROM rounds", "UPDATE rounds SET seen_ms = seen_ms + 1"])
async def test_round_that_the_store_has_lost_is_stored_again(fault: str) -> None:
    """A promoted standby that is behind lacks the newest rounds; a damaged row is not read."""
    env = await sync_new()
    for _ in range(2):  # lost before it was read again, and after
        env.store.conn.execute(fault)
        await env.registry.reload_from_store()
        await env.sync()
        assert env.active == [ROUND_ID]
        await env.registry.reload_from_store()
        assert [stored.round_id for stored in await env.store.list_rounds()] == [ROUND_ID]


async def test_registry_stores_chain_id() -> None:
    env = await sync_new()
    assert await env.store.get_meta("chain_id") == "svote-1"

    other_chain = FakeNetwork(a=FakeNode(env.clock, chain_id="other-9")).create_node_pool(env.clock)
    registry = RoundRegistry(env.store, other_chain)
    await registry.restore()
    await other_chain.probe_all()
    assert other_chain.unusable_reasons()["a:1317"] == "is on chain other-9, expected svote-1"

    configured = FakeNetwork(a=FakeNode(env.clock)).create_node_pool(env.clock, chain_id="other-9")
    with pytest.raises(ConfigError, match="the database belongs to chain svote-1, not other-9"):
        await RoundRegistry(env.store, configured).restore()


def round_json_ending_at(end: int, status: int = 1) -> dict[str, Any]:
    return recorded_round(status) | {"vote_end_time": end}


EARLIER, LATER = VOTE_END - 60, VOTE_END + 600


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
@pytest.mark.parametrize("end", [EARLIER, LATER])
async def test_end_reported_by_every_node_is_applied_and_stored(hosts: tuple[str, ...], end: int) -> None:
    env = await sync_active(*hosts)
    revision = env.registry.revision
    env.set_rounds(round_json_ending_at(end))
    with capture_logs() as logs:
        await env.sync()
    assert [log["event"] for log in logs if log["event"].startswith("round_end")] == ["round_end_changed"]
    assert env.known.vote_end_time == end
    assert env.registry.unconfirmed_reports() == {}
    assert env.registry.frozen_reason(ROUND_ID) is None
    assert env.registry.revision > revision
    assert env.store.stored_rounds[ROUND_ID].vote_end_time == end
    assert len(env.endpoints.usable_nodes) == len(hosts)

    after_restart = await env.restore_registry()
    assert known_round(after_restart).vote_end_time == end


@pytest.mark.parametrize(
    ("false", "doubted", "report"),
    [
        ({"vote_end_time": EARLIER}, "is_end_agreed", "reported but not confirmed"),
        ({"status": 2}, "is_status_agreed", "status TALLYING reported"),
        ({"status": 3}, "is_status_agreed", "status FINALIZED reported"),
        ({"proposals": []}, "are_proposals_agreed", "reported but not confirmed"),
        ({"proposals": recorded_round(1)["proposals"][:1]}, "are_proposals_agreed", "reported but not confirmed"),
    ],
)
async def test_change_reported_by_one_of_two_nodes_is_not_applied(
    false: dict[str, Any], doubted: str, report: str
) -> None:
    env = await sync_active("a", "b")
    known = env.known
    env.nodes["a"].rounds = [recorded_round(1) | false]
    for _ in range(20):
        await env.sync()
        assert env.registry.active_rounds() == [known]
        assert getattr(env.registry.view(ROUND_ID), doubted), "a second node contradicts it"
        assert len(env.endpoints.usable_nodes) == 2
        await env.advance_blocks(1)
    del env.network.nodes["b"]
    await env.sync_later(5)
    assert env.registry.active_rounds() == [known], "due shares are still revealed"
    assert not getattr(env.registry.view(ROUND_ID), doubted)
    assert env.registry.view(ROUND_ID).latest_end == VOTE_END
    assert report in env.registry.unconfirmed_reports()[ROUND_ID]
    assert env.registry.frozen_reason(ROUND_ID) is None
    env.network.nodes["b"] = env.nodes["b"]
    with capture_logs() as logs:
        await env.list_rounds_later(recorded_round(1))
    assert ("round_end_report_withdrawn" in [log["event"] for log in logs]) is ("vote_end_time" in false)
    assert env.registry.unconfirmed_reports() == {}


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_end_of_nodes_behind_the_last_change_is_not_reported(is_restarted: bool) -> None:
    env = await sync_active("a", "b")
    await env.list_rounds(round_json_ending_at(LATER))
    if is_restarted:
        height = env.nodes["a"].height
        await env.store.run(apply_blocks, [(height, height)], [])
        env.registry = RoundRegistry(env.store, env.endpoints)
        await env.registry.restore()
    env.set_rounds(recorded_round(1))
    for node in env.nodes.values():
        node.height -= 1
    await env.sync()
    assert env.known.vote_end_time == LATER
    assert env.registry.unconfirmed_reports() == {}
    assert env.store.stored_rounds[ROUND_ID].vote_end_time == LATER


async def test_end_confirmed_by_other_host_is_applied() -> None:
    env = await sync_active("a", "b")
    other = await env.restore_registry()
    await env.list_rounds(round_json_ending_at(LATER))
    await other.reload_from_store()
    assert known_round(other).vote_end_time == LATER
    third = RoundRegistry(env.store, env.endpoints)
    await third.reload_from_store()
    assert known_round(third).vote_end_time == LATER, "a round that this host has not listed yet"


@pytest.mark.rule("R14")
async def test_round_closes_at_changed_end_once_confirmed() -> None:
    env = await sync_active("a", "b", now=VOTE_END)
    env.nodes["a"].rounds = [round_json_ending_at(VOTE_END + 20, status=3)]
    await env.sync()
    record_block(env.registry, VOTE_END + 10)
    assert not await env.registry.is_closed(ROUND_ID), "the end is not agreed"
    await env.list_rounds(round_json_ending_at(VOTE_END + 20, status=3))
    assert not await env.registry.is_closed(ROUND_ID), "no block at the changed end was processed"
    record_block(env.registry, VOTE_END + 20)
    assert await env.registry.is_closed(ROUND_ID)


@pytest.mark.rule("R14")
@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
@pytest.mark.parametrize(
    ("listed", "problem"),
    [([recorded_round(1) | {"status": 5}], "status 5 is unknown"), ([], "no longer listed")],
)
async def test_round_with_unknown_status_closes_after_its_end_once_confirmed(
    hosts: tuple[str, ...], listed: list[dict[str, Any]], problem: str
) -> None:
    env = await sync_active(*hosts, now=VOTE_END - 120)
    await env.list_rounds_later(*listed, blocks=1)
    record_block(env.registry, VOTE_END - 5)
    assert env.registry.active_rounds() == []
    assert problem in env.registry.unconfirmed_reports()[ROUND_ID]
    await env.sync_later(10)
    assert not await env.registry.is_closed(ROUND_ID), "no block at the end was processed"
    record_block(env.registry, VOTE_END + 1, Ledger(1, 1000, ((56, 56),)))
    await env.sync()
    assert env.registry.frozen_reason(ROUND_ID) is not None, "the first block after the round's creation is unread"
    record_block(env.registry, VOTE_END + 1, Ledger(1, 1000, ((55, 55), (401, 401))))
    await env.advance_blocks(4)
    revision = env.registry.revision
    with capture_logs() as logs:
        await env.sync()
    assert [log["event"] for log in logs] == ["round_closed"]
    assert env.registry.revision > revision, "retention checks the round"
    assert env.registry.frozen_reason(ROUND_ID) is None
    assert await env.registry.is_closed(ROUND_ID)
    assert env.store.stored_rounds[ROUND_ID].closed_at is not None
    await env.sync()
    assert env.registry.frozen_reason(ROUND_ID) is None
    assert env.registry.active_rounds() == []


@pytest.mark.rule("R14")
@pytest.mark.parametrize("listed", [[recorded_round(1) | {"status": 5}], []])
async def test_unknown_status_of_one_of_two_nodes_does_not_close(listed: list[dict[str, Any]]) -> None:
    env = await sync_active("a", "b", now=VOTE_END + 50)
    env.nodes["a"].rounds = listed
    record_block(env.registry, VOTE_END + 60)
    for _ in range(3):
        await env.sync_later()
        assert not await env.registry.is_closed(ROUND_ID)
    assert env.store.stored_rounds[ROUND_ID].closed_at is None


@pytest.mark.parametrize("before", [4, 1, 2])
async def test_status_never_goes_back(before: int) -> None:
    env = Environment("a", "b")
    env.store.add_share(1)
    await env.list_rounds(recorded_round(1) | {"status": before})
    await env.advance_blocks()
    await env.list_rounds(recorded_round(1) | {"status": 4})
    assert env.known.status == before
    assert env.store.stored_rounds[ROUND_ID].status == before
    assert env.registry.frozen_reason(ROUND_ID) is None
    assert len(env.endpoints.usable_nodes) == 2
    assert env.registry.unconfirmed_reports() == {}


async def test_stored_round_that_is_pending_remains_agreed() -> None:
    env = Environment("a", "b")
    await env.list_rounds(recorded_round(1) | {"status": 4})
    env.nodes["a"].rounds = [recorded_round(1) | {"status": 1, "vote_end_time": VOTE_END + 600}]
    await env.sync_later()
    assert env.registry.unconfirmed_reports() == {}
    assert (env.known.status, env.known.vote_end_time) == (RoundStatus.ACTIVE, VOTE_END)
    assert env.store.stored_rounds[ROUND_ID].status == RoundStatus.PENDING, "one node has reported it as active"
    assert env.registry.view(ROUND_ID).is_status_agreed, "an early acceptance does no harm"
    assert len(env.registry.active_rounds()) == 1


async def test_round_listed_as_ended_is_unconfirmed_until_second_node_responds() -> None:
    env = Environment("a", "b", chain_id=CHAIN_ID)
    env.nodes["a"].rounds = [recorded_round(1) | {"status": 3}]
    b = env.network.nodes.pop("b")
    await env.sync()
    assert env.registry.get(ROUND_ID) is None, "its shares are refused temporarily"
    env.network.nodes["b"] = b
    await env.sync_later()
    assert len(env.registry.active_rounds()) == 1


async def test_ended_round_on_whose_end_nodes_differ_at_first_is_known_once_they_agree() -> None:
    env = Environment("a", "b")
    env.set_rounds(closed_round_json())
    env.nodes["a"].rounds = [closed_round_json() | {"vote_end_time": VOTE_END - 1}]
    await env.sync()
    assert env.registry.get(ROUND_ID) is None
    await env.list_rounds_later(closed_round_json())
    assert env.known.status is RoundStatus.FINALIZED
    assert env.store.stored_rounds == {}


async def test_frozen_round_with_waiting_shares_is_reported() -> None:
    env = await sync_active()
    env.store.add_share(1)
    await env.list_rounds()
    assert env.registry.frozen_shares() == {ROUND_ID: 1}
    await env.list_rounds_later(recorded_round(1))
    assert env.registry.frozen_shares() == {}


def with_proposals(number: int) -> dict[str, Any]:
    listed = recorded_round(1)
    return listed | {"proposals": listed["proposals"][:number]}


def proposal_ids(env: Environment) -> list[int]:
    return [proposal.id for proposal in env.known.proposals]


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")])
async def test_proposals_change_once_confirmed(hosts: tuple[str, ...]) -> None:
    env = await sync_active(*hosts)
    await env.list_rounds(with_proposals(1))
    assert proposal_ids(env) == [1]
    assert env.registry.view(ROUND_ID).are_proposals_agreed


async def test_proposals_of_round_without_any_are_applied_immediately() -> None:
    env = Environment("a", "b")
    await env.list_rounds(with_proposals(0))
    assert proposal_ids(env) == []
    await env.list_rounds(recorded_round(1))
    assert proposal_ids(env) == [1, 2]


async def test_rounds_listed_as_ended_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_registry, "MAX_PAST_ROUNDS", 3)
    env = Environment()
    for start in range(1, 9):
        ids = [bytes([start + number]) * 32 for number in range(4)]
        env.set_rounds(
            recorded_round(1),
            *(closed_round_json() | {"vote_round_id": b64encode(round_id).decode()} for round_id in ids),
        )
        await env.sync()
        await env.advance_blocks(1)

    assert len(env.registry._records) <= 4
    assert [known.round_id for known in env.registry.all_rounds()] == [ROUND_ID]
    assert set(env.store.stored_rounds) == {ROUND_ID}
