"""Batch validation: the native reader accepts only what the Python reader accepts, with equal results."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import orjson
import pytest

import proofs
from helper.core.share import Share
from helper.errors import ShareRefused
from helper.ingest import payload as payload_module
from helper.ingest import validator
from helper.ingest.payload import MAX_BODY, SMALL_BODY, parse_share
from helper.ingest.schema import WireError
from helper.ingest.validator import ShareValidator
from proofs import ProofsError, ReadShare, ShareCheck
from tests.campaign.mutations import Mutator
from tests.unit.ingest.admission_fixtures import COMMITMENT, NULLIFIER, PAYLOADS, FakeChecks, body, payload

pytestmark = pytest.mark.anyio
MUTATED = 30_000


def as_read(share: Share, check: ShareCheck) -> tuple[Any, ...]:
    """The expected result of the native reader for a share."""
    return (*(getattr(share, name) for name in ReadShare._fields[:11]), check.vote_commitment, check.nullifier)


def slowly(posted: bytes) -> tuple[Any, ...]:
    """The result of the Python reader and `check_share`."""
    share = parse_share(posted)
    fields = {
        name: getattr(share, name) for name in ReadShare._fields[:11] if name not in {"tree_position", "submit_at"}
    }
    return as_read(share, proofs.check_share(**fields))


def without(**changes: Any) -> bytes:
    """The first recorded payload without some fields, or with others."""
    changed = payload(**changes)
    return json.dumps({name: value for name, value in changed.items() if value is not ...}).encode()


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_native_reader_recorded_payloads_match_python_reader(number: int) -> None:
    posted = json.dumps(PAYLOADS[number]).encode()
    (read,) = proofs.read_shares([posted])
    assert read == slowly(posted)


def test_native_reader_mutated_payloads_match_python_reader() -> None:
    mutator = Mutator(PAYLOADS, random.Random(11))
    mutated = list(itertools.islice(mutator, MUTATED))
    taken = [(posted, read) for posted, read in zip(mutated, proofs.read_shares(mutated), strict=True) if read]
    assert taken, "some mutations change nothing that matters"
    for posted, read in taken:
        assert read == slowly(posted)


SEALED = PAYLOADS[0]["enc_share"]
TEXT = body().decode()


@pytest.mark.parametrize(
    "posted",
    [
        b"",
        b"null",
        b"\xef\xbb\xbf" + body(),
        json.dumps(list(payload().values())).encode(),
        without(enc_share=[SEALED["c1"], SEALED["c2"], 0]),
        without(all_enc_shares=[[SEALED["c1"], SEALED["c2"], 0]]),
        without(anything=1),
        without(enc_share={**SEALED, "anything": 1}),
        without(enc_share={**SEALED, "c1": SEALED["c2"]}),
        without(enc_share={**SEALED, "share_index": 16}),
        without(enc_share={**SEALED, "share_index": 3}),
        without(tree_position=...),
        without(tree_position=1 << 24),
        without(tree_position=-1),
        without(tree_position=2.0),
        without(proposal_id=0),
        without(proposal_id=51),
        without(vote_decision=8),
        without(vote_decision=True),
        without(submit_at=1 << 63),
        without(submit_at="0"),
        without(share_comms=PAYLOADS[0]["share_comms"][:15]),
        without(share_comms=[*PAYLOADS[0]["share_comms"], PAYLOADS[0]["share_comms"][0]]),
        without(shares_hash=PAYLOADS[0]["primary_blind"]),
        without(shares_hash=PAYLOADS[0]["shares_hash"].rstrip("=")),
        without(vote_round_id=payload()["vote_round_id"][:-2]),
        TEXT.replace('"tree_position"', '"tree_position": 2, "tree_position"').encode(),
        TEXT.replace('"tree_position"', '"tree\\u005fposition"').encode(),
        TEXT.replace("/", "\\/").encode(),
        (TEXT + "{}").encode(),
        TEXT[:-1].encode(),
    ],
)
def test_native_reader_invalid_body_returns_none(posted: bytes) -> None:
    assert proofs.read_shares([posted]) == [None]


@pytest.mark.parametrize(
    ("posted", "fields"),
    [
        (without(submit_at=...), {"submit_at": 0}),
        (without(submit_at=None), {"submit_at": 0}),
        (without(submit_at=(1 << 63) - 1), {"submit_at": (1 << 63) - 1}),
        (without(enc_share={**SEALED, "share_index": None}), {"share_index": 0}),
        (without(share_index=0), {}),
        (without(all_enc_shares=[SEALED]), {}),
        (without(vote_round_id=payload()["vote_round_id"].upper()), {}),
    ],
)
def test_native_reader_wallet_variations_are_accepted(posted: bytes, fields: dict[str, int]) -> None:
    (read,) = proofs.read_shares([posted])
    assert read is not None
    assert read == slowly(posted)
    assert {name: getattr(read, name) for name in fields} == fields
    assert "ReadShare(…)" in repr([read]), "nothing of a witness is shown"


async def test_validator_wrong_hash_is_refused_after_cached_right_one() -> None:
    checker = ShareValidator(proofs)
    await checker.read(body())
    other = [*PAYLOADS[0]["share_comms"]]
    other[15], other[14] = other[14], other[15]
    with pytest.raises(ShareRefused, match="is not the hash of share_comms"):
        await checker.read(body(share_comms=other))


class Batches(FakeChecks):
    """Notes what comes together; each batch waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.failure: Exception | None = None
        self.begun: Callable[[], None] = lambda: None

    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | None]:
        self.batches.append(len(bodies))
        self.threads.add(threading.current_thread().name)
        self.begun()
        assert self.go_on.wait(30)
        if self.failure is not None:
            raise self.failure
        return super().read_shares(bodies)


