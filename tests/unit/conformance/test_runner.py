"""Selecting and running checks, and the two forms of the result."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.check_failures import CheckFailed, CheckSkipped, require
from conformance.checks import Check, CheckResult, Level, Phase, Verdict
from conformance.http_requests import ConnectionEnded, HelperClient, parse_address
from conformance.runner import CHECKS, create_report, is_conformant, run_checks, select_checks, to_junit
from conformance.session import Session
from conformance.shares import encode, invented_share
from helper.core.json_records import to_json
from tests.support.clock import FakeClock
from tests.support.schemas import assert_conforms

DOCUMENT = Path(__file__).parents[3] / "docs" / "conformance-kit.md"
SOURCES = ("protocol ", "protocol-now ", "wallet 5.3.0: ", "wallets: ", "draft: ", "RFC ")
TOPICS = {check.id.partition("-")[0] for check in CHECKS}


def test_catalog_ids_are_unique_and_well_formed() -> None:
    assert [name for name, count in Counter(check.id for check in CHECKS).items() if count > 1] == []
    assert [check.id for check in CHECKS if re.fullmatch("[A-Z]+-[0-9]{3,4}", check.id) is None] == []
    assert len(CHECKS) > 450


def test_catalog_ids_of_some_checks_stay_the_same() -> None:
    """CI systems select checks by id, so the meaning of an id never changes."""
    names = {check.id: check.name for check in CHECKS}
    assert names["POST-001"] == "accepts: body of wallet library 5.3.0"
    assert names["DUP-002"] == "a repeat is `duplicate`: submit_at 0"
    assert names["FIELD-0220"] == "refuses primary_blind above the modulus"
    assert names["FIELD-1033"] == "refuses proposal_id plus 2^32"
    assert names["HASH-001"] == "refuses a share with another shares_hash"
    assert names["SLOW-002"] == "the receipt has exactly its fields and the token"
    assert names["CHAIN-002"] == "no share is sent before its submit_at"
    assert names["LEAK-020"] == "no request contains the nullifier of a share that is not due"
    assert names["RESTART-002"] == "a waiting share is still known"


def test_catalog_checks_have_names_and_known_sources() -> None:
    assert [check.id for check in CHECKS if not check.source.startswith(SOURCES)] == []
    assert [name for name, count in Counter((check.id[:4], check.name) for check in CHECKS).items() if count > 1] == []
    assert [check.id for check in CHECKS if len(check.name) > 100 or not check.name] == []


def test_catalog_checks_that_take_shares_need_them() -> None:
    assert [check.id for check in CHECKS if check.shares and not check.needs_shares] == []


def test_document_lists_every_topic() -> None:
    table = DOCUMENT.read_text().partition("## Topics")[2].partition("\n\n`CHAIN`")[0]
    listed = set(re.findall("`([A-Z]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert listed == TOPICS


@pytest.mark.parametrize(
    ("only", "expected"), [(["DUP-001"], {"DUP-001"}), (["dup-001", "CORS-005"], {"DUP-001", "CORS-005"})]
)
def test_select_by_id_returns_these_checks(only: list[str], expected: set[str]) -> None:
    assert {check.id for check in select_checks(only)} == expected


def test_select_by_topic_returns_all_of_it() -> None:
    assert select_checks([]) == list(CHECKS)
    assert [check for check in CHECKS if check.id.startswith("SLOW-")] == select_checks(["slow"])


def test_select_unknown_check_is_refused() -> None:
    with pytest.raises(ValueError, match="no such check or topic: NONE, POST-999"):
        select_checks(["POST-999", "POST", "none"])


def create_session(*, token: str = "", restart: str | None = None, shares_file: Path | None = None) -> Session:
    clock = FakeClock()
    client = HelperClient(parse_address("http://127.0.0.1:1"), token, clock)
    return Session(client, clock, restart_command=restart, shares_file=shares_file)


def create_check(number: int, run: Callable[[Session], Awaitable[str]], **needs: Any) -> Check:
    return Check(f"DUP-{number:03}", "name", "protocol R10", "must", run, **needs)


async def run_pass(_session: Session) -> str:
    return "seen"


def raising(error: Exception) -> Callable[[Session], Awaitable[str]]:
    async def run(_session: Session) -> str:
        raise error

    return run


def summarize(results: list[CheckResult]) -> list[tuple[str, str, str]]:
    return [(result.check.id[-3:], result.verdict, result.seen) for result in results]


async def test_verdicts_follow_from_what_a_check_raises() -> None:
    checks = [
        create_check(1, run_pass),
        create_check(2, raising(CheckFailed("x" * 400))),
        create_check(3, raising(CheckSkipped("reason"))),
        create_check(4, raising(KeyError("buckets"))),
        create_check(5, raising(ConnectionEnded("connection closed"))),
        create_check(6, raising(OverflowError("int too large to convert to float"))),
    ]
    results = summarize(await run_checks(create_session(), checks))
    assert results[0] == ("001", "passed", "seen")
    assert results[1][1] == "failed"
    assert len(results[1][2]) == 300
    assert results[2:] == [
        ("003", "skipped", "reason"),
        ("004", "failed", "unexpected response: KeyError 'buckets'"),
        ("005", "failed", "connection closed"),
        ("006", "failed", "unexpected response: OverflowError int too large to convert to float"),
    ]


async def test_check_has_time_for_late_reveals_in_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.runner.CHECK_SECONDS", 0.0)

    async def run(_session: Session) -> str:
        later = asyncio.Event()
        asyncio.get_running_loop().call_soon(later.set)  # called after the end of a limit of 0 s
        await later.wait()
        return "seen"

    session = create_session()
    session.reveal_seconds = 30.0
    assert [result.verdict for result in await run_checks(session, [create_check(1, run)])] == ["passed"]


async def test_checks_that_lack_something_are_skipped_with_the_reason() -> None:
    checks = [
        create_check(1, run_pass, needs_token=True),
        create_check(2, run_pass, needs_restart=True, needs_shares=True),
        create_check(3, run_pass, needs_chain=True, needs_shares=True),
        create_check(4, run_pass, needs_shares=True),
    ]
    reasons = [result.seen for result in await run_checks(create_session(), checks)]
    assert reasons == [
        "needs a helper with a token (--token)",
        "needs a command that restarts the helper (--restart)",
        "needs a dev chain (--devnet)",
        "needs shares (--devnet or --shares)",
    ]
    with_token = await run_checks(create_session(token="secret"), checks[:1])
    assert summarize(with_token) == [("001", "passed", "seen")]


async def test_slow_checks_run_alongside_others_and_end_before_the_restart() -> None:
    order: list[str] = []
    quick_done = asyncio.Event()

    def create_run(name: str) -> Callable[[Session], Awaitable[str]]:
        async def run(_session: Session) -> str:
            if name.startswith("slow"):
                await quick_done.wait()
            order.append(name)
            if name == "reveal":
                quick_done.set()
            return name

        return run

    phases = {
        "end": Phase.END,
        "restart": Phase.RESTART,
        "slow one": Phase.SLOW,
        "slow two": Phase.SLOW,
        "reveal": Phase.REVEAL,
        "quiet": Phase.QUIET,
        "quick": Phase.QUICK,
    }
    checks = [create_check(n, create_run(name), phase=phase) for n, (name, phase) in enumerate(phases.items())]
    session = create_session(restart="true")
    reported: list[str] = []
    results = await run_checks(session, checks, lambda result: reported.append(result.seen))
    assert order == ["quick", "quiet", "reveal", "slow one", "slow two", "restart", "end"]
    assert reported == order
    assert [result.seen for result in results] == list(phases)


async def test_helper_that_accepts_no_share_fails_once(tmp_path: Path) -> None:
    """The helper does not respond, so the first valid share is not accepted."""
    file = tmp_path / "shares.jsonl"
    file.write_bytes(b"\n".join([encode(invented_share().body())] * 2))
    checks = [
        create_check(1, run_pass),
        create_check(2, run_pass, needs_shares=True),
        create_check(3, run_pass, needs_shares=True),
    ]
    results = await run_checks(create_session(shares_file=file), checks)
    assert [result.verdict for result in results] == ["passed", "failed", "skipped"]
    assert "POST /shielded-vote/v1/shares: ConnectError" in results[1].seen
    assert results[2].seen == "no valid share is accepted, see DUP-002"


async def test_once_returns_one_result_and_one_error_to_all() -> None:
    session = create_session()
    calls: list[str] = []

    async def make(_session: Session) -> int:
        calls.append("make")
        await asyncio.sleep(0)
        return len(calls)

    async def fail(_session: Session) -> int:
        calls.append("fail")
        raise CheckFailed("seen")

    assert list(await asyncio.gather(session.once(make), session.once(make))) == [1, 1]
    for _ in range(2):
        with pytest.raises(CheckFailed, match="seen"):
            await session.once(fail)
    assert calls == ["make", "fail"]


def test_require_raises_only_without_condition() -> None:
    require([1], "seen")
    with pytest.raises(CheckFailed, match="seen"):
        require([], "seen")


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
    result = to_json(create_report(RESULTS))
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
