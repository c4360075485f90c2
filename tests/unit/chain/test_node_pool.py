"""Node pool: fresh nodes, order of calls, backoff, probes, log events, read-only calls and limited concurrency."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any
from unittest.mock import patch

import anyio
import anyio.lowlevel
import httpx
import pytest
from structlog.testing import capture_logs

from helper.chain import node_http, node_pool
from helper.chain.chain_data import BlockHead
from helper.chain.node import SYNC_STATUS_SECONDS
from helper.chain.node import Node as Endpoint
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, create_nodes, gather_limited
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.errors import ChainError, ChainResponseError, ChainUnavailable, ConfigError, HelperError
from tests.support.clock import FakeClock
from tests.support.fakes import TIMEOUT_SECONDS, wait_for_length
from tests.unit.chain.fakes import FakeNetwork, FakeNode, create_network, json_response, probe_network, read_recorded


def node_names(endpoints: NodePool) -> list[str]:
    return [endpoint.name for endpoint in endpoints.usable_nodes]


async def test_fresh_lists_nodes_in_configured_order() -> None:
    _, network, endpoints = create_network("a", "b")
    network.nodes["b"].height = 465
    assert not endpoints.has_usable_node
    assert endpoints.head is None
    with capture_logs() as logs:
        await endpoints.probe_all()
    assert node_names(endpoints) == ["a:1317", "b:1317"]
    assert endpoints.head is not None
    assert endpoints.head.height == 463, "the greatest height that both have"
    assert endpoints.greatest_height == 465
    assert endpoints.chain_id == "svote-1"
    assert [log["endpoint"] for log in logs if log["event"] == "node_fresh"] == ["a:1317", "b:1317"]
    with capture_logs() as logs:
        await endpoints.probe_all()
    assert logs == [], "one log entry per change of state"


def test_nodes_at_one_host_have_different_names() -> None:
    nodes = create_nodes([("http://a/one", ""), ("http://b", ""), ("http://a/secret", "")])
    assert [node.name for node in nodes] == ["a:80", "b:80", "a:80#2"], "what they report counts for each"


@pytest.mark.parametrize("again", ["http://user:pw@a.example/", "http://A.example", "http://a.example:80"])
def test_one_node_cannot_be_listed_twice_to_confirm_its_reports(again: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.example:80"):
        create_nodes([("http://a.example", ""), (again, "")])
    with pytest.raises(ConfigError, match=r"rpc, a\.example:80"):
        create_nodes([("http://b.example", "http://a.example"), ("http://c.example", again)])


async def test_height_is_pruned_only_if_each_of_two_nodes_at_one_host_says_so() -> None:
    nodes = create_nodes([("http://a/one", ""), ("http://a/two", "")])
    reader = ReadOnlyNodePool(pool := NodePool(nodes, clock=FakeClock()))
    errors = iter([ChainUnavailable("no response"), HeightPrunedError("pruned")])

    async def read(_client: ChainClient) -> None:
        raise next(errors)

    with patch.object(NodePool, "usable_nodes", pool.nodes), pytest.raises(ChainResponseError) as caught:
        await reader.call(read)
    assert not isinstance(caught.value, HeightPrunedError)
    await reader.aclose()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chain_id": "other-9"}, "is on chain other-9, expected svote-1"),
        ({"syncing": True, "height": 464}, "node is syncing"),
        ({"age": 91.0}, "newest block is 91 s old"),
        ({"age": -121.0}, "newest block is 121 s ahead of our clock"),
        ({"faults": {"latest": lambda _: httpx.Response(200, content=b"<html>")}}, "the response is HTML"),
        (
            {"faults": {"syncing": lambda _: json_response(200, {"syncing": "no"})}, "height": 464},
            "expected true or false",
        ),
        ({"faults": {"latest": lambda _: httpx.Response(502)}}, "HTTP 502"),
        ({"hangs": True}, "no response within 0.05 s"),
    ],
)
async def test_node_not_fresh_is_logged_with_reason(change: dict[str, Any], reason: str) -> None:
    _, network, endpoints = await probe_network("good", "bad", timeout=0.05)
    assert node_names(endpoints) == ["good:1317", "bad:1317"]
    for key, value in change.items():
        setattr(network.nodes["bad"], key, value)
    with capture_logs() as logs:
        await endpoints.probe_all()
        await endpoints.probe_all()
    assert node_names(endpoints) == ["good:1317"]
    assert [(log["endpoint"], log["log_level"]) for log in logs] == [("bad:1317", "warning")]
    assert reason in logs[0]["reason"]
    assert reason in str(endpoints.unusable_reasons()["bad:1317"])


async def test_fresh_lists_slow_node_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.chain.node_http.SLOW_CALL_SECONDS", 0.01)
    _, network, endpoints = await probe_network("a", "b", timeout=0.2)
    network.nodes["a"].hangs = True
    async with anyio.create_task_group() as group:
        group.start_soon(endpoints.probe_all)
        with anyio.fail_after(5):
            while node_names(endpoints) != ["b:1317", "a:1317"]:
                await anyio.sleep(0.005)
    assert node_names(endpoints) == ["b:1317"], "the call timed out"
    network.nodes["a"].hangs = False
    await endpoints.probe_all()
    assert node_names(endpoints) == ["a:1317", "b:1317"]


async def test_unreachable_node_is_reported() -> None:
    _, network, endpoints = create_network("good", "gone", chain_id="svote-1")
    del network.nodes["gone"]
    await endpoints.probe_all()
    assert node_names(endpoints) == ["good:1317"]
    assert endpoints.unusable_reasons()["gone:1317"] == "unreachable (ConnectError)"


async def test_node_becomes_stale_without_probe() -> None:
    clock, _, endpoints = await probe_network("a")
    clock.advance(90)
    assert endpoints.has_usable_node
    clock.advance(1)
    assert not endpoints.has_usable_node
    assert endpoints.unusable_reasons()["a:1317"] == "newest block is 91 s old"


async def test_reset_node_is_not_fresh_until_caught_up() -> None:
    _, network, endpoints = await probe_network("a")
    node = network.nodes["a"]
    for node.height in (460, 455):
        await endpoints.probe_all()
    assert endpoints.has_usable_node, "nodes behind one URL may differ by a few blocks"
    node.height = 454
    await endpoints.probe_all()
    reason = "height decreased from 460 to 454: if the chain was reset, restart the helper"
    assert endpoints.unusable_reasons()["a:1317"] == reason
    node.height = 464
    await endpoints.probe_all()
    assert endpoints.has_usable_node


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("blocks", [2**60, 90, 60, 1, -4])
async def test_one_false_head_moves_nothing(count: int, blocks: int) -> None:
    clock = FakeClock()
    nodes = {"abc"[number]: FakeNode(clock) for number in range(count)}
    endpoints = FakeNetwork(**nodes).create_node_pool(clock, rpc=True)
    nodes["a"].height += blocks
    nodes["a"].age = -119.0
    for _ in range(3):
        await endpoints.probe_all()
        expected = 463 + (blocks if count == 2 and blocks < 0 else 0)
        assert endpoints.head == BlockHead("svote-1", expected, clock.now())
        assert endpoints.last_head == endpoints.head
        assert endpoints.agreed_height == expected
        assert endpoints.wall_time() == clock.now()
    assert len(endpoints.usable_nodes) == count, "a false head makes no node unusable"
    nodes["a"].height, nodes["a"].age = 464, 0.0
    nodes["b"].height = 464
    await endpoints.probe_all()
    assert (endpoints.agreed_height, endpoints.head and endpoints.head.height) == (464, 464)


async def test_lone_node_moves_head_but_not_agreed_height() -> None:
    _, network, endpoints = await probe_network("a", "b")
    silent = network.nodes.pop("b")
    network.nodes["a"].height += 90
    await endpoints.probe_all()
    assert (endpoints.agreed_height, endpoints.head and endpoints.head.height) == (463, 553)
    network.nodes["b"] = silent
    await endpoints.probe_all()
    assert (endpoints.agreed_height, endpoints.head and endpoints.head.height) == (463, 463)


@pytest.mark.parametrize(("count", "agree", "needed"), [(1, 2, 1), (2, 2, 2), (3, 2, 2), (2, 1, 1)])
async def test_chain_id_is_agreed_once_enough_nodes_report_it(count: int, agree: int, needed: int) -> None:
    clock = FakeClock()
    network = FakeNetwork(**{"abc"[number]: FakeNode(clock) for number in range(count)})
    endpoints = network.create_node_pool(clock, agree=agree)
    nodes, network.nodes = network.nodes, {}
    for number, name in enumerate(nodes, 1):
        network.nodes[name] = nodes[name]
        await endpoints.probe_all()
        assert endpoints.reported_chain_id == "svote-1"
        assert endpoints.chain_id == ("svote-1" if number >= needed else None)


async def test_chain_id_of_lone_false_node_is_replaced() -> None:
    _, network, endpoints = create_network("a", "b", "c")
    network.nodes["a"].chain_id = "other-9"
    honest = {name: network.nodes.pop(name) for name in "bc"}
    seen = []
    for name in ("", "b", "c"):
        network.nodes |= {name: honest[name]} if name else {}
        await endpoints.probe_all()
        seen.append((endpoints.chain_id, endpoints.reported_chain_id))
    assert seen == [(None, "other-9"), (None, "other-9"), ("svote-1", "svote-1")]


async def test_false_chain_id_reported_first_excludes_no_node_of_a_pair() -> None:
    _, network, endpoints = create_network("a", "b")
    network.nodes["a"].chain_id = "other-9"
    honest = network.nodes.pop("b")
    with capture_logs() as logs:
        for nodes in ({}, {"b": honest}, {}):
            network.nodes |= nodes
            await endpoints.probe_all()
    assert (node_names(endpoints), endpoints.chain_id) == (["a:1317", "b:1317"], None)
    assert endpoints.agreed_height == honest.height
    disputes = [entry["reason"] for entry in logs if entry["event"] == "chain_id_disputed"]
    assert disputes == ["a:1317 is on chain other-9, b:1317 is on chain svote-1"]
    del network.nodes["a"]
    await endpoints.probe_all()
    assert (endpoints.chain_id, endpoints.reported_chain_id) == (None, "svote-1")


async def test_one_false_height_of_only_node_is_forgotten() -> None:
    _, network, endpoints = create_network("a")
    node = network.nodes["a"]
    for height in (463, 2**60, 464):
        node.height = height
        await endpoints.probe_all()
    assert endpoints.head is not None
    assert endpoints.head.height == 464


async def test_configured_chain_id_is_not_replaced_by_node() -> None:
    _, network, endpoints = create_network("a", "b", chain_id="svote-1")
    network.nodes["a"].chain_id = "other-9"
    await endpoints.probe_all()
    assert node_names(endpoints) == ["b:1317"]


@pytest.mark.parametrize(
    ("ages", "skew", "is_suspect"),
    [
        ((200, 400), 200, True),
        ((-200, -400), -200, True),
        ((200, 1), 1, False),
        ((0, 3600, 3600), 0, True),
        ((0, 60, 60), 0, False),
    ],
)
async def test_clock_is_suspect_when_all_nodes_or_two_of_three_differ(
    ages: tuple[float, ...], skew: float, is_suspect: bool
) -> None:
    _, network, endpoints = create_network(*"abc"[: len(ages)])
    for name, age in zip("abc", ages, strict=False):
        network.nodes[name].age = age
    assert endpoints.clock_skew is None
    await endpoints.probe_all()
    assert endpoints.clock_skew == pytest.approx(skew)
    assert endpoints.is_clock_suspect is is_suspect


async def test_clock_that_was_right_is_suspect_only_if_it_was_set_since() -> None:
    clock, network, endpoints = await probe_network("false", "behind", "c")

    async def produce_block(*ages: float) -> bool:
        clock.advance(5)
        for node, age in zip(network.nodes.values(), ages, strict=True):
            node.age, node.height = age, node.height + 1
        await endpoints.probe_all()
        return endpoints.is_clock_suspect

    assert not await produce_block(121, 200, 0), "old blocks of a false node and of one that is behind"
    clock.set_wall_clock(200)
    assert await produce_block(0, 200, 200), "two nodes are right, and a false one confirms the clock"
    clock.set_wall_clock(-200)
    assert not await produce_block(0, 0, 0)
    clock.advance(node_pool.CLOCK_RIGHT_SECONDS)
    assert await produce_block(0, 200, 200), "it may have drifted"


async def test_step_of_wall_clock_hides_no_new_block() -> None:
    clock, network, endpoints = create_network("a")
    node = network.nodes["a"]
    for step in (0.0, 60.0, -60.0):
        await endpoints.probe_all()
        clock.set_wall_clock(step)
        node.age += step
        sent_at = clock.monotonic()
        await endpoints.probe_all()
        clock.advance(5)
        node.height += 1
        await endpoints.probe_all()
        assert endpoints.nodes_with_head_since(sent_at) == {"a:1317"}
        assert endpoints.clock_skew == pytest.approx(node.age)


async def test_clock_is_not_suspect_when_chain_halts() -> None:
    clock, network, endpoints = await probe_network("a")
    node = network.nodes["a"]
    clock.advance(600)
    node.age = 600
    await endpoints.probe_all()
    assert not endpoints.has_usable_node
    assert not endpoints.is_clock_suspect


def refuse_connection(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("no answer", request=request)


async def test_pool_backs_off_unresponsive_node_and_calls_next() -> None:
    clock, network, endpoints = await probe_network("a", "b")
    network.nodes["a"].faults["rounds"] = refuse_connection
    requests = network.nodes["a"].requests
    with capture_logs() as logs:
        assert len((await endpoints.call(lambda client: client.rounds())).rounds) == 1
    assert [(log["endpoint"], log["reason"]) for log in logs] == [("a:1317", "no response within 5 s")]
    before = len(requests)
    await endpoints.call(lambda client: client.rounds())
    assert len(requests) == before, "the node is in backoff and does not delay others"
    for delay in (1, 2, 4, 8, 16, 30, 30):
        assert node_names(endpoints) == ["b:1317"]
        await endpoints.probe_all()
        clock.advance(delay - 0.1)
        assert node_names(endpoints) == ["b:1317"], "a successful probe does not end the backoff"
        clock.advance(0.1)
        await endpoints.probe_all()
        assert node_names(endpoints) == ["a:1317", "b:1317"]
        await endpoints.call(lambda client: client.rounds())
    clock.advance(30)
    await endpoints.probe_all()
    network.nodes["a"].faults.clear()
    await endpoints.call(lambda client: client.rounds())
    network.nodes["a"].faults["rounds"] = refuse_connection
    await endpoints.call(lambda client: client.rounds())
    clock.advance(1)
    assert node_names(endpoints) == ["a:1317", "b:1317"], "after a success the backoff is 1 s again"


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500, content=b"<html>"),
        httpx.Response(503),
        httpx.Response(404),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, content=b'{"rounds": 7}'),
        httpx.Response(200, content=b" " * (9 << 20)),
    ],
    ids=["500", "503", "404", "html", "wrong type", "too long"],
)
async def test_pool_uses_node_for_other_requests_when_one_fails(response: httpx.Response) -> None:
    clock, network, endpoints = await probe_network("a", "b")
    network.nodes["a"].faults["rounds"] = lambda _: response
    with capture_logs() as logs:
        for _ in range(3):
            assert len((await endpoints.call(lambda client: client.rounds())).rounds) == 1
            assert node_names(endpoints) == ["a:1317", "b:1317"]
            clock.advance(5)
            await endpoints.probe_all()
    assert (await endpoints.call_until(get_node_name))[-1] == "a:1317", "other requests go to it first"
    reported = [(log["event"], log["endpoint"]) for log in logs]
    assert reported == [("node_response_invalid", "a:1317")], "logged once while it persists"


async def test_node_that_delays_a_sync_is_left_out_of_the_next_ones() -> None:
    clock, _, endpoints = await probe_network("a", "b")
    delays = {"a:1317": 8.0, "b:1317": 0.1}

    async def take(node: Endpoint) -> str:
        clock.advance(delays[node.name])
        return node.name

    async def synchronize(turn: int) -> list[str]:
        await endpoints.probe_all()
        return await endpoints.call_until(take, is_enough=lambda _: False, turn=turn)

    assert await synchronize(1) == ["a:1317", "b:1317"]
    assert [await synchronize(turn) for turn in (2, 3, 4, 5)] == [["b:1317"]] * 4
    delays["b:1317"] = math.inf  # it responds no more
    endpoints.start_backoff(endpoints.nodes[1], "no response")
    assert await synchronize(6) == ["a:1317"], "it is asked if it is the only one"
    clock.advance(40)
    delays["b:1317"] = 0.1
    assert await synchronize(7) == ["b:1317", "a:1317"], "one fifth of the time is left for it"


async def test_pool_with_one_node_stays_usable_when_one_request_fails() -> None:
    clock = FakeClock()
    network = FakeNetwork(a=FakeNode(clock, faults={"rounds": lambda _: httpx.Response(500)}))
    endpoints = network.create_node_pool(clock, rpc=True)
    await endpoints.probe_all()
    with pytest.raises(ChainUnavailable, match="HTTP 500"):
        await endpoints.call(lambda client: client.rounds())
    network.nodes["a"].faults["abci_query"] = lambda _: json_response(500, {"error": {"data": "no such path"}})
    rpc = endpoints.nodes[0].rpc
    assert rpc is not None
    with pytest.raises(ChainError) as caught:
        await rpc.is_spent(bytes(32), bytes(32))
    endpoints.record_error(endpoints.nodes[0], caught.value, rpc=True)
    assert endpoints.has_usable_node
    assert endpoints.usable_rpc_nodes == endpoints.nodes
    assert endpoints.head is not None


async def get_node_name(endpoint: Endpoint) -> str:
    return endpoint.name


async def test_call_without_fresh_node_raises_with_reasons() -> None:
    _, network, endpoints = create_network("a", "b")
    network.nodes["b"].syncing = True
    with pytest.raises(ChainUnavailable, match="a:1317: not probed yet"):
        await endpoints.call(lambda client: client.rounds())
    await endpoints.probe_all()
    network.nodes["a"].faults["rounds"] = lambda _: httpx.Response(500)
    with pytest.raises(ChainUnavailable, match=r"a:1317: rounds: HTTP 500"):
        await endpoints.call(lambda client: client.rounds())


async def test_call_prefers_nodes_at_min_height() -> None:
    _, network, endpoints = create_network("a", "b")
    network.nodes["b"].height = 464
    await endpoints.probe_all()

    async def get_name(client: ChainClient) -> str:
        return client.name

    assert await endpoints.call(get_name) == "a:1317"
    assert await endpoints.call(get_name, min_height=464) == "b:1317"


async def test_call_to_stopped_node_goes_to_next_node_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "MIN_LIMIT_SECONDS", 0.02)
    _, network, endpoints = await probe_network("a", "b", timeout=60.0)
    for _ in range(node_http.MIN_RESPONSES):
        await endpoints.call(lambda client: client.rounds())
    network.nodes["a"].hangs = True
    with anyio.fail_after(10):
        await endpoints.call(lambda client: client.rounds())
    assert node_names(endpoints) == ["b:1317"]
    assert "no response within" in str(endpoints.unusable_reasons()["a:1317"])


async def test_only_node_is_not_limited_by_its_recent_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "MIN_LIMIT_SECONDS", 0.02)
    _, network, endpoints = await probe_network("a", timeout=60.0)
    for _ in range(node_http.MIN_RESPONSES):
        await endpoints.call(lambda client: client.rounds())
    network.nodes["a"].hangs = True
    with pytest.raises(TimeoutError), anyio.fail_after(0.1):
        await endpoints.call(lambda client: client.rounds())
    assert node_names(endpoints) == ["a:1317"]


async def test_check_slow_node_does_not_delay_others() -> None:
    _, network, endpoints = create_network("tarpit", "good", timeout=30.0, chain_id="svote-1")
    network.nodes["tarpit"].hangs = True
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(endpoints.probe_all)
            while not endpoints.has_usable_node:
                await anyio.lowlevel.checkpoint()
            assert node_names(endpoints) == ["good:1317"]
            group.cancel_scope.cancel()


async def test_monitor_slow_node_does_not_delay_others() -> None:
    clock, network, endpoints = create_network("tarpit", "good", timeout=30.0, chain_id="svote-1")
    network.nodes["tarpit"].hangs = True
    calls: list[int] = []
    endpoints.subscribe_to_probes(lambda head: calls.append(head.height if head is not None else 0))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(endpoints.monitor, 1.0)
            for height in (464, 465, 466):
                network.nodes["good"].height = height
                await anyio.wait_all_tasks_blocked()
                clock.advance(1)
                await wait_for_length(calls, height - 463)
                assert calls[-1] == height
            group.cancel_scope.cancel()


async def test_subscribers_are_called_on_changes_only() -> None:
    _, network, endpoints = create_network("a")
    calls: list[bool] = []
    endpoints.subscribe(lambda: calls.append(endpoints.has_usable_node))
    await endpoints.probe_all()
    await endpoints.probe_all()
    network.nodes["a"].syncing = True
    network.nodes["a"].height += 1
    await endpoints.probe_all()
    assert calls == [True, False]


async def test_node_fails_with_its_second_consecutive_error_response() -> None:
    _, network, endpoints = await probe_network("a")
    error = httpx.Response(500, json={"message": "internal error"})
    with capture_logs() as logs:
        for _ in range(3):
            network.nodes["a"].faults["latest"] = lambda _: error
            await endpoints.probe_all()
            network.nodes["a"].faults.clear()
            await endpoints.probe_all()
            assert node_names(endpoints) == ["a:1317"]
        assert logs == []
        network.nodes["a"].faults["latest"] = lambda _: error
        await endpoints.probe_all()
        await endpoints.probe_all()
        assert node_names(endpoints) == []
        network.nodes["a"].faults.clear()
        await endpoints.probe_all()
    assert [log["event"] for log in logs] == ["node_not_fresh", "node_fresh"]


async def test_rpc_health_is_separate() -> None:
    clock, network, endpoints = await probe_network("a", "b", rpc=True)
    network.nodes["a"].faults["/status"] = lambda _: httpx.Response(500, content=b"<html>")
    network.nodes["a"].height += 1
    with capture_logs() as logs:
        # The RPC is probed after the REST API reports a new block. One error is not final, and the REST API must
        # respond after the second.
        for _ in range(4):
            await endpoints.probe_all()
            clock.advance(1)
    assert node_names(endpoints) == ["a:1317", "b:1317"]
    assert [endpoint.name for endpoint in endpoints.usable_rpc_nodes] == ["b:1317"]
    assert [(log["event"], log["endpoint"]) for log in logs] == [("rpc_not_fresh", "a:26657")]
    endpoints.record_error(endpoints.nodes[1], ChainError("broken"), rpc=True)
    assert endpoints.usable_rpc_nodes == []
    assert node_names(endpoints) == ["a:1317", "b:1317"]


async def test_probe_without_new_block_requests_head_only() -> None:
    clock, network, endpoints = create_network("a", rpc=True)
    node = network.nodes["a"]

    async def probed_paths() -> list[str]:
        before = len(node.requests)
        await endpoints.probe_all()
        return sorted(path.rsplit("/", 1)[-1] for path in node.requests[before:])

    all_paths = ["latest", "status", "syncing"]
    assert await probed_paths() == all_paths
    assert await probed_paths() == ["latest"]
    clock.advance(1)
    node.height += 1
    assert await probed_paths() == ["latest", "syncing"]
    assert await probed_paths() == ["latest", "status"], "the RPC has not reported this block yet"
    assert await probed_paths() == ["latest"]
    clock.advance(SYNC_STATUS_SECONDS)
    assert await probed_paths() == all_paths, "the report is outdated"
    assert await probed_paths() == ["latest"]

    node.height, node.syncing = node.height + 1, True
    assert await probed_paths() == ["latest", "syncing"]
    assert not endpoints.has_usable_node
    assert await probed_paths() == all_paths, "a node that is catching up may finish at any time"
    node.syncing = False
    assert await probed_paths() == all_paths
    assert endpoints.has_usable_node
    assert await probed_paths() == ["latest"]

    node.faults["latest"] = lambda _: httpx.Response(502)
    assert await probed_paths() == ["latest"]
    del node.faults["latest"]
    assert await probed_paths() == all_paths, "the state before the failure is no longer valid"


async def test_syncing_node_or_lost_rpc_is_detected_in_five_seconds() -> None:
    clock, network, endpoints = await probe_network("a", rpc=True)
    node = network.nodes["a"]
    assert (endpoints.has_usable_node, len(endpoints.usable_rpc_nodes)) == (True, 1)
    node.faults["/status"] = lambda _: httpx.Response(500)
    node.syncing = True
    for _ in range(4):
        clock.advance(1)
        await endpoints.probe_all()
    assert (endpoints.has_usable_node, len(endpoints.usable_rpc_nodes)) == (False, 0)


async def test_recorded_head_is_fresh_at_its_time() -> None:
    body = read_recorded("latest block")["response"]
    clock = FakeClock(1795268520.0)
    node = FakeNode(clock, faults={"latest": lambda _: json_response(200, body)})
    endpoints = FakeNetwork(a=node).create_node_pool(clock)
    await endpoints.probe_all()
    assert endpoints.head is not None
    assert (endpoints.head.chain_id, endpoints.head.height) == ("svote-1", 463)


async def test_two_names_of_one_node_are_reported() -> None:
    clock = FakeClock()
    network = FakeNetwork(a=FakeNode(clock), b=FakeNode(clock), c=FakeNode(clock))
    for name, node_id in (("a", "6c6f"), ("b", "6c6f"), ("c", "00aa")):
        info = {"default_node_info": {"network": "svote-1", "default_node_id": node_id}}
        network.nodes[name].faults["node_info"] = partial(lambda info, _: json_response(200, info), info)
    endpoints = network.create_node_pool(clock)
    with capture_logs() as logs:
        await endpoints.compare_node_ids()
        await endpoints.compare_node_ids()
    assert [(log["event"], log["endpoint"]) for log in logs] == [("node_listed_twice", "b:1317")], "reported once"
    assert endpoints.same_nodes == [("b:1317", "a:1317")]
    network.nodes["b"].faults.clear()  # another node, which reports no id
    await endpoints.compare_node_ids()
    assert endpoints.same_nodes == []


ADDRESS = "svvaloper1tp7fhly84qm6q4hhzmp0nh5frtdugmysz4l4zy"


BROKEN_NODES = {
    "no response": ({"faults": {"validators": lambda _: httpx.Response(501)}}, ChainResponseError),
    "away": ({"faults": {"validators": lambda _: httpx.Response(503)}}, ChainUnavailable),
    "silent": ({"hangs": True}, ChainUnavailable),
}


@pytest.mark.parametrize(("broken", "raised"), BROKEN_NODES.values(), ids=BROKEN_NODES)
async def test_read_only_pool_errors_do_not_affect_health(broken: dict[str, Any], raised: type[ChainError]) -> None:
    _, network, endpoints = await probe_network("a", "b")
    pool = ReadOnlyNodePool(endpoints, timeout=0.05, transport=network)
    for node in network.nodes.values():
        for name, value in broken.items():
            setattr(node, name, value)
    with capture_logs() as logs, pytest.raises(raised, match=r"a:1317: .*b:1317: "):
        await pool.call(lambda client: client.validator_status(ADDRESS))
    assert [endpoint.name for endpoint in endpoints.usable_nodes] == ["a:1317", "b:1317"]
    assert logs == []


async def test_read_only_pool_calls_next_node_after_error() -> None:
    clock = FakeClock()
    network = FakeNetwork(a=FakeNode(clock, faults={"rounds": lambda _: httpx.Response(500)}), b=FakeNode(clock))
    endpoints = network.create_node_pool(clock)
    pool = ReadOnlyNodePool(endpoints, transport=network)
    with pytest.raises(ChainUnavailable, match="none is in sync"):
        await pool.call(lambda client: client.rounds())
    await endpoints.probe_all()
    assert len((await pool.call(lambda client: client.rounds())).rounds) == 1


async def test_read_only_pool_calls_as_many_nodes_as_an_agreement_needs() -> None:
    clock = FakeClock()
    away = FakeNode(clock, faults={"rounds": lambda _: httpx.Response(503)})
    network = FakeNetwork(a=away, b=FakeNode(clock), c=FakeNode(clock), d=FakeNode(clock))
    endpoints = network.create_node_pool(clock)
    pool = ReadOnlyNodePool(endpoints, transport=network)
    await endpoints.probe_all()
    results = await pool.call_enough(lambda client: client.rounds())
    assert results is not None
    assert len(results) == 2
    assert len(await pool.call_each(lambda client: client.rounds())) == 3
    for node in (network.nodes["b"], network.nodes["c"]):
        node.faults["rounds"] = away.faults["rounds"]
    assert await pool.call_enough(lambda client: client.rounds()) is None, "only one node responds"


async def test_pools_close_the_connections_of_all_services() -> None:
    _, network, endpoints = create_network("a", rpc=True)
    with patch.object(network, "aclose") as close:
        await ReadOnlyNodePool(endpoints, transport=network).aclose()
        assert close.await_count == 2, "those that are reused and those that are not"
        await endpoints.aclose()
    assert close.await_count == 2 + 4, "REST API and RPC"


async def test_gather_limited_returns_in_order_and_stops_after_error() -> None:
    started: list[int] = []

    async def work(number: int) -> int:
        started.append(number)
        if number == 3:
            raise HelperError("three")
        return number * 2

    assert await gather_limited([0, 1, 2], work, 2) == [0, 2, 4]
    assert await gather_limited([], work, 2) == []
    started.clear()
    with pytest.raises(HelperError, match="three"):
        await gather_limited(range(100), work, 1)
    assert started == [0, 1, 2, 3]


async def test_gather_limited_starts_no_task_for_each_item() -> None:
    tasks = 0

    async def count_tasks(_: int) -> None:
        nonlocal tasks
        tasks = max(tasks, len(asyncio.all_tasks()))
        await asyncio.sleep(0)

    before = len(asyncio.all_tasks())
    await gather_limited(range(1000), count_tasks, 3)
    assert tasks == before + 3, "to cancel one for each of 300,000 transactions takes minutes"


async def test_gather_limited_runs_exactly_limit_concurrently() -> None:
    under_way, most = 0, 0
    together = asyncio.Barrier(3)

    async def work(_: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await together.wait()
        under_way -= 1

    async with asyncio.timeout(TIMEOUT_SECONDS):  # Two concurrent calls would wait for a third.
        await gather_limited(range(21), work, 3)
    assert most == 3
