"""Performance figures, their targets, and the document's tables."""

from __future__ import annotations

import pytest

from bench.plot import plot_growth
from bench.table import (
    MEASURES,
    ROWS,
    figures_of_runs,
    format_row,
    growth_exponent,
    meets_goal,
    of_all_host_runs,
    of_largest_size,
    relative_to_empty,
    relative_to_one_process,
)
from scripts.performance_docs import DOCUMENT, PICTURE, render_document, render_plot

RUNS = [{"size": size, "each": size**0.5, "rate": 1000 / size, "flat": 3.0} for size in (10, 10, 1000, 100_000)]


def test_performance_document_has_latest_results() -> None:
    assert DOCUMENT.read_text() == render_document(DOCUMENT.read_text()), "run `make docs`"
    assert PICTURE.read_text() == render_plot(), "run `make docs`"


def test_performance_table_matches_measurements() -> None:
    assert {row.measure for row in ROWS} == set(MEASURES)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("value", "goal", "is_met"),
    [(5400, "≥ 5,400", True), (5399, "≥ 5,400", False), (0.5, "≤ 0.5", True), (0.51, "≤ 0.5", False)],
)
def test_goal_is_met_or_missed(value: float, goal: str, is_met: bool) -> None:
    assert meets_goal(value, goal) is is_met


def test_growth_is_logarithmic_slope() -> None:
    assert growth_exponent("each")(RUNS) == [pytest.approx(0.5)]
    assert growth_exponent("rate", -1)(RUNS) == [pytest.approx(1.0)], "a falling rate is a growing cost"
    assert growth_exponent("flat")(RUNS) == [pytest.approx(0.0)]
    assert growth_exponent("each")(RUNS[:2]) == [], "one size gives no slope"


def test_largest_queue_is_compared_with_empty_one_of_same_run() -> None:
    assert of_largest_size("flat")(RUNS) == [3.0]
    measurements = [
        {"size": 0, "rate": 2.0},
        {"size": 9, "rate": 1.0},
        {"size": 9, "rate": 2.0},
        {"size": 0, "rate": 8.0},
    ]
    assert relative_to_empty("rate")(measurements) == [0.5, 0.25]
    with pytest.raises(ValueError, match="argument"):
        relative_to_empty("rate")(measurements[1:])


def test_table_line_shows_goal_result_spread_and_verdict() -> None:
    row = next(row for row in ROWS if row.name == "accept latency, 64 connections, p99")
    figure = row.figure([{"p99_ms": 31.0}, {"p99_ms": 20.0}, {"p99_ms": 25.0}])
    assert figure == {
        "name": row.name,
        "goal": "≤ 30",
        "figure": 25.0,
        "unit": "ms",
        "holds": True,
        "runs": [31.0, 20.0, 25.0],
    }
    assert format_row(figure) == (row.name, "≤ 30 ms", "25 ms (20 – 31)", "yes")
    assert format_row(row.figure([])) == (row.name, "≤ 30 ms", "not measured", "–")


def test_plot_growth_draws_curves_with_points_and_leaves_out_the_others() -> None:
    svg = plot_growth(
        [
            {"name": "a path < a root", "power": 1, "points": [(10, 1.0), (100, 3.0)]},
            {"name": "nothing", "power": 1, "points": []},
        ]
    )
    assert "a path &lt; a root" in svg
    assert "#1f77b4" in svg, "the color of the first curve"
    assert "#ff7f0e" not in svg, "there is no second curve"
    assert "nothing" not in svg


def test_runs_of_hosts_and_of_processes_are_compared() -> None:
    runs = [{"size": 1, "cost": 2.0}, {"size": 8, "cost": 3.0}]
    runs += [{"size": 0, "processes": 1, "rate": 10.0}, {"size": 0, "processes": 2, "rate": 15.0}]
    assert figures_of_runs("cost", size=8)(runs) == [3.0]
    assert figures_of_runs("rate", processes=1)(runs) == [10.0]
    assert of_all_host_runs("cost")(runs) == [2.0, 3.0]
    assert relative_to_one_process("rate")(runs) == [pytest.approx(1.5)]
    assert relative_to_one_process("rate")(runs[:2]) == []
