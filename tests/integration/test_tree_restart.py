"""After a restart, the tree is read from the database without hashing it again."""

from __future__ import annotations

import random
from pathlib import Path

from bench import tree as bench

LEAF_COUNT = 20_000


async def test_tree_restore_is_faster_than_sync(tmp_path: Path) -> None:
    leaves = bench.random_leaves(LEAF_COUNT, random.Random(1))
    tree, appending = bench.build_tree(leaves)
    await bench.save_tree(tmp_path / "queue.db", tree, leaves)
    restored, _, restoring = await bench.restore_tree(tmp_path / "queue.db")
    assert len(restored) == LEAF_COUNT
    assert restored.root() == tree.root()
    for position, size in ((0, LEAF_COUNT), (LEAF_COUNT - 1, LEAF_COUNT), (1023, 1024), (12_345, 15_000)):
        assert restored.path(position, size) == tree.path(position, size)
    assert restoring < appending / 2, "at most a tenth on an idle machine"
