"""The dev chain responds to the recorded requests like the real chain: status, shape, and comparable values."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from devnet.faults import FaultRequest
from devnet.node import Node
from tests.conftest import RECORDED, read_recorded_lines
from tests.support import recorded_chain as recorded
from tests.support.recorded_chain import RecordedRound

EXCHANGES = read_recorded_lines("exchanges.jsonl")
BLOCKS = read_recorded_lines("blocks.jsonl")
OTHER_ROUND = read_recorded_lines("other-round-events.jsonl")

# The height of the real chain at the request. All other requests were made after the end of the round.
HEIGHTS = {
    "round, status 4": recorded.CREATED_HEIGHT,
    "round, status 1": recorded.ACTIVE_HEIGHT,
    "tree of a round with no leaf yet": recorded.ACTIVE_HEIGHT,
    "reveal: the very same bytes again, round active": recorded.ALL_REVEALED_HEIGHT,
    "reveal: proof does not verify": recorded.ALL_REVEALED_HEIGHT,
    "reveal: no root at the anchor height": recorded.ALL_REVEALED_HEIGHT,
    "reveal: nullifier already spent (another helper was first)": recorded.ALL_REVEALED_HEIGHT,
    "reveal: unknown round, active chain": recorded.ALL_REVEALED_HEIGHT,
}
# Identities, hashes and signatures of the recorded node differ on any other chain.
UNCOMPARED_KEYS = {
    "hash",
    "last_commit_hash",
    "validators_hash",
    "next_validators_hash",
    "consensus_hash",
    "app_hash",
    "data_hash",
    "last_results_hash",
    "proposer_address",
    "validator_address",
    "signature",
    "timestamp",
    "default_node_id",
    "id",
    "moniker",
    "address",
    "latest_block_hash",
    "latest_app_hash",
    "earliest_block_hash",
    "gas_used",
}
LOST_RPC_EXCHANGE = "node lost its consensus RPC while broadcasting"


class ReplayedChain:
    """A node of the recorded chain, at a height that only increases."""

    def __init__(self) -> None:
        self.round = RecordedRound()
        self.node = Node(self.round.devnet, "node0")

    async def request(self, service: str, method: str, path: str, request: Any) -> httpx.Response:
        app = self.node.rest if service == "rest" else self.node.rpc
        content = request if isinstance(request, str) or request is None else json.dumps(request)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://chain") as client:
            return await client.request(method, path, content=content)


@pytest.fixture
async def chain() -> AsyncIterator[ReplayedChain]:
    chain = ReplayedChain()
    yield chain
    await chain.round.close()


def find_differences(expected: Any, actual: Any, free: set[str], path: str = "$", key: str = "") -> list[str]:
    """Return the paths at which two JSON values differ in shape, or in a value that must be equal."""
    if type(expected) is not type(actual):
        return [f"{path}: {expected!r} became {actual!r}"]
    if isinstance(expected, dict):
        if list(expected) != list(actual) and set(expected) != set(actual):
            return [f"{path}: keys {sorted(expected)} became {sorted(actual)}"]
        parts = (find_differences(expected[name], actual[name], free, f"{path}.{name}", name) for name in expected)
        return [problem for part in parts for problem in part]
    if isinstance(expected, list):
        if len(expected) != len(actual):
            return [f"{path}: {len(expected)} entries became {len(actual)}"]
        pairs = enumerate(zip(expected, actual, strict=True))
        parts = (find_differences(a, b, free, f"{path}[{index}]", key) for index, (a, b) in pairs)
        return [problem for part in parts for problem in part]
    return [] if key in free or expected == actual else [f"{path}: {expected!r} became {actual!r}"]


async def check_exchange(chain: ReplayedChain, row: dict[str, Any], service: str, free: set[str]) -> None:
    """Repeat a recorded request and compare the response."""
    response = await chain.request(service, row.get("method", "GET"), row["path"], row.get("request"))
    assert response.headers["content-type"] == "application/json"
    assert response.status_code == row["status"], response.text
    assert find_differences(row["response"], response.json(), free) == []


async def test_devnet_rest_matches_recorded_exchanges(chain: ReplayedChain) -> None:
    rows = sorted(EXCHANGES, key=lambda row: HEIGHTS.get(row["name"], recorded.CLOSED_HEIGHT))
    problems = {}
    for row in rows:
        await chain.round.advance(HEIGHTS.get(row["name"], recorded.CLOSED_HEIGHT))
        if row["name"] == LOST_RPC_EXCHANGE:
            chain.node.faults.apply_request(FaultRequest(routes=["reveal-share"], status_502=1), 1)
        try:
            await check_exchange(chain, row, "rest", UNCOMPARED_KEYS)
        except AssertionError as wrong:
            problems[row["name"]] = str(wrong)
    assert problems == {}


async def test_devnet_blocks_and_rpc_match_recording(chain: ReplayedChain) -> None:
    await chain.round.advance(recorded.NEWEST_HEIGHT)
    for row in BLOCKS:
        await check_exchange(
            chain, row, row["service"], UNCOMPARED_KEYS | ({"value"} if row["name"] == "status" else set())
        )


async def test_devnet_abci_queries_match_recording(chain: ReplayedChain) -> None:
    await chain.round.advance(recorded.CLOSED_HEIGHT)
    rows = json.loads((RECORDED / "abci-query.json").read_text())
    for row in rows.values():
        data = base64.b64decode(row["result"]["response"]["key"]).hex()
        await check_exchange(
            chain,
            {"path": f'/abci_query?path="/store/vote/key"&data=0x{data}', "status": 200, "response": row},
            "rpc",
            set(),
        )


@pytest.mark.parametrize(("recorded_height", "height"), [(58, 58), (85, 84)])
async def test_devnet_vote_events_match_recorded_shape(chain: ReplayedChain, recorded_height: int, height: int) -> None:
    row = next(row for row in OTHER_ROUND if row["path"].endswith(f"={recorded_height}"))
    await chain.round.advance(height)
    response = await chain.request("rpc", "GET", f"/block_results?height={height}", None)
    # Attribute values depend on the round. The comparison covers the attribute names.
    assert find_differences(row["response"], response.json(), UNCOMPARED_KEYS | {"height", "value"}) == []


async def test_devnet_round_end_events_match_recording(chain: ReplayedChain) -> None:
    row = next(row for row in OTHER_ROUND if "round_status_change" in row["name"])
    await chain.round.advance(recorded.CLOSED_HEIGHT)
    (round_,) = chain.round.devnet.chain.rounds.values()
    tallying = next(height for height, status in round_.status_history if status == 2)
    response = await chain.request("rpc", "GET", f"/block_results?height={tallying}", None)
    events = response.json()["result"]["finalize_block_events"]
    values = {entry["key"]: entry["value"] for entry in events[0]["attributes"]}
    assert find_differences(row["response"], response.json(), UNCOMPARED_KEYS | {"height", "value"}) == []
    assert values["vote_round_id"] == round_.round_id.hex()
    assert (values["old_status"], values["new_status"]) == (
        "SESSION_STATUS_ACTIVE",
        "SESSION_STATUS_TALLYING",
    )


async def test_devnet_finds_recorded_transactions_by_height(chain: ReplayedChain) -> None:
    await chain.round.advance(recorded.ALL_REVEALED_HEIGHT)
    for row in read_recorded_lines("reveals.jsonl"):
        response = await chain.request("rest", "GET", f"/shielded-vote/v1/tx/{row['response']['tx_hash']}", None)
        assert response.status_code == 200
        assert response.json() == row["tx"]
