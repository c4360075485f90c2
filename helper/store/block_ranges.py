"""Sets of block heights as ascending, disjoint, inclusive ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

BlockRange = tuple[int, int]
"""First and last height, both included."""


def add_range(ranges: Sequence[BlockRange], first: int, last: int) -> list[BlockRange]:
    """Return the ranges with the heights from `first` to `last` added; touching ranges are joined."""
    joined: list[BlockRange] = []
    for low, high in sorted([*ranges, (first, last)]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def remove_range(ranges: Iterable[BlockRange], first: int, last: int) -> list[BlockRange]:
    """Return the ranges without the heights from `first` to `last`."""
    pieces = [piece for low, high in ranges for piece in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return [(low, high) for low, high in pieces if low <= high]


def remove_heights(ranges: Iterable[BlockRange], heights: Iterable[int]) -> list[BlockRange]:
    """Return the ranges without these heights."""
    removed, pieces = sorted(heights), list[BlockRange]()
    for first, last in ranges:
        low = first
        for height in removed[bisect_left(removed, first) : bisect_right(removed, last)]:
            if low < height:
                pieces.append((low, height - 1))
            low = height + 1
        if low <= last:
            pieces.append((low, last))
    return pieces


def clip_ranges(ranges: Iterable[BlockRange], first: int, last: int) -> list[BlockRange]:
    """Return the parts of the ranges from `first` to `last`."""
    parts = [(max(low, first), min(high, last)) for low, high in ranges]
    return [(low, high) for low, high in parts if low <= high]


def count_heights(ranges: Iterable[BlockRange]) -> int:
    """Return the number of heights in the ranges."""
    return sum(last - first + 1 for first, last in ranges)


def format_ranges(ranges: Iterable[BlockRange]) -> str:
    """Return the ranges as text, such as "5-9,12-12"."""
    return ",".join(f"{first}-{last}" for first, last in ranges)


def parse_ranges(text: str | None) -> list[BlockRange]:
    """Parse the output of `format_ranges`. Returns an empty list for None or an empty string."""
    pairs = (piece.split("-") for piece in (text or "").split(",") if piece)
    return [(int(first), int(last)) for first, last in pairs]
