"""Suppression of recently reported items."""

from __future__ import annotations

from helper.core.log_limits import LoggedProblem, RecentKeys


def test_recent_keys_are_new_again_after_a_pause() -> None:
    recent = RecentKeys(10.0)
    times = [0.0, 9.0, 18.0, 29.0, 30.0]
    assert [recent.remember("a", time) for time in times] == [True, False, False, True, False]
    assert recent.remember("b", 30.0)
    recent.remember("c", 41.0)
    assert list(recent._seen_at) == ["c"], "no longer in memory"


def test_recent_keys_above_limit_drops_the_oldest() -> None:
    recent = RecentKeys(10.0, max_keys=2)
    assert [recent.remember(key, 0.0) for key in ("a", "b", "a", "c", "a", "b")] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


def test_logged_problem_is_new_when_it_begins_or_changes_and_ends_once() -> None:
    problem = LoggedProblem()
    assert not problem.clear()
    assert [problem.note(reason) for reason in ("full", "full", "slow", "full")] == [True, False, True, True]
    assert [problem.clear(), problem.clear()] == [True, False]
    assert [problem.note(), problem.note(), problem.clear(), problem.note()] == [True, False, True, True]
