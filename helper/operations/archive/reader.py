"""Finds a reveal's bundle in the archive. What comes from there is looked at as if it came from anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from helper.chain.gather import gather_limited
from helper.errors import ProofBundleError
from helper.object_store.bucket import Bucket
from helper.operations.archive.object_names import Entry, bundle_name, find_entry, index_folder, round_of
from helper.operations.proof_bundle import ProofBundle, unpack
from proofs import CircuitInfo

AT_ONCE = 8
"""Parts of an index that are read at once."""


async def find_bundle(
    bucket: Bucket, circuits: Mapping[str, CircuitInfo], nullifier: bytes, round_ids: Sequence[bytes]
) -> tuple[bytes, ProofBundle] | None:
    """The bundle of the reveal that made a nullifier count, None when the archive has none.

    The store is asked for a whole round's index, and then for the one bundle by its name, which its keeper sees.

    Args:
        bucket: the archive's place.
        circuits: the circuits that are known here.
        nullifier: 32 bytes.
        round_ids: the rounds that it may be of, empty for all that the archive has.

    Raises:
        EvidenceError: what is there is not what was written.
        BucketError: the store could not be asked.
    """
    if not round_ids:
        round_ids = [known for folder in await bucket.folders() if (known := round_of(folder)) is not None]
    for round_id in round_ids:
        entry = await _entry(bucket, round_id, nullifier)
        if entry is None:
            continue
        name = bundle_name(round_id, entry.transaction)
        found = await bucket.get(name)
        if found is None:
            raise ProofBundleError(f"the archive's index names {name}, and it is not there")
        return found.body, checked(found.body, entry, circuits, round_id)
    return None


async def _entry(bucket: Bucket, round_id: bytes, nullifier: bytes) -> Entry | None:
    names = await bucket.names(index_folder(round_id))

    async def look(name: str) -> Entry | None:
        part = await bucket.get(name)
        return None if part is None else find_entry(part.body, nullifier)

    for start in range(0, len(names), AT_ONCE):
        for entry in await gather_limited(names[start : start + AT_ONCE], look, AT_ONCE):
            if entry is not None:
                return entry
    return None


def checked(bundle: bytes, entry: Entry, circuits: Mapping[str, CircuitInfo], round_id: bytes) -> ProofBundle:
    """What a bundle of the archive says, if it is the one that its index names.

    Whether its proof holds is the verifier's to say, and whether the chain counted it the chain's.

    Raises:
        EvidenceError: it is not; says in what.
    """
    if sha256(bundle).hexdigest() != entry.sha256:
        raise ProofBundleError(
            f"the archive's bundle of {entry.transaction} is not what was written (its hash is another)"
        )
    evidence = unpack(bundle, circuits)
    message = evidence.message
    told = entry.transaction, entry.height, entry.nullifier, round_id
    if (evidence.tx_hash, evidence.height, message.nullifier.hex(), message.round_id) != told:
        raise ProofBundleError(f"the archive's bundle of {entry.transaction} is of another reveal than its index says")
    return evidence
