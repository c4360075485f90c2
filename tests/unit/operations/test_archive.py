"""The archive: all the chain's counted reveals and nothing of whose they are, whole again on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import pytest
from structlog.testing import capture_logs

from helper.chain.lookups import CountedReveal
from helper.chain.models import Round, RoundStatus
from helper.chain.rest_client import HeightGoneError
from helper.errors import BucketError, BucketRefused, ChainUnavailable, ProofBundleError
from helper.object_store.bucket import StoredObject
from helper.operations.archive.object_names import (
    PART,
    Entry,
    Progress,
    bundle_name,
    find_entry,
    heights_of,
    index_name,
    part_of,
    progress_name,
    round_of,
    write_index,
)
from helper.operations.archive.reader import find_bundle
from helper.operations.archive.writer import ArchiveWriter
from helper.operations.proof_bundle import pack, unpack
from proofs import CIRCUITS
from tests.recorded.test_proof_bundle import ROOT, recorded_evidence
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock

CHAIN = "svote-1"
FIRST = recorded_evidence(0)
SECOND = recorded_evidence(1)
ROUND = FIRST.message.round_id
PROGRESS = progress_name(CHAIN)


class Blocks:
    """A chain with two recorded reveals in it, at heights of the test's own."""

    def __init__(self, head: int = 2 * PART + 50) -> None:
        self.chain_id: str | None = CHAIN
        self.head = head
        self.whole = True
        self.there = {105: [FIRST], 160: [SECOND]}
        self.lowest = 1
        self.says_lowest = True
        self.away = False
        self.asked: list[int] = []
        self.roots = 0
        self.root: bytes | None = ROOT
        self.broken = False
        self.closed = False

    async def reveals(self, height: int) -> list[CountedReveal]:
        self.asked.append(height)
        if self.away:
            raise ChainUnavailable("away")
        if height < self.lowest:
            raise HeightGoneError("gone", self.lowest if self.says_lowest else None)
        return [CountedReveal(height, one.transaction, one.message) for one in self.there.get(height, [])]

    async def root_at(self, round_id: bytes, height: int) -> bytes | None:
        self.roots += 1
        if self.broken:
            raise RuntimeError("a mistake of ours")
        return self.root

    async def aclose(self) -> None:
        self.closed = True


