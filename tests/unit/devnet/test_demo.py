"""The demo's final stage: it ends with the tally, not with the round's end time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from devnet.demo.plan import DURATION_FACTOR, DemoOptions, round_seconds
from devnet.demo.progress import ProgressBars
from devnet.demo.report import build_result, is_successful, merge_fleet_stats, print_report
from devnet.demo.run import Demo
from tests.support.process import TIMEOUT_SECONDS
from tests.unit.cli.test_main import run_command

CHECKS = [
    {"id": "A1", "verdict": "passed", "why": "", "count": 3},
    {"id": "E", "verdict": "not_checked", "why": "one node", "count": 1},
]
AUDITED: dict[str, Any] = {"round": "00" * 32, "verdict": "not_checked", "checks": CHECKS, "seconds": 1.5}
OPTIONS = DemoOptions(voters=1)


@pytest.fixture
async def demo() -> AsyncIterator[Demo]:
    async def audit(_: object, __: bytes) -> dict[str, Any]:
        return AUDITED

    chain = {"rest": "http://chain", "rpc": "http://rpc"}
    demo_ = Demo(OPTIONS, chain, {"urls": ["http://helper"], "sockets": []}, audit=audit)
    real = demo_._http
    yield demo_
    await real.aclose()


@pytest.mark.parametrize(
    ("confirmed", "posted"),
    [
        (
            OPTIONS.share_count,
            [
                ("/devnet/faults", {"halt_chain": True}),
                ("/devnet/mine", {"blocks": 8, "time": 1001}),
                ("/devnet/faults", {"halt_chain": False}),
            ],
        ),
        (OPTIONS.share_count - 1, []),
    ],
)
async def test_round_end_with_all_shares_confirmed_produces_its_blocks_immediately(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, confirmed: int, posted: list[tuple[str, Any]]
) -> None:
    requests: list[tuple[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={})

    async def facts() -> dict[str, Any]:
        return {"counts": {"confirmed": confirmed}}

    monkeypatch.setattr(demo, "_merged_stats", facts)
    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as chain, asyncio.timeout(TIMEOUT_SECONDS):
        monkeypatch.setattr(demo, "_http", chain)
        await demo._end_round(1000, ProgressBars(1))
    assert requests == posted


def helper_facts(confirmed: int, proven: int, p50: float | None) -> dict[str, Any]:
    times = {"p50_ms": p50, "p99_ms": p50}
    return {
        "counts": {"confirmed": confirmed, "proven": proven},
        "proving_seconds": 2.0 if proven else 0.0,
        "lateness_start": times,
        "lateness_broadcast": times,
        "proof": times,
        "circuit": "k10",
        "provers": {"workers": 2, "self_test_seconds": p50},
    }


def test_fleet_stats_are_sums_of_counts_and_largest_times() -> None:
    merged = merge_fleet_stats([helper_facts(20, 9, 5.0), helper_facts(24, 0, None), helper_facts(20, 25, 7.0)])
    assert merged["counts"] == {"confirmed": 64, "proven": 34}
    assert merged["provers"] == {"workers": 6, "self_test_seconds": 7.0}
    assert (merged["lateness_start"]["p99_ms"], merged["proving_seconds"]) == (7.0, 2.0)


def test_fleet_result_counts_each_share_once() -> None:
    options = DemoOptions(voters=1, helpers=3)
    assert (options.helpers_per_share, options.share_count, options.copy_count) == (2, 32, 64)
    merged = merge_fleet_stats([helper_facts(20, 8, 5.0), helper_facts(24, 8, 5.0), helper_facts(20, 24, 5.0)])
    result = build_result(options, [], merged, counted={}, early=0, audited=AUDITED, seconds=1.0)
    assert (result["confirmed"], result["helpers"], result["proofs_per_reveal"]) == (32, 3, 1.25)


def report_text(result: dict[str, Any]) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    print_report(result, console)
    return console.export_text()


def test_report_has_the_verdict_of_the_audit_and_fails_with_a_failed_check() -> None:
    figures = helper_facts(32, 32, 5.0)
    result = build_result(OPTIONS, [], figures, counted={}, early=0, audited=AUDITED, seconds=1.0)
    result |= {"accepted": 32, "tally_ok": True}
    assert is_successful(result)
    assert "not checked (1 of 2 checks passed, 1.5 s)" in report_text(result)
    assert "E not checked: one node" in report_text(result)
    failed = [{"id": "B1", "verdict": "failed", "why": "the sum does not match", "count": 1}, CHECKS[0]]
    audited = {**AUDITED, "verdict": "failed", "checks": failed}
    result |= {"audit": build_result(OPTIONS, [], figures, counted={}, early=0, audited=audited, seconds=1.0)["audit"]}
    assert not is_successful(result)
    assert "B1 failed: the sum does not match" in report_text(result)


def test_round_of_fleet_lasts_until_every_copy_could_be_proven() -> None:
    one, three = DemoOptions(voters=1), DemoOptions(voters=1, helpers=3)
    assert round_seconds(three, 1.0, 2) - round_seconds(one, 1.0, 2) == DURATION_FACTOR * 32 / 2


@pytest.mark.parametrize(
    "arguments",
    [("--store", "postgres"), ("--db", "queue.db"), ("--helpers", "0"), ("--helpers", "21"), ("--wallets", "all")],
)
def test_demo_of_fleet_with_other_store_or_bad_number_is_usage_error(arguments: tuple[str, str]) -> None:
    assert run_command("demo", "--helpers", "2", *arguments) == 2


def test_demo_does_not_use_an_existing_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = tmp_path / "queue.db"
    queue.touch()
    assert run_command("demo", "--db", str(queue)) == 2
    assert "exists already" in capsys.readouterr().err
