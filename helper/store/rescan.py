"""The latest rescan: blocks to read again at the operator's request, and the result. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from helper.store.block_ranges import (
    BlockRange,
    add_range,
    clip_ranges,
    count_heights,
    format_ranges,
    parse_ranges,
    remove_range,
)

RESCAN_KEY: Final = "chain.rescan"
"""Key of the latest rescan in `meta`."""


@dataclass(frozen=True, slots=True)
class Rescan:
    """State of the latest rescan.

    Attributes:
        number: ascending; reads for another number are ignored.
        requested: the blocks to read.
        unread: those of them that are not read yet.
        pruned: those of them that could not be read, because every node has pruned them.
        added: number of nullifiers found that were not stored before.
        confirmed: number of this queue's shares that were confirmed by them.
    """

    number: int
    requested: tuple[BlockRange, ...]
    unread: tuple[BlockRange, ...]
    pruned: tuple[BlockRange, ...] = ()
    added: int = 0
    confirmed: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks to read."""
        return count_heights(self.requested)

    @property
    def left(self) -> int:
        """Number of blocks that are not read yet."""
        return count_heights(self.unread)

    @property
    def counts(self) -> dict[str, int]:
        """The result so far: blocks read, blocks pruned, nullifiers added, shares confirmed."""
        pruned = count_heights(self.pruned)
        return {
            "read": self.blocks - self.left - pruned,
            "pruned": pruned,
            "added": self.added,
            "confirmed": self.confirmed,
        }

    def after_read(self, first: int, last: int, *, added: int, confirmed: int) -> Rescan:
        """Return the state after the blocks from `first` to `last` were read."""
        return replace(
            self,
            unread=tuple(remove_range(self.unread, first, last)),
            added=self.added + added,
            confirmed=self.confirmed + confirmed,
        )

    def after_pruned(self, first: int, last: int) -> Rescan:
        """Return the state after the blocks from `first` to `last` turned out to be pruned by every node."""
        pruned: list[BlockRange] = list(self.pruned)
        for low, high in clip_ranges(self.unread, first, last):
            pruned = add_range(pruned, low, high)
        return replace(self, unread=tuple(remove_range(self.unread, first, last)), pruned=tuple(pruned))

    def without_above(self, height: int) -> Rescan:
        """Return the state without the blocks above `height`, which the block follower reads again."""
        if not self.requested or self.requested[-1][1] <= height:
            return self
        top = self.requested[-1][1]
        return replace(
            self,
            requested=tuple(remove_range(self.requested, height + 1, top)),
            unread=tuple(remove_range(self.unread, height + 1, top)),
            pruned=tuple(remove_range(self.pruned, height + 1, top)),
        )

    def to_text(self) -> str:
        """Return the stored form."""
        fields = {
            "number": self.number,
            "requested": format_ranges(self.requested),
            "unread": format_ranges(self.unread),
            "pruned": format_ranges(self.pruned),
            "added": self.added,
            "confirmed": self.confirmed,
        }
        return orjson.dumps(fields).decode()


def start_rescan(previous: Rescan | None, first: int, last: int) -> Rescan:
    """Return a new rescan of the blocks from `first` to `last`. Unread blocks of the previous one remain unread."""
    ranges = list(previous.unread) if previous is not None else []
    if first <= last:
        ranges = add_range(ranges, first, last)
    return Rescan(1 if previous is None else previous.number + 1, tuple(ranges), tuple(ranges))


def parse_rescan(text: str | None) -> Rescan | None:
    """Parse the output of `Rescan.to_text`. Returns None for None."""
    if text is None:
        return None
    fields: Mapping[str, Any] = orjson.loads(text)
    return Rescan(
        number=int(fields["number"]),
        requested=tuple(parse_ranges(fields["requested"])),
        unread=tuple(parse_ranges(fields["unread"])),
        pruned=tuple(parse_ranges(fields["pruned"])),
        added=int(fields["added"]),
        confirmed=int(fields["confirmed"]),
    )
