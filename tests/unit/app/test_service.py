"""The service as a whole: when it takes shares, and that it ends with an error when a part of it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helper.app import service as app_module
from helper.app.dependencies import Dependencies
from helper.app.service import Service
from helper.chain.node_pool import create_nodes
from helper.config import Config
from helper.errors import HelperError, StoreDisplaced
from helper.server.application import create_app
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import Network, Node

pytestmark = pytest.mark.anyio

PATIENCE = 20.0
STATUS = "/shielded-vote/v1/status"


class House:
    """A service over one node, not running; its store is open."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.node = Node(self.clock, height=100)
        self.network = Network(node=self.node)
        monkeypatch.setattr(app_module, "harden_process", list)
        config = Config.model_validate({"helper": {"db_path": str(folder / "q.db"), "port": 0}})
        edges = Dependencies(nodes=create_nodes(["http://node:1317"], transport=self.network))
        self.service = Service(config, clock=self.clock, prover_command=("false",), edges=edges)

    async def poll(self, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        await self.service.endpoints.check()
        await self.service.follower.tick()

    async def status(self) -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(self.service.wallet_view))
        async with httpx.AsyncClient(transport=transport, base_url="http://helper") as client:
            return await client.get(STATUS)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    house = House(tmp_path, monkeypatch)
    await house.service.store.open()
    yield house
    await house.service.store.close()


async def test_shares_are_taken_until_the_newest_block_is_too_old(house: House) -> None:
    paused = house.service.vitals.intake_paused
    assert "starting" in str(paused())
    await house.poll()
    assert paused() is None
    del house.network.nodes["node"]
    await house.poll(30)
    assert not house.service.endpoints.usable
    assert paused() is None, "a node that is away for a moment"
    await house.poll(59)
    assert paused() is None
    await house.poll(2)
    assert str(paused()) == "no chain node is in sync"
    house.network.nodes["node"] = house.node
    await house.poll(0)
    assert paused() is None


async def test_one_error_of_the_only_node_pauses_nothing(house: House) -> None:
    await house.poll()
    endpoints = house.service.endpoints
    endpoints.rest(endpoints.all[0], "one error")
    assert not endpoints.usable
    assert house.service.vitals.intake_paused() is None


async def test_a_node_that_stands_still_or_is_of_another_chain_does_not_keep_it_open(house: House) -> None:
    await house.poll()
    house.node.chain_id = "other-1"
    await house.poll()
    assert house.service.vitals.intake_paused() is not None, "it is there, and of no use"
    house.node.chain_id = "svote-1"
    await house.poll()
    assert house.service.vitals.intake_paused() is None
    house.node.age = 91
    await house.poll()
    assert house.service.vitals.intake_paused() is not None


