"""Proof of absence from a node's response, and first arrivals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helper.chain import absence_proof
from helper.chain.absence_proof import (
    ABSENCE_BLOCKS,
    CLOCK_TOLERANCE_SECONDS,
    ArrivalKey,
    FirstArrivals,
    Observation,
    ShareArrival,
    next_observation,
    proves_absence,
)
from helper.chain.models import BlockHead


def head(height: int, time: float) -> BlockHead:
    return BlockHead("svote-1", height, time)


def test_observation_covers_head_after_execution_time() -> None:
    first = next_observation(None, "a", head(1, 10.0), 10.2)
    assert (first.has_executed_head, first.covered_head) == (False, None)
    second = next_observation(first, "a", head(2, 16.0), 16.2)
    assert (second.has_executed_head, second.covered_head) == (False, head(1, 10.0))
    again = next_observation(second, "a", head(2, 16.0), 17.2)
    assert (again.has_executed_head, again.covered_head) == (True, head(2, 16.0))
    hasty = next_observation(second, "a", head(2, 16.0), 16.21)
    assert hasty.covered_head == head(1, 10.0)
    assert next_observation(hasty, "a", head(2, 16.0), 16.4).covered_head == head(2, 16.0), (
        "measured from the first observation"
    )


def test_observation_of_other_node_with_same_head_is_not_settled() -> None:
    first = next_observation(next_observation(None, "a", head(1, 10.0), 10.2), "a", head(2, 16.0), 16.2)
    other = next_observation(first, "b", head(2, 16.0), 17.2)
    assert other.covered_head == head(1, 10.0)


def test_observation_of_lagging_node_covers_nothing() -> None:
    ahead = next_observation(next_observation(None, "a", head(9, 90.0), 90.2), "a", head(10, 100.0), 100.2)
    assert next_observation(ahead, "b", head(7, 70.0), 100.4).covered_head is None


def observation_at(height: int, time: float) -> Observation:
    return Observation("a", 1.0, 0.0, head(height, time))


@pytest.mark.parametrize(
    ("height", "time", "offsets", "proven"),
    [
        (50 + ABSENCE_BLOCKS, 100.0 + CLOCK_TOLERANCE_SECONDS, (0.2, 0.2), True),
        (50 + ABSENCE_BLOCKS - 1, 200.0, (0.2, 0.2), False),  # A lag could hide that the local clock is behind.
        (90, 100.0 + CLOCK_TOLERANCE_SECONDS - 0.1, (0.2, 0.2), False),  # Possibly produced before the arrival.
        (90, 104.0, (-5.0, 0.2), False),  # The local clock was behind at the arrival.
        (90, 104.0, (0.2, -5.0), False),  # A local clock that is behind was detected later.
        (90, 105.0 + CLOCK_TOLERANCE_SECONDS, (-5.0, -5.0), True),
        (
            90,
            100.0 + CLOCK_TOLERANCE_SECONDS,
            (math.inf, 60.0),
            True,
        ),  # A lag, or a clock that is ahead, needs no correction.
    ],
)
def test_proves_absence_requires_later_block_by_time_and_height(
    height: int, time: float, offsets: tuple[float, float], proven: bool
) -> None:
    assert proves_absence(observation_at(height, time), ShareArrival(100.0, 50, offsets[0]), offsets[1]) is proven


def test_proves_absence_without_response_is_false() -> None:
    assert not proves_absence(None, ShareArrival(0.0, 0, 0.0), 0.0)
    assert not proves_absence(Observation("a", 0.0, 0.0, head(90, 900.0)), ShareArrival(0.0, 0, 0.0), 0.0)


@settings(max_examples=300, deadline=None)
@given(
    block=st.sampled_from([1.0, 1.5, 2.0, 6.0]),
    lag=st.floats(0.0, 3.0),
    clock=st.floats(-120.0, 120.0),
    stamped=st.sampled_from([0.0, 1.0]),
    phase=st.floats(0.0, 1.0),
    moment=st.floats(0.0, 1.0),
)
def test_proves_absence_never_before_wallets_block_is_covered(
    block: float, lag: float, clock: float, stamped: float, phase: float, moment: float
) -> None:
    """Clock offsets of ±120 s, lags of up to 3 blocks, block intervals of 1 to 6 s, observed once per second.

    Time 0 and height 0 are the chain's. `stamped` is the age in blocks of a block when a current node reports it.
    """

    def shown_height(at: float, behind: float) -> int:
        return math.floor(at / block - stamped - behind)

    arrived = (40 + moment) * block
    wallets_block = shown_height(arrived, 0.0)
    offsets: list[float] = []
    observation: Observation | None = None
    arrival: ShareArrival | None = None
    newest, proven_at, at = 0, None, phase
    while at < arrived + (ABSENCE_BLOCKS + 12) * block:
        if arrival is None and at >= arrived:
            arrival = ShareArrival(arrived + clock, newest, min(offsets))
        height = shown_height(at, lag)
        if height > newest:
            newest = height
            offsets = [*offsets, at + clock - height * block][-16:]
        if height > 0:
            observation = next_observation(observation, "a", head(height, height * block), at)
            if arrival is not None and proves_absence(observation, arrival, min(offsets)):
                assert observation.covered_head is not None
                assert observation.covered_head.height >= wallets_block
                proven_at = at
                break
        at += 1.0
    if -1.0 < clock < 1.0:
        assert proven_at is not None, "the absence is proven in the end"


def key(number: int) -> ArrivalKey:
    return ArrivalKey(bytes(32), number, bytes(32))


def test_first_arrivals_keep_first_until_removed_or_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = FirstArrivals()
    first, second = ShareArrival(1.0, 1, 0.0), ShareArrival(2.0, 2, 0.0)
    assert arrivals.get_or_add(key(1), first, 0.0) is first
    assert arrivals.get_or_add(key(1), second, 1.0) is first
    assert arrivals.get_or_add(key(2), second, 1.0) is second
    arrivals.forget(key(1))
    assert arrivals.get_or_add(key(1), second, 2.0) is second
    assert arrivals.get_or_add(key(2), first, 1.0 + absence_proof.ARRIVAL_TTL_SECONDS) is first, (
        "the old arrival expired"
    )
    monkeypatch.setattr(absence_proof, "MAX_ARRIVALS", 3)
    for number in range(3, 9):
        arrivals.get_or_add(key(number), first, 400.0)
    assert len(arrivals) == 3
