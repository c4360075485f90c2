"""Evidence file of an audit: a zip of all data that was read, to repeat the audit without a node.

Members: `blocks.jsonl` (one block per line with the round's transactions), `documents.json` (documents by name) and
`manifest.json` (format, round, missing data, SHA-256 of the other members). All of it is public on the chain.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Final, cast

import orjson

from audit.source import (
    MAX_LINE_BYTES,
    AuditBlock,
    AuditSource,
    DataMissing,
    decode_block,
    encode_block,
    encode_document,
)
from helper.chain.json_fields import Fields, limit_stored_values
from helper.errors import AuditError, InvalidResponse
from helper.operations.archived_objects import MAX_DOCUMENTS_BYTES
from helper.operations.proof_bundle import create_zip_entry

FORMAT: Final = "svote-helper round evidence"
VERSION: Final = 1
BLOCKS: Final = "blocks.jsonl"
DOCUMENTS: Final = "documents.json"
MANIFEST: Final = "manifest.json"

_MAX_MANIFEST_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 20
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others can need gigabytes of memory
_ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    ValueError,
    EOFError,
    OSError,
    KeyError,
)


class RecordingSource:
    """Passes the data of another source on, hashes it, and writes it to an evidence file.

    Args:
        source: the source.
        round_id: 32 bytes.
        file: file for the evidence, None to only hash the data.

    Attributes:
        has_all_blocks: as the source's.
        hashes: SHA-256 of the members by name, in hex; complete after `finish`.
    """

    def __init__(self, source: AuditSource, round_id: bytes, file: IO[bytes] | None = None) -> None:
        self._source = source
        self._round_id = round_id
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) if file is not None else None
        self._documents: dict[str, orjson.Fragment] = {}
        self._missing: dict[str, str] = {}
        self._blocks_hash = sha256()
        self.has_all_blocks = source.has_all_blocks
        self.hashes: dict[str, str] = {}

    async def document(self, name: str) -> object:
        """Return a document of the source."""
        try:
            document = await self._source.document(name)
            self._documents[name] = orjson.Fragment(encode_document(document))
        except DataMissing as error:
            self._missing[name] = str(error)
            raise
        return document

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks of the source."""
        with self._open_blocks() as member:
            try:
                async with aclosing(self._source.blocks(first)) as blocks:
                    async for block in blocks:
                        line = encode_block(block)
                        self._blocks_hash.update(line)
                        if member is not None:
                            member.write(line)
                        yield block
            except DataMissing as error:
                self._missing[BLOCKS] = str(error)
                raise

    @contextmanager
    def _open_blocks(self) -> Generator[IO[bytes] | None]:
        if self._zip is None:
            yield None
            return
        with self._zip.open(create_zip_entry(BLOCKS, zipfile.ZIP_DEFLATED), "w", force_zip64=True) as member:
            yield member

    def finish(self) -> None:
        """Write the documents and the manifest, and close the evidence file.

        Raises:
            AuditError: the documents have too many values.
        """
        documents = orjson.dumps(self._documents, option=orjson.OPT_SORT_KEYS)
        self.hashes = {BLOCKS: self._blocks_hash.hexdigest(), DOCUMENTS: sha256(documents).hexdigest()}
        if self._zip is None:
            return
        try:
            limit_stored_values(documents, DOCUMENTS)
        except InvalidResponse as error:  # `EvidenceSource` would refuse the file
            raise AuditError(str(error)) from None
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "round": self._round_id.hex(),
            "has_all_blocks": self.has_all_blocks,
            "missing": self._missing,
            "sha256": self.hashes,
        }
        self._zip.writestr(create_zip_entry(DOCUMENTS, zipfile.ZIP_DEFLATED), documents)
        text = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
        self._zip.writestr(create_zip_entry(MANIFEST, zipfile.ZIP_DEFLATED), text)
        self._zip.close()

    def close(self) -> None:
        """Close the evidence file, complete or not."""
        if self._zip is not None:
            self._zip.close()


