"""Reads a round from the archive, and writes the documents of a finished round to it.

An archive contains all data for the audit of a finished round. Of a running round it contains only the reveals: no
block times and no other transactions. All other data then comes from the nodes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from audit import source as sources
from audit.documents import FINALIZED, RoundFacts, parse_round_facts
from audit.source import AuditBlock, AuditSource, AuditTx, DataMissing
from audit.transactions import is_of_round
from helper.errors import ChainUnavailable, InvalidResponse, ProofBundleError
from helper.object_store import Bucket
from helper.operations.archive_reader import ArchivedRound, list_blocks, read_blocks, read_round
from helper.operations.archived_objects import RoundManifest, documents_name, manifest_name, pack_documents


class ArchiveSource:
    """A round in the archive, whose content is untrusted.

    Args:
        bucket: the archive's bucket.
        round_id: 32 bytes.
        documents: the archived documents of the round, or another source of them.
        blocks: names of the objects with all blocks of the round; None if only the reveals are archived.

    Attributes:
        has_all_blocks: whether all blocks are archived.
    """

    def __init__(
        self,
        bucket: Bucket,
        round_id: bytes,
        documents: ArchivedRound | AuditSource,
        blocks: Sequence[str] | None = None,
    ) -> None:
        self._bucket = bucket
        self._round_id = round_id
        self._documents = documents
        self._blocks = blocks
        self.has_all_blocks = blocks is not None

    async def document(self, name: str) -> object:
        """Return a document by name.

        Raises:
            DataMissing: it was missing when the archive was written, or the other source does not have it.
        """
        if not isinstance(self._documents, ArchivedRound):
            return await self._documents.document(name)
        stored = self._documents
        if sources.parse_heads_name(name) is not None:
            name = sources.HEADS
        if name not in stored.documents:
            raise DataMissing(stored.manifest.missing.get(name, "not in the archive"))
        return stored.documents[name]

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks from a height on; only over those with reveals if not all blocks are archived.

        Raises:
            DataMissing: an object is missing or was altered.
            BucketError: the object store is unreachable.
        """
        try:
            async with aclosing(self._read_reveals() if self._blocks is None else self._read_blocks()) as blocks:
                async for block in blocks:
                    if block.height >= first:
                        yield block
        except ProofBundleError as error:
            raise DataMissing(str(error)) from None

    async def _read_blocks(self) -> AsyncGenerator[AuditBlock]:
        assert self._blocks is not None
        stored = read_blocks(self._bucket, self._round_id, self._blocks)
        async with aclosing(stored) as blocks:
            async for block, reveals in blocks:
                txs = [AuditTx(tx.raw, tx.code) for tx in block.others]
                # Reveals append no leaves, so their position among the other transactions is irrelevant.
                txs = [tx for tx in txs if is_of_round(tx.raw, self._round_id)]
                yield AuditBlock(block.height, block.time, (*txs, *(AuditTx(raw, 0) for raw in reveals)))

    async def _read_reveals(self) -> AsyncGenerator[AuditBlock]:
        height = 0
        txs: list[AuditTx] = []
        async with aclosing(read_round(self._bucket, self._round_id)) as groups:
            async for group in groups:
                for bundle in group:
                    if bundle.height != height and txs:
                        yield AuditBlock(height, None, tuple(txs))
                        txs = []
                    height = bundle.height
                    txs.append(AuditTx(bundle.transaction, 0))
        if txs:
            yield AuditBlock(height, None, tuple(txs))


async def open_archived_round(bucket: Bucket, round_id: bytes, stored: ArchivedRound) -> ArchiveSource:
    """Return the source of a finished round.

    Raises:
        BucketError: the object store is unreachable.
    """
    blocks = None
    try:
        facts = parse_round_facts(stored.documents.get(sources.ROUND))
    except InvalidResponse:
        facts = None  # the audit reports it
    if facts is not None:
        heights = range(facts.created_at_height, stored.manifest.height + 1)
        blocks = await list_blocks(bucket, stored.manifest.chain_id, heights)
    return ArchiveSource(bucket, round_id, stored, blocks)


async def archive_documents(
    bucket: Bucket, nodes: AuditSource, round_id: bytes, *, chain_id: str, height: int
) -> ArchivedRound:
    """Write the documents of a finished round to the archive.

    Args:
        bucket: the archive's bucket.
        nodes: the nodes.
        round_id: 32 bytes.
        chain_id: the chain.
        height: the archive is complete up to this block, which is after the round's tally.

    Raises:
        AuditError: the round cannot be read or stored.
        InvalidResponse: the responses have too many values to be stored.
        ChainUnavailable: no node responded.
        BucketError: the object store is unreachable.
    """
    document = await nodes.document(sources.ROUND)
    encoded = {sources.ROUND: sources.encode_document(document)}
    facts = parse_round_facts(document)
    if facts.status != FINALIZED:
        raise ChainUnavailable("the node does not report the round as finalized")
    documents: dict[str, object] = {}
    missing: dict[str, str] = {}
    for name in _document_names(facts, height):
        key = sources.HEADS if sources.parse_heads_name(name) is not None else name
        try:
            stored = await nodes.document(name)
            encoded[key] = sources.encode_document(stored)
            documents[key] = stored
        except DataMissing as error:
            missing[key] = str(error)
    documents[sources.ROUND] = document
    digest, pieces = pack_documents(encoded)
    manifest = RoundManifest(
        chain_id=chain_id, round=round_id.hex(), height=height, pieces=len(pieces), sha256=digest, missing=missing
    )
    for number, piece in enumerate(pieces):
        await bucket.put(documents_name(round_id, number), piece)
    await bucket.put(manifest_name(round_id), manifest.to_line())
    return ArchivedRound(manifest, documents)


def _document_names(facts: RoundFacts, height: int) -> list[str]:
    """The names of all documents that an audit of the round may read, except for the round itself."""
    sums = [sources.tally_document(proposal_id) for proposal_id in facts.options]
    fixed = [sources.LEAVES, sources.ROOTS, sources.RESULTS, sources.SUMMARY, sources.PARTIALS]
    return [*fixed, *sums, sources.heads_document(height)]
