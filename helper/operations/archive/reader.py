"""Reads proof bundles and the data of finished rounds of the archive. The archive's content is untrusted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from helper.chain.node_pool import gather_limited
from helper.errors import ProofBundleError
from helper.object_store.bucket import Bucket
from helper.operations.archive.object_names import (
    IndexEntry,
    blocks_directory,
    bundle_name,
    documents_name,
    find_entry,
    index_directory,
    manifest_name,
    parse_blocks_name,
    parse_index,
    parse_round_directory,
)
from helper.operations.archive.round_data import (
    ArchivedBlock,
    ArchivedReveal,
    RoundManifest,
    parse_blocks,
    parse_object,
    unpack_documents,
)
from helper.operations.proof_bundle import ProofBundle, unpack_bundle
from proofs import CircuitInfo

CONCURRENCY = 8
"""Index parts that are read concurrently."""


async def find_bundle(
    bucket: Bucket, circuits: Mapping[str, CircuitInfo], nullifier: bytes, round_ids: Sequence[bytes]
) -> ProofBundle | None:
    """Return the bundle of the reveal with this nullifier, None if the archive does not contain it.

    Reads all index parts of a round, then one bundle by name. The operator of the object store can see which bundle is
    read.

    Args:
        bucket: the archive's bucket.
        circuits: the known circuits.
        nullifier: 32 bytes.
        round_ids: the rounds to search, empty for all archived rounds.

    Raises:
        ProofBundleError: an object is missing or was altered.
        BucketError: the object store is unreachable.
    """
    if not round_ids:
        round_ids = [
            known
            for directory in await bucket.list_folders()
            if (known := parse_round_directory(directory)) is not None
        ]
    for round_id in round_ids:
        entry = await _find_index_entry(bucket, round_id, nullifier)
        if entry is None:
            continue
        bundle = await _get(bucket, bundle_name(round_id, entry.transaction))
        return _unpack_archived_bundle(bundle, entry, circuits, round_id)
    return None


async def read_round(
    bucket: Bucket, circuits: Mapping[str, CircuitInfo], round_id: bytes
) -> AsyncGenerator[list[ProofBundle]]:
    """Iterate over the bundles of a round, one index part at a time, by height.

    Raises:
        ProofBundleError: an object is missing or was altered.
        BucketError: the object store is unreachable.
    """

    async def read(entry: IndexEntry) -> ProofBundle:
        return _unpack_archived_bundle(
            await _get(bucket, bundle_name(round_id, entry.transaction)), entry, circuits, round_id
        )

    for name in sorted(await bucket.list_names(index_directory(round_id))):
        part = await bucket.get(name)
        entries = [] if part is None else parse_index(part.body)
        for start in range(0, len(entries), CONCURRENCY):
            yield await gather_limited(entries[start : start + CONCURRENCY], read, CONCURRENCY)


async def _get(bucket: Bucket, name: str) -> bytes:
    """Return an object that another object names."""
    stored = await bucket.get(name)
    if stored is None:
        raise ProofBundleError(f"{name} is missing in the archive")
    return stored.body


@dataclass(frozen=True, slots=True)
class ArchivedRound:
    """The documents of a finished round, by name, with their manifest."""

    manifest: RoundManifest
    documents: dict[str, Any]


async def read_finished_round(bucket: Bucket, round_id: bytes) -> ArchivedRound | None:
    """Return the documents of a round, None if the archive does not have them.

    An archive has none of a running round.

    Raises:
        ProofBundleError: an object is missing or was altered.
        BucketError: the object store is unreachable.
    """
    stored = await bucket.get(manifest_name(round_id))
    if stored is None:
        return None
    manifest = parse_object(RoundManifest, stored.body)
    if manifest.round != round_id.hex():
        raise ProofBundleError("the archive's manifest is of another round")
    pieces = [await _get(bucket, documents_name(round_id, number)) for number in range(manifest.pieces)]
    return ArchivedRound(manifest, unpack_documents(pieces, manifest.sha256))


async def list_blocks(bucket: Bucket, chain_id: str, heights: range) -> list[tuple[range, str]] | None:
    """Return heights and name of the objects with these blocks, by height. None if some are not archived.

    Raises:
        BucketError: the object store is unreachable.
    """
    listed = sorted(
        (
            (covered, name)
            for name in await bucket.list_names(blocks_directory(chain_id))
            if (covered := parse_blocks_name(name))
        ),
        key=lambda entry: entry[0].start,
    )
    needed: list[tuple[range, str]] = []
    next_height = heights.start
    for covered, name in listed:
        if covered.start <= next_height < covered.stop and next_height < heights.stop:
            needed.append((covered, name))
            next_height = covered.stop
    return needed if next_height >= heights.stop else None


async def read_blocks(
    bucket: Bucket, circuits: Mapping[str, CircuitInfo], round_id: bytes, names: Sequence[str]
) -> AsyncGenerator[tuple[ArchivedBlock, list[bytes]]]:
    """Iterate over the blocks in some objects, each with the transactions of the round's reveals.

    Raises:
        ProofBundleError: an object is missing or was altered.
        BucketError: the object store is unreachable.
    """

    async def read(height: int, reveal: ArchivedReveal) -> bytes:
        name = bundle_name(round_id, reveal.transaction)
        proof_bundle = unpack_bundle(await _get(bucket, name), circuits)
        if (proof_bundle.tx_hash, proof_bundle.height) != (reveal.transaction, height):
            raise ProofBundleError(f"the archive's bundle of {reveal.transaction}: content does not match the block")
        return proof_bundle.transaction

    for name in names:
        for block in parse_blocks(await _get(bucket, name)):
            reveals = [reveal for reveal in block.reveals if reveal.round == round_id.hex()]
            yield block, await gather_limited(reveals, partial(read, block.height), CONCURRENCY)


async def _find_index_entry(bucket: Bucket, round_id: bytes, nullifier: bytes) -> IndexEntry | None:
    names = await bucket.list_names(index_directory(round_id))

    async def search(name: str) -> IndexEntry | None:
        part = await bucket.get(name)
        return None if part is None else find_entry(part.body, nullifier)

    for start in range(0, len(names), CONCURRENCY):
        for entry in await gather_limited(names[start : start + CONCURRENCY], search, CONCURRENCY):
            if entry is not None:
                return entry
    return None


def _unpack_archived_bundle(
    bundle: bytes, entry: IndexEntry, circuits: Mapping[str, CircuitInfo], round_id: bytes
) -> ProofBundle:
    """Decode an archived bundle and compare it with its index entry.

    Neither verifies the proof nor checks that the chain confirmed the reveal.

    Raises:
        ProofBundleError: the bundle is invalid or does not match the entry.
    """
    if sha256(bundle).hexdigest() != entry.sha256:
        raise ProofBundleError(f"the archive's bundle of {entry.transaction}: hash does not match the index")
    proof_bundle = unpack_bundle(bundle, circuits)
    message = proof_bundle.message
    expected = entry.transaction, entry.height, entry.nullifier, round_id
    if (proof_bundle.tx_hash, proof_bundle.height, message.nullifier.hex(), message.round_id) != expected:
        raise ProofBundleError(f"the archive's bundle of {entry.transaction}: content does not match the index")
    return proof_bundle
