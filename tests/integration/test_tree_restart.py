"""A tree comes back from the database after a restart by reading, not by hashing it all again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import tree as bench

LEAVES = 20_000


@pytest.mark.anyio
async def test_a_tree_comes_back_many_times_quicker_than_it_was_made(tmp_path: Path) -> None:
    leaves = bench.random_leaves(LEAVES, random.Random(1))
    made, appending = bench.build(leaves)
    await bench.save(tmp_path / "queue.db", made, leaves)
    restored, _, restoring = await bench.restore(tmp_path / "queue.db")
    assert len(restored) == LEAVES
    assert restored.root() == made.root()
    for position, size in ((0, LEAVES), (LEAVES - 1, LEAVES), (1023, 1024), (12_345, 15_000)):
        assert restored.path(position, size) == made.path(position, size)
    assert restoring < appending / 2, "a tenth or less, on a machine at rest"
