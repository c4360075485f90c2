"""Due times and retry delays; order of due shares within a round and across rounds."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.dispatch_order import (
    BacklogLimits,
    DueShare,
    ProofPace,
    RoundQueue,
    RoundTurns,
    due_ms,
    is_at_risk,
    last_attempt_time,
    rank,
    rank_fraction,
    retry_delay,
    retry_time,
)

times = st.floats(0, 4e9, allow_nan=False)


@pytest.mark.rule("R11")
def test_retry_delay_doubles_up_to_64_seconds() -> None:
    assert [retry_delay(n) for n in range(1, 9)] == [2, 4, 8, 16, 32, 64, 64, 64]
    assert retry_delay(10_000) == 64


DAY = 86_400.0


def attempt_times(first_due: float, end: float, fraction: float, *, quick_retries: int = 5) -> list[float]:
    """Times of all attempts of a share that always fails immediately."""
    last = last_attempt_time(first_due, end, fraction)
    times = [first_due]
    while times[-1] < end:
        retry = retry_time(len(times), times[-1], quick_retries=quick_retries, last_attempt=last, end=end)
        times.append(retry)
    return times[:-1]


@pytest.mark.rule("R11")
def test_retry_time_is_quick_then_one_and_ten_minutes_then_longer() -> None:
    retries = attempt_times(0.0, 14 * DAY, 0.5)
    delays = [later - earlier for earlier, later in pairwise(retries)]
    assert delays[:9] == [2, 4, 8, 16, 32, 60, 600, 3600, 21_600]
    assert max(delays) == 21_600
    assert len(retries) < 100, "a share that always fails costs a bounded number of proofs"


@pytest.mark.rule("R11")
@pytest.mark.parametrize(("failures", "expected"), [(1, 2), (2, 4), (3, 60), (4, 600)])
def test_retry_time_number_of_quick_retries_is_configurable(failures: int, expected: float) -> None:
    assert retry_time(failures, 0.0, quick_retries=2, last_attempt=DAY, end=DAY + 300) == expected


@pytest.mark.rule("R11", "N27")
@given(
    st.floats(0, 1e6),
    st.one_of(st.floats(200, 4000), st.floats(4000, 60 * DAY)),
    st.floats(0, 1),
    st.integers(1, 50),
)
def test_retries_reach_last_attempt_and_end_before_the_round(
    first_due: float, length: float, fraction: float, quick_retries: int
) -> None:
    end = first_due + length
    last = last_attempt_time(first_due, end, fraction)
    retries = attempt_times(first_due, end, fraction, quick_retries=quick_retries)
    slow = retries[quick_retries:]
    for earlier, later in pairwise(slow):
        assert later - earlier >= 10 - 1e-6
        target = last if last - earlier >= 10 else end - 30
        assert later == target or later - earlier <= (target - earlier) / 2 + 1e-6
    if slow and slow[0] <= last - 10:
        assert last in slow
    if slow and slow[0] <= end - 40:
        assert slow[-1] > end - 41, "the attempts do not stop before the end"
    assert not slow[1:] or slow[-1] <= end - 30


@pytest.mark.parametrize(
    ("length", "latest", "spread"),
    [(14 * DAY, 300, 600), (1600, 200, 200), (80, 30, 10), (0, 30, 0), (-5, 30, 0)],
)
def test_last_attempt_has_margin_and_spread(length: float, latest: float, spread: float) -> None:
    end = 1e6
    assert last_attempt_time(end - length, end, 0.0) == end - latest
    assert last_attempt_time(end - length, end, 1.0) == end - latest - spread


def test_retry_time_in_last_seconds_is_not_before_the_end() -> None:
    assert retry_time(6, 980.0, quick_retries=5, last_attempt=900.0, end=1000.0) == 1044.0
    assert retry_time(6, 900.0, quick_retries=5, last_attempt=900.0, end=1000.0) == 935.0


@pytest.mark.rule("R1", "N10")
@given(st.integers(1, 2**40), times)
def test_due_ms_is_submit_at_and_never_earlier(submit_at: int, now: float) -> None:
    due = due_ms(submit_at, now)

    assert due >= submit_at * 1000
    if submit_at > now:
        assert due == submit_at * 1000


@pytest.mark.rule("R2", "W6")
@given(times, st.integers(0, 10_000))
def test_due_ms_of_zero_or_past_time_is_now(now: float, ago: int) -> None:
    past = max(0, int(now) - ago)

    assert due_ms(0, now) == int(now * 1000)
    assert due_ms(past, now) == int(now * 1000)


@pytest.mark.rule("R6")
def test_schedule_functions_ignore_random_state() -> None:
    values = [due_ms(1_800_000_000, 5.0), retry_delay(3), rank(b"k" * 32, b"m" * 32)]

    random.seed(1)

    assert values == [due_ms(1_800_000_000, 5.0), retry_delay(3), rank(b"k" * 32, b"m" * 32)]


@pytest.mark.rule("R5", "N26")
def test_rank_within_second_is_independent_of_arrival() -> None:
    arrival = list(range(2_000))
    ranks = [rank(b"a key of the database", number.to_bytes(32, "big")) for number in arrival]
    order = sorted(arrival, key=lambda number: ranks[number])
    mean = (len(arrival) - 1) / 2
    spread = sum((n - mean) ** 2 for n in arrival)

    correlation = sum((rank - mean) * (n - mean) for rank, n in enumerate(order)) / spread

    assert abs(correlation) < 0.1
    assert len(set(ranks)) == len(ranks)


@given(st.binary(min_size=32, max_size=32))
def test_rank_fits_sqlite_integer_and_depends_on_key(mac: bytes) -> None:
    assert 0 <= rank(b"k" * 32, mac) < 2**63
    assert 0 <= rank_fraction(rank(b"k" * 32, mac)) <= 1
    assert rank(b"k" * 32, mac) != rank(b"l" * 32, mac)


NOW = 1_000_000.0
FAR_END = NOW + 1_000_000
PACE = ProofPace(proof_seconds=1.0, shares_per_second=2.0)
LIMITS = BacklogLimits(due_shares=2, overdue_seconds=2.0)


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


@pytest.mark.parametrize(
    ("late", "due", "expected"), [(2.0, 3, False), (2.1, 3, True), (2.1, 2, False), (100.0, 1, False), (-1.0, 9, False)]
)
def test_backlog_needs_more_due_shares_than_provers_and_lateness(late: float, due: int, expected: bool) -> None:
    assert LIMITS.is_backlog(int((NOW - late) * 1000), due, NOW) is expected


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


def test_rounds_that_may_not_exist_get_a_part_of_the_turns_and_what_is_left() -> None:
    doubted = [queue("b", late=0.5, end=math.inf), queue("c", late=900.0, end=math.inf)]

    assert select(RoundTurns(), *doubted, queue("a", shares=2), limit=3) == "aaB"
    assert select(RoundTurns(), *doubted, queue("a", shares=20), limit=8) == "aaacaaab"
    assert select(RoundTurns(), *doubted, queue("a", shares=20, waiting=1000, end=NOW + 520), limit=5) == "AAAAA"


def test_rounds_on_time_go_by_rank_at_the_same_time() -> None:
    first, second = queue("b", shares=1, late=0.5), queue("c", shares=1, late=0.5)
    first.shares[0] = first.shares[0]._replace(rank=1)

    assert select(RoundTurns(), first, second, limit=2) == "CB"


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
    assert not is_at_risk(NOW + 600, 1000, NOW, PACE), "99 s of slack, more than 30 s and a tenth of the work"
    assert is_at_risk(NOW + 580, 1000, NOW, PACE)
    assert not is_at_risk(NOW + 500, 1000, NOW, PACE), "it cannot be met"


def test_small_rounds_wait_for_few_shares_of_a_large_one() -> None:
    turns = RoundTurns()
    large, small = queue("a", shares=100_000), [queue(name, shares=100) for name in "bcdefghij"]

    selected = select(turns, large, *small, limit=1000)

    assert Counter(selected) == dict.fromkeys("abcdefghij", 100)
