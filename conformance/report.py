"""The result of a run: as JSON, and as JUnit XML for CI systems. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final
from xml.etree import ElementTree

from conformance.checks import CheckResult

_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow."""


def is_conformant(results: Sequence[CheckResult]) -> bool:
    """Whether no `must` check failed."""
    return not any(result.verdict == "failed" and result.check.level == "must" for result in results)


def to_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    """The number of each verdict, and every check with its observation."""
    counts = Counter(result.verdict for result in results)
    return {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "checks": [
            {
                "id": result.check.id,
                "source": result.check.source,
                "level": result.check.level,
                "verdict": result.verdict,
                "seen": result.seen,
            }
            for result in results
        ],
    }


def to_junit(url: str, results: Sequence[CheckResult]) -> bytes:
    """JUnit XML with one test case for each check.

    A failed `should` check is a skipped test case whose message states this, because a failure would fail a build.
    """
    failures = [result for result in results if result.verdict == "failed" and result.check.level == "must"]
    not_passed = [result for result in results if result.verdict != "passed"]
    suite = ElementTree.Element(
        "testsuite",
        name=f"conformance {url}",
        tests=str(len(results)),
        failures=str(len(failures)),
        errors="0",
        skipped=str(len(not_passed) - len(failures)),
    )
    for result in results:
        check = result.check
        topic = check.id.partition("-")[0]
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"conformance.{topic}", name=f"{check.id} {check.name}"
        )
        seen = _NOT_XML.sub("�", result.seen)
        if result.verdict == "passed":
            ElementTree.SubElement(case, "system-out").text = seen
        elif result.verdict == "failed" and check.level == "must":
            ElementTree.SubElement(case, "failure", message=seen).text = f"{check.level}: {check.source}"
        else:
            prefix = "should, but failed: " if result.verdict == "failed" else ""
            ElementTree.SubElement(case, "skipped", message=prefix + seen)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    document: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return document
