"""Reads the reveals of a round from the archive; everything else comes from the nodes.

The archive outlives the blocks of nodes that prune them. It has no block times, and no transactions but reveals.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from helper.audit.source import AuditBlock, AuditSource, AuditTx, DataMissing
from helper.errors import ProofBundleError
from helper.object_store.bucket import Bucket
from helper.operations.archive.reader import read_round
from proofs import CircuitInfo


class ArchiveSource:
    """The reveals in an archive, with the documents of another source.

    Args:
        documents: the source of the documents.
        bucket: the archive's bucket; its content is untrusted.
        circuits: the known circuits.
        round_id: 32 bytes.
    """

    has_all_blocks = False

    def __init__(
        self, documents: AuditSource, bucket: Bucket, circuits: Mapping[str, CircuitInfo], round_id: bytes
    ) -> None:
        self._documents = documents
        self._bucket = bucket
        self._circuits = circuits
        self._round_id = round_id

    async def document(self, name: str) -> object:
        """Return a document of the other source."""
        return await self._documents.document(name)

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks with archived reveals.

        Raises:
            DataMissing: a bundle is missing or was altered.
            BucketError: the object store is unreachable.
        """
        height = 0
        txs: list[AuditTx] = []
        try:
            async with aclosing(read_round(self._bucket, self._circuits, self._round_id)) as groups:
                async for group in groups:
                    for bundle in group:
                        if bundle.height != height and txs:
                            yield AuditBlock(height, None, tuple(txs))
                            txs = []
                        height = bundle.height
                        if height >= first:
                            txs.append(AuditTx(bundle.transaction, 0))
        except ProofBundleError as error:
            raise DataMissing(str(error)) from None
        if txs:
            yield AuditBlock(height, None, tuple(txs))
