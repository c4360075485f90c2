"""Parsing of `--round` and `--due-before`."""

from __future__ import annotations

from typing import Any

import pytest

from helper.cli.operator_api import OperatorApi, Selection, parse_due_before
from helper.cli.queue import print_stats
from helper.config.sections import Config
from helper.errors import NotFound, UsageError

NOW = 1_795_268_000.7
ROUNDS = ("3fa2c9d1" + "0" * 56, "3fa2c9d1" + "1" * 56, "77ffee00" * 8)
API = OperatorApi(Config())


@pytest.fixture(autouse=True)
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_api: OperatorApi, path: str) -> dict[str, Any]:
        assert path == "/rounds"
        return {"rounds": [{"round": round_id} for round_id in ROUNDS]}

    monkeypatch.setattr(OperatorApi, "get", get)


def parse_round(text: str) -> str:
    return Selection(round_id=text).to_query(API)["round"]


def test_round_argument_accepts_unique_prefix() -> None:
    assert parse_round("77FFEE") == parse_round(ROUNDS[2].upper()) == ROUNDS[2]
    assert parse_round(ROUNDS[1][:9]) == ROUNDS[1]
    assert parse_round("") == ""
    assert parse_round("ab" * 32) == "ab" * 32, "a complete reference is checked by the server"


@pytest.mark.parametrize("text", ["77ffe", "77ffeg", "../../..", ROUNDS[0][:8]])
def test_round_argument_invalid_or_ambiguous_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"64 hex characters|2 rounds begin"):
        parse_round(text)


def test_round_argument_unknown_round_is_not_found() -> None:
    with pytest.raises(NotFound, match="begins with abcdef"):
        parse_round("abcdef")


@pytest.mark.parametrize(
    ("text", "second"),
    [
        ("", ""),
        ("1795268123", "1795268123"),
        ("+90s", "1795268090"),
        ("+5min", "1795268300"),
        ("+5m", "1795268300"),
        ("+2h", "1795275200"),
        ("+1d", "1795354400"),
        ("2026-11-21 13:33:20", "1795268000"),
        ("2026-11-21T14:33:20+01:00", "1795268000"),
        ("2026-11-21 13:33:20.001", "1795268001"),
    ],
)
def test_time_argument_accepts_table_format_and_relative(text: str, second: str) -> None:
    assert parse_due_before(text, NOW) == second


@pytest.mark.parametrize("text", ["soon", "5min", "+5", "+5 weeks", "-1"])
def test_time_argument_invalid_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="due_before must be Unix seconds"):
        parse_due_before(text, NOW)


def test_stats_are_printed_one_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    service = {
        "checks": [{"name": "store", "problem": None}, {"name": "chain", "problem": "no chain node is in sync"}],
        "endpoints": [{"name": "node_1:80", "reason": None, "height": 7, "block_age": 1.024}],
        "provers": {"pids": [5, 6], "deaths": {}},
        "clock_skew": 0.46818,
        "proof": {"count": 16, "p50_ms": 1141.1, "p99_ms": 1714.1, "min_ms": 784.6, "max_ms": 1714.2},
        "queue_age": {"count": 0, "p50_ms": None, "p99_ms": None, "min_ms": None, "max_ms": None},
        "recent_failures": [{"stage": "proof", "reason": "timed out"}],
        "process": {"core_bytes": 0, "dumpable": False},
        "in_hand": 2,
        "paused": None,
        "counts": {"too_late": 1},
    }
    total = dict.fromkeys(("received", "witnessed", "broadcast", "submitted", "failed", "total"), 0)
    empty: dict[str, Any] = {"rounds": {}, "failed": [], "failed_before": [], "damaged": []}
    print_stats({"total": total, **empty, "service": service})
    assert capsys.readouterr().out.splitlines()[4:] == [
        "check store\tok",
        "check chain\tno chain node is in sync",
        "node node_1:80\tok, height 7, block age 1.0",
        "provers pids\t5, 6",
        "unexpected exits of provers\t-",
        "clock minus chain, seconds\t0.468",
        "time of a proof\t16: median 1141 ms, p99 1714 ms, max 1714 ms",
        "time in the queue\tnone yet",
        "failure 0 stage\tproof",
        "failure 0 reason\ttimed out",
        "limit of core files, bytes\t0",
        "core files and debuggers possible\tno",
        "shares being proven or sent\t2",
        "processing paused\t-",
        "since the start: too late\t1",
    ]
