"""Runs many seeds in worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial

from tests.simulation.run import SeedResult, run_seed
from tests.simulation.scenario import LiarPlan

SEEDS_PER_BATCH = 5
"""Seeds per task of a worker process."""


def run_seeds(
    seeds: Sequence[int], *, jobs: int, verbose: bool = False, liar: LiarPlan | None = None
) -> Iterator[SeedResult]:
    """Yield the results as they arrive.

    Args:
        jobs: number of processes; 1 runs the seeds in this process.
        liar: lies of one node, see `run_seed`.
    """
    if jobs <= 1 or len(seeds) == 1:
        yield from (run_seed(seed, verbose=verbose, liar=liar) for seed in seeds)
        return
    # Spawned, not forked: a forked process would inherit the parent's state.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(partial(run_seed, verbose=verbose, liar=liar), seeds, chunksize=SEEDS_PER_BATCH)
