"""Capacity model of many hosts: each limit equals the computed one."""

from __future__ import annotations

import pytest

from bench.capacity_model import (
    HOST_CORES,
    LIMIT_BLOCK_READING,
    LIMIT_CHAIN,
    LIMIT_DATABASE,
    LIMIT_PROOFS,
    LIMIT_SENDER,
    SERVER_CORES,
    ShareCosts,
    find_saturation,
    simulate_cluster,
)
from bench.capacity_table import MEASURED_FIGURES, compute_costs, compute_lines, format_table
from bench.table import ROWS

PROOF_SECONDS = 0.2
PROOFS_PER_SECOND = HOST_CORES / PROOF_SECONDS
"""Proofs per second of one host."""


def test_capacity_of_one_host_is_limited_by_proofs() -> None:
    costs = ShareCosts(
        proof=PROOF_SECONDS,
        host=0.05,
        database=0.003,
        sender=0.005,
        sender_database=0.001,
        first_read=0.001,
        other_read=0.0001,
    )
    result = simulate_cluster(costs, 1, 1.0)
    assert result.limit == LIMIT_PROOFS
    assert result.rate == pytest.approx(HOST_CORES / 0.25, rel=0.05)


@pytest.mark.parametrize(("seconds", "most"), [(2.0, 128), (6.0, 256 / 6)])
def test_capacity_of_many_hosts_is_limited_by_chain(seconds: float, most: float) -> None:
    result = simulate_cluster(ShareCosts(proof=PROOF_SECONDS), 20, seconds)
    assert result.limit == LIMIT_CHAIN
    assert result.rate == pytest.approx(most)
    assert find_saturation(ShareCosts(proof=PROOF_SECONDS), seconds, 20) == (
        -(-int(most) // int(PROOFS_PER_SECOND)),
        LIMIT_CHAIN,
    )


@pytest.mark.parametrize(
    ("cost", "limit", "rate"),
    [
        ({"sender": 0.02}, LIMIT_SENDER, 50),
        ({"database": 0.03, "sender_database": 0.01}, LIMIT_DATABASE, SERVER_CORES / 0.04),
    ],
)
def test_doubled_cost_halves_its_limit(cost: dict[str, float], limit: str, rate: float) -> None:
    single = simulate_cluster(ShareCosts(proof=PROOF_SECONDS, **cost), 12, 1.0)
    doubled = simulate_cluster(
        ShareCosts(proof=PROOF_SECONDS, **{name: 2 * value for name, value in cost.items()}), 12, 1.0
    )
    assert (single.limit, doubled.limit) == (limit, limit)
    assert single.rate == pytest.approx(rate, rel=0.1)
    assert doubled.rate == pytest.approx(rate / 2, rel=0.1)


def test_half_as_fast_sender_supports_half_the_hosts() -> None:
    assert find_saturation(ShareCosts(proof=PROOF_SECONDS, sender=0.0099), 1.0, 20) == (10, LIMIT_SENDER)
    assert find_saturation(ShareCosts(proof=PROOF_SECONDS, sender=0.0198), 1.0, 20) == (5, LIMIT_SENDER)


def test_block_reading_cost_grows_with_all_proofs() -> None:
    """Total cost grows with the square of the number of hosts."""
    result = simulate_cluster(ShareCosts(proof=PROOF_SECONDS, other_read=0.001), 4, 1.0)
    assert result.limit == LIMIT_PROOFS
    assert result.utilization[LIMIT_BLOCK_READING] == pytest.approx(4 * PROOFS_PER_SECOND * 4 * 0.001, rel=0.1)
    assert simulate_cluster(ShareCosts(proof=PROOF_SECONDS, other_read=0.001), 16, 1.0).limit == LIMIT_BLOCK_READING


def test_equal_costs_give_equal_capacity() -> None:
    costs = ShareCosts(proof=PROOF_SECONDS, database=0.003, sender=0.005, other_read=0.0001)
    assert simulate_cluster(costs, 7, 1.0) == simulate_cluster(costs, 7, 1.0)


def test_costs_require_all_measurements() -> None:
    figures: dict[str, float | None] = dict.fromkeys(MEASURED_FIGURES.values(), 2.0)
    figures |= {MEASURED_FIGURES["sends_per_second"]: 200.0, "raw proof rate k10": 11.0, "raw proof rate k11": None}
    costs = compute_costs(figures, "k10")
    assert costs is not None
    assert costs.proof == pytest.approx(2 / 11)
    assert (costs.sender, costs.database, costs.other_read) == (0.005, 0.004, 0.002)
    assert compute_costs(figures, "k11") is None


def test_missing_measurements_are_named() -> None:
    for lines in ([], compute_lines({})):
        rows = format_table(lines).splitlines()
        assert len(rows) == 2 + 6
        assert all(line.endswith("not measured |") for line in rows[2:])


def test_capacity_line_shows_rates_and_bottleneck() -> None:
    rates = [5.5, 11.0, 22.0, 44.0, 88.0, 128.0, 128.0, 128.0]
    table = format_table([{"name": "k10, 2 s", "rates": rates, "at": 24, "breaks": LIMIT_CHAIN}])
    assert "| k10, 2 s | 5.5 | 11 | 22 | 44 | 88 | 128 | 128 | 128 | the chain, with 24 hosts |" in table
    table = format_table([{"name": "k11, 1 s", "rates": rates, "at": None, "breaks": LIMIT_PROOFS}])
    assert "none up to 100 hosts" in table


def test_every_required_measurement_is_in_the_table() -> None:
    assert {*MEASURED_FIGURES.values(), "raw proof rate k10", "raw proof rate k11"} <= {row.name for row in ROWS}
