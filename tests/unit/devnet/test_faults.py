"""Every fault switch does what it says, where it is told to, and no more often."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet.faults import FaultRequest, Faults
from devnet.node import rest_route, rpc_route
from tests.unit.devnet.support import API, START, Net, changed, running

pytestmark = pytest.mark.anyio
SYNCING = "/cosmos/base/tendermint/v1beta1/syncing"
LATEST = "/cosmos/base/tendermint/v1beta1/blocks/latest"


async def height_of(net: Net, node: httpx.AsyncClient | None = None) -> int:
    """The height that a node says it is at."""
    answer = await (node or net.rest).get(LATEST)
    return int(answer.json()["block"]["header"]["height"])


async def test_a_dropped_reply_was_acted_on() -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round())
        reveal = net.stand_in(ballot, 0)
        await net.fault(routes=["reveal-share"], drop_reply=1, times=1)
        with pytest.raises(httpx.ReadError):
            await net.send(reveal)
        await net.mine()
        assert net.devnet.stats()["reveals_counted"] == 1
        # Spent: the switch struck as often as it was allowed to.
        assert (await net.send(reveal)).status_code == 200


@pytest.mark.parametrize(("switch", "acted"), [("status_502", 0), ("status_502_after", 1)])
async def test_a_502_comes_before_or_after_acting(switch: str, acted: int) -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round())
        switches: dict[str, Any] = {switch: True}
        await net.fault(routes=["reveal-share"], **switches)
        answer = await net.send(net.stand_in(ballot, 0))
        assert answer.status_code == 502
        assert answer.json()["error"].startswith("broadcast failed")
        await net.mine()
        assert net.devnet.stats()["reveals_counted"] == acted
        assert (await net.rest.get(SYNCING)).status_code == 200


async def test_refused_connections_and_warming_keys_act_on_nothing() -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round())
        await net.fault(refuse=1)
        with pytest.raises(httpx.ConnectError):
            await net.send(net.stand_in(ballot, 0))
        await net.fault(reset=True, status_503=1)
        assert (await net.send(net.stand_in(ballot, 0))).status_code == 503
        await net.mine()
        assert net.devnet.stats()["reveals_counted"] == 0


async def test_answers_can_be_html_or_half() -> None:
    async with running() as net:
        await net.fault(routes=["syncing"], html=1)
        page = await net.rest.get(SYNCING)
        assert page.headers["content-type"].startswith("text/html")
        await net.fault(reset=True, routes=["syncing"], half_json=1)
        half = await net.rest.get(SYNCING)
        assert half.status_code == 200
        with pytest.raises(json.JSONDecodeError):
            half.json()


async def test_latency_and_trickle_keep_the_answer_waiting() -> None:
    async with running() as net:
        await net.fault(routes=["syncing"], latency_ms=40)
        await net.rest.get(SYNCING)
        assert net.devnet.log.after(0)[-1]["ms"] >= 40
        await net.fault(reset=True, trickle=0.001)
        answer = await net.rest.get(SYNCING)
        assert answer.json() == {"syncing": False}
        assert net.devnet.log.after(0)[-1]["ms"] >= len(answer.content)


async def test_accepted_reveals_can_be_lost_or_beaten() -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round())
        await net.fault(routes=["reveal-share"], never_include=1)
        lost = (await net.send(net.stand_in(ballot, 0))).json()
        await net.fault(routes=["reveal-share"], reset=True, include_failed=1)
        beaten = (await net.send(net.stand_in(ballot, 1))).json()
        assert lost["code"] == beaten["code"] == 0
        await net.mine(3)
        assert (await net.rest.get(f"{API}/tx/{lost['tx_hash']}")).status_code == 404
        failed = await net.rest.get(f"{API}/tx/{beaten['tx_hash']}")
        assert failed.status_code == 422
        assert "nullifier already spent" in failed.json()["log"]
        # The share itself is counted: the other helper's transaction did it.
        query = f"reveal_share.vote_round_id='{ballot.round_id.hex()}'"
        found = (await net.rpc.get("/tx_search", params={"query": f'"{query}"'})).json()["result"]["txs"]
        assert len(found) == 1
        assert found[0]["hash"] != beaten["tx_hash"]


async def test_one_node_lags_while_the_others_follow() -> None:
    async with running(nodes=2) as net:
        other = net.others[0]
        ballot, _ = await net.vote(await net.new_round())
        await net.fault(other, freeze_blocks=True)
        at = await height_of(net)
        await net.send(net.stand_in(ballot, 0))
        await net.mine(4)
        assert (await height_of(net), await height_of(net, other)) == (at + 4, at)
        missing = await other.get(f"/cosmos/base/tendermint/v1beta1/blocks/{at + 1}")
        assert missing.status_code == 400
        await net.fault(other, freeze_blocks=False)
        assert await height_of(net, other) == at + 4


async def test_a_stale_node_shows_the_chain_as_it_was() -> None:
    async with running(nodes=2) as net:
        other = net.others[0]
        round_id = await net.new_round()
        ballot, _ = await net.vote(round_id)
        sent = (await net.send(net.stand_in(ballot, 0))).json()
        await net.mine(10)
        await net.fault(other, stale=10)
        assert await height_of(net, other) == await height_of(net) - 10
        assert (await other.get(f"{API}/tx/{sent['tx_hash']}")).status_code == 404
        assert (await net.rest.get(f"{API}/tx/{sent['tx_hash']}")).status_code == 200
        key = f"0102{round_id.hex()}{ballot.shares[0].nullifier.hex()}"
        query = {"path": '"/store/vote/key"', "data": f"0x{key}"}
        assert (await net.rpc.get("/abci_query", params=query)).json()["result"]["response"]["value"] == "AQ=="
        await net.fault(stale=12)
        assert (await net.rpc.get("/abci_query", params=query)).json()["result"]["response"]["value"] is None


async def test_a_node_can_fall_back_and_follow_from_there() -> None:
    async with running() as net:
        await net.mine(10)
        await net.fault(reset_height=4)
        assert await height_of(net) == 4
        await net.mine(2)
        assert await height_of(net) == 6


async def test_a_node_can_lie_about_what_it_is() -> None:
    async with running() as net:
        round_id = await net.new_round()
        ballot, _ = await net.vote(round_id)
        tree = f"{API}/commitment-tree/{round_id.hex()}/latest"
        root = (await net.get(tree))["tree"]["root"]
        await net.fault(chain_id="another-1", wrong_root=True, catching_up=True, round_status=4)
        assert (await net.get(LATEST))["block"]["header"]["chain_id"] == "another-1"
        assert (await net.get(SYNCING)) == {"syncing": True}
        status = (await net.rpc.get("/status")).json()["result"]
        assert status["sync_info"]["catching_up"] is True
        assert status["node_info"]["network"] == "another-1"
        assert (await net.get(tree))["tree"]["root"] != root
        assert (await net.get(f"{API}/round/{round_id.hex()}"))["round"]["status"] == 4
        refused = await net.send(net.stand_in(ballot, 0))
        assert refused.json()["log"] == "vote round is not active: status is SESSION_STATUS_PENDING"
        await net.fault(round_status=0)
        assert (await net.rest.get(f"{API}/round/{round_id.hex()}")).status_code == 500
        assert (await net.send(net.stand_in(ballot, 0))).json()["code"] == 3


async def test_a_node_may_not_know_the_newest_anchors() -> None:
    async with running(nodes=2) as net:
        ballot, _ = await net.vote(await net.new_round())
        reveal = net.stand_in(ballot, 0)
        await net.fault(net.others[0], routes=["reveal-share"], anchor_unknown=3)
        behind = await net.send(reveal, net.others[0])
        assert behind.json()["log"].endswith(f"no commitment tree root at height {reveal.anchor_height}")
        await net.mine(3)
        assert (await net.send(reveal, net.others[0])).status_code == 200


async def test_the_whole_chain_can_halt_and_have_a_wrong_clock() -> None:
    async with running() as net:
        await net.fault(clock_offset_seconds=-300, halt_chain=True)
        await net.mine()
        header = (await net.get(LATEST))["block"]["header"]
        assert net.devnet.chain.time == START + 1 - 300
        assert header["time"].endswith("Z")
        assert net.devnet.producer.halted


async def test_a_lagging_node_takes_what_is_spent_elsewhere() -> None:
    async with running(nodes=2) as net:
        round_id = await net.new_round()
        ballot, _ = await net.vote(round_id)
        first = net.stand_in(ballot, 0)
        await net.fault(net.others[0], freeze_blocks=True)
        await net.send(first)
        await net.mine()
        again = changed(first, proof=first.proof)
        assert (await net.send(again, net.others[0])).status_code == 200


async def test_requests_are_logged_with_what_they_gave_away(tmp_path: Path) -> None:
    path = tmp_path / "requests.ndjson"
    async with running(nodes=2, request_log=path) as net:
        ballot, _ = await net.vote(await net.new_round())
        await net.fault(net.others[0], routes=["syncing"], status_502=1)
        await net.send(net.stand_in(ballot, 0))
        await net.others[0].get(SYNCING + "?probe=1")
        await net.rpc.get("/status")
        entries = (await net.get("/devnet/requests?after=0"))["requests"]
        # Written as they happen, not at the end.
        assert [json.loads(line) for line in path.read_text().splitlines()] == entries
    reveal, probe, status = entries
    assert (reveal["route"], reveal["status"], reveal["port"]) == ("reveal-share", 200, "rest")
    assert reveal["nullifier"] == ballot.shares[0].nullifier.hex()
    assert len(reveal["body_sha256"]) == 64
    assert (probe["node"], probe["path"], probe["status"]) == ("node1", SYNCING + "?probe=1", 502)
    assert probe["faults"] == ["status_502"]
    assert (status["port"], status["route"]) == ("rpc", "status")
    assert [entry["seq"] for entry in entries] == [1, 2, 3]


def struck(seed: int) -> list[str | None]:
    """How 50 requests end under a seed."""
    faults = Faults()
    faults.apply(FaultRequest(seed=seed, drop_reply=0.5), 1)
    return [faults.decide("tx", 1, lambda _: 1).ending for _ in range(50)]


def test_the_dice_are_seeded() -> None:
    assert struck(1) == struck(1) != struck(2)
    assert {"drop_reply", None} == set(struck(1))


def test_a_routes_own_rule_goes_before_the_rule_for_all() -> None:
    faults = Faults()
    faults.apply(FaultRequest(refuse=1), 1)
    faults.apply(FaultRequest(routes=["tx"], refuse=0, latency_ms=5), 1)
    assert faults.decide("round", 1, lambda _: 1).ending == "refuse"
    assert faults.decide("tx", 1, lambda _: 1).ending is None
    assert faults.decide("tx", 1, lambda _: 1).latency_ms == 5
    faults.apply(FaultRequest(reset=True), 1)
    assert faults.shown() == {}


@pytest.mark.parametrize("body", [{"latency": 5}, {"drop_reply": 2}, {"circuit": "k12"}, {"round_status": 256}])
async def test_unknown_switches_and_values_are_refused(body: dict[str, Any]) -> None:
    async with running() as net:
        answer = await net.rest.post("/devnet/faults", json=body)
        assert answer.status_code == 400
        assert next(iter(body)) in answer.json()["error"]


def test_routes_have_names() -> None:
    ids = "ab" * 32
    named = {
        f"{API}/rounds/active": "rounds",
        f"{API}/round/{ids}": "round",
        f"{API}/commitment-tree/{ids}/latest": "tree-latest",
        f"{API}/commitment-tree/{ids}/leaves": "tree-leaves",
        f"{API}/commitment-tree/{ids}/7": "tree-height",
        f"{API}/reveal-share": "reveal-share",
        LATEST: "blocks",
        SYNCING: "syncing",
        "/cosmos/staking/v1beta1/validators/x": "validators",
    }
    assert {path: rest_route(path) for path in named} == named
    assert rpc_route("/abci_query") == "abci_query"


async def test_a_trickle_ends_when_the_client_leaves() -> None:
    async with running() as net:
        await net.fault(trickle=3600)
        app: Any = net.nodes[0].rest
        left = asyncio.Event()
        sent: list[Any] = []
        scope = {"type": "http", "method": "GET", "path": SYNCING, "headers": [], "query_string": b""}
        requests = iter([{"type": "http.request", "body": b""}])

        async def receive() -> Any:
            found = next(requests, None)
            if found is not None:
                return found
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            left.set()

        await app(scope, receive, send)
        assert [message["type"] for message in sent] == ["http.response.start"]
