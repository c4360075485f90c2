"""Opens the archive; reads bundles, the data of finished rounds and results of audits. The content is untrusted.

What reads raises ProofBundleError if an object is missing or was altered, and BucketError if the object store is
unreachable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import structlog

from helper.chain.node_pool import gather_limited
from helper.clock import Clock
from helper.config.sections import Config
from helper.config.value_types import BucketLocation
from helper.core.log_limits import LoggedProblem
from helper.errors import ConfigError, HelperError, ProofBundleError
from helper.object_store import Bucket, open_bucket
from helper.operations.archived_objects import (
    AUDITS,
    ArchivedBlock,
    ArchivedReveal,
    IndexEntry,
    RoundManifest,
    StoredAudit,
    blocks_directory,
    bundle_name,
    documents_name,
    index_directory,
    manifest_name,
    parse_blocks_name,
    parse_lines,
    parse_object,
    parse_round_directory,
    parse_round_object,
    unpack_documents,
)
from helper.operations.proof_bundle import ProofBundle, unpack_bundle

CONCURRENCY = 8
"""Index parts that are read concurrently."""
RETRIES = 3
"""Repetitions of a failed request, within a second. A longer failure is left to the next check of the archive."""


def open_archive_bucket(config: Config, clock: Clock) -> Bucket:
    """Open the archive's bucket.

    Raises:
        ConfigError: no archive is configured, a required package is not installed, or the credentials file is invalid.
    """
    if not config.archive.place:
        raise ConfigError("[archive] place is not set")
    return open_bucket(config.s3, BucketLocation.parse(config.archive.place), clock=clock, retries=RETRIES)


async def find_bundle(bucket: Bucket, nullifier: bytes, round_ids: Sequence[bytes]) -> ProofBundle | None:
    """Return the bundle of the reveal with this nullifier, None if the archive does not contain it.

    Reads all index parts of a round, then one bundle by name. The operator of the object store can see which bundle is
    read.

    Args:
        round_ids: the rounds to search, empty for all archived rounds.
    """
    if not round_ids:
        round_ids = [
            known
            for directory in await bucket.list_folders()
            if (known := parse_round_directory(directory)) is not None
        ]
    for round_id in round_ids:
        entry = await _find_index_entry(bucket, round_id, nullifier)
        if entry is not None:
            return await _read_bundle(bucket, round_id, entry)
    return None


async def read_round(bucket: Bucket, round_id: bytes) -> AsyncGenerator[list[ProofBundle]]:
    """Iterate over the bundles of a round, one index part at a time, by height."""
    read = partial(_read_bundle, bucket, round_id)
    for name in sorted(await bucket.list_names(index_directory(round_id))):
        entries = list(parse_lines(IndexEntry, await _get(bucket, name)))
        for start in range(0, len(entries), CONCURRENCY):
            yield await gather_limited(entries[start : start + CONCURRENCY], read, CONCURRENCY)


async def _get(bucket: Bucket, name: str) -> bytes:
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
    """Return the documents of a round, None if the archive does not have them, as of a running round."""
    stored = await bucket.get(manifest_name(round_id))
    if stored is None:
        return None
    manifest = parse_object(RoundManifest, stored.body)
    if manifest.round != round_id.hex():
        raise ProofBundleError("the archive's manifest is of another round")
    pieces = [await _get(bucket, documents_name(round_id, number)) for number in range(manifest.pieces)]
    return ArchivedRound(manifest, unpack_documents(pieces, manifest.sha256))


async def list_blocks(bucket: Bucket, chain_id: str, heights: range) -> list[str] | None:
    """Return the names of the objects with these blocks, by height. None if some are not archived."""
    needed: list[str] = []
    next_height = heights.start
    for name in sorted(await bucket.list_names(blocks_directory(chain_id))):  # sorted by height
        covered = parse_blocks_name(name) or range(0)
        if next_height in covered and next_height < heights.stop:
            needed.append(name)
            next_height = covered.stop
    return needed if next_height >= heights.stop else None


async def read_blocks(
    bucket: Bucket, round_id: bytes, names: Sequence[str]
) -> AsyncGenerator[tuple[ArchivedBlock, list[bytes]]]:
    """Iterate over the blocks in some objects, each with the transactions of the round's reveals."""

    async def read(height: int, reveal: ArchivedReveal) -> bytes:
        name = bundle_name(round_id, reveal.transaction)
        proof_bundle = unpack_bundle(await _get(bucket, name))
        if (proof_bundle.tx_hash, proof_bundle.height) != (reveal.transaction, height):
            raise ProofBundleError(f"the archive's bundle of {reveal.transaction}: content does not match the block")
        return proof_bundle.transaction

    for name in names:
        for block in parse_lines(ArchivedBlock, await _get(bucket, name)):
            reveals = [reveal for reveal in block.reveals if reveal.round == round_id.hex()]
            yield block, await gather_limited(reveals, partial(read, block.height), CONCURRENCY)


