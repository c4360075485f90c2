"""The block follower finds the 16 recorded nullifiers in the recorded blocks, over consensus RPC and REST."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import httpx
import pytest

from helper.chain.follower import BlockFollower
from helper.chain.round_registry import RoundRegistry
from helper.store.ledger import Ledger
from tests.recorded.test_chain_data import message_from_request
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, ChainStore, FakeNetwork, FakeNode, read_recorded


def nullifiers_of_reveals(reveals: list[dict[str, Any]]) -> set[tuple[bytes, bytes]]:
    return {(ROUND_ID, b64decode(row["request"]["share_nullifier"])) for row in reveals}


def create_recorded_chain(clock: FakeClock, reveals: list[dict[str, Any]]) -> FakeNode:
    """Create a node with the recorded transactions in their blocks.

    They are identical byte for byte where a full response was recorded.
    """
    node = FakeNode(clock, height=120)
    for row in reveals:
        node.add_transaction(int(row["tx"]["height"]), message_from_request(row["request"]).to_tx(), row["tx"])

    def replay(names: dict[str, str], key: str) -> None:
        fault_request = node.faults.pop(key, None)
        assert fault_request is None

        def fault(request: httpx.Request) -> httpx.Response:
            where = request.url.params.get("height") or request.url.path.rsplit("/", 1)[1]
            if where in names:
                row = read_recorded(names[where], "blocks.jsonl")
                return httpx.Response(row["status"], content=json.dumps(row["response"]).encode())
            return node._results(int(where)) if key == "block_results" else node._block(int(where))

        node.faults[key] = fault

    replay({"106": "block results 106", "107": "block results 107"}, "block_results")
    replay({"106": "block with raw transactions"}, "v1beta1/blocks/1")
    return node


@pytest.mark.rule("R12")
@pytest.mark.parametrize("rpc", [True, False], ids=["rpc", "rest"])
async def test_follower_over_blocks_finds_all_reveals(rpc: bool, recorded_reveals: list[dict[str, Any]]) -> None:
    clock = FakeClock()
    node = create_recorded_chain(clock, recorded_reveals)
    endpoints = FakeNetwork(node=node).create_node_pool(clock, rpc=rpc)
    store = ChainStore(clock, Ledger(1, 100))
    for number, (_, nullifier) in enumerate(sorted(nullifiers_of_reveals(recorded_reveals))[:3], start=1):
        store.add_share(number, nullifier)
    confirmed: list[int] = []
    blocks: list[int] = []
    rounds = RoundRegistry(store, endpoints)
    listener = BlockFollower(store, endpoints, rounds, on_block=blocks.append, on_confirmed=confirmed.extend)
    await endpoints.probe_all()
    while await listener.read_new() or await listener.read_gaps():
        pass
    assert store.spent == nullifiers_of_reveals(recorded_reveals)
    assert len(store.spent) == 16
    assert store.ledger == Ledger(1, 120)
    assert blocks[-1] == 120
    assert sorted(confirmed) == [1, 2, 3]
    assert listener.height == 120
    lookups = [path for path in node.requests if "/tx/" in path]
    assert len(lookups) == (0 if rpc else 16), "either every reveal of a block is looked up or none"


async def test_follower_from_round_start_finds_all_reveals(recorded_reveals: list[dict[str, Any]]) -> None:
    clock = FakeClock()
    node = create_recorded_chain(clock, recorded_reveals)
    endpoints = FakeNetwork(node=node).create_node_pool(clock)
    store = ChainStore(clock)
    rounds = RoundRegistry(store, endpoints)
    listener = BlockFollower(store, endpoints, rounds)
    await endpoints.probe_all()
    await rounds.sync()
    while await listener.read_new():
        pass
    assert store.ledger == Ledger(55, 120, ((55, 112),))
    while await listener.read_gaps():
        pass
    assert store.spent == nullifiers_of_reveals(recorded_reveals)
    assert store.ledger == Ledger(55, 120)
