"""Measured costs carried to many hosts: each limit is found where arithmetic puts it."""

from __future__ import annotations

import pytest

from bench.capacity_model import (
    CHAIN,
    DATABASE,
    HOST_CORES,
    PROOFS,
    READING,
    SENDER,
    SERVER_CORES,
    Costs,
    carry,
    knee,
)
from bench.capacity_table import MEASURED, costs_of, lines, table
from bench.table import ROWS

PROOF = 0.2
EACH = HOST_CORES / PROOF
"""Proofs a second of one host."""


def test_one_host_is_limited_by_its_proofs() -> None:
    costs = Costs(proof=PROOF, host=0.05, database=0.003, sender=0.005, sent=0.001, counted=0.001, again=0.0001)
    found = carry(costs, 1, 1.0)
    assert found.limit == PROOFS
    assert found.rate == pytest.approx(HOST_CORES / 0.25, rel=0.05)


@pytest.mark.parametrize(("seconds", "most"), [(2.0, 128), (6.0, 256 / 6)])
def test_any_number_of_hosts_is_limited_by_the_chain(seconds: float, most: float) -> None:
    found = carry(Costs(proof=PROOF), 20, seconds)
    assert found.limit == CHAIN
    assert found.rate == pytest.approx(most)
    assert knee(Costs(proof=PROOF), seconds, 20) == (-(-int(most) // int(EACH)), CHAIN)


@pytest.mark.parametrize(
    ("cost", "limit", "rate"),
    [
        ({"sender": 0.02}, SENDER, 50),
        ({"database": 0.03, "sent": 0.01}, DATABASE, SERVER_CORES / 0.04),
    ],
)
def test_a_cost_that_doubles_halves_what_it_limits(cost: dict[str, float], limit: str, rate: float) -> None:
    once = carry(Costs(proof=PROOF, **cost), 12, 1.0)
    twice = carry(Costs(proof=PROOF, **{name: 2 * value for name, value in cost.items()}), 12, 1.0)
    assert (once.limit, twice.limit) == (limit, limit)
    assert once.rate == pytest.approx(rate, rel=0.1)
    assert twice.rate == pytest.approx(rate / 2, rel=0.1)


def test_a_sender_that_is_half_as_fast_breaks_at_half_the_hosts() -> None:
    assert knee(Costs(proof=PROOF, sender=0.0099), 1.0, 20) == (10, SENDER)
    assert knee(Costs(proof=PROOF, sender=0.0198), 1.0, 20) == (5, SENDER)


def test_reading_blocks_costs_each_host_what_all_hosts_prove() -> None:
    """So what it takes grows with the square of their number."""
    found = carry(Costs(proof=PROOF, again=0.001), 4, 1.0)
    assert found.limit == PROOFS
    assert found.busy[READING] == pytest.approx(4 * EACH * 4 * 0.001, rel=0.1)
    assert carry(Costs(proof=PROOF, again=0.001), 16, 1.0).limit == READING


def test_the_same_costs_come_to_the_same() -> None:
    costs = Costs(proof=PROOF, database=0.003, sender=0.005, again=0.0001)
    assert carry(costs, 7, 1.0) == carry(costs, 7, 1.0)


def test_figures_become_costs_once_all_of_them_are_measured() -> None:
    figures: dict[str, float | None] = dict.fromkeys(MEASURED.values(), 2.0)
    figures |= {MEASURED["sender"]: 200.0, "raw proofs k10": 11.0, "raw proofs k11": None}
    costs = costs_of(figures, "k10")
    assert costs is not None
    assert costs.proof == pytest.approx(2 / 11)
    assert (costs.sender, costs.database, costs.again) == (0.005, 0.004, 0.002)
    assert costs_of(figures, "k11") is None


def test_what_was_not_measured_is_said_to_be() -> None:
    for kept in ([], lines({})):
        told = table(kept).splitlines()
        assert len(told) == 2 + 6
        assert all(line.endswith("not measured |") for line in told[2:])


def test_a_line_tells_rates_and_what_breaks_first() -> None:
    rates = [5.5, 11.0, 22.0, 44.0, 88.0, 128.0, 128.0, 128.0]
    told = table([{"name": "k10, 2 s", "rates": rates, "at": 24, "breaks": CHAIN}])
    assert "| k10, 2 s | 5.5 | 11 | 22 | 44 | 88 | 128 | 128 | 128 | the chain, with 24 provers |" in told
    told = table([{"name": "k11, 1 s", "rates": rates, "at": None, "breaks": PROOFS}])
    assert "nothing up to 100 provers" in told


def test_every_figure_that_it_needs_is_a_line_of_the_table() -> None:
    assert {*MEASURED.values(), "raw proofs k10", "raw proofs k11"} <= {row.name for row in ROWS}
