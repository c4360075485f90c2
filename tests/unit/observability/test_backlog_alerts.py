"""The alert rules for rounds that will not be finished in time, evaluated on simulated rounds."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest
import yaml

ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yaml"
SCRAPE_SECONDS, FOR_SECONDS, RANGE_SECONDS = 15, 300, 900
HOUR = 3600


def load_rule(name: str) -> dict[str, Any]:
    (rule,) = [rule for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"] if rule["alert"] == name]
    loaded: dict[str, Any] = rule
    return loaded


def seconds_ahead(load: float, window: int, *, before: float = 0.0) -> int | None:
    """Return how long before the end of a round the rule fires; None if it does not.

    Args:
        load: shares that become due in the last-moment window, relative to what the provers can prove in that time.
        window: length of that window in seconds.
        before: seconds of proofs that are due at its beginning.
    """
    rule = load_rule("SvoteHelperRoundAtRisk")
    assert rule["for"] == f"{FOR_SECONDS // 60}m"
    # for one series, this subset of PromQL is Python
    expression, count = re.subn(rf"helper_backlog_drain_seconds\[{RANGE_SECONDS // 60}m\]", "history", rule["expr"])
    assert count == 1
    drain = before
    since: int | None = None
    history: list[tuple[float, float]] = []

    def deriv(points: list[tuple[float, float]]) -> float:
        points = points[-RANGE_SECONDS // SCRAPE_SECONDS :]
        times, values = [time for time, _ in points], [value for _, value in points]
        return linear_regression(times, values).slope if len(points) > 1 else 0.0

    for time in range(0, window, SCRAPE_SECONDS):
        history.append((time, drain))
        names = {
            "helper_backlog_drain_seconds": drain,
            "helper_round_left_seconds": window - time,
            "history": history,
            "deriv": deriv,
        }
        if eval(" ".join(expression.split()), names):
            since = time if since is None else since
            if time - since >= FOR_SECONDS:
                return window - time
        else:
            since = None
        drain = max(0.0, drain + (load - 1) * SCRAPE_SECONDS)
    return None


@pytest.mark.parametrize(("load", "window"), [(1.02, 6 * HOUR), (1.2, 6 * HOUR), (5, 6 * HOUR), (1.1, HOUR), (3, HOUR)])
def test_alert_fires_half_an_hour_before_the_end_of_a_flood(load: float, window: int) -> None:
    ahead = seconds_ahead(load, window)
    assert ahead is not None
    assert ahead >= 1800


def test_alert_does_not_fire_if_the_backlog_shrinks_in_time() -> None:
    assert seconds_ahead(0.95, 6 * HOUR) is None
    assert seconds_ahead(0.5, 2 * HOUR, before=HOUR) is None
    ahead = seconds_ahead(0.95, 2 * HOUR, before=HOUR)
    assert ahead is not None, "the backlog shrinks too slowly"
    assert ahead > 1800


def test_alert_for_missing_time_names_the_commands() -> None:
    for name in ("SvoteHelperBacklogTooLarge", "SvoteHelperRoundAtRisk"):
        action = load_rule(name)["annotations"]["action"]
        assert "max_concurrent_proofs" in action
        assert "svote-helper queue export --round ROUND --output FILE" in action
        assert "svote-helper queue import FILE" in action
