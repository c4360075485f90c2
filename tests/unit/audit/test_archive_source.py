"""Rounds in the archive: everything that an audit reads, damage, and archives without blocks."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import pytest

from audit.archive_source import ArchiveSource, archive_documents, open_archived_round
from audit.auditor import Audit, audit_round
from audit.check_results import CHECKS, Verdict
from audit.source import AuditTx
from helper.errors import ChainUnavailable, InvalidResponse, ProofBundleError
from helper.object_store import StoredObject
from helper.operations import archived_objects
from helper.operations.archive_reader import list_blocks, read_finished_round
from helper.operations.archived_objects import (
    blocks_name,
    documents_name,
    manifest_name,
    parse_blocks_name,
    parse_round_object,
)
from tests.recorded.test_audit import heads, of_verdict, why
from tests.support.audit_rounds import MemorySource, threshold_round
from tests.support.bucket import MemoryBucket
from tests.support.round_archive import CHAIN_ID, archive_round, remove_blocks

ONLY_REVEALS = {"A1", "A4", "A5", "C6", "C7", "D1", "D4"}
ALL_BLOCKS = {"A1", "A2", "A3", "A4", "A5", "B1", "B2", "C3", "C4", "C6", "C7", "D1", "D4"}


def agreed_round() -> MemorySource:
    """The threshold round with the same block and state on two nodes."""
    source = threshold_round()
    source.documents["heads"] = heads(("a", "A", "S"), ("b", "A", "S"))
    return source


async def archive_agreed_round() -> tuple[MemorySource, MemoryBucket]:
    source = agreed_round()
    return source, await archive_round(source)


async def audit(bucket: MemoryBucket, round_id: bytes) -> Audit:
    stored = await read_finished_round(bucket, round_id)
    assert stored is not None
    return await audit_round(await open_archived_round(bucket, round_id, stored), round_id)


async def test_audit_of_archived_round_passes_every_check() -> None:
    source, bucket = await archive_agreed_round()
    folders = {name.partition("/")[0] for name in bucket.objects}
    assert folders == {source.round_id.hex(), "blocks", "progress", "rounds"}
    result = await audit(bucket, source.round_id)
    assert of_verdict(result, Verdict.PASSED) == set(CHECKS)
    assert result.counts == {(1, 1): 16}


async def test_audit_of_archived_round_has_other_reveals_and_failed_ones_left_out() -> None:
    """The same chain has a reveal of another round and a failed cast vote; both are archived or dropped correctly."""
    source = agreed_round()
    height, _, raw = source.find(0x04)[0]
    block = next(block for block in source.block_list if block.height == height)
    foreign = raw.replace(source.round_id, bytes([1]) * 32)
    cast = source.find(0x03)[0][2]
    at = source.block_list.index(block)
    source.block_list[at] = replace(block, txs=(*block.txs, AuditTx(foreign, 0), AuditTx(cast, 3)))
    bucket = await archive_round(source)
    assert any(name.startswith("01" * 32) for name in bucket.objects)
    assert of_verdict(await audit(bucket, source.round_id), Verdict.PASSED) == set(CHECKS)


async def test_audit_of_archive_finds_fraud() -> None:
    source = agreed_round()
    source.documents["results"]["results"][0]["total_value"] = 2
    result = await audit(await archive_round(source), source.round_id)
    assert of_verdict(result, Verdict.FAILED) == {"C4", "C6"}


async def test_audit_of_archive_with_unknown_result_is_not_checked() -> None:
    source = agreed_round()
    height, at, raw = source.find(0x03)[0]
    source.replace_tx(height, at, raw, code=None)
    result = await audit(await archive_round(source), source.round_id)
    assert of_verdict(result, Verdict.FAILED) == set()
    assert of_verdict(result, Verdict.NOT_CHECKED) >= {"A1", "A5", "D1", "D4"}


def first_name(bucket: MemoryBucket, prefix: str, suffix: str) -> str:
    return next(name for name in sorted(bucket.objects) if name.startswith(prefix) and name.endswith(suffix))


def change_lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[MemoryBucket, bytes], None]:
    """Change the lines of the second object of blocks, which has the reveals."""

    def apply(bucket: MemoryBucket, _: bytes) -> None:
        name = blocks_name(CHAIN_ID, range(100, 200))
        lines = change(bucket.objects[name].body.splitlines(keepends=True))
        bucket.objects[name] = StoredObject(b"".join(lines), "tag")

    return apply


def drop_bundle(bucket: MemoryBucket, round_id: bytes) -> None:
    del bucket.objects[first_name(bucket, round_id.hex(), ".zip")]


def alter_bundle(bucket: MemoryBucket, round_id: bytes) -> None:
    name = first_name(bucket, round_id.hex(), ".zip")
    bucket.objects[name] = StoredObject(bucket.objects[name].body + b"x", "tag")


def exchange_bundles(bucket: MemoryBucket, round_id: bytes) -> None:
    names = [name for name in sorted(bucket.objects) if name.startswith(round_id.hex()) and name.endswith(".zip")]
    bucket.objects[names[0]] = bucket.objects[names[1]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (drop_bundle, "is missing in the archive"),
        (alter_bundle, "bundle"),
        (exchange_bundles, "content does not match the block"),
        (change_lines(lambda lines: [*lines[:50], *lines[51:]]), "block 150 is missing"),
        (change_lines(lambda lines: [*lines[:50], b"{}\n", *lines[51:]]), "invalid object"),
        (change_lines(lambda lines: [line.replace(b'"tx":"', b'"tx":"?') for line in lines]), "not in base64"),
    ],
)
async def test_audit_of_damaged_archive_is_not_checked(
    damage: Callable[[MemoryBucket, bytes], None], reason: str
) -> None:
    source, bucket = await archive_agreed_round()
    damage(bucket, source.round_id)
    result = await audit(bucket, source.round_id)
    assert of_verdict(result, Verdict.FAILED) == set()
    assert of_verdict(result, Verdict.NOT_CHECKED) >= ALL_BLOCKS - {"E"}
    assert reason in why(result, "A1")


@pytest.mark.parametrize("part", [100, 200, 300])
async def test_audit_of_archive_without_some_blocks_uses_the_reveals_only(part: int) -> None:
    source, bucket = await archive_agreed_round()
    del bucket.objects[blocks_name(CHAIN_ID, range(part, part + 100))]
    result = await audit(bucket, source.round_id)
    assert of_verdict(result, Verdict.FAILED) == set()
    # version 0.5 serves no partial decryptions, so C3 and C4 need the blocks
    assert of_verdict(result, Verdict.NOT_CHECKED) == ONLY_REVEALS | {"C3", "C4"}


async def test_audit_of_archive_without_blocks_checks_the_reveals() -> None:
    source, bucket = await archive_agreed_round()
    remove_blocks(bucket)
    assert await read_finished_round(bucket, source.round_id) is None
    result = await audit_round(ArchiveSource(bucket, source.round_id, source), source.round_id)
    assert {"A2", "A3", "B1", "B2"} <= of_verdict(result, Verdict.PASSED)
    assert of_verdict(result, Verdict.FAILED) == set()


@pytest.mark.parametrize("index", [None, b"{}\n"], ids=["missing", "altered"])
async def test_audit_of_archive_with_fewer_reveals_than_published_is_not_checked(index: bytes | None) -> None:
    source, bucket = await archive_agreed_round()
    remove_blocks(bucket)
    name = first_name(bucket, f"{source.round_id.hex()}/index", ".jsonl")
    if index is None:
        del bucket.objects[name]
    else:
        bucket.objects[name] = StoredObject(index, "tag")
    result = await audit_round(ArchiveSource(bucket, source.round_id, source), source.round_id)
    assert of_verdict(result, Verdict.FAILED) == set()
    assert of_verdict(result, Verdict.NOT_CHECKED) >= {"A1", "A2", "A3", "B1", "B2"}
    reason = why(result, "B1")
    assert "the source has 0 of 16 reveals of proposal 1, option 1" in reason
    assert ("the archive has an invalid object (IndexEntry)" in reason) is (index is not None)


@pytest.mark.parametrize("damage", ["piece missing", "piece altered", "hash altered", "manifest of another round"])
async def test_read_finished_round_damaged_is_refused(damage: str) -> None:
    source, bucket = await archive_agreed_round()
    piece, manifest = documents_name(source.round_id, 0), manifest_name(source.round_id)
    if damage == "piece missing":
        del bucket.objects[piece]
    elif damage == "piece altered":
        bucket.objects[piece] = StoredObject(bucket.objects[piece].body[:-9], "tag")
    else:
        fields = json.loads(bucket.objects[manifest].body)
        fields["sha256" if damage == "hash altered" else "round"] = "ab" * 32
        bucket.objects[manifest] = StoredObject(json.dumps(fields).encode(), "tag")
    with pytest.raises(ProofBundleError):
        await read_finished_round(bucket, source.round_id)


async def test_archive_documents_keeps_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_objects, "PIECE_BYTES", 500)
    source = threshold_round()
    bucket = await archive_round(source)
    stored = await read_finished_round(bucket, source.round_id)
    assert stored is not None
    assert stored.manifest.pieces > 1
    assert stored.manifest.missing == {"partials": "not served by the node", "heads": "not served by the node"}
    assert stored.documents == {name: source.documents[name] for name in source.documents}
    assert of_verdict(await audit(bucket, source.round_id), Verdict.NOT_CHECKED) == {"E"}


async def test_archive_documents_of_running_round_is_refused() -> None:
    source = copy.deepcopy(threshold_round())
    source.documents["round"]["round"]["status"] = 2
    with pytest.raises(ChainUnavailable, match="finalized"):
        await archive_documents(MemoryBucket(), source, source.round_id, chain_id=CHAIN_ID, height=400)


async def test_list_blocks_needs_every_height() -> None:
    bucket = MemoryBucket()
    for heights in (range(100, 150), range(150, 200), range(220, 300)):
        await bucket.put(blocks_name(CHAIN_ID, heights), b"")
    await bucket.put("blocks/other", b"")
    assert await list_blocks(bucket, CHAIN_ID, range(120, 200)) == [
        blocks_name(CHAIN_ID, range(100, 150)),
        blocks_name(CHAIN_ID, range(150, 200)),
    ]
    assert await list_blocks(bucket, CHAIN_ID, range(160, 190)) == [blocks_name(CHAIN_ID, range(150, 200))]
    for heights in (range(99, 120), range(160, 230), range(250, 301)):
        assert await list_blocks(bucket, CHAIN_ID, heights) is None


def test_group_blocks_limits_the_size_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_objects, "BLOCKS_BYTES", 10)
    lines = [(height, b"123456\n") for height in (5, 6, 7, 9, 10)]
    groups = archived_objects.group_blocks(lines)
    assert [heights for heights, _ in groups] == [range(5, 7), range(7, 10), range(10, 11)]
    assert b"".join(content for _, content in groups) == b"123456\n" * 5
    assert archived_objects.group_blocks([]) == []


def test_names_of_rounds_and_blocks_are_parsed() -> None:
    assert parse_blocks_name(blocks_name(CHAIN_ID, range(7, 12))) == range(7, 12)
    assert parse_blocks_name("blocks/x/1-2.jsonl") is None
    assert parse_round_object(manifest_name(bytes(32))) == bytes(32)
    assert parse_round_object("rounds/x.json") is None


async def test_archive_documents_leaves_out_a_deeply_nested_one() -> None:
    source = agreed_round()
    for _ in range(300):
        source.documents["summary"]["x"] = [source.documents["summary"].get("x")]
    result = await audit(await archive_round(source), source.round_id)
    assert of_verdict(result, Verdict.NOT_CHECKED) == {"A1", "C6"}


@pytest.mark.parametrize(("added", "reason"), [([1] * 100_000, "too many values"), ("x" * 300_000, "more than 300000")])
async def test_documents_that_could_not_be_read_again_are_not_archived(
    monkeypatch: pytest.MonkeyPatch, added: object, reason: str
) -> None:
    monkeypatch.setattr(archived_objects, "MAX_DOCUMENTS_BYTES", 300_000)
    source = agreed_round()
    source.documents["summary"]["x"] = added
    bucket = MemoryBucket()
    with pytest.raises(InvalidResponse, match=reason):
        await archive_documents(bucket, source, source.round_id, chain_id=CHAIN_ID, height=1000)
    assert bucket.objects == {}


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"x":[' + b",".join([b"[]"] * 50_000) + b"]}"])
def test_unpack_documents_refuses_other_content(content: bytes) -> None:
    with pytest.raises(ProofBundleError, match="not readable"):
        archived_objects.unpack_documents([zlib.compress(content)], sha256(content).hexdigest())
