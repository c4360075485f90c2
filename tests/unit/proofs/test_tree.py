"""The tree equals a naive one at every size, and survives serialization."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import proofs
from tests.unit.proofs.votes import MODULUS, encode_element, seeded_element

LEAVES = [seeded_element(f"leaf {i}") for i in range(40)]


def empty_hashes() -> list[bytes]:
    hashes = [proofs.poseidon(bytes(32), bytes(32))]
    for _ in range(proofs.TREE_DEPTH):
        hashes.append(proofs.poseidon(hashes[-1], hashes[-1]))
    return hashes


EMPTY_HASHES = empty_hashes()


def naive_path(leaves: list[bytes], position: int) -> tuple[bytes, bytes]:
    """Root, and the path of a position, hashed level by level."""
    level, path = list(leaves), b""
    for height in range(proofs.TREE_DEPTH):
        if len(level) % 2:
            level.append(EMPTY_HASHES[height])
        sibling = position ^ 1
        path += level[sibling] if sibling < len(level) else EMPTY_HASHES[height]
        level = [proofs.poseidon(*level[i : i + 2]) for i in range(0, len(level), 2)]
        position //= 2
    return (level[0] if level else EMPTY_HASHES[-1]), path


def create_tree(leaves: list[bytes]) -> proofs.CommitmentTree:
    tree = proofs.CommitmentTree()
    tree.append(b"".join(leaves))
    return tree


def test_empty_tree_root_and_path() -> None:
    tree = proofs.CommitmentTree()
    assert len(tree) == 0
    assert tree.root() == tree.root(0) == proofs.EMPTY_ROOT == EMPTY_HASHES[-1]
    tree.append(b"")
    assert len(tree) == 0


@settings(max_examples=25)
@given(st.data())
def test_root_and_path_match_reference_at_every_size(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(LEAVES)))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    tree = proofs.CommitmentTree()
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        tree.append(b"".join(LEAVES[start:end]))
    size = data.draw(st.integers(1, length))
    position = data.draw(st.integers(0, size - 1))
    root, path = naive_path(LEAVES[:size], position)
    assert tree.root(size) == root
    assert tree.path(position, size) == path
    assert tree.leaf(position) == LEAVES[position]
    assert tree.root() == tree.root(length)
    assert tree.path(position) == tree.path(position, length)
    assert len(tree) == length


def test_root_at_size_ignores_later_leaves() -> None:
    tree, shorter = create_tree(LEAVES), create_tree(LEAVES[:13])
    assert tree.root(13) == shorter.root()
    assert [tree.path(i, 13) for i in range(13)] == [shorter.path(i) for i in range(13)]


def test_missing_position_or_size_is_refused() -> None:
    tree = create_tree(LEAVES[:10])
    for outside in (10, 2**24, 2**64, -1):
        with pytest.raises(proofs.TreeError):
            tree.leaf(outside)
        with pytest.raises(proofs.TreeError):
            tree.path(outside)
    for size in (11, 2**24 + 1, 2**70, -1):
        with pytest.raises(proofs.TreeError):
            tree.root(size)
        with pytest.raises(proofs.TreeError):
            tree.path(0, size)
    with pytest.raises(proofs.TreeError):
        tree.path(5, 5)
    with pytest.raises(proofs.TreeError):
        tree.subtree(0)


def test_invalid_leaf_is_named_and_nothing_is_appended() -> None:
    tree = create_tree(LEAVES[:3])
    before = tree.root()
    for bad, field, reason in [
        (LEAVES[3] + encode_element(MODULUS), "leaf[1]", "non-canonical"),
        (LEAVES[3] + bytes(31), "leaf", "length"),
    ]:
        with pytest.raises(proofs.EncodingError) as caught:
            tree.append(bad)
        assert (caught.value.field, caught.value.reason) == (field, reason)
        assert len(tree) == 3
        assert tree.root() == before


def test_restored_tree_equals_appended_tree() -> None:
    rng = random.Random(11)
    leaves = [encode_element(rng.randrange(MODULUS)) for _ in range(2 * proofs.SUBTREE_LEAVES + 100)]
    joined = b"".join(leaves)
    tree = create_tree(leaves)
    first, second = tree.subtree(0), tree.subtree(1)
    assert len(first) == (proofs.SUBTREE_LEAVES - 1) * 32
    assert first[:32] == proofs.poseidon(leaves[0], leaves[1])
    for stored in (b"", first, first + second):
        restored = proofs.CommitmentTree.restore(joined, stored)
        assert len(restored) == len(tree)
        for size in (1, 1023, 1024, 1025, 2048, len(tree)):
            assert restored.root(size) == tree.root(size)
            assert restored.path(size - 1, size) == tree.path(size - 1, size)
        assert restored.subtree(1) == second
        restored.append(leaves[0])
        assert restored.root(len(tree)) == tree.root()


def test_restore_of_invalid_data_is_refused() -> None:
    leaves = b"".join(LEAVES)
    node_bytes = (proofs.SUBTREE_LEAVES - 1) * 32
    for subtrees in (bytes(node_bytes), bytes(31), b"\xff" * node_bytes):
        with pytest.raises(proofs.TreeError):
            proofs.CommitmentTree.restore(leaves, subtrees)
    with pytest.raises(proofs.TreeError):
        proofs.CommitmentTree.restore(bytes(32 * proofs.SUBTREE_LEAVES), b"\xff" * node_bytes)
    with pytest.raises(proofs.EncodingError):
        proofs.CommitmentTree.restore(encode_element(MODULUS), b"")


def test_tree_is_readable_while_another_thread_appends() -> None:
    tree = create_tree(LEAVES[:7])
    root = tree.root()
    stop = threading.Event()
    roots: list[bytes] = []

    def read() -> None:
        while not stop.is_set():
            roots.append(tree.root(7))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for leaf in LEAVES[7:]:
        tree.append(leaf * 20)
    stop.set()
    for reader in readers:
        reader.join()
    assert set(roots) <= {root}
    assert len(tree) == 7 + 33 * 20
