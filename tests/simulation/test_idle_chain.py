"""The log of the service on an idle chain: recorded responses in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, MutableMapping
from typing import Any
from unittest.mock import patch

import anyio.to_thread
import httpx
import pytest
from structlog.testing import capture_logs

from helper.app.service import Service
from helper.chain.node_pool import create_nodes
from helper.config.sections import Config
from tests.simulation.chain import EPOCH
from tests.simulation.host import SimClock
from tests.simulation.prover import SimProvers
from tests.simulation.store import SimDisk, SimStore
from tests.simulation.virtual_loop import SimLoop
from tests.unit.chain.fakes import CHAIN_ID, FakeNetwork, FakeNode, json_response, read_recorded, recorded_round

DAY_SECONDS = 24 * 3600.0
BLOCK_SECONDS = 60.0
"""Longer than on a real chain, so that a day has few requests."""
COMMIT_SECONDS = 0.2
"""Seconds after each block in which the node refuses queries."""
STALL_AFTER_SECONDS = 100.0
ROUND_END = EPOCH + DAY_SECONDS / 2
TALLY_SECONDS = 600
FIRST_HEIGHT = 463
COMMITTING = "invalid height: context did not contain latest block height in either check state or finalize block state"


class IdleNode(FakeNode):
    """A node with empty blocks and one round, which ends and is tallied.

    Args:
        stall_path: the first request with this in its path, after `STALL_AFTER_SECONDS`, stops the node for a while.
    """

    def __init__(self, clock: SimClock, stall_path: str, stall_seconds: float) -> None:
        node_info = read_recorded("node info")["response"]
        super().__init__(clock, faults={"node_info": lambda _: json_response(200, node_info)})  # type: ignore[arg-type]
        self._round = recorded_round(1) | {"vote_end_time": str(int(ROUND_END))}
        self._stall_path = stall_path
        self._stall_seconds = stall_seconds
        self._stalled_until = 0.0

    async def handle(self, request: httpx.Request) -> httpx.Response:
        seconds = self.clock.now() - EPOCH
        blocks, since_block = divmod(seconds, BLOCK_SECONDS)
        self.height = FIRST_HEIGHT + int(blocks)
        past_end = self._time(self.height) - ROUND_END
        self.rounds = [self._round | {"status": 1 if past_end < 0 else 2 if past_end < TALLY_SECONDS else 3}]
        if self._stall_seconds and seconds >= STALL_AFTER_SECONDS and self._stall_path in request.url.path:
            self._stalled_until, self._stall_seconds = seconds + self._stall_seconds, 0.0
        await asyncio.sleep(max(0.0, self._stalled_until - seconds))
        if since_block < COMMIT_SECONDS and request.url.port == 1317:
            return json_response(500, {"code": 18, "message": COMMITTING, "details": []})
        return await super().handle(request)

    def _time(self, height: int) -> float:
        return EPOCH + (height - FIRST_HEIGHT) * BLOCK_SECONDS


async def run_inline(func: Callable[..., Any], *args: Any, **_options: Any) -> Any:
    await asyncio.sleep(0)
    return func(*args)


def run_service(
    seconds: float, *, poll_seconds: float, stall: tuple[str, float] = ("", 0.0)
) -> list[MutableMapping[str, Any]]:
    """Run the service with an idle node for this long. Returns its log."""
    loop, disk = SimLoop(random.Random(1)), SimDisk(random.Random(2))
    clock = SimClock(loop)
    network = FakeNetwork(node=IdleNode(clock, *stall))

    async def run() -> None:
        service = Service(
            Config.model_validate({"chain": {"poll_seconds": poll_seconds, "chain_id": CHAIN_ID}}),
            clock=clock,
            store=SimStore(disk, clock),
            nodes=create_nodes([("http://node:1317", "http://node:26657")], transport=network),
            spawn_worker=SimProvers(random.Random(3), 0.5).spawn,
        )
        async with service.open_queue():
            running = asyncio.create_task(service.run_components())
            await asyncio.sleep(seconds)
            service.stop()
            await running

    with patch.object(anyio.to_thread, "run_sync", run_inline), capture_logs() as logs:
        loop.run_until_complete(run())
    assert loop.unhandled_errors == []
    disk.close()
    loop.close()
    return logs


def test_day_beside_idle_chain_writes_no_warning() -> None:
    logs = run_service(DAY_SECONDS, poll_seconds=50.0)
    assert [entry for entry in logs if entry["log_level"] not in ("debug", "info")] == []
    statuses = [entry["status"] for entry in logs if entry["event"] == "round_updated"]
    assert statuses == ["ACTIVE", "TALLYING", "FINALIZED"]


@pytest.mark.parametrize("path", ["latest", "syncing", "rounds", "commitment-tree", "block_results", "status"])
def test_node_that_stops_for_seconds_is_one_warning_with_its_end(path: str) -> None:
    logs = run_service(300.0, poll_seconds=1.0, stall=(path, 25.0))
    assert [entry["event"] for entry in logs if entry["log_level"] not in ("debug", "info")] == ["node_not_fresh"]
    names = ("node_not_fresh", "dispatch_paused", "node_fresh", "dispatch_resumed")
    assert [entry["event"] for entry in logs if entry["event"] in names][-4:] == list(names)
