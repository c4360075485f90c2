"""Checks of the nodes: addresses, chain ids, block ages, the clock."""

from __future__ import annotations

from base64 import b64decode
from functools import partial
from typing import Any

import httpx
import pytest

from helper.chain.node_http import SLOW_CALL_SECONDS
from helper.chain.node_pool import create_nodes
from helper.chain.rest_client import ChainClient
from helper.config.sections import Config
from helper.doctor import CheckResult, Level
from helper.doctor import chain as chain_module
from helper.doctor.chain import (
    NodeReport,
    check_nodes,
    evaluate_clock,
    evaluate_nodes,
    query_authority_keys,
)
from helper.doctor.proving import evaluate_circuit
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import ROUND_ID, FakeNetwork, FakeNode, json_response, recorded_round

Results = tuple[list[CheckResult], list[NodeReport]]


def by_subject(results: Results) -> dict[str, CheckResult]:
    return {finding.subject: finding for finding in results[0]}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def check(
    monkeypatch: pytest.MonkeyPatch,
    clock: FakeClock,
    *nodes: FakeNode | None,
    known_id: str | None = None,
    **settings: Any,
) -> Results:
    """The results for nodes named a, b, …; None is a node that does not respond."""
    names = "abcd"[: len(nodes)]
    network = FakeNetwork(**{name: node for name, node in zip(names, nodes, strict=True) if node is not None})
    monkeypatch.setattr(chain_module, "create_nodes", partial(create_nodes, transport=network))
    chain = {"endpoints": [f"http://{name}:1317" for name in names], **settings}
    return await check_nodes(Config.model_validate({"chain": chain}), clock, known_id)


def identified(node_id: str) -> dict[str, Any]:
    """The fault of a node that reports a version and this id."""
    info = {"application_version": {"version": "v1.3.0"}, "default_node_info": {"default_node_id": node_id}}
    return {"node_info": lambda _: json_response(200, info)}


async def test_query_authority_keys_uses_the_first_node_that_lists_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, other = recorded_round(1), "b" * 43 + "="
    without_key = {name: value for name, value in listed.items() if name != "ea_pk"}
    later = {**listed, "vote_round_id": "A" * 43 + "=", "ea_pk": other}
    responses = {
        "html": httpx.Response(200, text="<html>"),
        "pending": json_response(200, {"rounds": [without_key]}),
        "first": json_response(200, {"rounds": [listed]}),
        "second": json_response(200, {"rounds": [{**listed, "ea_pk": other}, later]}),
    }

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.host not in responses:
            raise httpx.ConnectError("refused")
        return responses[request.url.host]

    monkeypatch.setattr(chain_module, "ChainClient", partial(ChainClient, transport=httpx.MockTransport(reply)))
    hosts = ("gone", "html", "pending", "first", "second")
    keys = await query_authority_keys([f"http://{host}" for host in hosts])
    assert keys == {ROUND_ID: b64decode(listed["ea_pk"]), bytes(32): b64decode(other)}