class EvidenceSource:
    """The data of an evidence file. The file is untrusted.

    Args:
        path: the file.

    Attributes:
        has_all_blocks: as that of the recorded source.
        round_id: the round of the evidence, 32 bytes.

    Raises:
        AuditError: the file is not evidence, or the hash of the documents does not match.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except _ZIP_ERRORS as error:
            raise AuditError(f"not readable as a zip file ({type(error).__name__})") from None
        with _zip_errors("evidence"):
            if sorted(self._zip.namelist()) != [BLOCKS, DOCUMENTS, MANIFEST]:
                raise AuditError(f"an evidence file contains exactly {BLOCKS}, {DOCUMENTS} and {MANIFEST}")
            if any(member.compress_type not in _METHODS for member in self._zip.infolist()):
                raise AuditError("the evidence file uses an unsupported compression method")
            manifest = Fields(orjson.loads(self._read(MANIFEST, _MAX_MANIFEST_BYTES)), MANIFEST)
            if manifest.text("format") != FORMAT or manifest.uint("version") != VERSION:
                raise AuditError("not an evidence file, or one of a newer version")
            self.round_id = manifest.hex_bytes("round")
            self.has_all_blocks = manifest.boolean("has_all_blocks")
            missing = manifest.child("missing")
            self._missing = {name: missing.text(name) for name in missing.names()}
            self._blocks_hash = manifest.child("sha256").hex_bytes(BLOCKS)
            documents = self._read(DOCUMENTS, MAX_DOCUMENTS_BYTES)
            _check_hash(DOCUMENTS, sha256(documents).digest(), manifest.child("sha256").hex_bytes(DOCUMENTS))
            limit_stored_values(documents, DOCUMENTS)
            self._documents = Fields(orjson.loads(documents), DOCUMENTS)

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    async def document(self, name: str) -> object:
        """Return a document of the evidence file by name.

        Raises:
            DataMissing: it was missing when the evidence was made.
        """
        if not self._documents.has(name):
            raise DataMissing(self._missing.get(name, "not in the evidence file"))
        return self._documents.value(name)

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks from a height on.

        The hash is checked at the end, even if the caller stops early, because reading a large file takes long.

        Raises:
            DataMissing: a block was missing when the evidence was made.
            AuditError: a block is not readable, or the hash does not match.
        """
        digest = sha256()
        with _zip_errors(BLOCKS), self._open_buffered(BLOCKS) as member:
            try:
                while line := member.readline(MAX_LINE_BYTES):
                    digest.update(line)
                    block = decode_block(line)
                    if block.height >= first:
                        yield block
            finally:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                _check_hash(BLOCKS, digest.digest(), self._blocks_hash)
        if BLOCKS in self._missing:
            raise DataMissing(self._missing[BLOCKS])

    def _open_buffered(self, name: str) -> io.BufferedReader:
        """Open a member to read lines: the zip module searches for the end of a long line in small pieces."""
        return io.BufferedReader(cast("io.RawIOBase", self._zip.open(name)), _CHUNK_BYTES)

    def _read(self, name: str, limit: int) -> bytes:
        with self._zip.open(name) as member:
            content = member.read(limit + 1)
        if len(content) > limit:
            raise AuditError(f"{name}: longer than {limit} bytes")
        return content


def _check_hash(name: str, digest: bytes, expected: bytes) -> None:
    if digest != expected:
        raise AuditError(f"{name}: the hash does not match the manifest")


@contextmanager
def _zip_errors(name: str) -> Generator[None]:
    """Convert errors of a damaged file."""
    try:
        yield
    except InvalidResponse as error:
        raise AuditError(str(error)) from None
    except _ZIP_ERRORS as error:
        raise AuditError(f"{name}: not readable ({type(error).__name__})") from None
