"""What waits against the time that is left."""

from __future__ import annotations

import pytest

from helper.doctor.backlog import REVEALS_A_BLOCK, ProofRate, Waiting, judge_backlog
from helper.doctor.result import Level

NOW = 1_000_000.0
ONE_A_SECOND = ProofRate(seconds_per_proof=2.0, slots=2, block_seconds=1.0)
MINUTE = 60


def waits(left: int, minutes: float, *, name: str = "aa", at_end: int = 0, later: int = 0) -> Waiting:
    """A round that ends in so many minutes; `at_end` of its shares are due in the last whole minute."""
    due = [left - at_end - later, *[0] * 59]
    due[max(0, int(minutes) - 1) if at_end else 0] += at_end
    return Waiting(name * 32, NOW + minutes * MINUTE, left, minutes=due, later=later)


def test_nothing_waits() -> None:
    (found,) = judge_backlog([], ONE_A_SECOND, NOW)
    assert (found.level, found.message) == (Level.OK, "no share waits")
    (found,) = judge_backlog([waits(0, 5)], ONE_A_SECOND, NOW)
    assert found.level is Level.OK


def test_it_says_what_is_needed_and_what_is_left() -> None:
    (found,) = judge_backlog([waits(2280, 51)], ONE_A_SECOND, NOW)
    assert found.level is Level.OK
    assert found.subject == "round aaaaaaaa"
    assert found.message == "2280 shares left, 38 min needed, 51 min left"
    assert found.facts["seconds_needed"] == 2280
    assert found.facts["seconds_left"] == 3060


@pytest.mark.parametrize(
    ("left", "level"), [(2400, Level.OK), (2500, Level.WARN), (3000, Level.WARN), (3001, Level.FAIL)]
)
def test_tight_is_a_warning_and_too_late_a_failure(left: int, level: Level) -> None:
    (found,) = judge_backlog([waits(left, 50)], ONE_A_SECOND, NOW)
    assert found.level is level
    assert bool(found.advice) is (level is not Level.OK)


def test_a_round_waits_for_those_that_end_before_it() -> None:
    later, earlier = waits(1800, 60, name="bb"), waits(1900, 40)
    first, second = judge_backlog([later, earlier], ONE_A_SECOND, NOW)
    assert (first.subject, first.level) == ("round aaaaaaaa", Level.OK)
    assert (second.subject, second.level) == ("round bbbbbbbb", Level.FAIL), "3,700 of 3,600 seconds"
    (alone,) = judge_backlog([later], ONE_A_SECOND, NOW)
    assert alone.level is Level.OK


def test_what_is_due_at_the_very_end_must_be_proven_then() -> None:
    (found,) = judge_backlog([waits(100, 30, at_end=100)], ONE_A_SECOND, NOW)
    assert found.level is Level.FAIL
    assert found.facts["too_many_at_the_end"] == 40
    assert "40 of those due in its last 60 s" in found.message
    (found,) = judge_backlog([waits(60, 30, at_end=60)], ONE_A_SECOND, NOW)
    assert found.level is Level.OK
    (found,) = judge_backlog([waits(101, 30, at_end=100, later=1)], ONE_A_SECOND, NOW)
    assert found.level is Level.OK, "its end is beyond what is known by the minute"


def test_a_round_whose_time_is_over_is_told_also_when_all_was_sent() -> None:
    over = Waiting("aa" * 32, NOW - 1, 0, unconfirmed=3)
    (found,) = judge_backlog([over], ONE_A_SECOND, NOW)
    assert (found.level, found.message) == (Level.FAIL, "3 shares left, and its time is over")


def test_the_chains_blocks_bound_the_pace() -> None:
    quick = ProofRate(seconds_per_proof=0.001, slots=64, block_seconds=5.0)
    assert quick.per_second == REVEALS_A_BLOCK / 5
    assert ProofRate(None, 2, 5.0).per_second == REVEALS_A_BLOCK / 5
    (found,) = judge_backlog([waits(10, 10)], ProofRate(None, 2), NOW)
    assert "proving was not measured" in found.message
    assert ProofRate(2.0, 4, 1.0).per_second == 2.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(61, "61 s left"), (600, "10 min left"), (9000, "2.5 h left"), (432_000, "5.0 days left")]
)
def test_times_are_for_people(seconds: int, text: str) -> None:
    (found,) = judge_backlog([Waiting("aa" * 32, NOW + seconds, 1)], ONE_A_SECOND, NOW)
    assert text in found.message