async def _find_index_entry(bucket: Bucket, round_id: bytes, nullifier: bytes) -> IndexEntry | None:
    searched = nullifier.hex()

    async def search(name: str) -> IndexEntry | None:
        entries = parse_lines(IndexEntry, await _get(bucket, name), containing=searched.encode())
        return next((entry for entry in entries if entry.nullifier == searched), None)

    names = await bucket.list_names(index_directory(round_id))
    found = await gather_limited(names, search, CONCURRENCY)
    return next((entry for entry in found if entry is not None), None)


async def _read_bundle(bucket: Bucket, round_id: bytes, entry: IndexEntry) -> ProofBundle:
    """Read the bundle of an index entry, and compare it with the entry.

    Neither verifies the proof nor checks that the chain confirmed the reveal.
    """
    bundle = await _get(bucket, bundle_name(round_id, entry.transaction))
    if sha256(bundle).hexdigest() != entry.sha256:
        raise ProofBundleError(f"the archive's bundle of {entry.transaction}: hash does not match the index")
    proof_bundle = unpack_bundle(bundle)
    message = proof_bundle.message
    expected = entry.transaction, entry.height, entry.nullifier, round_id
    if (proof_bundle.tx_hash, proof_bundle.height, message.nullifier.hex(), message.round_id) != expected:
        raise ProofBundleError(f"the archive's bundle of {entry.transaction}: content does not match the index")
    return proof_bundle


log = structlog.get_logger("helper.operations")


class AuditResults:
    """The stored results by round. They are read in the background, each once."""

    def __init__(self, bucket: Bucket, *, clock: Clock, interval_seconds: float) -> None:
        self._bucket = bucket
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._results: dict[bytes, StoredAudit] = {}
        self._problem = LoggedProblem()

    def get(self, round_id: bytes) -> StoredAudit | None:
        """The result of a round, None if it is not known."""
        return self._results.get(round_id)

    async def run(self) -> None:
        """Read new results until cancelled. Errors are logged once."""
        while True:
            try:
                await self.refresh()
            except HelperError as error:
                if self._problem.note(str(error)):
                    log.warning("audit_results_unavailable", reason=str(error))
            else:
                self._problem.clear()
            await self._clock.sleep(self._interval_seconds)

    async def refresh(self) -> None:
        """Read all results that are new.

        Raises:
            ProofBundleError: a result is invalid; the others were read.
            BucketError: the object store is unreachable.
        """
        invalid: ProofBundleError | None = None
        for name in await self._bucket.list_names(AUDITS):
            round_id = parse_round_object(name)
            if round_id is None or round_id in self._results:
                continue
            stored = await self._bucket.get(name)
            if stored is not None:
                try:
                    self._results[round_id] = parse_object(StoredAudit, stored.body)
                except ProofBundleError as error:
                    invalid = ProofBundleError(f"{name}: {error}", advice=error.advice)
        if invalid is not None:
            raise invalid
