"""The ledger equals a plain set of heights, and no order of reads, gaps or deferrals loses a height."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.store.ledger import (
    Ledger,
    Rescan,
    add_rescan,
    count_heights,
    find_unread,
    format_ledger,
    is_read,
    mark_pruned,
    mark_read,
    mark_unread,
    next_heights,
    parse_ledger,
    start_ledger,
    truncate,
)

HEIGHTS = st.integers(0, 12)


def read_heights(ledger: Ledger, head: int) -> set[int]:
    return {height for height in range(-1, head + 1) if is_read(ledger, height, height)}


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(["read", "unread"]), HEIGHTS, HEIGHTS), max_size=12))
def test_ledger_is_a_set_of_heights_in_canonical_form(start: int, changes: list[tuple[str, int, int]]) -> None:
    ledger, read, first = start_ledger(start), set[int](), start
    for kind, *bounds in changes:
        low, high = min(bounds), max(bounds)
        if kind == "read":
            ledger = mark_read(ledger, low, high)
            read |= {height for height in range(low, high + 1) if height >= first}
        else:
            ledger = mark_unread(ledger, low, high)
            first = min(first, low)
            read -= set(range(low, high + 1))
        assert read_heights(ledger, 14) == read
        assert parse_ledger(format_ledger(ledger)) == ledger
        assert count_heights(find_unread(ledger, first, 14)) == 15 - first - len(read)
        # One set has one form: it equals the ledger that reads these heights in order.
        canonical = start_ledger(first)
        for height in sorted(read):
            canonical = mark_read(canonical, height, height)
        assert ledger == canonical


def test_every_order_of_five_heights_ends_in_the_same_ledger() -> None:
    for order in permutations(range(3, 8)):
        ledger = start_ledger(3)
        for height in order:
            ledger = mark_read(ledger, height, height)
        assert ledger == Ledger(3, 7)


@pytest.mark.parametrize(
    ("head", "deferred", "heights"),
    [
        (12, {}, (12, 11, 8)),  # the head first, then the newest gap
        (12, {12: 5.0, 8: 5.0}, (11, 7, 3)),  # what cannot be read now delays nothing else
        (12, {12: 4.0}, (12, 11, 8)),
        (9, {}, (8, 7, 3)),  # no block above the agreed height
        (2, {}, ()),
    ],
)
def test_next_heights(head: int, deferred: dict[int, float], heights: tuple[int, ...]) -> None:
    ledger = Ledger(1, 10, ((3, 3), (7, 8)))
    assert next_heights(ledger, (0, head), deferred, now=4.0, limit=3) == heights


def test_heights_above_a_false_head_stay_unread() -> None:
    ledger = mark_read(start_ledger(1), 1, 5)
    assert next_heights(ledger, (0, 90), {}, now=0.0, limit=2) == (90, 89)
    assert next_heights(ledger, (0, 7), {}, now=0.0, limit=9) == (7, 6)


def test_round_that_began_before_the_ledger_is_not_read() -> None:
    ledger = mark_read(start_ledger(50), 50, 60)
    assert not is_read(ledger, 40, 60)
    ledger = mark_unread(ledger, 40, 49)
    assert next_heights(ledger, (0, 60), {}, now=0.0, limit=99) == tuple(range(49, 39, -1))
    assert is_read(mark_read(ledger, 40, 49), 40, 60)


@given(st.sets(st.integers(1, 40)), st.integers(1, 8), st.data())
def test_every_height_is_read_although_some_attempts_fail(read: set[int], limit: int, data: st.DataObject) -> None:
    ledger = start_ledger(1)
    for height in read:
        ledger = mark_read(ledger, height, height)
    deferred: dict[int, float] = {}
    for step in range(400):
        for height in next_heights(ledger, (0, 40), deferred, float(step), limit):
            if step < 40 and data.draw(st.booleans()):
                deferred[height] = step + data.draw(st.integers(1, 5))
            else:
                ledger = mark_read(ledger, height, height)
        if is_read(ledger, 1, 40):
            return
    pytest.fail(f"unread: {ledger}")


def test_rescan_reports_what_is_left_and_pruned() -> None:
    ledger = add_rescan(Ledger(1, 100, ((20, 29),)), 11)
    assert ledger == Ledger(1, 10, (), Rescan(11, 100))
    ledger = mark_pruned(mark_read(ledger, 51, 100), 15)
    assert ledger == Ledger(1, 100, ((16, 50),), Rescan(11, 100, pruned=((11, 15),)))
    assert parse_ledger(format_ledger(ledger)) == ledger
    assert add_rescan(ledger, 101).rescan == Rescan(101, 100), "nothing to read"
    assert add_rescan(ledger, 101).unread == ledger.unread


@given(HEIGHTS, HEIGHTS, st.sets(HEIGHTS))
def test_truncated_ledger_has_read_no_height_above(first: int, last: int, read: set[int]) -> None:
    ledger = start_ledger(first)
    for height in read:
        ledger = mark_read(ledger, height, height)
    truncated = truncate(ledger, last)
    assert read_heights(truncated, 20) == {height for height in read_heights(ledger, 20) if height <= last}
    assert truncated.top <= max(last, ledger.first - 1, last)
