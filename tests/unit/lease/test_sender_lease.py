"""How long a host may consider its lease valid."""

from __future__ import annotations

import pytest

from helper.lease import Term
from tests.support.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def term(clock: FakeClock) -> Term:
    return Term(clock, seconds=8)


def test_term_starts_before_request_and_ends_before_margin(clock: FakeClock, term: Term) -> None:
    assert not term.is_running
    readings = term.read_clocks()
    clock.advance(3)  # duration of the response
    term.start(readings)
    clock.advance(4.9)
    assert term.is_running
    clock.advance(0.1)
    assert not term.is_running


def test_term_is_extended_by_each_renewal(clock: FakeClock, term: Term) -> None:
    for _ in range(5):
        term.start(term.read_clocks())
        clock.advance(7)
        assert term.is_running


def test_term_end_is_immediate(term: Term) -> None:
    term.start(term.read_clocks())
    term.end()
    assert not term.is_running


def test_term_after_suspend_has_ended(clock: FakeClock, term: Term) -> None:
    term.start(term.read_clocks())
    clock.set_wall_clock(8)  # the monotonic clock did not advance
    assert not term.is_running


def test_term_after_clock_set_back_has_ended(clock: FakeClock, term: Term) -> None:
    term.start(term.read_clocks())
    clock.set_wall_clock(-0.9)
    assert term.is_running
    clock.set_wall_clock(-0.2)
    assert not term.is_running
