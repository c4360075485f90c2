"""All checks in the order in which they are reported; runs them, and writes the result as JSON and as JUnit XML.

Slow checks run concurrently, all others sequentially, phase by phase.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final
from xml.etree import ElementTree

from conformance import (
    admission_checks,
    connection_checks,
    field_checks,
    json_checks,
    leak_checks,
    load_checks,
    post_checks,
    query_checks,
    restart_checks,
    reveal_checks,
    route_checks,
    slow_body_checks,
    status_checks,
)
from conformance.check_failures import CheckFailed, CheckSkipped, shorten
from conformance.checks import Check, CheckResult, Level, Phase, Verdict
from conformance.session import ENDED, Session
from helper.errors import ChainUnavailable, UsageError

CHECKS: Final[Sequence[Check]] = tuple(
    chain(
        status_checks.checks,
        route_checks.checks,
        post_checks.checks,
        field_checks.checks,
        json_checks.checks,
        admission_checks.checks,
        query_checks.checks,
        slow_body_checks.checks,
        connection_checks.checks,
        load_checks.checks,
        leak_checks.checks,
        reveal_checks.checks,
        restart_checks.checks,
    )
)


def select_checks(only: Sequence[str]) -> list[Check]:
    """The checks with these ids, or of these topics (the part of an id before the hyphen); all without any.

    Raises:
        UsageError: there is no such check or topic.
    """
    wanted = {text.upper() for text in only}
    known = {name for check in CHECKS for name in (check.id, check.id.partition("-")[0])}
    if unknown := sorted(wanted - known):
        raise UsageError(f"no such check or topic: {', '.join(unknown)}")
    return [check for check in CHECKS if not wanted or wanted & {check.id, check.id.partition("-")[0]}]


CHECK_SECONDS: Final = 600.0
"""Time limit of one check, without the time for reveals. Checks have shorter limits of their own."""
_MAX_REVEAL_WAITS: Final = 2
"""Maximum number of times that one check waits for reveals, one after the other."""
_BEFORE_SLOW_END: Final = (Phase.QUICK, Phase.QUIET, Phase.REVEAL)
_AFTER_SLOW_END: Final = (Phase.RESTART, Phase.END)


async def run_checks(
    session: Session, checks: Sequence[Check], on_result: Callable[[CheckResult], None] = lambda _: None
) -> list[CheckResult]:
    """Run checks. Returns their results in the order of `checks`.

    The rounds that the run has created on the dev chain are ended.

    If the helper accepts no share at all, the first check that needs shares fails with its response, and the others are
    skipped.

    Raises:
        ChainUnavailable: the dev chain does not respond.
    """
    results: dict[str, CheckResult] = {}

    def add(result: CheckResult) -> None:
        results[result.check.id] = result
        on_result(result)

    runnable: list[Check] = []
    for check in checks:
        reason = _missing_reason(session, check)
        if reason is None:
            runnable.append(check)
        else:
            add(CheckResult(check, "skipped", reason))
    needing = [check for check in runnable if check.needs_shares]
    if needing and (refusal := await _prepare(session)) is not None:
        add(CheckResult(needing[0], "failed", refusal))
        for check in needing[1:]:
            add(CheckResult(check, "skipped", f"no valid share is accepted, see {needing[0].id}"))
        runnable = [check for check in runnable if not check.needs_shares]

    async def run_phase(phase: Phase) -> None:
        for check in runnable:
            if check.phase is phase:
                add(await _run_check(session, check))

    async def run_slow(check: Check) -> None:
        add(await _run_check(session, check))

    slow = [asyncio.ensure_future(run_slow(check)) for check in runnable if check.phase is Phase.SLOW]
    try:
        for phase in _BEFORE_SLOW_END:
            await run_phase(phase)
        await asyncio.gather(*slow)
    finally:
        for task in slow:
            task.cancel()
    for phase in _AFTER_SLOW_END:
        await run_phase(phase)
    await session.end_rounds()
    return [results[check.id] for check in checks]


def _missing_reason(session: Session, check: Check) -> str | None:
    """Why a check cannot run."""
    if check.needs_token and not session.client.token:
        return "needs a helper with a token (--token)"
    if check.needs_restart and session.restart_command is None:
        return "needs a command that restarts the helper (--restart)"
    if check.needs_chain and not session.has_chain:
        return "needs a dev chain (--devnet)"
    if check.needs_shares and not session.has_shares:
        return "needs shares (--devnet or --shares)"
    return ENDED if check.needs_shares and session.has_ended else None


async def _prepare(session: Session) -> str | None:
    """Create round and shares. Returns the response to a valid share that was not accepted."""
    try:
        await session.prepare()
    except CheckFailed as failure:
        return str(failure)
    return None


async def _run_check(session: Session, check: Check) -> CheckResult:
    seconds = CHECK_SECONDS + _MAX_REVEAL_WAITS * session.reveal_seconds
    try:
        async with asyncio.timeout(seconds):
            return CheckResult(check, "passed", shorten(await check.run(session)))
    except CheckFailed as failure:
        return CheckResult(check, "failed", shorten(str(failure)))
    except CheckSkipped as reason:
        return CheckResult(check, "skipped", str(reason))
    except TimeoutError:
        return CheckResult(check, "failed", f"not finished within {seconds:.0f} s")
    except ChainUnavailable:
        raise
    except Exception as error:
        # The JSON of the response has an unexpected shape. It must not end the other checks, whatever it is.
        return CheckResult(check, "failed", shorten(f"unexpected response: {type(error).__name__} {error}"))


_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow."""


def is_conformant(results: Sequence[CheckResult]) -> bool:
    """Whether at least one check ran and no `must` check failed."""
    failed = any(result.verdict == "failed" and result.check.level == "must" for result in results)
    return not failed and any(result.verdict != "skipped" for result in results)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """A check with its observation."""

    id: str = field(metadata={"description": "Stable identifier of the check: topic and number."})
    source: str = field(metadata={"description": "The clause that requires it."})
    level: Level = field(metadata={"description": "A failed check fails the run only if its level is `must`."})
    verdict: Verdict = field(metadata={"description": "Verdict of the check."})
    seen: str = field(metadata={"description": "Observation: request and response, or why the check was skipped."})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`conformance`."""

    passed: int = field(metadata={"description": "Number of checks that passed."})
    failed: int = field(metadata={"description": "Number of checks that failed, of both levels."})
    skipped: int = field(metadata={"description": "Number of checks that could not run."})
    checks: Sequence[CheckRow] = field(
        metadata={"description": "The selected checks, in a fixed order. Their topics are in docs/conformance-kit.md."}
    )


def create_report(results: Sequence[CheckResult]) -> Report:
    """The number of each verdict, and every check with its observation."""
    counts = Counter(result.verdict for result in results)
    rows = [
        CheckRow(
            id=result.check.id,
            source=result.check.source,
            level=result.check.level,
            verdict=result.verdict,
            seen=result.seen,
        )
        for result in results
    ]
    return Report(passed=counts["passed"], failed=counts["failed"], skipped=counts["skipped"], checks=rows)


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
