"""Figures, their goals, and what the document says of them."""

from __future__ import annotations

import pytest

from bench.plot import plot_growth
from bench.table import MEASURES, ROWS, against_empty, by_hosts, each, exponent, holds, largest, of_two, told
from scripts.performance_docs import DOCUMENT, PICTURE, picture, render

RUNS = [{"size": size, "each": size**0.5, "rate": 1000 / size, "flat": 3.0} for size in (10, 10, 1000, 100_000)]


def test_the_document_has_the_figures_that_were_measured_last() -> None:
    assert DOCUMENT.read_text() == render(DOCUMENT.read_text()), "run `make docs`"
    assert PICTURE.read_text() == picture(), "run `make docs`"


def test_every_measure_is_in_the_table_and_every_line_has_a_measure() -> None:
    assert {row.measure for row in ROWS} == set(MEASURES)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [(5400, "≥ 5,400", True), (5399, "≥ 5,400", False), (0.5, "≤ 0.5", True), (0.51, "≤ 0.5", False)],
)
def test_a_goal_is_met_or_not(value: float, goal: str, met: bool) -> None:
    assert holds(value, goal) is met


def test_growth_is_the_slope_in_logarithms() -> None:
    assert exponent("each")(RUNS) == [pytest.approx(0.5)]
    assert exponent("rate", -1)(RUNS) == [pytest.approx(1.0)], "a rate that falls is a cost that grows"
    assert exponent("flat")(RUNS) == [pytest.approx(0.0)]
    assert exponent("each")(RUNS[:2]) == [], "one size has no slope"


def test_the_largest_is_compared_with_the_empty_one_that_was_measured_beside_it() -> None:
    assert largest("flat")(RUNS) == [3.0]
    beside = [{"size": 0, "rate": 2.0}, {"size": 9, "rate": 1.0}, {"size": 9, "rate": 2.0}, {"size": 0, "rate": 8.0}]
    assert against_empty("rate")(beside) == [0.5, 0.25]
    with pytest.raises(ValueError, match="argument"):
        against_empty("rate")(beside[1:])


def test_a_line_tells_goal_figure_spread_and_whether_it_holds() -> None:
    row = next(row for row in ROWS if row.name == "accepting, 64 connections, p99")
    figure = row.figure([{"p99_ms": 31.0}, {"p99_ms": 20.0}, {"p99_ms": 25.0}])
    assert figure == {
        "name": row.name,
        "goal": "≤ 30",
        "figure": 25.0,
        "unit": "ms",
        "holds": True,
        "runs": [31.0, 20.0, 25.0],
    }
    assert told(figure) == (row.name, "≤ 30 ms", "25 ms (20 – 31)", "yes")
    assert told(row.figure([])) == (row.name, "≤ 30 ms", "not measured", "–")


def test_plot_growth_draws_curves_with_points_and_leaves_out_the_others() -> None:
    svg = plot_growth(
        [
            {"name": "a path < a root", "power": 1, "points": [(10, 1.0), (100, 3.0)]},
            {"name": "nothing", "power": 1, "points": []},
        ]
    )
    assert "a path &lt; a root" in svg
    assert "#1f77b4" in svg, "the colour of the first curve"
    assert "#ff7f0e" not in svg, "there is no second curve"
    assert "nothing" not in svg


def test_runs_of_several_hosts_and_of_several_processes_stand_beside_each_other() -> None:
    runs = [{"size": 1, "cost": 2.0}, {"size": 8, "cost": 3.0}]
    runs += [{"size": 0, "processes": 1, "rate": 10.0}, {"size": 0, "processes": 2, "rate": 15.0}]
    assert each("cost", size=8)(runs) == [3.0]
    assert each("rate", processes=1)(runs) == [10.0]
    assert by_hosts("cost")(runs) == [2.0, 3.0]
    assert of_two("rate")(runs) == [pytest.approx(1.5)]
    assert of_two("rate")(runs[:2]) == []
