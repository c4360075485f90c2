"""How long a host may believe in its lease."""

from __future__ import annotations

import pytest

from helper.lease.term import Term
from tests.support.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def term(clock: FakeClock) -> Term:
    return Term(clock, seconds=10, margin=2)


def test_it_runs_from_before_it_was_asked_for_less_the_margin(clock: FakeClock, term: Term) -> None:
    assert not term.running
    asked = term.ask()
    clock.advance(3)  # the answer takes so long
    term.begin(asked)
    clock.advance(4.9)
    assert term.running
    clock.advance(0.1)
    assert not term.running


def test_it_runs_on_from_each_word(clock: FakeClock, term: Term) -> None:
    for _ in range(5):
        term.begin(term.ask())
        clock.advance(7)
        assert term.running


def test_it_ends_at_once(term: Term) -> None:
    term.begin(term.ask())
    term.end()
    assert not term.running


def test_a_machine_that_was_suspended_does_not_believe_in_it(clock: FakeClock, term: Term) -> None:
    term.begin(term.ask())
    clock.jump(8)  # the monotonic clock stood still
    assert not term.running


def test_a_clock_that_was_set_back_proves_nothing(clock: FakeClock, term: Term) -> None:
    term.begin(term.ask())
    clock.jump(-0.9)
    assert term.running
    clock.jump(-0.2)
    assert not term.running


@pytest.mark.parametrize("margin", [-1, 10, 11])
def test_a_margin_must_leave_something(clock: FakeClock, margin: float) -> None:
    with pytest.raises(ValueError, match="no time left"):
        Term(clock, seconds=10, margin=margin)
