"""Node reports and their assessment: addresses, chain ids, block ages, the clock."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from functools import partial

import httpx
import pytest

from helper.chain.node import HeadLimits
from helper.chain.node_http import SLOW_CALL_SECONDS
from helper.chain.rest_client import ChainClient
from helper.doctor import chain as chain_module
from helper.doctor.chain import NodeCriteria, NodeReport, evaluate_clock, evaluate_nodes, query_authority_keys
from helper.doctor.proving import evaluate_circuit
from helper.doctor.result import CheckResult, Level
from tests.unit.chain.fakes import ROUND_ID, json_response, recorded_round

NOW = 1_000_000.0
LIMITS = NodeCriteria(chain_id="svote-1", now=NOW, limits=HeadLimits(stale_after=90, clock_skew=120))
GOOD = NodeReport("a:1317", chain_id="svote-1", height=100, block_time=NOW - 3, version="v1.3.0", seconds=0.01)


def named(name: str, **changes: object) -> NodeReport:
    return replace(GOOD, name=name, **changes)  # type: ignore[arg-type]


def by_subject(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.subject: finding for finding in findings}


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
    keys = await query_authority_keys([(f"http://{host}", "") for host in hosts] + [("no url", "")])
    assert keys == {ROUND_ID: b64decode(listed["ea_pk"]), bytes(32): b64decode(other)}


def test_evaluate_nodes_reports_values_of_healthy_node() -> None:
    evaluation = evaluate_nodes([GOOD], LIMITS)
    node, chain = evaluation.findings
    assert (node.subject, node.level) == ("node a:1317", Level.OK)
    assert node.message == "chain svote-1, height 100, block 3 s old, response in 10 ms, version v1.3.0"
    assert node.facts["latency_ms"] == 10.0
    assert chain.level is Level.OK
    assert "add a second one" in chain.message
    assert evaluation.usable == [GOOD]


def test_evaluate_nodes_warns_while_verifying_keys_are_not_ready() -> None:
    warming = named("b:1317", unready_reason="the verifying keys are being generated")
    evaluation = evaluate_nodes([GOOD, warming], LIMITS)
    finding = by_subject(evaluation.findings)["node b:1317"]
    assert finding.level is Level.WARN
    assert finding.message == "the node accepts no reveals yet: the verifying keys are being generated"
    assert finding.advice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": "unreachable (ConnectError)"}, "unreachable"),
        ({"chain_id": "other-1"}, "on chain other-1, expected svote-1"),
        ({"syncing": True}, "catching up"),
        ({"block_time": NOW - 91}, "newest block is 91 s old"),
        ({"block_time": NOW + 121}, "121 s ahead of our clock"),
    ],
)
def test_evaluate_nodes_faulty_node_fails_alone_and_warns_with_healthy_one(
    changes: dict[str, object], message: str
) -> None:
    bad = named("b:1317", **changes)
    alone = by_subject(evaluate_nodes([bad], LIMITS).findings)
    assert alone["node b:1317"].level is Level.FAIL
    assert message in alone["node b:1317"].message
    assert alone["node b:1317"].advice
    assert alone["chain"].level is Level.FAIL
    together = by_subject(evaluate_nodes([bad, GOOD], LIMITS).findings)
    assert together["node b:1317"].level is Level.WARN
    assert together["chain"].level is Level.OK
    assert together["chain"].facts == {"chain_id": "svote-1", "endpoints": 2, "of_use": 1}


def test_evaluate_nodes_warns_about_one_node_under_two_names() -> None:
    nodes = [named("a:1317", node_id="6c6f"), named("b:1317", node_id="6c6f"), named("c:1317"), named("d:1317")]
    warnings = [finding for finding in evaluate_nodes(nodes, LIMITS).findings if finding.level is Level.WARN]
    assert [finding.message for finding in warnings] == ["it reports the same node id as a:1317"]


def test_evaluate_nodes_without_chain_id_uses_that_of_first_node() -> None:
    evaluation = evaluate_nodes([named("a:1", chain_id="x-1"), GOOD], replace(LIMITS, chain_id=None))
    assert [node.name for node in evaluation.usable] == ["a:1"]


def test_evaluate_nodes_slow_node_is_warning() -> None:
    node, _ = evaluate_nodes([named("a:1", seconds=SLOW_CALL_SECONDS + 0.1)], LIMITS).findings
    assert node.level is Level.WARN


def test_evaluate_nodes_unreachable_rpc_is_warning_and_node_stays_usable() -> None:
    evaluation = evaluate_nodes([named("a:1", rpc=NodeReport("a:2", problem="unreachable"))], LIMITS)
    result = by_subject(evaluation.findings)
    assert result["rpc a:2"].level is Level.WARN
    assert result["node a:1"].level is Level.OK
    healthy = evaluate_nodes([named("a:1", rpc=named("a:2"))], LIMITS)
    assert by_subject(healthy.findings)["rpc a:2"].level is Level.OK


@pytest.mark.parametrize(
    ("age", "level", "text"),
    [
        (3, Level.OK, "3 s old"),
        (121, Level.FAIL, "121 s ahead"),
        (-4, Level.OK, "0 s old"),
        (-6, Level.WARN, "6 s behind"),
        (-121, Level.FAIL, "121 s behind"),
    ],
)
def test_evaluate_clock_uses_nearest_block_time(age: float, level: Level, text: str) -> None:
    nodes = [named("a:1", block_time=NOW - age), named("b:1", block_time=NOW - 5000), named("c:1", syncing=True)]
    result = evaluate_clock(nodes, NOW, limit=120)
    assert result.level is level
    assert text in result.message


def test_evaluate_clock_without_block_is_warning() -> None:
    assert evaluate_clock([named("a:1", problem="away")], NOW, limit=120).level is Level.WARN


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