async def test_the_status_is_only_ok_where_a_share_would_be_taken(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused() -> str:
        answer = await house.status()
        assert answer.status_code == 503
        assert answer.json()["status"] == "error"
        return str(answer.json()["error"])

    assert "starting" in await refused()
    await house.poll()
    assert await refused() == "starting", "no prover yet"
    monkeypatch.setattr(type(house.service.prover), "ready", property(lambda _: True))
    monkeypatch.setattr(house.service.vitals, "revealing", True)
    assert (await house.status()).json()["status"] == "ok"
    del house.network.nodes["node"]
    await house.poll(91)
    assert "no chain node" in await refused()
    assert not house.service.vitals.ready


async def test_readiness_fails_while_dispatch_is_paused_for_long(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = house.service.vitals
    monkeypatch.setattr(type(house.service.listener), "arrived", property(lambda _: True))

    def dispatch() -> str | None:
        return {check.name: check.problem for check in vitals.checks()}["dispatch"]

    await house.poll()
    assert (vitals.gate().paused, dispatch()) == (None, None)
    del house.network.nodes["node"]
    await house.poll()
    assert str(vitals.gate().paused) == "no chain node is in sync"
    await house.poll(29)
    assert dispatch() is None, "a node that is restarted"
    await house.poll(1)
    assert dispatch() == "no chain node is in sync"
    assert vitals.intake_paused() is None, "shares are still taken"
    house.network.nodes["node"] = house.node
    await house.poll()
    assert dispatch() is None
    del house.network.nodes["node"]
    await house.poll(29)
    assert dispatch() is None, "the pause before it is over"


async def test_one_failing_route_of_the_only_node_pauses_no_dispatch(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(house.service.listener), "arrived", property(lambda _: True))
    await house.poll()
    house.node.faults["/rounds"] = lambda _: httpx.Response(500)
    for _ in range(60):
        house.node.height += 1
        await house.poll()
        assert house.service.vitals.gate().paused is None


async def test_any_error_of_a_look_at_sent_reveals_is_outlived(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: asyncio.Queue[int] = asyncio.Queue()

    async def reconcile(_height: int) -> None:
        looks.put_nowait(1)
        if looks.qsize() == 1:
            raise ValueError("a mistake of ours")

    await house.poll()
    monkeypatch.setattr(house.service.vitals, "revealing", True)
    for name in ("caught_up", "arrived"):
        monkeypatch.setattr(type(house.service.listener), name, property(lambda _: True))
    monkeypatch.setattr(house.service.broadcaster, "reconcile", reconcile)
    task = asyncio.create_task(house.service._reconcile())
    async with asyncio.timeout(PATIENCE):
        for number in (1, 2):
            house.service._on_block(100 + number)
            while looks.qsize() < number:
                await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


@pytest.mark.parametrize("part", ["prover", "listener", "follower"])
@pytest.mark.parametrize("error", [None, ValueError("a mistake of ours")])
async def test_a_part_that_ends_ends_the_service_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception | None
) -> None:
    house = House(tmp_path, monkeypatch)

    async def ends() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(getattr(house.service, part), "run", ends)
    monkeypatch.setattr(house.service.prover, "wait_ready", forever)
    if part != "prover":
        monkeypatch.setattr(house.service.prover, "run", forever)
    expected: Any = HelperError if error is None else ValueError
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(expected, match=f"{part} ended unexpectedly" if error is None else "mistake"):
            await house.service.run()
    assert not house.service.config.socket_path.exists()


async def test_a_stop_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path, monkeypatch)
    monkeypatch.setattr(house.service.prover, "run", forever)
    monkeypatch.setattr(house.service.prover, "wait_ready", forever)
    async with asyncio.timeout(PATIENCE):
        await house.service.run(started=lambda _url: house.service.stop())


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_status_says_so_when_the_queue_cannot_be_written(house: House) -> None:
    await house.poll()
    assert isinstance(house.service.store, SqliteStore)
    house.service.store._writer.trouble.reason = "no space"
    assert str(house.service.vitals.intake_paused()) == "the queue cannot be written"
    answer = await house.status()
    assert (answer.status_code, "cannot be written" in answer.text) == (503, True)


async def test_service_frozen_round_with_waiting_shares_fails_readiness(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.poll()
    service = house.service
    monkeypatch.setattr(service.rounds, "frozen_shares", lambda: {b"\x07" * 32: 2})
    problems = {check.name: check.problem for check in service.vitals.checks()}
    assert problems["rounds"] == "round 07070707 is frozen with 2 waiting shares"
    assert service.vitals.intake_paused() is None, "other rounds go on"


async def test_service_with_displaced_database_pauses_until_it_is_back(house: House, tmp_path: Path) -> None:
    await house.poll()
    service, reason = house.service, "the database file is no longer at its path"
    (tmp_path / "q.db").rename(tmp_path / "aside.db")
    with pytest.raises(StoreDisplaced):
        await service.store.set_meta("test", "value")

    assert str(service.vitals.intake_paused()) == reason
    assert {check.name: check.problem for check in service.vitals.checks()}["store"] == reason
    assert str(service.vitals.gate().paused) == reason
    answer = await house.status()
    assert (answer.status_code, reason in answer.text) == (503, True)

    (tmp_path / "aside.db").rename(tmp_path / "q.db")
    async with asyncio.timeout(PATIENCE):
        while service.vitals.intake_paused() is not None:
            await asyncio.sleep(0.01)
    await service.store.set_meta("test", "value")
