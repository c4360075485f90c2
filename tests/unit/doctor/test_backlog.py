"""Backlog check: time needed compared with the remaining time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helper.core.load_forecast import ProofRate
from helper.doctor import CheckResult, Level
from helper.doctor.running_helper import evaluate_backlog
from helper.observability.queue_snapshot import QueueSnapshot, RoundSnapshot, ShareCounts
from helper.store.models import RetryingShares

NOW = 1_000_000.0
ONE_PER_SECOND = ProofRate(seconds_per_proof=2.0, slots=2, block_seconds=1.0)
MINUTE = 60


def waiting_round(
    left: int, minutes: float, *, name: str = "aa", at_end: int = 0, later: int = 0, sent: int = 0
) -> RoundSnapshot:
    """A round that ends after `minutes`; `at_end` of its shares are due in the last whole minute."""
    due = [left - at_end - later, *[0] * 59]
    due[max(0, int(minutes) - 1) if at_end else 0] += at_end
    return RoundSnapshot(
        round_id=name * 32,
        status=1,
        vote_end_time=int(NOW + minutes * MINUTE),
        counts=ShareCounts(received=left, broadcast=sent),
        due_per_minute=tuple(due),
        later=later,
    )


def evaluate(
    *rounds: RoundSnapshot, rate: ProofRate = ONE_PER_SECOND, retries: Sequence[RetryingShares] = ()
) -> list[CheckResult]:
    return evaluate_backlog(QueueSnapshot(at=NOW, rounds=rounds, retries=retries), rate, NOW)


def test_backlog_without_waiting_shares_is_ok() -> None:
    (result,) = evaluate()
    assert (result.level, result.message) == (Level.OK, "no shares are waiting")
    (result,) = evaluate(waiting_round(0, 5))
    assert result.level is Level.OK


def test_backlog_message_shows_time_needed_and_left() -> None:
    (result,) = evaluate(waiting_round(2280, 51))
    assert result.level is Level.OK
    assert result.subject == "round aaaaaaaa"
    assert result.message == "2280 shares left, 38 min needed, 51 min left"
    assert result.facts["seconds_needed"] == 2280
    assert result.facts["seconds_left"] == 3060


@pytest.mark.parametrize(
    ("left", "level"), [(2400, Level.OK), (2500, Level.WARN), (3000, Level.WARN), (3001, Level.FAIL)]
)
def test_backlog_warns_when_tight_and_fails_when_too_late(left: int, level: Level) -> None:
    (result,) = evaluate(waiting_round(left, 50))
    assert result.level is level
    assert bool(result.advice) is (level is not Level.OK)


def test_backlog_counts_shares_of_rounds_that_end_earlier() -> None:
    later, earlier = waiting_round(1800, 60, name="bb"), waiting_round(1900, 40)
    first, second = evaluate(later, earlier)
    assert (first.subject, first.level) == ("round aaaaaaaa", Level.OK)
    assert (second.subject, second.level) == ("round bbbbbbbb", Level.FAIL), "3,700 of 3,600 seconds"
    (alone,) = evaluate(later)
    assert alone.level is Level.OK


def test_backlog_fails_on_excess_shares_due_in_last_minutes() -> None:
    (result,) = evaluate(waiting_round(100, 30, at_end=100))
    assert result.level is Level.FAIL
    assert result.facts["too_many_at_the_end"] == 40
    assert "40 shares more than can be processed are due shortly before the end" in result.message
    (result,) = evaluate(waiting_round(60, 30, at_end=60))
    assert result.level is Level.OK
    (result,) = evaluate(waiting_round(100, 90, later=100))
    assert result.level is Level.OK, "the due times after the known minutes are spread"


def test_backlog_advice_names_provers_and_commands() -> None:
    (result,) = evaluate(waiting_round(6000, 50))
    assert "about 3000 will not be revealed" in result.message
    assert result.facts["slack_seconds"] == -3000
    assert "4 provers are needed, 2 run" in result.advice
    assert "max_concurrent_proofs = 4" in result.advice
    assert f"svote-helper queue export --round {'aa' * 32} --output FILE" in result.advice
    (result,) = evaluate(waiting_round(2900, 50))
    assert result.level is Level.WARN
    assert "2 provers are just enough" in result.advice
    assert "max_concurrent_proofs = 3" in result.advice
    (result,) = evaluate(waiting_round(256 * 3001, 50))
    assert "256 reveals per block" in result.advice


def test_backlog_advice_counts_only_rounds_up_to_this_one() -> None:
    later, earlier = waiting_round(50_000, 60, name="bb"), waiting_round(1900, 40)
    first, second = evaluate(later, earlier, rate=ProofRate(2.0, 1, 1.0))
    assert "2 provers are needed, 1 run" in first.advice
    assert "29 provers are needed, 1 run" in second.advice


def test_backlog_fails_for_ended_round_with_unconfirmed_shares() -> None:
    (result,) = evaluate(waiting_round(0, -1 / MINUTE, sent=3))
    assert (result.level, result.message) == (Level.FAIL, "3 shares left after the round ended")


def test_backlog_without_proof_time_uses_block_capacity() -> None:
    (result,) = evaluate(waiting_round(10, 10), rate=ProofRate(None, 2))
    assert "proof time was not measured" in result.message


@pytest.mark.parametrize(
    ("seconds", "text"), [(61, "61 s left"), (600, "10 min left"), (9000, "2.5 h left"), (432_000, "5.0 d left")]
)
def test_backlog_formats_durations(seconds: int, text: str) -> None:
    (result,) = evaluate(waiting_round(1, seconds / MINUTE))
    assert text in result.message


def retry_group(minute: int, count: int, *, reason: str = "no memory", name: str = "aa") -> RetryingShares:
    """Shares whose retry is due in the middle of this minute."""
    return RetryingShares(name * 32, "proof", reason, minute, count, NOW + minute * MINUTE + 30)


@pytest.mark.rule("R11")
def test_backlog_says_what_shares_in_retry_backoff_wait_for() -> None:
    retries = [retry_group(29, 95), retry_group(12, 5, reason="timed out"), retry_group(3, 7, name="bb")]
    waiting = waiting_round(100, 30, at_end=95)
    assert evaluate(waiting)[0].level is Level.FAIL

    (result,) = evaluate(waiting, retries=retries)

    assert (result.level, result.advice) == (Level.OK, "")
    assert result.message.endswith(
        "; 100 of them waiting for a retry, the next in 12 min (after proof: timed out and 1 other failure)"
    )
    assert result.facts["retrying"] == 100


def test_backlog_with_retries_still_fails_on_excess_of_other_shares() -> None:
    (result,) = evaluate(waiting_round(100, 30, at_end=100), retries=[retry_group(29, 10)])

    assert result.level is Level.FAIL
    assert result.facts["too_many_at_the_end"] == 30