async def test_validator_bodies_during_batches_form_next_batch() -> None:
    checks = Batches()
    checker = ShareValidator(checks)

    async def post() -> None:
        found = await checker.read(body())
        assert (found.vote_commitment, found.nullifier) == (COMMITMENT, NULLIFIER)

    first = [2, *[1] * (validator.BATCHES - 1)]
    async with anyio.create_task_group() as group:
        for number, posts in enumerate(first):
            for _ in range(posts):
                group.start_soon(post)
            while len(checks.batches) <= number:
                await anyio.sleep(0.001)
        for _ in range(validator.MAX_BATCH + 3):
            group.start_soon(post)
        await anyio.wait_all_tasks_blocked()
        assert checks.batches == first
        assert threading.current_thread().name not in checks.threads
        checks.go_on.set()
    assert sorted(checks.batches) == sorted([*first, validator.MAX_BATCH, 3])


async def test_validator_single_body_is_read_on_event_loop() -> None:
    checks = Batches()
    checks.go_on.set()
    checker = ShareValidator(checks)
    for _ in range(3):
        await checker.read(body())
    assert (checks.batches, checks.threads) == ([1] * 3, {threading.current_thread().name})


async def test_validator_large_body_does_not_wait_for_batch() -> None:
    checks = Batches()
    found = await ShareValidator(checks).read(body() + b" " * SMALL_BODY)
    assert (found.share, checks.batches) == (parse_share(body()), [])


NOISE = b'"pad":[' + b"[]," * ((MAX_BODY - 8_000) // 3) + b"1]"
"""A member that takes orjson 80 ms to read."""


def noisy(posted: bytes) -> bytes:
    """The same body with an unknown member that makes it nearly as large as one may be."""
    return posted.rstrip()[:-1] + b"," + NOISE + b"}"


async def test_validator_large_body_is_never_parsed_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def loads(document: bytes) -> Any:
        sizes.append(len(document))
        return orjson.loads(document)

    monkeypatch.setattr(payload_module, "orjson", SimpleNamespace(loads=loads, JSONDecodeError=orjson.JSONDecodeError))
    checker = ShareValidator(proofs)
    found = await checker.read(noisy(body()))
    assert found.share == parse_share(body())
    with pytest.raises(WireError):
        await checker.read(body(share_comms=[0] * (MAX_BODY // 4)))
    assert max(sizes) <= SMALL_BODY


async def test_validator_large_bodies_share_one_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most, threads = 0, 0, set[str]()

    def members(document: bytes, names: Iterable[str]) -> bytes | int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        threads.add(threading.current_thread().name)
        reduced = proofs.json_members(document, names)
        under_way -= 1
        return reduced

    monkeypatch.setattr(validator, "json_members", members)
    checker = ShareValidator(FakeChecks())
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(checker.read, noisy(body()))
    assert most == validator.LARGE_THREADS
    assert threading.current_thread().name not in threads


@pytest.mark.parametrize(
    "posted",
    [
        body(),
        without(tree_position=...),
        without(share_comms=PAYLOADS[0]["share_comms"][:15]),
        without(enc_share={**SEALED, "anything": [1]}),
        without(enc_share={**SEALED, "c1": 5}),
        TEXT.replace('"tree_position"', '"tree_position": "x", "tree_position"').encode(),
        TEXT.replace('"tree_position"', '"tree_position": 9, "tree\\u005fposition"').encode(),
        TEXT.replace('"proposal_id": ', '"proposal_id": x').encode(),
        TEXT.replace('"proposal_id": ', '"é": 1, "proposal_id": x').encode(),
        TEXT.replace('"primary_blind": "', '"primary_blind": "').encode().replace(b'blind": "', b'blind": "\xff'),
    ],
)
async def test_validator_large_body_is_read_or_refused_as_a_small_one(posted: bytes) -> None:
    checker = ShareValidator(FakeChecks())
    results: list[Share | tuple[str, str]] = []
    for one in (posted, noisy(posted)):
        try:
            results.append((await checker.read(one)).share)
        except WireError as error:
            results.append((error.field, error.message))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("posted", "message"),
    [
        (b"[" + body() + b"," + body() + b" " * SMALL_BODY + b"]", "body: must be a JSON object"),
        (noisy(body()) + b"x", "body: is not valid JSON here"),
        (noisy(body()).replace(b"1]}", b"1]"), "body: is not valid JSON here"),
        (noisy(body()).replace(b"1]}", b'"\xff"]}'), "body: is not UTF-8"),
        (
            body(share_comms=[0] * SMALL_BODY),
            f"body: the fields of the share are larger than {SMALL_BODY} bytes together",
        ),
    ],
)
async def test_validator_large_invalid_body_is_refused(posted: bytes, message: str) -> None:
    with pytest.raises(WireError) as refused:
        await ShareValidator(proofs).read(posted)
    assert str(refused.value) == message


async def test_validator_failed_batch_is_read_one_by_one() -> None:
    checks = Batches()
    checks.go_on.set()
    checks.failure = ProofsError("internal error")
    found = await ShareValidator(checks).read(body())
    assert found.share == parse_share(body())
    with pytest.raises(WireError, match="tree_position: is missing"):
        await ShareValidator(checks).read(without(tree_position=...))
