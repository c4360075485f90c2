"""Measure the commitment tree up to the size of a real round: `python -m bench.tree [--sizes 500000] [--quick]`.

Prints JSON:

- `append_leaves_per_second`: appending leaves in batches, as from blocks; `sync_…` also stores leaves and inner nodes
  in the database
- `restore_seconds`: restoring the tree from the database, including `load_seconds` for reading
- `path_ms`, `past_path_ms`, `past_root_ms`: medians, at the newest size and at random past sizes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from helper.store import rounds
from helper.store.models import StoredRound
from helper.store.sqlite.store import SqliteStore
from proofs import SUBTREE_LEAVES, CommitmentTree

SIZES = (5_000, 50_000, 500_000)
LEAVES_PER_BATCH = 8192
ROUND_ID = bytes(range(32))


def random_leaves(count: int, rng: random.Random) -> bytes:
    """Generate canonical field elements: the top two bits are clear."""
    return b"".join(rng.randbytes(31) + bytes([rng.randrange(0x40)]) for _ in range(count))


def measure_microseconds(calls: int, call: Any) -> float:
    """Return the median duration of a call in microseconds."""
    spent = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return round(median(spent) * 1e6, 1)


def build_tree(leaves: bytes) -> tuple[CommitmentTree, float]:
    """Build the tree. Returns it with the elapsed seconds."""
    tree, began = CommitmentTree(), time.perf_counter()
    for start in range(0, len(leaves), 32 * LEAVES_PER_BATCH):
        tree.append(leaves[start : start + 32 * LEAVES_PER_BATCH])
    tree.root()
    return tree, time.perf_counter() - began


async def save_tree(path: Path, tree: CommitmentTree, leaves: bytes) -> float:
    """Store a tree like the service. Returns the elapsed seconds."""
    store = SqliteStore(path)
    await store.open()
    try:
        await store.run(rounds.save_rounds, [StoredRound(ROUND_ID, 1, 2_000_000_000, 1, ())], 1.0)
        began = time.perf_counter()
        for number, start in enumerate(range(0, len(tree), LEAVES_PER_BATCH)):
            await store.run(
                rounds.save_leaves, ROUND_ID, number + 1, start, leaves[32 * start : 32 * (start + LEAVES_PER_BATCH)]
            )
        complete = range(len(tree) // SUBTREE_LEAVES)
        await store.run(rounds.save_subtrees, ROUND_ID, 0, b"".join(tree.subtree(index) for index in complete))
        return time.perf_counter() - began
    finally:
        await store.close()


async def restore_tree(path: Path) -> tuple[CommitmentTree, float, float]:
    """Restore the tree from the file. Returns it, the seconds of reading, and the seconds until the first root."""
    store = SqliteStore(path)
    await store.open()
    try:
        began = time.perf_counter()
        leaves, _ = await store.load_leaves(ROUND_ID)
        subtrees = await store.load_subtrees(ROUND_ID)
        read = time.perf_counter() - began
        tree = CommitmentTree.restore(leaves, subtrees)
        tree.root()
        return tree, read, time.perf_counter() - began
    finally:
        await store.close()


async def measure(count: int) -> dict[str, Any]:
    """Run once."""
    rng = random.Random(count)
    leaves = random_leaves(count, rng)
    tree, appended = build_tree(leaves)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tree.db"
        saved = await save_tree(path, tree, leaves)
        restored, loaded, total = await restore_tree(path)
        if (len(restored), restored.root()) != (len(tree), tree.root()):
            raise SystemExit("the restored tree differs")
    return {
        "size": count,
        "append_leaves_per_second": round(count / appended),
        "sync_leaves_per_second": round(count / (appended + saved)),
        "load_seconds": round(loaded, 4),
        "restore_seconds": round(total, 4),
        "path_ms": measure_microseconds(1000, lambda: restored.path(rng.randrange(count))) / 1000,
        "past_path_ms": measure_microseconds(1000, lambda: restored.path(0, rng.randrange(count) + 1)) / 1000,
        "past_root_ms": measure_microseconds(1000, lambda: restored.root(rng.randrange(count) + 1)) / 1000,
    }


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run, without the largest tree")
    options = parser.parse_args()
    sizes, runs = (SIZES[:2], 1) if options.quick else (options.sizes, options.runs)
    results = [asyncio.run(measure(size)) for size in sizes for _ in range(runs)]
    print(json.dumps({"name": "tree", "runs": results}))


if __name__ == "__main__":
    main()
