"""What nodes tell, and what is made of it: addresses, chains, ages, the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helper.chain.node_http import SLOW
from helper.doctor.chain import Expected, NodeReport, judge_clock, judge_nodes
from helper.doctor.circuit import judge_circuit
from helper.doctor.result import CheckResult, Level

NOW = 1_000_000.0
LIMITS = Expected(chain_id="svote-1", now=NOW, stale_after=90, clock_skew=120)
GOOD = NodeReport("a:1317", chain_id="svote-1", height=100, block_time=NOW - 3, version="v1.3.0", seconds=0.01)


def named(name: str, **changes: object) -> NodeReport:
    return replace(GOOD, name=name, **changes)  # type: ignore[arg-type]


def by_subject(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.subject: finding for finding in findings}


def test_a_good_node_is_told_with_its_figures() -> None:
    judged = judge_nodes([GOOD], LIMITS)
    node, chain = judged.findings
    assert (node.subject, node.level) == ("node a:1317", Level.OK)
    assert node.message == "chain svote-1, height 100, block 3 s old, answers in 10 ms, version v1.3.0"
    assert node.facts["latency_ms"] == 10.0
    assert chain.level is Level.OK
    assert "name a second one" in chain.message
    assert judged.good == [GOOD]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": "unreachable (ConnectError)"}, "unreachable"),
        ({"chain_id": "other-1"}, "serves chain other-1, not svote-1"),
        ({"syncing": True}, "catching up"),
        ({"block_time": NOW - 91}, "newest block is 91 s old"),
        ({"block_time": NOW + 121}, "121 s ahead of our clock"),
    ],
)
def test_a_bad_node_is_a_failure_alone_and_a_warning_beside_a_good_one(
    changes: dict[str, object], message: str
) -> None:
    bad = named("b:1317", **changes)
    alone = by_subject(judge_nodes([bad], LIMITS).findings)
    assert alone["node b:1317"].level is Level.FAIL
    assert message in alone["node b:1317"].message
    assert alone["node b:1317"].advice
    assert alone["chain"].level is Level.FAIL
    beside = by_subject(judge_nodes([bad, GOOD], LIMITS).findings)
    assert beside["node b:1317"].level is Level.WARN
    assert beside["chain"].level is Level.OK
    assert beside["chain"].facts == {"chain_id": "svote-1", "endpoints": 2, "of_use": 1}


def test_where_nobody_says_which_chain_the_first_node_does() -> None:
    judged = judge_nodes([named("a:1", chain_id="x-1"), GOOD], replace(LIMITS, chain_id=None))
    assert [look.name for look in judged.good] == ["a:1"]


def test_a_slow_node_is_a_warning() -> None:
    node, _ = judge_nodes([named("a:1", seconds=SLOW + 0.1)], LIMITS).findings
    assert node.level is Level.WARN


def test_an_rpc_that_is_away_is_a_warning_and_the_node_stays_good() -> None:
    judged = judge_nodes([named("a:1", rpc=NodeReport("a:2", problem="unreachable"))], LIMITS)
    found = by_subject(judged.findings)
    assert found["rpc a:2"].level is Level.WARN
    assert found["node a:1"].level is Level.OK
    well = judge_nodes([named("a:1", rpc=named("a:2"))], LIMITS)
    assert by_subject(well.findings)["rpc a:2"].level is Level.OK


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
def test_the_clock_is_judged_by_the_node_that_is_nearest(age: float, level: Level, text: str) -> None:
    looks = [named("a:1", block_time=NOW - age), named("b:1", block_time=NOW - 5000), named("c:1", syncing=True)]
    found = judge_clock(looks, NOW, limit=120)
    assert found.level is level
    assert text in found.message


def test_without_a_block_the_clock_is_not_judged() -> None:
    assert judge_clock([named("a:1", problem="away")], NOW, limit=120).level is Level.WARN


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
    ],
)
def test_the_circuit_against_the_versions(setting: str, current: str | None, versions: list[str], level: Level) -> None:
    found = judge_circuit(setting, current, versions)
    assert found.level is level
    assert bool(found.advice) is (level is not Level.OK)
