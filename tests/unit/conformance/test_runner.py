"""Order, verdicts and reasons of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.checks import Check, CheckResult, Phase
from conformance.http_client import HelperClient, parse_address
from conformance.raw_http import ConnectionEnded
from conformance.runner import run_checks
from conformance.session import Session
from conformance.shares import encode, invented_share
from conformance.verdicts import CheckFailed, CheckSkipped, require
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


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
    ]
    results = summarize(await run_checks(create_session(), checks))
    assert results[0] == ("001", "passed", "seen")
    assert results[1][1] == "failed"
    assert len(results[1][2]) == 300
    assert results[2:] == [
        ("003", "skipped", "reason"),
        ("004", "failed", "unexpected response: KeyError 'buckets'"),
        ("005", "failed", "connection closed"),
    ]


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
