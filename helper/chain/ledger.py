"""Records which heights are read, and selects the next ones. Pure.

A height is read once its agreed block is stored, or once every node reports it as pruned. Nothing else takes a height
out: not a head that a node reports, not a failed request, not a later block. A gap after downtime, a rescan and a
disputed block are all unread heights, and one loop reads them: the newest readable height first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from helper.store.block_ranges import (
    BlockRange,
    add_range,
    clip_ranges,
    count_heights,
    format_ranges,
    parse_ranges,
    remove_range,
)


class Ledger(NamedTuple):
    """Which heights are read: those from `first` to `top`, except `unread`.

    It is a function of the heights read, not of their order.

    Attributes:
        first: the lowest height that matters. Below it nothing was read, and nothing is.
        top: the greatest height read; `first` - 1 before the first.
        unread: the heights below `top` that are not read, as ascending, disjoint ranges.
    """

    first: int
    top: int
    unread: tuple[BlockRange, ...] = ()


def start_ledger(first: int) -> Ledger:
    """A ledger in which every height from `first` on is unread."""
    return Ledger(first, first - 1)


def take_out(ledger: Ledger, first: int, last: int) -> Ledger:
    """Record the heights from `first` to `last` as read. Heights below the ledger's first are ignored."""
    low = max(first, ledger.first)
    if low > last:
        return ledger
    unread = [*ledger.unread]
    if low > ledger.top + 1:
        unread = add_range(unread, ledger.top + 1, low - 1)
    return Ledger(ledger.first, max(ledger.top, last), tuple(remove_range(unread, low, last)))


def add(ledger: Ledger, first: int, last: int) -> Ledger:
    """Record the heights from `first` to `last` as unread again: a rescan, or a round that began before the ledger."""
    lowest, top, unread = min(first, ledger.first), ledger.top, [*ledger.unread]
    if lowest < ledger.first:
        unread = add_range(unread, lowest, ledger.first - 1)
    if first <= min(last, top):
        unread = add_range(unread, first, min(last, top))
    if unread and unread[-1][1] == top:  # nothing is read above this gap
        top = unread.pop()[0] - 1
    return Ledger(lowest, top, tuple(unread))


def next_heights(ledger: Ledger, head: int, deferred: Mapping[int, float], now: float, limit: int) -> tuple[int, ...]:
    """The unread heights to read next, newest first, at most `limit`.

    Args:
        ledger: which heights are read.
        head: the agreed height; no node is asked for a block above it.
        deferred: heights that could not be read, with the time of the next attempt. They delay no other height.
        now: the present time, on the clock of `deferred`.
        limit: the greatest number of heights.
    """
    heights: list[int] = []
    for first, last in reversed(clip_ranges([*ledger.unread, (ledger.top + 1, head)], ledger.first, head)):
        for height in range(last, first - 1, -1):
            if len(heights) == limit:
                return tuple(heights)
            if deferred.get(height, now) <= now:
                heights.append(height)
    return tuple(heights)


def is_read(ledger: Ledger, first: int, last: int) -> bool:
    """Whether every height from `first` to `last` is read. This is the condition to close a round."""
    return ledger.first <= first and last <= ledger.top and not clip_ranges(ledger.unread, first, last)


def count_unread(ledger: Ledger, head: int) -> int:
    """Number of unread heights up to `head`."""
    return count_heights(clip_ranges([*ledger.unread, (ledger.top + 1, head)], ledger.first, head))


def format_ledger(ledger: Ledger) -> str:
    """The stored form, such as "5:90:20-29,41-41"."""
    return f"{ledger.first}:{ledger.top}:{format_ranges(ledger.unread)}"


def parse_ledger(text: str) -> Ledger:
    """Parse the output of `format_ledger`."""
    first, top, unread = text.split(":")
    return Ledger(int(first), int(top), tuple(parse_ranges(unread)))
