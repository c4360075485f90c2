"""Every fault switch has its effect on the given target and the given number of times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet.faults import FaultRequest, FaultRules
from devnet.node import rest_route_name, rpc_route_name
from tests.unit.devnet.support import API_PREFIX, START_TIME, ChainFixture, replace_fields, run_chain

SYNCING = "/cosmos/base/tendermint/v1beta1/syncing"
LATEST = "/cosmos/base/tendermint/v1beta1/blocks/latest"


async def height_of(chain: ChainFixture, node: httpx.AsyncClient | None = None) -> int:
    """The height that a node reports."""
    response = await (node or chain.rest).get(LATEST)
    return int(response.json()["block"]["header"]["height"])


async def test_fault_rules_can_be_read() -> None:
    async with run_chain() as net:
        assert await net.get_json("/devnet/faults") == {}
        await net.set_faults(routes=["syncing"], status_502=1, times=2)
        assert await net.get_json("/devnet/faults") == {"syncing": {"status_502": 1, "times_left": {"status_502": 2}}}


async def test_dropped_reply_still_takes_effect(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round())
    reveal = chain.create_stand_in_reveal(ballot, 0)
    await chain.set_faults(routes=["reveal-share"], drop_reply=1, times=1)
    with pytest.raises(httpx.ReadError):
        await chain.send_reveal(reveal)
    await chain.mine()
    assert chain.devnet.stats()["reveals_counted"] == 1
    # The switch has reached its limit.
    assert (await chain.send_reveal(reveal)).status_code == 200


@pytest.mark.parametrize(("switch", "effect_count"), [("status_502", 0), ("status_502_after", 1)])
async def test_502_comes_before_or_after_effect(chain: ChainFixture, switch: str, effect_count: int) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round())
    switches: dict[str, Any] = {switch: True}
    await chain.set_faults(routes=["reveal-share"], **switches)
    response = await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
    assert response.status_code == 502
    assert response.json()["error"].startswith("broadcast failed")
    await chain.mine()
    assert chain.devnet.stats()["reveals_counted"] == effect_count
    assert (await chain.rest.get(SYNCING)).status_code == 200


async def test_refused_connection_and_warming_keys_have_no_effect(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round())
    await chain.set_faults(refuse=1)
    with pytest.raises(httpx.ConnectError):
        await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
    await chain.set_faults(reset=True, status_503=1)
    assert (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))).status_code == 503
    await chain.mine()
    assert chain.devnet.stats()["reveals_counted"] == 0


async def test_response_can_be_html_or_truncated(chain: ChainFixture) -> None:
    await chain.set_faults(routes=["syncing"], html=1)
    page = await chain.rest.get(SYNCING)
    assert page.headers["content-type"].startswith("text/html")
    await chain.set_faults(reset=True, routes=["syncing"], half_json=1)
    half = await chain.rest.get(SYNCING)
    assert half.status_code == 200
    with pytest.raises(json.JSONDecodeError):
        half.json()


async def test_latency_and_trickle_delay_response(chain: ChainFixture) -> None:
    await chain.set_faults(routes=["syncing"], latency_ms=40)
    await chain.rest.get(SYNCING)
    assert chain.devnet.request_log.entries_after(0)[-1]["ms"] >= 40
    await chain.set_faults(reset=True, trickle=0.001)
    response = await chain.rest.get(SYNCING)
    assert response.json() == {"syncing": False}
    assert chain.devnet.request_log.entries_after(0)[-1]["ms"] >= len(response.content)


async def test_accepted_reveal_can_be_lost_or_overtaken(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round())
    await chain.set_faults(routes=["reveal-share"], never_include=1)
    lost = (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))).json()
    await chain.set_faults(routes=["reveal-share"], reset=True, include_failed=1)
    duplicate = (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 1))).json()
    assert lost["code"] == duplicate["code"] == 0
    await chain.mine(3)
    assert (await chain.rest.get(f"{API_PREFIX}/tx/{lost['tx_hash']}")).status_code == 404
    failed = await chain.rest.get(f"{API_PREFIX}/tx/{duplicate['tx_hash']}")
    assert failed.status_code == 422
    assert "nullifier already spent" in failed.json()["log"]
    # The share is counted through the other helper's transaction.
    query = f"reveal_share.vote_round_id='{ballot.round_id.hex()}'"
    transactions = (await chain.rpc.get("/tx_search", params={"query": f'"{query}"'})).json()["result"]["txs"]
    assert len(transactions) == 1
    assert transactions[0]["hash"] != duplicate["tx_hash"]


async def test_lagging_node_is_behind_the_others() -> None:
    async with run_chain(nodes=2) as chain:
        other = chain.other_clients[0]
        ballot, _ = await chain.cast_vote(await chain.create_round())
        await chain.set_faults(other, freeze_blocks=True)
        at = await height_of(chain)
        await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
        await chain.mine(4)
        assert (await height_of(chain), await height_of(chain, other)) == (at + 4, at)
        missing = await other.get(f"/cosmos/base/tendermint/v1beta1/blocks/{at + 1}")
        assert missing.status_code == 400
        await chain.set_faults(other, freeze_blocks=False)
        assert await height_of(chain, other) == at + 4


async def test_stale_node_serves_old_state() -> None:
    async with run_chain(nodes=2) as chain:
        other = chain.other_clients[0]
        round_id = await chain.create_round()
        ballot, _ = await chain.cast_vote(round_id)
        sent = (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))).json()
        await chain.mine(10)
        await chain.set_faults(other, stale=10)
        assert await height_of(chain, other) == await height_of(chain) - 10
        assert (await other.get(f"{API_PREFIX}/tx/{sent['tx_hash']}")).status_code == 404
        assert (await chain.rest.get(f"{API_PREFIX}/tx/{sent['tx_hash']}")).status_code == 200
        key = f"0102{round_id.hex()}{ballot.shares[0].nullifier.hex()}"
        query = {"path": '"/store/vote/key"', "data": f"0x{key}"}
        assert (await chain.rpc.get("/abci_query", params=query)).json()["result"]["response"]["value"] == "AQ=="
        await chain.set_faults(stale=12)
        assert (await chain.rpc.get("/abci_query", params=query)).json()["result"]["response"]["value"] is None


async def test_node_can_roll_back_and_follow_again(chain: ChainFixture) -> None:
    await chain.mine(10)
    await chain.set_faults(reset_height=4)
    assert await height_of(chain) == 4
    await chain.mine(2)
    assert await height_of(chain) == 6


async def test_node_can_serve_blocks_without_transactions(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round())
    await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
    await chain.mine()

    async def transactions() -> tuple[int, int]:
        block = (await chain.get_json(LATEST))["block"]["data"]["txs"]
        results = (await chain.rpc.get("/block_results")).json()["result"]["txs_results"]
        return len(block), len(results or [])

    assert await transactions() == (1, 1)
    await chain.set_faults(empty_blocks=True)
    assert await transactions() == (0, 0)


async def test_node_can_report_wrong_identity(chain: ChainFixture) -> None:
    round_id = await chain.create_round()
    ballot, _ = await chain.cast_vote(round_id)
    tree = f"{API_PREFIX}/commitment-tree/{round_id.hex()}/latest"
    root = (await chain.get_json(tree))["tree"]["root"]
    await chain.set_faults(chain_id="another-1", wrong_root=True, catching_up=True, round_status=4)
    assert (await chain.get_json(LATEST))["block"]["header"]["chain_id"] == "another-1"
    assert (await chain.get_json(SYNCING)) == {"syncing": True}
    status = (await chain.rpc.get("/status")).json()["result"]
    assert status["sync_info"]["catching_up"] is True
    assert status["node_info"]["network"] == "another-1"
    assert (await chain.get_json(tree))["tree"]["root"] != root
    assert (await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}"))["round"]["status"] == 4
    refused = await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
    assert refused.json()["log"] == "vote round is not active: status is SESSION_STATUS_PENDING"
    await chain.set_faults(round_status=0)
    assert (await chain.rest.get(f"{API_PREFIX}/round/{round_id.hex()}")).status_code == 500
    assert (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))).json()["code"] == 3


async def test_node_can_miss_newest_anchors() -> None:
    async with run_chain(nodes=2) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        reveal = chain.create_stand_in_reveal(ballot, 0)
        await chain.set_faults(chain.other_clients[0], routes=["reveal-share"], anchor_unknown=3)
        behind = await chain.send_reveal(reveal, chain.other_clients[0])
        assert behind.json()["log"].endswith(f"no commitment tree root at height {reveal.anchor_height}")
        await chain.mine(3)
        assert (await chain.send_reveal(reveal, chain.other_clients[0])).status_code == 200


async def test_chain_can_halt_and_have_wrong_clock(chain: ChainFixture) -> None:
    await chain.set_faults(clock_offset_seconds=-300, halt_chain=True)
    await chain.mine()
    header = (await chain.get_json(LATEST))["block"]["header"]
    assert chain.devnet.chain.time == START_TIME + 1 - 300
    assert header["time"].endswith("Z")
    assert chain.devnet.producer.is_halted


async def test_lagging_node_accepts_spent_nullifier() -> None:
    async with run_chain(nodes=2) as chain:
        round_id = await chain.create_round()
        ballot, _ = await chain.cast_vote(round_id)
        first = chain.create_stand_in_reveal(ballot, 0)
        await chain.set_faults(chain.other_clients[0], freeze_blocks=True)
        await chain.send_reveal(first)
        await chain.mine()
        resent = replace_fields(first, proof=first.proof)
        assert (await chain.send_reveal(resent, chain.other_clients[0])).status_code == 200


async def test_requests_are_logged_with_their_content(tmp_path: Path) -> None:
    path = tmp_path / "requests.ndjson"
    async with run_chain(nodes=2, request_log=path) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        await chain.set_faults(chain.other_clients[0], routes=["syncing"], status_502=1)
        await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
        await chain.other_clients[0].get(SYNCING + "?probe=1")
        await chain.rpc.get("/status")
        entries = (await chain.get_json("/devnet/requests?after=0"))["requests"]
        # Lines are written when the events happen, not at the end.
        assert [json.loads(line) for line in path.read_text().splitlines()] == entries
    reveal, probe, status = entries
    assert (reveal["route"], reveal["status"], reveal["port"]) == ("reveal-share", 200, "rest")
    assert reveal["nullifier"] == ballot.shares[0].nullifier.hex()
    assert len(reveal["body_sha256"]) == 64
    assert (probe["node"], probe["path"], probe["status"]) == ("node1", SYNCING + "?probe=1", 502)
    assert probe["faults"] == ["status_502"]
    assert (status["port"], status["route"]) == ("rpc", "status")
    assert [entry["seq"] for entry in entries] == [1, 2, 3]


def request_endings(seed: int) -> list[str | None]:
    faults = FaultRules()
    faults.apply_request(FaultRequest(seed=seed, drop_reply=0.5), 1)
    return [faults.decide("tx", 1, lambda _: 1).response_fault for _ in range(50)]


def test_random_faults_are_seeded() -> None:
    assert request_endings(1) == request_endings(1) != request_endings(2)
    assert {"drop_reply", None} == set(request_endings(1))


def test_route_fault_overrides_general_fault() -> None:
    faults = FaultRules()
    faults.apply_request(FaultRequest(refuse=1), 1)
    faults.apply_request(FaultRequest(routes=["tx"], refuse=0, latency_ms=5), 1)
    assert faults.decide("round", 1, lambda _: 1).response_fault == "refuse"
    assert faults.decide("tx", 1, lambda _: 1).response_fault is None
    assert faults.decide("tx", 1, lambda _: 1).switches.latency_ms == 5
    faults.apply_request(FaultRequest(reset=True), 1)
    assert faults.to_json() == {}


@pytest.mark.parametrize("body", [{"latency": 5}, {"drop_reply": 2}, {"circuit": "k12"}, {"round_status": 256}])
async def test_unknown_fault_switches_and_values_are_refused(chain: ChainFixture, body: dict[str, Any]) -> None:
    response = await chain.rest.post("/devnet/faults", json=body)
    assert response.status_code == 400
    assert next(iter(body)) in response.json()["error"]


def test_fault_routes_have_names() -> None:
    ids = "ab" * 32
    named = {
        f"{API_PREFIX}/rounds/active": "rounds",
        f"{API_PREFIX}/round/{ids}": "round",
        f"{API_PREFIX}/commitment-tree/{ids}/latest": "tree-latest",
        f"{API_PREFIX}/commitment-tree/{ids}/leaves": "tree-leaves",
        f"{API_PREFIX}/commitment-tree/{ids}/7": "tree-height",
        f"{API_PREFIX}/reveal-share": "reveal-share",
        LATEST: "blocks",
        SYNCING: "syncing",
        "/cosmos/staking/v1beta1/validators/x": "validators",
    }
    assert {path: rest_route_name(path) for path in named} == named
    assert rpc_route_name("/abci_query") == "abci_query"


async def test_trickle_ends_when_client_disconnects(chain: ChainFixture) -> None:
    await chain.set_faults(trickle=3600)
    app: Any = chain.nodes[0].rest
    left = asyncio.Event()
    sent: list[Any] = []
    scope = {"type": "http", "method": "GET", "path": SYNCING, "headers": [], "query_string": b""}
    requests = iter([{"type": "http.request", "body": b""}])

    async def receive() -> Any:
        request = next(requests, None)
        if request is not None:
            return request
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        left.set()

    await app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"]
