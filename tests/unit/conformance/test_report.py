"""JSON and JUnit XML of a run."""

from __future__ import annotations

from xml.etree import ElementTree

from conformance.checks import Check, CheckResult, Level, Verdict
from conformance.report import is_conformant, to_json, to_junit
from conformance.session import Session
from tests.support.schemas import assert_conforms


async def unused(_session: Session) -> str:
    raise AssertionError


def create_result(number: int, level: Level, verdict: Verdict, seen: str = "seen") -> CheckResult:
    return CheckResult(Check(f"DUP-{number:03}", f"check {number}", "protocol R10", level, unused), verdict, seen)


RESULTS = [
    create_result(1, "must", "passed"),
    create_result(2, "must", "failed", "POST → 500 <\x00&\x1b>"),
    create_result(3, "should", "failed"),
    create_result(4, "must", "skipped", "needs shares"),
]


def test_json_has_counts_and_documented_shape() -> None:
    result = to_json(RESULTS)
    assert_conforms("conformance", result)
    assert (result["passed"], result["failed"], result["skipped"]) == (1, 2, 1)
    assert result["checks"][0] == {
        "id": "DUP-001",
        "source": "protocol R10",
        "level": "must",
        "verdict": "passed",
        "seen": "seen",
    }


def test_only_failed_must_checks_make_a_helper_non_conformant() -> None:
    assert not is_conformant(RESULTS)
    assert is_conformant([result for result in RESULTS if result.check.id != "DUP-002"])


def test_junit_is_xml_and_fails_only_for_must_checks() -> None:
    suite = ElementTree.fromstring(to_junit("http://helper", RESULTS))[0]
    assert suite.attrib == {
        "name": "conformance http://helper",
        "tests": "4",
        "failures": "1",
        "errors": "0",
        "skipped": "2",
    }
    assert [case.get("classname") for case in suite] == ["conformance.DUP"] * 4
    assert [[child.tag for child in case] for case in suite] == [["system-out"], ["failure"], ["skipped"], ["skipped"]]
    failure, should, skipped = (case[0].get("message") for case in list(suite)[1:])
    assert failure == "POST → 500 <�&�>"
    assert (should, skipped) == ("should, but failed: seen", "needs shares")
