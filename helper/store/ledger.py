"""The ledger: which blocks are read, and which are read next. Pure.

A height is read once its agreed block is stored, or once every node reports it as pruned. Nothing else marks a
height as read: not a head that a node reports, not a failed request, not a later block. A gap after downtime, a rescan
and a disputed block are all unread heights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

LEDGER_KEY: Final = "chain.ledger"
"""Key of the ledger in `meta`."""

BlockRange = tuple[int, int]
"""First and last height, both included."""


class Rescan(NamedTuple):
    """The latest rescan: blocks that an operator wants to be read again.

    Attributes:
        first: the first height; greater than `last` if there is no block to read.
        last: the last height.
        added: nullifiers found that were not stored before.
        confirmed: this queue's shares that were confirmed by them.
        pruned: the heights that every node has pruned.
    """

    first: int
    last: int
    added: int = 0
    confirmed: int = 0
    pruned: tuple[BlockRange, ...] = ()


class Ledger(NamedTuple):
    """Which heights are read: those from `first` to `top`, except `unread`.

    Without its rescan, it is a function of the heights read, not of their order.

    Attributes:
        first: the lowest height that matters. Below it nothing was read, and nothing is.
        top: the greatest height read; `first` - 1 before the first.
        unread: the heights below `top` that are not read, as ascending, disjoint ranges.
        rescan: the latest rescan, None before the first.
    """

    first: int
    top: int
    unread: tuple[BlockRange, ...] = ()
    rescan: Rescan | None = None


def start_ledger(first: int) -> Ledger:
    """A ledger in which every height from `first` on is unread."""
    return Ledger(first, first - 1)


def mark_read(ledger: Ledger, first: int, last: int) -> Ledger:
    """Record the heights from `first` to `last` as read. Heights below the ledger's first are ignored."""
    low = max(first, ledger.first)
    if low > last:
        return ledger
    unread = [*ledger.unread]
    if low > ledger.top + 1:
        unread = add_range(unread, ledger.top + 1, low - 1)
    return ledger._replace(top=max(ledger.top, last), unread=tuple(_remove_range(unread, low, last)))


def mark_unread(ledger: Ledger, first: int, last: int) -> Ledger:
    """Record the heights from `first` to `last` as unread again: a rescan, or a round that began before the ledger."""
    lowest, top, unread = min(first, ledger.first), ledger.top, [*ledger.unread]
    if lowest < ledger.first:
        unread = add_range(unread, lowest, ledger.first - 1)
    if first <= min(last, top):
        unread = add_range(unread, first, min(last, top))
    if unread and unread[-1][1] == top:  # nothing is read above this gap
        top = unread.pop()[0] - 1
    return ledger._replace(first=lowest, top=top, unread=tuple(unread))


def truncate(ledger: Ledger, last: int) -> Ledger:
    """Forget the heights above `last`: the chain has been reset to an earlier height."""
    if last >= ledger.top:
        return ledger
    first = min(ledger.first, last + 1)
    return mark_unread(Ledger(first, last, clip_ranges(ledger.unread, first, last), ledger.rescan), last + 1, last)


def mark_pruned(ledger: Ledger, last: int) -> Ledger:
    """Record the unread heights up to `last` as read, because every node has pruned them."""
    rescan = ledger.rescan
    if rescan is not None:
        pruned = list(rescan.pruned)
        for low, high in find_unread(ledger, rescan.first, min(last, rescan.last)):
            pruned = add_range(pruned, low, high)
        rescan = rescan._replace(pruned=tuple(pruned))
    return mark_read(ledger, ledger.first, last)._replace(rescan=rescan)


def add_rescan(ledger: Ledger, first: int) -> Ledger:
    """Record the heights from `first` to the greatest one read as unread again, at the operator's request."""
    return mark_unread(ledger, min(first, ledger.top + 1), ledger.top)._replace(rescan=Rescan(first, ledger.top))


def next_heights(
    ledger: Ledger, within: BlockRange, deferred: Mapping[int, float], now: float, limit: int
) -> tuple[int, ...]:
    """The unread heights within a range to read next, newest first, at most `limit`.

    The range has no height above the agreed one: no node is asked for such a block. `deferred` has heights that could
    not be read, with the time of the next attempt; they delay no other height.
    """
    heights: list[int] = []
    for low, high in reversed(find_unread(ledger, *within)):
        for height in range(high, low - 1, -1):
            if len(heights) == limit:
                return tuple(heights)
            if deferred.get(height, now) <= now:
                heights.append(height)
    return tuple(heights)


def find_unread(ledger: Ledger, first: int, last: int) -> tuple[BlockRange, ...]:
    """The unread heights from `first` to `last`, as ascending, disjoint ranges."""
    return clip_ranges([*ledger.unread, (ledger.top + 1, max(last, ledger.top + 1))], max(first, ledger.first), last)


def is_read(ledger: Ledger, first: int, last: int) -> bool:
    """Whether every height from `first` to `last` is read. This is the condition to close a round."""
    return ledger.first <= first and not find_unread(ledger, first, last)


def format_ledger(ledger: Ledger) -> str:
    """The stored form: a JSON array."""
    return json.dumps(ledger, separators=(",", ":"))


@lru_cache(4)
def parse_ledger(text: str | None) -> Ledger | None:
    """Parse the output of `format_ledger`. Returns None for None."""
    if text is None:
        return None
    first, top, unread, rescan = json.loads(text)
    ledger = Ledger(first, top, _parse_ranges(unread))
    if rescan is None:
        return ledger
    first, last, added, confirmed, pruned = rescan
    return ledger._replace(rescan=Rescan(first, last, added, confirmed, _parse_ranges(pruned)))


def _parse_ranges(ranges: Iterable[Sequence[Any]]) -> tuple[BlockRange, ...]:
    return tuple((first, last) for first, last in ranges)


def add_range(ranges: Iterable[BlockRange], first: int, last: int) -> list[BlockRange]:
    """The ranges with the heights from `first` to `last` added; touching ranges are joined."""
    joined: list[BlockRange] = []
    for low, high in sorted([*ranges, (first, last)]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def _remove_range(ranges: Iterable[BlockRange], first: int, last: int) -> list[BlockRange]:
    pieces = [piece for low, high in ranges for piece in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return [(low, high) for low, high in pieces if low <= high]


def clip_ranges(ranges: Iterable[BlockRange], first: int, last: int) -> tuple[BlockRange, ...]:
    """The parts of the ranges from `first` to `last`."""
    parts = [(max(low, first), min(high, last)) for low, high in ranges]
    return tuple((low, high) for low, high in parts if low <= high)


def count_heights(ranges: Iterable[BlockRange]) -> int:
    """The number of heights in the ranges."""
    return sum(last - first + 1 for first, last in ranges)
