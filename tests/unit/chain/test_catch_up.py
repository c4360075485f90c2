"""Decisions of the block follower and the history reader, as tables."""

from __future__ import annotations

import pytest

from helper.chain.catch_up import (
    CONCURRENT_BLOCKS,
    CURSOR_RESET_HEADS,
    INDEX_LAG_BLOCKS,
    MAX_ATTEMPTS,
    MAX_BLOCKS_BEHIND,
    MIN_SEARCH_BLOCKS,
    SEARCH_WINDOW_BLOCKS,
    SLACK_BLOCKS,
    AtHeadStep,
    CursorAboveHeadStep,
    FollowStep,
    HistoryRead,
    MoveBackStep,
    ReadStep,
    SkipStep,
    WaitStep,
    is_left_to_history,
    is_thorough,
    next_follow_step,
    next_history_read,
)
from helper.chain.copy_quorum import SecondCopyMissingError
from helper.chain.models import Round, RoundStatus
from helper.chain.rest_client import HeightPrunedError
from helper.errors import ChainError, ChainUnavailable
from helper.store.block_ranges import BlockRange


def created_at(height: int, status: RoundStatus = RoundStatus.ACTIVE) -> Round:
    return Round(height.to_bytes(32, "big"), status, 2_000_000_000, (), height)


OLD = created_at(55)
NEW = created_at(900, RoundStatus.TALLYING)
PENDING = created_at(30, RoundStatus.PENDING)
HEAD = 1000


@pytest.mark.parametrize(
    ("cursor", "rounds", "heads_below", "step"),
    [
        (None, None, 0, WaitStep()),
        (None, [], 0, SkipStep(HEAD, HEAD + 1)),
        (None, [PENDING], 0, SkipStep(HEAD, HEAD + 1)),
        (None, [PENDING, OLD, NEW], 0, SkipStep(HEAD - INDEX_LAG_BLOCKS, 55)),
        (None, [created_at(HEAD - 3)], 0, SkipStep(HEAD - 4, HEAD - 3)),
        (HEAD - MAX_BLOCKS_BEHIND - 1, [OLD], 0, SkipStep(HEAD - INDEX_LAG_BLOCKS)),
        (HEAD - MAX_BLOCKS_BEHIND - 1, None, 0, SkipStep(HEAD - INDEX_LAG_BLOCKS)),
        (
            HEAD - MAX_BLOCKS_BEHIND,
            [OLD],
            0,
            ReadStep(range(HEAD - MAX_BLOCKS_BEHIND + 1, HEAD - MAX_BLOCKS_BEHIND + CONCURRENT_BLOCKS + 1)),
        ),
        (HEAD - 2, [OLD], 0, ReadStep(range(HEAD - 1, HEAD + 1))),
        (HEAD - 2, None, 0, ReadStep(range(HEAD - 1, HEAD + 1))),
        (HEAD, [OLD], 0, AtHeadStep()),
        (HEAD + SLACK_BLOCKS, [OLD], CURSOR_RESET_HEADS, AtHeadStep()),
        (HEAD + SLACK_BLOCKS + 1, [OLD], 0, CursorAboveHeadStep()),
        (HEAD + SLACK_BLOCKS + 1, [OLD], CURSOR_RESET_HEADS - 2, CursorAboveHeadStep()),
        (HEAD + SLACK_BLOCKS + 1, None, CURSOR_RESET_HEADS, CursorAboveHeadStep()),
        (HEAD + SLACK_BLOCKS + 1, [NEW, OLD], CURSOR_RESET_HEADS - 1, MoveBackStep(HEAD - INDEX_LAG_BLOCKS, 55)),
        (
            HEAD + SLACK_BLOCKS + 1,
            [],
            CURSOR_RESET_HEADS - 1,
            MoveBackStep(HEAD - INDEX_LAG_BLOCKS, HEAD - INDEX_LAG_BLOCKS + 1),
        ),
    ],
)
def test_next_follow_step(cursor: int | None, rounds: list[Round] | None, heads_below: int, step: FollowStep) -> None:
    assert next_follow_step(cursor, HEAD, open_rounds=rounds, heads_below=heads_below) == step


def test_next_follow_step_moves_back_to_zero_on_short_chain() -> None:
    assert next_follow_step(500, 3, open_rounds=[OLD], heads_below=CURSOR_RESET_HEADS) == MoveBackStep(0, 55)


@pytest.mark.parametrize(
    ("unread", "failures", "read"),
    [
        ([], 0, None),
        ([(5, 5)], 0, HistoryRead(None, range(5, 4, -1))),
        ([(1, 9), (50, 52)], 0, HistoryRead(None, range(52, 49, -1))),
        ([(1, MIN_SEARCH_BLOCKS - 1)], 0, HistoryRead(None, range(63, 55, -1))),
        ([(1, MIN_SEARCH_BLOCKS)], 0, HistoryRead(range(1, 65), range(64, 56, -1))),
        ([(1, 5000)], 0, HistoryRead(range(5001 - SEARCH_WINDOW_BLOCKS, 5001), range(5000, 4992, -1))),
        ([(50, 52)], MAX_ATTEMPTS - 1, HistoryRead(None, range(52, 49, -1))),
        ([(50, 52)], MAX_ATTEMPTS, HistoryRead(range(50, 53), range(52, 49, -1))),
    ],
)
def test_next_history_read(unread: list[BlockRange], failures: int, read: HistoryRead | None) -> None:
    assert next_history_read(unread, failures) == read


@pytest.mark.parametrize(
    ("unread", "rescan", "read"),
    [
        ([(1, 5000)], [(1, 5000)], HistoryRead(None, range(5000, 4992, -1), is_rescan=True)),
        ([(1, 5000)], [(4997, 5000)], HistoryRead(None, range(5000, 4996, -1), is_rescan=True)),
        ([(1, 5000)], [(30, 4000)], HistoryRead(range(4001, 5001), range(5000, 4992, -1))),
        ([(1, 5000)], [(30, 4996)], HistoryRead(None, range(5000, 4996, -1))),
        ([(1, 20), (50, 52)], [(10, 20)], HistoryRead(None, range(52, 49, -1))),
    ],
)
def test_next_history_read_of_a_rescan(unread: list[BlockRange], rescan: list[BlockRange], read: HistoryRead) -> None:
    assert next_history_read(unread, 0, rescan=rescan) == read


UNKNOWN = None
AWAY = ChainUnavailable("no node answered")
GONE = HeightPrunedError("height is not available, lowest height is 321")
ONE_COPY = SecondCopyMissingError("no second node")


@pytest.mark.parametrize(
    ("problem", "failures", "is_left"),
    [
        (UNKNOWN, 1, False),
        (UNKNOWN, MAX_ATTEMPTS, True),
        (AWAY, MAX_ATTEMPTS - 1, False),
        (ONE_COPY, MAX_ATTEMPTS, True),
        (GONE, 1, True),
    ],
)
def test_is_left_to_history(problem: ChainError | None, failures: int, is_left: bool) -> None:
    assert is_left_to_history(problem, failures) is is_left


def test_is_thorough_from_half_of_the_tries_on() -> None:
    assert [is_thorough(failures) for failures in (0, MAX_ATTEMPTS // 2 - 1, MAX_ATTEMPTS // 2, MAX_ATTEMPTS)] == [
        False,
        False,
        True,
        True,
    ]
