"""Decides which blocks are read next, and what happens to blocks that are missing. Pure.

docs/decisions/0017-block-catch-up.md explains the two readers: the block follower stays near the head, and the history
reader reads the blocks that the follower skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from helper.chain.copy_quorum import BlockNotAgreedError
from helper.chain.models import Round, RoundStatus
from helper.chain.rest_client import HeightPrunedError
from helper.errors import ChainError
from helper.store.block_ranges import BlockRange

MAX_BLOCKS_BEHIND: Final = 64
"""Maximum number of blocks behind the head that are read in order. With more, the follower skips to the head."""
CONCURRENT_BLOCKS: Final = 8
"""Number of blocks fetched concurrently."""
MAX_ATTEMPTS: Final = 8
"""Failed attempts at an existing block before the follower skips it, and before the history reader reports it."""
CURSOR_RESET_HEADS: Final = 10
"""Number of consecutive heads far below the cursor after which the cursor is moved back."""
SLACK_BLOCKS: Final = 100
"""Blocks by which the cursor may be above the head without being moved back."""
INDEX_LAG_BLOCKS: Final = 10
"""Blocks below the head that are never searched, because a node's transaction index may lag behind its blocks."""
SEARCH_WINDOW_BLOCKS: Final = 2000
"""Blocks per search. A node compares every reveal of a round with the window, so small windows cost more."""
MIN_SEARCH_BLOCKS: Final = 64
"""Fewer blocks than this are fetched individually, which is as fast and needs no index."""


@dataclass(frozen=True, slots=True)
class WaitStep:
    """The rounds are unknown, so the first block to read is unknown."""


@dataclass(frozen=True, slots=True)
class AtHeadStep:
    """All blocks up to the head are applied."""


@dataclass(frozen=True, slots=True)
class CursorAboveHeadStep:
    """The cursor is far above the head; it is not moved yet, because the head may be wrong."""


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Fetch these blocks and apply them in order."""

    heights: range


@dataclass(frozen=True, slots=True)
class SkipStep:
    """Move the cursor forward to `height`. The skipped blocks are unread; without a cursor, those from `first` on."""

    height: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class MoveBackStep:
    """Move the cursor back to `height`. The blocks from `first` to `height` are read again."""

    height: int
    first: int


FollowStep = WaitStep | AtHeadStep | CursorAboveHeadStep | ReadStep | SkipStep | MoveBackStep


def next_follow_step(
    cursor: int | None, head: int, *, open_rounds: Sequence[Round] | None, heads_below: int
) -> FollowStep:
    """Decide what the block follower does next.

    Args:
        cursor: the newest block that was applied or skipped, None on a new database.
        head: the newest block of the chain.
        open_rounds: the rounds that are not closed, None while unknown.
        heads_below: number of consecutive heads far below the cursor before this one.
    """
    if cursor is None:
        return WaitStep() if open_rounds is None else _begin(head, open_rounds)
    if cursor - head > SLACK_BLOCKS:
        if open_rounds is None or heads_below + 1 < CURSOR_RESET_HEADS:
            return CursorAboveHeadStep()
        # It is unknown which blocks of the open rounds were skipped. Applying a block twice is harmless.
        target = max(0, head - INDEX_LAG_BLOCKS)
        return MoveBackStep(target, min((known.created_at_height for known in open_rounds), default=target + 1))
    if head - cursor > MAX_BLOCKS_BEHIND:
        return SkipStep(head - INDEX_LAG_BLOCKS)
    return AtHeadStep() if cursor >= head else ReadStep(range(cursor + 1, min(cursor + CONCURRENT_BLOCKS, head) + 1))


def _begin(head: int, open_rounds: Sequence[Round]) -> SkipStep:
    """Start near the head. The blocks since the oldest round with reveals was created are unread."""
    statuses = (RoundStatus.ACTIVE, RoundStatus.TALLYING)
    first = min((known.created_at_height for known in open_rounds if known.status in statuses), default=head + 1)
    return SkipStep(min(head, max(head - INDEX_LAG_BLOCKS, first - 1)), first)


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """What the history reader reads next.

    Attributes:
        window: blocks to search by a node's index, None if a search has no advantage.
        batch: blocks to fetch if no index can be searched, newest first.
        is_rescan: whether these blocks belong to a rescan. No index is then searched, because a node that served wrong
            blocks may have a wrong index.
    """

    window: range | None
    batch: range
    is_rescan: bool = False


def next_history_read(
    unread: Sequence[BlockRange], failures: int, *, rescan: Sequence[BlockRange] = ()
) -> HistoryRead | None:
    """Decide what the history reader reads next, None if no block is unread.

    Args:
        unread: the unread blocks, in ascending order.
        failures: failed attempts at the newest of them.
        rescan: those of them that belong to a rescan, in ascending order.
    """
    if not unread:
        return None
    first, last = unread[-1]
    if rescan and rescan[-1][1] == last:
        first = max(first, rescan[-1][0])
        return HistoryRead(None, range(last, max(first, last - CONCURRENT_BLOCKS + 1) - 1, -1), is_rescan=True)
    if rescan:
        first = max(first, rescan[-1][1] + 1)
    is_searched = last - first + 1 >= MIN_SEARCH_BLOCKS or failures >= MAX_ATTEMPTS
    window = range(max(first, last - SEARCH_WINDOW_BLOCKS + 1), last + 1) if is_searched else None
    return HistoryRead(window, range(last, max(first, last - CONCURRENT_BLOCKS + 1) - 1, -1))


def is_left_to_history(problem: ChainError | None, failures: int) -> bool:
    """Whether the block follower leaves a block that it cannot read to the history reader.

    A block on which two nodes do not agree yet is left immediately: the follower waits for no second node.

    Args:
        problem: why no node returns it, None if a node does not have it or a result in it yet.
        failures: failed attempts at the block, including this one.
    """
    return failures >= MAX_ATTEMPTS or isinstance(problem, (HeightPrunedError, BlockNotAgreedError))


def is_thorough(failures: int) -> bool:
    """Whether additional sources are tried for a block after this many failed attempts."""
    return failures >= MAX_ATTEMPTS // 2
