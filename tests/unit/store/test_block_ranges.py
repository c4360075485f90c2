"""Sets of heights as ranges, against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from helper.store.block_ranges import (
    BlockRange,
    add_range,
    count_heights,
    format_ranges,
    parse_ranges,
    remove_heights,
    remove_range,
)

HEIGHTS = st.integers(1, 40)


def expand_ranges(ranges: list[BlockRange]) -> set[int]:
    return {height for first, last in ranges for height in range(first, last + 1)}


@given(st.lists(st.tuples(st.booleans(), HEIGHTS, HEIGHTS), max_size=12))
def test_ranges_hold_the_same_heights_as_a_set(changes: list[tuple[bool, int, int]]) -> None:
    ranges: list[BlockRange] = []
    expected: set[int] = set()
    for adds, first, last in changes:
        span = set(range(first, last + 1))
        if span and adds:
            ranges, expected = add_range(ranges, first, last), expected | span
        elif span:
            ranges, expected = remove_range(ranges, first, last), expected - span
        assert expand_ranges(ranges) == expected
        assert expand_ranges(remove_heights(ranges, span)) == expected - span
        assert count_heights(ranges) == len(expected)
        assert ranges == sorted(ranges)
        assert all(low[1] + 1 < high[0] for low, high in pairwise(ranges)), "no two ranges are adjacent"
        assert parse_ranges(format_ranges(ranges)) == ranges


def test_parse_ranges_of_no_text_is_empty() -> None:
    assert parse_ranges(None) == parse_ranges("") == []
