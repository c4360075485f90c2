"""What an answer of a node proves about what it did not hold."""

from __future__ import annotations

import pytest

from helper.chain.models import BlockHead
from helper.pace import Look, Pace, next_look


def head(height: int, time: float) -> BlockHead:
    return BlockHead("svote-1", height, time)


def learnt(interval: float, *, age: float = 0.2, blocks: int = 6) -> Pace:
    """A pace learnt from blocks up to height `blocks`, whose time is `blocks * interval`."""
    pace = Pace()
    for height in range(1, blocks + 1):
        pace.saw(head(height, height * interval), height * interval + age)
    return pace


def test_a_look_covers_a_block_once_the_node_had_time_to_execute_it() -> None:
    first = next_look(None, head(1, 10.0), 10.2)
    assert (first.settled, first.covered) == (False, None)
    second = next_look(first, head(2, 16.0), 16.2)
    assert (second.settled, second.covered) == (False, 10.0)
    again = next_look(second, head(2, 16.0), 17.2)
    assert (again.settled, again.covered) == (True, 16.0)
    hasty = next_look(second, head(2, 16.0), 16.21)
    assert hasty.covered == 10.0
    assert next_look(hasty, head(2, 16.0), 16.4).covered == 16.0, "counted from the first look at this head"


def test_a_node_that_is_behind_the_one_asked_before_covers_nothing() -> None:
    ahead = next_look(next_look(None, head(9, 90.0), 90.2), head(10, 100.0), 100.2)
    behind = next_look(ahead, head(7, 70.0), 100.4)
    assert behind.covered is None


def test_pace_is_the_median_of_the_intervals_and_at_least_a_second() -> None:
    assert Pace().interval == 1.0
    assert learnt(6.0).interval == 6.0
    assert learnt(0.3).interval == 1.0
    pace = learnt(6.0)
    pace.saw(head(16, 6 * 6.0 + 60.0), 100.0)
    assert pace.interval == 6.0, "ten blocks in sixty seconds, seen at once"
    pace.saw(head(17, 600.0), 600.2)
    assert pace.interval == 6.0, "one long wait is no pace"


@pytest.mark.parametrize(
    ("interval", "first_seen", "asked", "expected"),
    [
        (6.0, 0.2, 1.2, True),
        (6.0, 0.2, 7.9, True),
        (6.0, 0.2, 8.1, False),  # a block is overdue
        (6.0, 6.3, 7.4, False),  # not old for such a chain, but seen a whole block late
        (1.0, 0.2, 2.9, True),
        (1.0, 2.2, 2.9, False),
    ],
)
def test_in_step_is_who_has_no_block_overdue(interval: float, first_seen: float, asked: float, expected: bool) -> None:
    pace = learnt(interval)
    newest = head(7, 7 * interval)
    pace.saw(newest, newest.time + first_seen)
    assert pace.in_step(newest, newest.time + asked) is expected
    assert not pace.in_step(head(6, 6 * interval), newest.time + asked), "another node has shown more"


def test_a_chain_whose_blocks_are_stamped_an_interval_ago_is_in_step() -> None:
    pace = learnt(6.0, age=6.3)
    assert pace.in_step(head(6, 36.0), 36.0 + 7.5)


def test_absence_is_proven_by_a_block_after_the_share() -> None:
    pace = learnt(6.0)
    assert not pace.proves_absence(None, 40.0)
    early = Look(39.0, 36.2, head(6, 36.0))
    assert not pace.proves_absence(early, 40.0), "asked before the share came"
    covering = Look(48.2, 48.2, head(8, 48.0), before=42.0)
    assert pace.proves_absence(covering, 40.0)
    assert not pace.proves_absence(covering, 43.0)


def test_absence_is_proven_by_a_node_that_is_in_step() -> None:
    pace = learnt(6.0)
    settled = Look(37.4, 36.2, head(6, 36.0))
    assert pace.proves_absence(settled, 37.0)
    assert not pace.proves_absence(Look(37.4, 37.4, head(6, 36.0)), 37.0), "not executed for certain"
    assert not pace.proves_absence(Look(46.0, 36.2, head(6, 36.0)), 45.0), "the next block is overdue"
