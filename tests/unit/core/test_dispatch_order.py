"""Order of due shares within a round and across rounds."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from helper.core.dispatch_order import (
    BacklogLimits,
    DueShare,
    ProofPace,
    RoundQueue,
    RoundTurns,
    can_finish_proof,
    is_at_risk,
    is_backlog,
    share_order,
    slack_seconds,
    work_seconds,
)

NOW = 1_000_000.0
FAR_END = NOW + 1_000_000
PACE = ProofPace(proof_seconds=1.0, fastest_seconds=0.5, shares_per_second=2.0)
LIMITS = BacklogLimits(due_shares=2)


def queue(
    name: str, *, shares: int = 1000, late: float = 60.0, end: float = FAR_END, waiting: int | None = None
) -> RoundQueue:
    """Return a round's queue whose share ids are (first letter of its name) × 10000 + n."""
    due_ms = int((NOW - late) * 1000)
    ids = range(ord(name[0]) * 10_000, ord(name[0]) * 10_000 + shares)
    due = deque(DueShare(due_ms + n, n, share_id) for n, share_id in enumerate(ids))
    return RoundQueue(name.encode(), end, shares if waiting is None else waiting, due_ms, due)


def select(turns: RoundTurns, *queues: RoundQueue, limit: int = 1, first_limit: int = 0) -> str:
    """Return the rounds of the selected shares as letters, in upper case if the share has priority."""
    selected = turns.select(
        queues, limit=limit, first_limit=max(limit, first_limit), now=NOW, chain_time=NOW, pace=PACE, limits=LIMITS
    )
    return "".join(
        letter.upper() if has_priority else letter
        for share, has_priority in selected
        for letter in [chr(share.id // 10_000)]
    )


def test_share_order_in_backlog_is_by_rank_alone() -> None:
    early, late = DueShare(1, 9, 1), DueShare(2, 3, 2)

    assert sorted([late, early], key=lambda share: share_order(share, in_backlog=False)) == [early, late]
    assert sorted([early, late], key=lambda share: share_order(share, in_backlog=True)) == [late, early]


@pytest.mark.parametrize(
    ("late", "due", "expected"), [(2.0, 3, False), (2.1, 3, True), (2.1, 2, False), (100.0, 1, False), (-1.0, 9, False)]
)
def test_backlog_needs_more_due_shares_than_provers_and_lateness(late: float, due: int, expected: bool) -> None:
    assert is_backlog(int((NOW - late) * 1000), due, NOW, LIMITS) is expected


def test_overdue_rounds_take_turns_whatever_their_size() -> None:
    turns = RoundTurns()
    queues = [queue("a", shares=5000), queue("b", shares=50), queue("c", shares=3)]

    assert select(turns, *queues, limit=12) == "abcabcabcaba"


def test_turns_continue_over_several_selections() -> None:
    turns = RoundTurns()
    queues = [queue("a"), queue("b"), queue("c")]

    assert "".join(select(turns, *queues) for _ in range(6)) == "abcabc"


def test_round_that_becomes_ready_has_the_next_turn() -> None:
    turns = RoundTurns()
    large = queue("a")
    assert select(turns, large, limit=5) == "aaaaa"

    assert select(turns, large, queue("b", shares=1), limit=3) == "baa"


def test_round_on_time_goes_before_overdue_rounds_in_order_of_due_time() -> None:
    on_time = [queue("b", shares=2, late=0.5), queue("c", shares=1, late=1.0)]

    assert select(RoundTurns(), queue("a"), *on_time, limit=5) == "CBBaa"


def test_shares_that_go_first_exceed_the_limit_and_others_do_not() -> None:
    turns = RoundTurns()

    assert select(turns, queue("a"), queue("b", shares=3, late=0.0), limit=0, first_limit=2) == "BB"
    assert select(turns, queue("a"), queue("b", shares=1, late=0.0), limit=0, first_limit=2) == "B"
    assert select(turns, queue("a"), limit=0, first_limit=2) == ""


def test_round_at_risk_goes_before_all_others() -> None:
    tight = queue("a", waiting=1000, end=NOW + 520)

    assert select(RoundTurns(), queue("b"), queue("c", late=0.0), tight, limit=3) == "AAA"


def test_rounds_at_risk_go_by_end_then_by_slack() -> None:
    first = queue("a", waiting=100, end=NOW + 60)
    second = queue("b", waiting=1000, end=NOW + 520)
    tied = queue("c", waiting=1010, end=NOW + 520)

    assert select(RoundTurns(), second, first, limit=1) == "A"
    assert select(RoundTurns(), second, tied, limit=1) == "C"


def test_round_that_cannot_be_met_takes_turns() -> None:
    hopeless = queue("a", waiting=1000, end=NOW + 400)

    assert select(RoundTurns(), hopeless, queue("b"), limit=4) == "abab"


def test_slack_counts_all_waiting_shares_and_the_last_proof() -> None:
    assert work_seconds(0, PACE) == 0
    assert slack_seconds(NOW + 600, 1000, NOW, PACE) == 600 - (500 + 1.0)
    assert not is_at_risk(NOW + 600, 1000, NOW, PACE), "99 s of slack, more than 30 s and a tenth of the work"
    assert is_at_risk(NOW + 580, 1000, NOW, PACE)
    assert not is_at_risk(NOW + 500, 1000, NOW, PACE), "it cannot be met"


@pytest.mark.parametrize(("left", "expected"), [(0.4, False), (0.5, False), (0.6, True), (-1.0, False)])
def test_proof_is_not_begun_when_even_the_fastest_would_be_late(left: float, expected: bool) -> None:
    assert can_finish_proof(NOW + left, NOW, PACE.fastest_seconds) is expected


def test_small_rounds_wait_for_few_shares_of_a_large_one() -> None:
    turns = RoundTurns()
    large, small = queue("a", shares=100_000), [queue(name, shares=100) for name in "bcdefghij"]

    selected = select(turns, large, *small, limit=1000)

    assert Counter(selected) == dict.fromkeys("abcdefghij", 100)
