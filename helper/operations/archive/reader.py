"""Reads proof bundles of the archive. The archive's content is untrusted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from hashlib import sha256

from helper.chain.limited_gather import gather_limited
from helper.errors import ProofBundleError
from helper.object_store.bucket import Bucket
from helper.operations.archive.object_names import (
    IndexEntry,
    bundle_name,
    find_entry,
    index_directory,
    parse_index,
    parse_round_directory,
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
        name = bundle_name(round_id, entry.transaction)
        stored = await bucket.get(name)
        if stored is None:
            raise ProofBundleError(f"{name} is in the archive's index but missing in the archive")
        return _unpack_archived_bundle(stored.body, entry, circuits, round_id)
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
        name = bundle_name(round_id, entry.transaction)
        stored = await bucket.get(name)
        if stored is None:
            raise ProofBundleError(f"{name} is in the archive's index but missing in the archive")
        return _unpack_archived_bundle(stored.body, entry, circuits, round_id)

    for name in sorted(await bucket.list_names(index_directory(round_id))):
        part = await bucket.get(name)
        entries = [] if part is None else parse_index(part.body)
        for start in range(0, len(entries), CONCURRENCY):
            yield await gather_limited(entries[start : start + CONCURRENCY], read, CONCURRENCY)


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