class Quick(FakeClock):
    """Time that passes when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


def known(created: int = 100) -> list[Round]:
    return [Round(ROUND, RoundStatus.ACTIVE, 2_000_000_000, (), created)]


def writer(
    bucket: MemoryBucket, blocks: Blocks, clock: FakeClock | None = None, rounds: Sequence[Round] | None = None
) -> ArchiveWriter:
    told = known() if rounds is None else rounds
    return ArchiveWriter(bucket, blocks, rounds=lambda: told, circuits=CIRCUITS, clock=clock or Quick(), every=60)


async def written() -> MemoryBucket:
    bucket = MemoryBucket()
    assert await writer(bucket, Blocks()).step()
    return bucket


async def test_a_part_of_the_chain_is_archived_once_all_its_blocks_are_there() -> None:
    bucket, blocks = MemoryBucket(), Blocks(head=2 * PART - 2)
    one = writer(bucket, blocks)
    assert not await one.step()
    assert (bucket.objects, one.through) == ({}, 99)
    blocks.head += 1
    assert await one.step()
    assert not await one.step()
    assert sorted(set(blocks.asked)) == list(range(100, 200))
    assert one.through == 199
    names = {bundle_name(ROUND, each.tx_hash) for each in (FIRST, SECOND)}
    assert set(bucket.objects) == names | {index_name(ROUND, 1), PROGRESS}
    found = bucket.objects[bundle_name(ROUND, FIRST.tx_hash)].body
    assert found == pack(replace(FIRST, height=105))
    assert unpack(found, CIRCUITS).tx_hash == FIRST.tx_hash
    assert Progress.from_bytes(bucket.objects[PROGRESS].body).next_part == 2
    assert blocks.roots <= 2


async def test_it_goes_on_where_the_archive_ends_and_writes_the_same_bytes_again() -> None:
    bucket, blocks = await written(), Blocks(head=3 * PART - 1)
    before = dict(bucket.objects)
    assert await writer(bucket, blocks).step()
    assert min(blocks.asked) == 200
    del bucket.objects[PROGRESS]
    assert await writer(bucket, Blocks()).step()
    assert {name: found.body for name, found in bucket.objects.items()} == {
        name: found.body for name, found in before.items()
    }


@pytest.mark.parametrize(("next_part", "refused"), [(2**60, True), (4, True), (3, False)])
async def test_an_archive_that_is_far_ahead_of_the_chain_is_no_archive_of_it(next_part: int, refused: bool) -> None:
    bucket, blocks = MemoryBucket(), Blocks(head=PART + 99)
    await bucket.put(PROGRESS, Progress(chain_id=CHAIN, next_part=next_part).to_bytes())
    one = writer(bucket, blocks)
    if refused:
        with pytest.raises(ProofBundleError, match="the archive ends at block") as caught:
            await one.step()
        assert PROGRESS in caught.value.advice
    else:
        assert not await one.step(), "a node may be some blocks behind the one that was asked before"
    assert one.facts()["behind"] in ({None} if refused else {0})


async def test_of_several_hosts_the_one_that_sends_writes_and_another_goes_on_from_there() -> None:
    bucket, blocks, mine = MemoryBucket(), Blocks(head=4 * PART - 1), True
    one = ArchiveWriter(bucket, blocks, rounds=known, circuits=CIRCUITS, clock=Quick(), every=60, mine=lambda: mine)
    assert one.facts() == {"through": 0, "behind": None, "problem": None}
    assert await one.step()
    assert one.facts() == {"through": 199, "behind": 200, "problem": None}
    mine = False
    assert not await one.step()
    assert one.facts()["through"] == 0, "another host's work"
    assert await writer(bucket, blocks).step()
    mine, blocks.asked = True, []
    assert await one.step()
    assert min(blocks.asked) == 300
    assert one.facts() == {"through": 399, "behind": 0, "problem": None}


async def test_it_begins_with_the_oldest_round_and_waits_until_it_is_known() -> None:
    bucket, blocks = MemoryBucket(), Blocks()
    rounds: list[Round] | None = None
    one = ArchiveWriter(bucket, blocks, rounds=lambda: rounds, circuits=CIRCUITS, clock=Quick(), every=60)
    assert not await one.step()
    rounds = known(created=42)
    assert await one.step()
    assert blocks.asked[0] == 1
    assert not await writer(bucket, Blocks(head=0)).step()
    nobody = Blocks()
    nobody.chain_id = None
    assert not await writer(bucket, nobody).step()
    without_rounds = Blocks(head=3 * PART)
    assert not await writer(MemoryBucket(), without_rounds, rounds=[]).step()
    assert without_rounds.asked == []


async def test_a_write_is_tried_three_times_from_two_seconds_on() -> None:
    bucket, clock, blocks = MemoryBucket(), Quick(), Blocks()
    bucket.fails = 2
    blocks.there = {105: [FIRST]}
    assert await writer(bucket, blocks, clock).step()
    assert [seconds for seconds in clock.waited if seconds > 1] == [2, 4]


async def test_what_fails_for_long_is_left_for_the_next_look_and_goes_on_where_it_was() -> None:
    bucket, clock, blocks = MemoryBucket(), Quick(), Blocks()
    bucket.fails = 3
    blocks.there = {105: [FIRST]}
    one = writer(bucket, blocks, clock)
    with pytest.raises(BucketError):
        await one.step()
    assert bucket.objects == {}
    asked = len(blocks.asked)
    assert await one.step()
    assert PROGRESS in bucket.objects
    assert len(blocks.asked) - asked < 100


async def test_a_refusal_is_not_tried_again_at_once() -> None:
    class Shut(MemoryBucket):
        async def put(self, name: str, body: bytes) -> None:
            self.asked["put"] += 1
            raise BucketRefused("Forbidden")

    bucket, blocks = Shut(), Blocks()
    blocks.there = {105: [FIRST]}
    with pytest.raises(BucketRefused):
        await writer(bucket, blocks).step()
    assert bucket.asked["put"] == 1


async def test_nothing_that_goes_wrong_ends_it_and_each_trouble_is_told_once() -> None:
    bucket, clock, blocks = MemoryBucket(), Quick(), Blocks()
    blocks.away = True
    one = writer(bucket, blocks, clock)

    async def until(done: int) -> None:
        async with asyncio.timeout(20):
            while clock.waited.count(60) < done:
                await asyncio.sleep(0)

    with capture_logs() as logs:
        running = asyncio.create_task(one.run())
        await until(3)
        blocks.away = False
        blocks.broken = True
        await until(5)
        blocks.broken = False
        async with asyncio.timeout(20):
            while PROGRESS not in bucket.objects:
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    events = [line["event"] for line in logs if line["log_level"] in {"warning", "error"}]
    assert events.count("archive_write_failed") == 1
    assert "archive_write_crashed" in events
    assert blocks.closed
    text = repr(logs)
    assert FIRST.message.nullifier.hex() not in text
    assert FIRST.tx_hash not in text


async def test_a_reveal_of_which_no_bundle_can_be_made_keeps_no_other_away() -> None:
    bucket, blocks = MemoryBucket(), Blocks()
    blocks.root = None
    with capture_logs() as logs:
        assert await writer(bucket, blocks).step()
    assert list(bucket.objects) == [PROGRESS]
    assert [line["event"] for line in logs] == ["archive_started"] + ["archive_reveal_skipped"] * 2


@pytest.mark.parametrize("says", [True, False])
async def test_blocks_that_no_node_has_are_left_out_loudly_once_that_is_certain(says: bool) -> None:
    bucket, clock, blocks = MemoryBucket(), Quick(), Blocks(head=2 * PART + 50)
    blocks.lowest, blocks.says_lowest, blocks.whole = 150 if says else 103, says, False
    one = writer(bucket, blocks, clock)
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(HeightGoneError):
                await one.step()
        assert bucket.objects == {}
        blocks.whole = True
        assert await one.step()
    missing = [line for line in logs if line["event"] == "archive_blocks_missing"]
    assert sum(line["count"] for line in missing) == (50 if says else 3)
    assert len(missing) == (1 if says else 3)
    assert (bundle_name(ROUND, FIRST.tx_hash) in bucket.objects) is not says
    assert bundle_name(ROUND, SECOND.tx_hash) in bucket.objects


async def test_a_long_gap_is_leapt_over() -> None:
    bucket, blocks = MemoryBucket(), Blocks(head=50 * PART)
    blocks.lowest = 40 * PART + 7
    blocks.there = {40 * PART + 20: [FIRST]}
    one = writer(bucket, blocks)
    with capture_logs() as logs:
        assert await one.step()
        assert await one.step()
    assert len([line for line in logs if line["log_level"] == "error"]) == 1
    assert bundle_name(ROUND, FIRST.tx_hash) in bucket.objects
    assert one.through == 41 * PART - 1


async def test_a_node_that_is_away_for_an_hour_holds_the_archive_up_no_longer() -> None:
    bucket, clock, blocks = MemoryBucket(), Quick(), Blocks()
    blocks.lowest, blocks.whole = 101, False
    one = writer(bucket, blocks, clock)
    with pytest.raises(HeightGoneError):
        await one.step()
    clock.advance(3600)
    with capture_logs():
        assert await one.step()


# The way back


async def test_a_bundle_is_found_by_its_nullifier_with_and_without_its_round() -> None:
    bucket = await written()
    bucket.objects[f"{'00' * 32}/index/{'0' * 12}-{'9' * 12}.jsonl"] = StoredObject(b"", '"x"')
    bucket.objects["elsewhere/x"] = StoredObject(b"", '"x"')
    for rounds in ([ROUND], [], [bytes(32), ROUND]):
        found = await find_bundle(bucket, CIRCUITS, SECOND.message.nullifier, rounds)
        assert found is not None
        bundle, evidence = found
        assert evidence == replace(SECOND, height=160)
        assert bundle == pack(evidence)
    for rounds in ([bytes(32)], []):
        assert await find_bundle(bucket, CIRCUITS, bytes(32), rounds) is None


async def test_what_was_changed_there_is_found_on_the_way_back() -> None:
    name, index = bundle_name(ROUND, FIRST.tx_hash), index_name(ROUND, 1)
    wanted = FIRST.message.nullifier

    async def refused(bucket: MemoryBucket, says: str) -> None:
        with pytest.raises(ProofBundleError, match=says):
            await find_bundle(bucket, CIRCUITS, wanted, [ROUND])

    def restated(**changes: object) -> bytes:
        entry = find_entry(whole.objects[index].body, wanted)
        assert entry is not None
        return write_index([entry.model_copy(update=changes)])

    whole = await written()
    for number in (0, 100, 4000):
        bucket = await written()
        body = bytearray(bucket.objects[name].body)
        body[number] ^= 1
        bucket.objects[name] = StoredObject(bytes(body), '"x"')
        await refused(bucket, "hash does not match")
    bucket = await written()
    del bucket.objects[name]
    await refused(bucket, "missing in the archive")
    other = bucket.objects[bundle_name(ROUND, SECOND.tx_hash)]
    bucket.objects[name] = other
    await refused(bucket, "hash does not match")
    bucket.objects[index] = StoredObject(restated(sha256=sha256(other.body).hexdigest()), '"x"')
    await refused(bucket, "content does not match")
    bucket = await written()
    bucket.objects[index] = StoredObject(restated(height=106), '"x"')
    await refused(bucket, "content does not match")
    bucket.objects[index] = StoredObject(bucket.objects[index].body.replace(b'"height"', b'"hight"'), '"x"')
    await refused(bucket, "invalid line")


def test_names_go_by_round_and_transaction_and_sort_by_height() -> None:
    assert bundle_name(ROUND, FIRST.tx_hash) == f"{ROUND.hex()}/{FIRST.tx_hash}.zip"
    assert [heights_of(part) for part in (0, 1)] == [range(1, 100), range(100, 200)]
    assert all(height in heights_of(part_of(height)) for height in (1, 99, 100, 12345))
    assert index_name(ROUND, 0).endswith("/index/000000000001-000000000099.jsonl")
    parts = [index_name(ROUND, part) for part in (0, 9, 10, 99, 12345)]
    assert parts == sorted(parts)
    assert round_of(ROUND.hex()) == ROUND
    assert round_of("progress") is None
    assert progress_name("a/b") != progress_name("a_b")
    assert progress_name("a/b").count("/") == 1


def test_an_index_has_the_same_bytes_in_whatever_order_it_came() -> None:
    entries = [
        Entry(height=height, transaction=f"{height:064X}", nullifier=f"{height:064x}", sha256="0" * 64)
        for height in range(1, 20)
    ]
    index = write_index(entries)
    assert index == write_index(reversed(entries))
    found = find_entry(index, (7).to_bytes(32, "big"))
    assert found == entries[6]
    assert find_entry(index, bytes(32)) is None
    assert find_entry(b"", bytes(32)) is None
    with pytest.raises(ProofBundleError, match="progress"):
        Progress.from_bytes(b"{}")
