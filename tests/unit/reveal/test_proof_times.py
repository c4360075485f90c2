"""The measured pace, and which proofs are not begun."""

from __future__ import annotations

import pytest

from helper.reveal.proof_times import RECENT_PROOFS, ProofTimes


def test_pace_before_first_proof_is_that_of_self_test() -> None:
    assert ProofTimes(4, lambda: 2.0).pace().proof_seconds == 2.0
    assert ProofTimes(4, lambda: 2.0).pace().shares_per_second == 2.0
    assert ProofTimes(4, lambda: None).pace().shares_per_second == 4.0


def test_pace_is_that_of_recent_proofs_and_all_hosts() -> None:
    times = ProofTimes(2, lambda: 50.0)
    for _ in range(10):
        times.record(100.0)
    for _ in range(RECENT_PROOFS // 2):
        times.record(0.5)
        times.record(1.5)
    times.hosts = 3

    pace = times.pace()

    assert (pace.proof_seconds, pace.shares_per_second) == (1.0, 6.0)


def test_pace_is_rate_of_confirmed_shares_if_other_helpers_reveal_more() -> None:
    times = ProofTimes(1, lambda: 1.0)
    for second in range(0, 300, 10):
        assert times.pace().shares_per_second == (1.0 if second <= 20 else 5.0)
        times.record_confirmed(5 * second, float(second))
    for second in range(300, 430, 10):
        times.record_confirmed(1500, float(second))

    assert times.pace().shares_per_second == 1.0, "older counts no longer matter"


@pytest.mark.parametrize(
    ("recorded", "estimate", "seconds_left", "expected"),
    [
        ([], None, 0.001, True),
        ([], 60.0, 31.0, True),
        ([], 60.0, 30.0, False),
        ([60.0, 45.0, 80.0], 10.0, 36.5, True),
        ([60.0, 45.0, 80.0], 10.0, 36.0, False),
        ([60.0], None, 0.0, False),
    ],
)
def test_proof_can_finish_unless_even_a_faster_one_would_be_late(
    recorded: list[float], estimate: float | None, seconds_left: float, expected: bool
) -> None:
    times = ProofTimes(1, lambda: estimate)
    for seconds in recorded:
        times.record(seconds)

    assert times.can_finish_proof(1000.0 + seconds_left, 1000.0) is expected
