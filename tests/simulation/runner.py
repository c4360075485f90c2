"""Plays many seeds, in processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial

from tests.simulation.run import SeedResult, run_seed

SEEDS_PER_BATCH = 5
"""Seeds that a process takes at once."""


def run_seeds(seeds: Sequence[int], *, jobs: int, verbose: bool = False) -> Iterator[SeedResult]:
    """The results, as they come in.

    Args:
        seeds: which.
        jobs: processes; with one, all runs here.
        verbose: with the product's own log.
    """
    if jobs <= 1 or len(seeds) == 1:
        gc.freeze()  # what the process has of old is not looked through after each seed
        try:
            yield from (run_seed(seed, verbose=verbose) for seed in seeds)
        finally:
            gc.unfreeze()
        return
    # Not forked: a process of its own begins without what the parent has running.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_initialize_worker) as pool:
        yield from pool.imap_unordered(partial(run_seed, verbose=verbose), seeds, chunksize=SEEDS_PER_BATCH)


def _initialize_worker() -> None:
    """What the process has by now is not looked through after each seed."""
    gc.collect()
    gc.freeze()
