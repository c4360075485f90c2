"""Whether two orders have anything to do with each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import sqrt

SIGNIFICANCE_SIGMAS = 4.5
"""Two independent orders correlate more than this many standard deviations once in a hundred thousand runs; an order
that goes by arrival does by fourteen in the shortest form."""


def rank_correlation(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Spearman's rho of two orders of the same things: 1 the same order, -1 the reverse, near 0 independent ones."""
    n = len(first)
    place = {thing: rank for rank, thing in enumerate(second)}
    if len(place) != n or place.keys() != set(first):
        raise ValueError("these are not two orders of the same things")
    distance = sum((rank - place[thing]) ** 2 for rank, thing in enumerate(first))
    return 1 - 6 * distance / (n * (n * n - 1))


def chance_bound(n: int) -> float:
    """The correlation that independent orders of so many things hardly ever exceed."""
    return SIGNIFICANCE_SIGMAS / sqrt(n - 1)


def first_occurrences(names: Iterable[str], wanted_names: Iterable[str]) -> list[str]:
    """Those names that are among others, each once, in the order in which it came first."""
    wanted = set(wanted_names)
    return list(dict.fromkeys(name for name in names if name in wanted))
