"""Archive of proof bundles: writing, restart, pruned blocks, lookup and tampering."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import pytest
from structlog.testing import capture_logs

from helper.chain.block_reader import HistoryBlock, RevealHistory
from helper.chain.chain_data import Round, RoundStatus
from helper.chain.rest_client import HeightPrunedError
from helper.chain.reveal_transaction import CountedReveal
from helper.errors import BucketError, ChainUnavailable, ProofBundleError
from helper.object_store import StoredObject
from helper.observability.service_state import ArchiveState
from helper.operations.archive_reader import find_bundle
from helper.operations.archive_writer import ArchiveWriter
from helper.operations.archived_objects import (
    PART_BLOCKS,
    IndexEntry,
    Progress,
    blocks_name,
    bundle_name,
    encode_index,
    index_name,
    parse_lines,
    parse_object,
    parse_round_directory,
    part_heights,
    part_of_height,
    progress_name,
)
from helper.operations.proof_bundle import pack_bundle, unpack_bundle
from tests.recorded.test_proof_bundle import RECORDED_ROOT, create_evidence
from tests.support.bucket import MemoryBucket
from tests.support.clock import JumpingClock
from tests.support.fakes import wait_until

CHAIN = "svote-1"
FIRST = create_evidence(0)
SECOND = create_evidence(1)
ROUND = FIRST.message.round_id
PROGRESS = progress_name(CHAIN)


class FakeHistory(RevealHistory):
    """A fake chain with two recorded reveals at heights that the test sets."""

    chain_id: str | None = CHAIN
    head: int = 0
    are_all_nodes_usable: bool = True

    def __init__(self, head: int = 2 * PART_BLOCKS + 50) -> None:
        self.head = head
        self.reveals_by_height = {105: [FIRST], 160: [SECOND]}
        self.others_by_height: dict[int, list[tuple[bytes, bool | None]]] = {}
        self.lowest_height = 1
        self.reports_lowest_height = True
        self.is_unreachable = False
        self.requested_heights: list[int] = []
        self.root_requests = 0
        self.root: bytes | None = RECORDED_ROOT
        self.is_broken = False
        self.is_closed = False

    async def read_block(self, height: int) -> HistoryBlock:
        self.requested_heights.append(height)
        if self.is_unreachable:
            raise ChainUnavailable("away")
        if height < self.lowest_height:
            raise HeightPrunedError("gone", self.lowest_height if self.reports_lowest_height else None)
        reveals = [
            CountedReveal(height, reveal.transaction, reveal.message)
            for reveal in self.reveals_by_height.get(height, [])
        ]
        return HistoryBlock(height, 1000.0 + height, tuple(reveals), tuple(self.others_by_height.get(height, ())))

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        self.root_requests += 1
        if self.is_broken:
            raise RuntimeError("a mistake of ours")
        return self.root

    async def aclose(self) -> None:
        self.is_closed = True


def known_rounds(created: int = 100) -> list[Round]:
    return [Round(ROUND, RoundStatus.ACTIVE, 2_000_000_000, (), created)]


def create_writer(
    bucket: MemoryBucket,
    blocks: FakeHistory,
    clock: JumpingClock | None = None,
    rounds: Sequence[Round] | None = None,
) -> ArchiveWriter:
    known = known_rounds() if rounds is None else rounds
    return ArchiveWriter(bucket, blocks, rounds=lambda: known, clock=clock or JumpingClock(), interval_seconds=60)


async def create_written_archive() -> MemoryBucket:
    bucket = MemoryBucket()
    assert await create_writer(bucket, FakeHistory()).write_next_part()
    return bucket


async def test_writer_writes_part_once_all_its_blocks_exist() -> None:
    bucket, blocks = MemoryBucket(), FakeHistory(head=2 * PART_BLOCKS - 2)
    writer = create_writer(bucket, blocks)
    assert not await writer.write_next_part()
    assert (bucket.objects, writer.archived_height) == ({}, 99)
    blocks.head += 1
    assert await writer.write_next_part()
    assert not await writer.write_next_part()
    assert sorted(set(blocks.requested_heights)) == list(range(100, 200))
    assert writer.archived_height == 199
    names = {bundle_name(ROUND, entry.tx_hash) for entry in (FIRST, SECOND)}
    blocks_object = blocks_name(CHAIN, range(100, 200))
    assert set(bucket.objects) == names | {index_name(ROUND, 1), blocks_object, PROGRESS}
    assert len(bucket.objects[blocks_object].body.splitlines()) == 100
    bundle = bucket.objects[bundle_name(ROUND, FIRST.tx_hash)].body
    assert bundle == pack_bundle(replace(FIRST, height=105))
    assert unpack_bundle(bundle).tx_hash == FIRST.tx_hash
    assert parse_object(Progress, bucket.objects[PROGRESS].body).next_part == 2
    assert blocks.root_requests <= 2


async def test_writer_restart_continues_and_writes_equal_bytes() -> None:
    bucket, blocks = await create_written_archive(), FakeHistory(head=3 * PART_BLOCKS - 1)
    before = dict(bucket.objects)
    assert await create_writer(bucket, blocks).write_next_part()
    assert min(blocks.requested_heights) == 200
    del bucket.objects[PROGRESS], bucket.objects[blocks_name(CHAIN, range(200, 300))]
    assert await create_writer(bucket, FakeHistory()).write_next_part()
    assert {name: stored.body for name, stored in bucket.objects.items()} == {
        name: stored.body for name, stored in before.items()
    }


@pytest.mark.parametrize(("next_part", "refused"), [(2**60, True), (4, True), (3, False)])
async def test_writer_progress_far_ahead_of_chain_is_refused(next_part: int, refused: bool) -> None:
    bucket, blocks = MemoryBucket(), FakeHistory(head=PART_BLOCKS + 99)
    await bucket.put(PROGRESS, Progress(chain_id=CHAIN, next_part=next_part).to_line())
    writer = create_writer(bucket, blocks)
    if refused:
        with pytest.raises(ProofBundleError, match="the archive ends at block") as caught:
            await writer.write_next_part()
        assert PROGRESS in caught.value.advice
    else:
        assert not await writer.write_next_part(), "a node may be a few blocks behind the previous one"
    assert writer.collect_status().behind in ({None} if refused else {0})


async def test_writer_takeover_by_another_host_continues() -> None:
    bucket, blocks, is_responsible = MemoryBucket(), FakeHistory(head=4 * PART_BLOCKS - 1), True
    writer = ArchiveWriter(
        bucket,
        blocks,
        rounds=known_rounds,
        clock=JumpingClock(),
        interval_seconds=60,
        is_writer=lambda: is_responsible,
    )
    assert writer.collect_status() == ArchiveState()
    assert await writer.write_next_part()
    assert writer.collect_status() == ArchiveState(through=199, behind=200)
    is_responsible = False
    assert not await writer.write_next_part()
    assert writer.collect_status().through == 0, "the other host is responsible"
    assert await create_writer(bucket, blocks).write_next_part()
    is_responsible, blocks.requested_heights = True, []
    assert await writer.write_next_part()
    assert min(blocks.requested_heights) == 300
    assert writer.collect_status() == ArchiveState(through=399, behind=0)


async def test_writer_starts_at_oldest_known_round() -> None:
    bucket, blocks = MemoryBucket(), FakeHistory()
    rounds: list[Round] | None = None
    writer = ArchiveWriter(bucket, blocks, rounds=lambda: rounds, clock=JumpingClock(), interval_seconds=60)
    assert not await writer.write_next_part()
    rounds = known_rounds(created=42)
    assert await writer.write_next_part()
    assert blocks.requested_heights[0] == 1
    assert not await create_writer(bucket, FakeHistory(head=0)).write_next_part()
    unknown_chain = FakeHistory()
    unknown_chain.chain_id = None
    assert not await create_writer(bucket, unknown_chain).write_next_part()
    rounds, blocks = [], FakeHistory(head=3 * PART_BLOCKS)
    writer = ArchiveWriter(MemoryBucket(), blocks, rounds=lambda: rounds, clock=JumpingClock(), interval_seconds=60)
    assert not await writer.write_next_part()
    rounds = known_rounds(created=42)
    assert await writer.write_next_part()
    assert blocks.requested_heights[0] == 1, "not the height at which no round was agreed yet"


async def test_writer_failure_continues_at_next_check() -> None:
    bucket, clock, blocks = MemoryBucket(), JumpingClock(), FakeHistory()
    bucket.failing_writes = 1
    blocks.reveals_by_height = {105: [FIRST]}
    writer = create_writer(bucket, blocks, clock)
    with pytest.raises(BucketError):
        await writer.write_next_part()
    assert bucket.objects == {}
    request_count = len(blocks.requested_heights)
    assert await writer.write_next_part()
    assert PROGRESS in bucket.objects
    assert len(blocks.requested_heights) - request_count < 100


async def test_writer_run_survives_errors_and_logs_each_once() -> None:
    bucket, clock, blocks = MemoryBucket(), JumpingClock(), FakeHistory()
    blocks.is_unreachable = True
    writer = create_writer(bucket, blocks, clock)

    with capture_logs() as logs:
        running = asyncio.create_task(writer.run())
        await wait_until(lambda: clock.sleeps.count(60) >= 3)
        blocks.is_unreachable = False
        blocks.is_broken = True
        await wait_until(lambda: clock.sleeps.count(60) >= 5)
        blocks.is_broken = False
        await wait_until(lambda: PROGRESS in bucket.objects)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    events = [line["event"] for line in logs if line["log_level"] in {"warning", "error"}]
    assert events.count("archive_write_failed") == 1
    assert "archive_write_crashed" in events
    await writer.aclose()
    assert blocks.is_closed
    text = repr(logs)
    assert FIRST.message.nullifier.hex() not in text
    assert FIRST.tx_hash not in text


async def test_writer_invalid_reveal_is_skipped() -> None:
    bucket, blocks = MemoryBucket(), FakeHistory()
    blocks.root = None
    with capture_logs() as logs:
        assert await create_writer(bucket, blocks).write_next_part()
    assert list(bucket.objects) == [blocks_name(CHAIN, range(100, 200)), PROGRESS]
    assert [line["event"] for line in logs] == ["archive_started"] + ["archive_reveal_skipped"] * 2


@pytest.mark.parametrize("reports_height", [True, False])
async def test_writer_pruned_blocks_are_skipped_and_logged(reports_height: bool) -> None:
    bucket, clock, blocks = MemoryBucket(), JumpingClock(), FakeHistory(head=2 * PART_BLOCKS + 50)
    blocks.lowest_height, blocks.reports_lowest_height, blocks.are_all_nodes_usable = (
        150 if reports_height else 103,
        reports_height,
        False,
    )
    writer = create_writer(bucket, blocks, clock)
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(HeightPrunedError):
                await writer.write_next_part()
        assert bucket.objects == {}
        blocks.are_all_nodes_usable = True
        assert await writer.write_next_part()
    missing = [line for line in logs if line["event"] == "archive_blocks_missing"]
    assert sum(line["count"] for line in missing) == (50 if reports_height else 3)
    assert len(missing) == (1 if reports_height else 3)
    assert (bundle_name(ROUND, FIRST.tx_hash) in bucket.objects) is not reports_height
    assert bundle_name(ROUND, SECOND.tx_hash) in bucket.objects


async def test_writer_skips_long_gap() -> None:
    bucket, blocks = MemoryBucket(), FakeHistory(head=50 * PART_BLOCKS)
    blocks.lowest_height = 40 * PART_BLOCKS + 7
    blocks.reveals_by_height = {40 * PART_BLOCKS + 20: [FIRST]}
    writer = create_writer(bucket, blocks)
    with capture_logs() as logs:
        assert await writer.write_next_part()
        assert await writer.write_next_part()
    assert len([line for line in logs if line["log_level"] == "error"]) == 1
    assert bundle_name(ROUND, FIRST.tx_hash) in bucket.objects
    assert writer.archived_height == 41 * PART_BLOCKS - 1


async def test_writer_skips_pruned_block_after_node_is_unreachable_one_hour() -> None:
    bucket, clock, blocks = MemoryBucket(), JumpingClock(), FakeHistory()
    blocks.lowest_height, blocks.are_all_nodes_usable = 101, False
    writer = create_writer(bucket, blocks, clock)
    with pytest.raises(HeightPrunedError):
        await writer.write_next_part()
    clock.advance(3600)
    with capture_logs():
        assert await writer.write_next_part()


# Lookup and verification


async def test_find_bundle_with_and_without_round() -> None:
    bucket = await create_written_archive()
    bucket.objects[f"{'00' * 32}/index/{'0' * 12}-{'9' * 12}.jsonl"] = StoredObject(b"", '"x"')
    bucket.objects["elsewhere/x"] = StoredObject(b"", '"x"')
    expected = replace(SECOND, height=160)
    assert bucket.objects[bundle_name(ROUND, SECOND.tx_hash)].body == pack_bundle(expected)
    for rounds in ([ROUND], [], [bytes(32), ROUND]):
        assert await find_bundle(bucket, SECOND.message.nullifier, rounds) == expected
    for rounds in ([bytes(32)], []):
        assert await find_bundle(bucket, bytes(32), rounds) is None


async def test_find_bundle_altered_archive_is_refused() -> None:
    name, index = bundle_name(ROUND, FIRST.tx_hash), index_name(ROUND, 1)
    nullifier = FIRST.message.nullifier

    async def refused(bucket: MemoryBucket, error: str) -> None:
        with pytest.raises(ProofBundleError, match=error):
            await find_bundle(bucket, nullifier, [ROUND])

    def changed_index(**changes: object) -> bytes:
        (entry,) = parse_lines(IndexEntry, intact.objects[index].body, containing=nullifier.hex().encode())
        return encode_index([entry.model_copy(update=changes)])

    intact = await create_written_archive()
    for number in (0, 100, 4000):
        bucket = await create_written_archive()
        body = bytearray(bucket.objects[name].body)
        body[number] ^= 1
        bucket.objects[name] = StoredObject(bytes(body), '"x"')
        await refused(bucket, "hash does not match")
    bucket = await create_written_archive()
    del bucket.objects[name]
    await refused(bucket, "missing in the archive")
    other = bucket.objects[bundle_name(ROUND, SECOND.tx_hash)]
    bucket.objects[name] = other
    await refused(bucket, "hash does not match")
    bucket.objects[index] = StoredObject(changed_index(sha256=sha256(other.body).hexdigest()), '"x"')
    await refused(bucket, "content does not match")
    bucket = await create_written_archive()
    bucket.objects[index] = StoredObject(changed_index(height=106), '"x"')
    await refused(bucket, "content does not match")
    bucket.objects[index] = StoredObject(bucket.objects[index].body.replace(b'"height"', b'"hight"'), '"x"')
    await refused(bucket, "IndexEntry")


def test_object_names_sort_by_height() -> None:
    assert bundle_name(ROUND, FIRST.tx_hash) == f"{ROUND.hex()}/{FIRST.tx_hash}.zip"
    assert [part_heights(part) for part in (0, 1)] == [range(1, 100), range(100, 200)]
    assert all(height in part_heights(part_of_height(height)) for height in (1, 99, 100, 12345))
    assert index_name(ROUND, 0).endswith("/index/000000000001-000000000099.jsonl")
    parts = [index_name(ROUND, part) for part in (0, 9, 10, 99, 12345)]
    assert parts == sorted(parts)
    assert parse_round_directory(ROUND.hex()) == ROUND
    assert parse_round_directory("progress") is None
    assert progress_name("a/b") != progress_name("a_b")
    assert progress_name("a/b").count("/") == 1


def test_write_index_is_independent_of_order() -> None:
    entries = [
        IndexEntry(height=height, transaction=f"{height:064X}", nullifier=f"{height:064x}", sha256="0" * 64)
        for height in range(1, 20)
    ]
    index = encode_index(entries)
    assert index == encode_index(reversed(entries))
    assert list(parse_lines(IndexEntry, index, containing=b"7" * 2)) == []
    assert list(parse_lines(IndexEntry, index, containing=b"0000007")) == [entries[6]]
    with pytest.raises(ProofBundleError, match="Progress"):
        parse_object(Progress, b"{}")
