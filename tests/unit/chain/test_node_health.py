"""Time of the next probe: by the interval and by the expected next block."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import median

import pytest

from helper.chain.chain_data import BlockHead
from helper.chain.node import PROBE_FRACTION, Health

AHEAD = 7.0
"""Seconds that the local clock is ahead of the chain's."""


def simulate_probes(shown: Sequence[float], interval: float) -> tuple[list[float], list[float]]:
    """Probe times of a node that reports its blocks at these times, and the detection delay of each block."""
    health, now, probed_at, waits = Health(), shown[0] + 0.4 * interval, [], []
    while now < shown[-1] + interval:
        probed_at.append(now)
        height = sum(at <= now for at in shown)
        if health.head is None or height > health.head.height:
            waits.append(now - shown[height - 1])
        head = BlockHead("c", height, shown[height - 1] - AHEAD)
        health.record_probe(head, is_syncing=False, started_at=now, ended_at=now)
        now += health.next_probe_delay(interval, now)
    return probed_at, waits


@pytest.mark.parametrize("seconds", [1.0, 2.5, 5.0])
def test_pause_regular_block_is_probed_when_expected(seconds: float) -> None:
    shown = [10 + seconds * number for number in range(60)]
    probed_at, waits = simulate_probes(shown, 1.0)
    assert len(waits) == len(shown)
    assert max(waits[4:]) <= PROBE_FRACTION, "without the prediction the average is half an interval"
    assert len(probed_at) <= 1.1 * len(shown) * ceil(seconds) + 5, (
        "no more probes than at the fixed interval, once the block times are known"
    )


def test_pause_irregular_block_is_probed_within_interval() -> None:
    rng = random.Random(7)
    at, shown = 0.0, []
    for _ in range(300):
        at += rng.uniform(4.0, 7.0)
        shown.append(at)
    probed_at, waits = simulate_probes(shown, 1.0)
    assert len(waits) == len(shown)
    assert max(waits) <= 1.0 + 1e-6
    assert median(waits) < 0.5
    assert len(probed_at) <= at + 3 * len(shown), "three more per block"


def test_pause_longer_than_block_time_is_interval() -> None:
    probed_at, _ = simulate_probes([10 + 5.0 * number for number in range(60)], 10.0)
    assert {round(later - earlier, 6) for earlier, later in pairwise(probed_at)} == {10.0}


def test_pause_never_below_quarter_of_interval() -> None:
    rng = random.Random(7)
    health, now, height = Health(), 0.0, 0
    times = []
    for _ in range(2_000):
        times.append(now)
        height += rng.choice((-3, 0, 0, 1, 1, 2, 1_000_000))
        head = BlockHead("c", height, now + rng.choice((0.0, -1.0, 1.0, 1e9, -1e9, rng.uniform(-2, 2))))
        health.record_probe(head, is_syncing=False, started_at=now, ended_at=now)
        pause = health.next_probe_delay(1.0, now)
        assert PROBE_FRACTION <= pause <= 1.0
        now += pause
    assert min(later - earlier for earlier, later in pairwise(times)) >= PROBE_FRACTION - 1e-9


def test_pause_after_clock_change_is_interval() -> None:
    health = Health()
    for number in range(4):
        health.record_probe(
            BlockHead("c", number, 5.0 * number),
            is_syncing=False,
            started_at=5.0 * number + 1,
            ended_at=5.0 * number + 1,
        )
    assert health.next_probe_delay(1.0, 16.5) == 1.0
    assert health.next_probe_delay(1.0, 20.0) == 0.75
    assert [health.next_probe_delay(1.0, 20.75), health.next_probe_delay(1.0, 21.0)] == [PROBE_FRACTION, PROBE_FRACTION]
    assert (
        health.next_probe_delay(1.0, 20.0 - 3600)
        == health.next_probe_delay(1.0, 20.0 + 3600)
        == health.next_probe_delay(1.0, 21.25)
        == 1.0
    )


def test_pause_before_second_block_is_interval() -> None:
    health = Health()
    assert health.next_probe_delay(1.0, 0.0) == 1.0
    health.record_probe(BlockHead("c", 1, 0.0), is_syncing=False, started_at=0.0, ended_at=0.0)
    assert health.next_probe_delay(1.0, 0.5) == 1.0