async def test_healthy_node_is_reported_with_its_values(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    (node, chain, time), usable = await check(monkeypatch, clock, FakeNode(clock, age=3, faults=identified("6c6f")))
    assert (node.subject, node.level) == ("node a:1317", Level.OK)
    assert node.message == "chain svote-1, height 463, block 3 s old, response in 0 ms, version v1.3.0"
    assert node.facts["latency_ms"] == 0.0
    assert chain.level is Level.OK
    assert "add a second one" in chain.message
    assert (time.level, time.message) == (Level.OK, "newest block is 3 s old")
    assert [(report.info.version, report.block_seconds) for report in usable] == [("v1.3.0", 5.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "unreachable"),
        ({"chain_id": "other-1"}, "on chain other-1, expected svote-1"),
        ({"syncing": True}, "syncing"),
        ({"age": 91}, "newest block is 91 s old"),
        ({"age": -121}, "121 s ahead of our clock"),
    ],
)
async def test_faulty_node_fails_alone_and_warns_with_healthy_one(
    changes: dict[str, Any] | None, message: str, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    bad = None if changes is None else FakeNode(clock, **changes)
    alone = by_subject(await check(monkeypatch, clock, bad, chain_id="svote-1"))
    assert alone["node a:1317"].level is Level.FAIL
    assert message in alone["node a:1317"].message
    assert alone["node a:1317"].advice
    assert alone["chain"].level is Level.FAIL
    together = by_subject(await check(monkeypatch, clock, bad, FakeNode(clock), chain_id="svote-1"))
    assert together["node a:1317"].level is Level.WARN
    assert "Correct this machine's clock" not in together["node a:1317"].advice, "the other node agrees with it"
    assert together["chain"].level is Level.OK
    assert together["chain"].facts == {"chain_id": "svote-1", "endpoints": 2, "of_use": 1}


async def test_advice_for_a_stale_node_of_an_unknown_chain_is_about_its_blocks(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """One of two nodes is silent and no chain id is configured, so none is agreed."""
    stale = by_subject(await check(monkeypatch, clock, FakeNode(clock, age=91), None))["node a:1317"]
    assert (stale.level, stale.message) == (Level.FAIL, "newest block is 91 s old")
    assert "chain_id" not in stale.advice


async def test_node_without_keys_is_a_warning(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    async def warming(_client: ChainClient) -> str:
        return "the verifying keys are being generated"

    monkeypatch.setattr(ChainClient, "unready_reason", warming)
    node = by_subject(await check(monkeypatch, clock, FakeNode(clock)))["node a:1317"]
    assert node.level is Level.WARN
    assert node.message == "the node accepts no reveals yet: the verifying keys are being generated"
    assert node.advice


async def test_one_node_under_two_names_is_a_warning(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    same = [FakeNode(clock, faults=identified("6c6f")) for _ in "ab"]
    findings, _ = await check(monkeypatch, clock, *same, FakeNode(clock), FakeNode(clock))
    warnings = [finding for finding in findings if finding.level is Level.WARN]
    assert [finding.message for finding in warnings] == ["it reports the same node id as a:1317"]


async def test_chain_id_is_that_of_the_running_helper_else_the_agreed_one(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    nodes = (FakeNode(clock, chain_id="x-1"), FakeNode(clock))
    known = by_subject(await check(monkeypatch, clock, *nodes, known_id="x-1"))
    assert (known["node a:1317"].level, known["node b:1317"].level) == (Level.OK, Level.WARN)
    unknown = by_subject(await check(monkeypatch, clock, *nodes))
    assert unknown["chain"].level is Level.FAIL
    assert "[chain] chain_id" in unknown["chain"].advice


async def test_slow_node_is_a_warning(clock: FakeClock) -> None:
    pool = FakeNetwork(a=FakeNode(clock)).create_node_pool(clock)
    await pool.probe_all()
    slow = evaluate_nodes(pool, {pool.nodes[0]: NodeReport(seconds=SLOW_CALL_SECONDS + 0.1)})
    assert by_subject(slow)["node a:1317"].level is Level.WARN


async def test_unreachable_rpc_is_a_warning_and_node_stays_usable(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    for rpc, level in (("http://gone:26657", Level.WARN), ("http://a:26657", Level.OK)):
        result = by_subject(await check(monkeypatch, clock, FakeNode(clock), rpc=[rpc]))
        assert result[f"rpc {rpc.removeprefix('http://')}"].level is level
        assert result["node a:1317"].level is Level.OK


async def test_without_nodes_the_check_fails(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    (chain, time), _ = await check(monkeypatch, clock)
    assert (chain.level, chain.message) == (Level.FAIL, "no node is configured: the helper does not start")
    assert time.level is Level.WARN


@pytest.mark.parametrize(
    ("skew", "level", "text"),
    [
        (3, Level.OK, "3 s old"),
        (91, Level.FAIL, "91 s ahead"),
        (-4, Level.OK, "0 s old"),
        (-6, Level.WARN, "6 s behind"),
        (-121, Level.FAIL, "121 s behind"),
        (None, Level.WARN, "no block time"),
    ],
)
def test_clock_is_compared_with_the_nearest_block_time(skew: float | None, level: Level, text: str) -> None:
    result = evaluate_clock(skew, max_ahead=90, max_behind=120)
    assert result.level is level
    assert text in result.message


@pytest.mark.parametrize(
    ("setting", "current", "versions", "level"),
    [
        ("auto", None, ["v1.3.0"], Level.OK),
        ("auto", "k10", ["v1.3.0", ""], Level.OK),
        ("auto", "k11", ["v1.3.0"], Level.WARN),
        ("auto", None, ["v1.3.0", "v1.2.9"], Level.WARN),
        ("auto", None, [""], Level.OK),
        ("k11", None, ["v1.3.0"], Level.FAIL),
        ("k11", "k11", ["v1.2.0"], Level.OK),
        ("k10", None, [], Level.OK),
        ("auto", "k10", ["v1.7.0"], Level.OK),
        ("auto", "k10", ["v1.8.0"], Level.WARN),
        ("k10", None, ["v1.8.0"], Level.WARN),
        ("k11", None, ["v1.8.0"], Level.FAIL),
    ],
)
def test_evaluate_circuit_compares_with_node_versions(
    setting: str, current: str | None, versions: list[str], level: Level
) -> None:
    result = evaluate_circuit(setting, current, versions)
    assert result.level is level
    assert bool(result.advice) is (level is not Level.OK)


@pytest.mark.rule("N21")
def test_evaluate_circuit_unknown_version_states_what_was_assumed() -> None:
    result = evaluate_circuit("auto", None, ["v1.8.0-rc.1", "v1.7.0"])
    assert result.message == (
        "node version not known to this release: v1.8.0-rc.1; assumed circuit: k10, as for version v1.7.0"
    )
    assert result.facts["newer_than_known"] == ["v1.8.0-rc.1"]
    assert "install a newer release" in str(result.advice)
