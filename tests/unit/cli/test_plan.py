"""`svote-helper plan`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helper.errors import ProverError
from tests.support.schemas import assert_conforms
from tests.unit.cli.test_main import run_command

SIZE = ("plan", "--voters", "1000", "--proposals", "2", "--helpers", "10", "--cores", "2")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command(*SIZE, *arguments, "--json") == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    result: dict[str, Any] = json.loads(output)
    assert_conforms("plan", result)
    return result


def test_plan_json_has_the_figures_of_the_round(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys)
    assert (result["shares"], result["proofs"], result["cores_needed"]) == (16_000, 16_000, 1)
    assert result["done_before_end"] is True
    assert (result["round_seconds"], result["distribution"]) == (7 * 86_400, "wallet")
    assert (result["seconds_per_proof"], result["measured"]) == (0.42, False)
    late = run_json(capsys, "--distribution", "deadline", "--round-length", "1h", "--bundles", "3")
    assert late["shares"] == 48_000
    assert (late["done_before_end"], late["limit"]) == (False, "chain")
    assert late["slack_seconds"] < 0
    assert run_json(capsys, "--circuit", "k11")["seconds_per_proof"] == 2.06


def test_plan_prints_a_table_and_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*SIZE) == 0
    output = capsys.readouterr()
    assert "shares of this helper\t16,000 of 32,000\n" in output.out
    assert "All shares are revealed in time" in output.err
    assert run_command(*SIZE, "--round-length", "1h") == 0
    output = capsys.readouterr()
    assert "after the end" in output.out
    assert "Use 3 cores, or several hosts" in output.err
    assert run_command(*SIZE, "--distribution", "deadline", "--round-length", "10min") == 0
    assert "256 reveals per block" in capsys.readouterr().err
    assert run_command(*SIZE, "--round-length", "60") == 0
    assert "no number is enough" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--voters", "0"),
        ("--voters", "many"),
        ("--proposals", "51"),
        ("--helpers", "0"),
        ("--bundles", "0"),
        ("--cores", "0"),
        ("--round-length", "59"),
        ("--round-length", "7w"),
        ("--round-length", "-1d"),
        ("--round-length", "400d"),
        ("--distribution", "late"),
        ("--circuit", "k12"),
        ("--block-seconds", "0"),
        ("--block-seconds", "nan"),
    ],
)
def test_plan_refuses_invalid_arguments(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*SIZE, *arguments) == 2
    assert capsys.readouterr().out == ""


def test_plan_without_the_size_of_the_round_exits_usage() -> None:
    assert run_command("plan", "--voters", "5") == 2


def test_plan_measures_with_a_prover_per_core(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int]] = []

    async def measure(circuit: str, *, provers: int, nice: int) -> float:
        calls.append((circuit, provers))
        if circuit == "k12":
            raise ProverError("unknown circuit")
        return 0.8

    monkeypatch.setattr("helper.cli.plan.measure_proof_seconds", measure)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    result = run_json(capsys, "--measure")
    assert (result["seconds_per_proof"], result["measured"], result["proofs_per_second"]) == (0.8, True, 2.5)
    assert calls == [("k10", 2)]
    assert run_command(*SIZE, "--measure", "--circuit", "k12") == 1
    assert "proofs could not be measured: unknown circuit" in capsys.readouterr().err
    assert run_command(*SIZE, "--measure", "--cores", "3") == 2, "cores that this machine does not have"
