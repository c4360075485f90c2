"""Batch validation: results of the native call, batches, large bodies."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

import proofs
from helper.core.share import Share
from helper.errors import ShareRefused
from helper.ingest import validator
from helper.ingest.payload import MAX_BODY, SMALL_BODY, invalid_share
from helper.ingest.schema import WireError
from helper.ingest.validator import CheckedShare, ShareValidator
from proofs import InvalidShare, ProofsError, ReadShare
from tests.campaign.mutations import Mutator
from tests.support.payloads import decode_share
from tests.unit.ingest.admission_fixtures import COMMITMENT, NULLIFIER, PAYLOADS, FakeChecks, body, parse_share, payload
from tests.unit.ingest.payload_bodies import NON_CANONICAL, OFF_CURVE, b64

pytestmark = pytest.mark.anyio
MUTATED = 30_000


def without(**changes: Any) -> bytes:
    """The first recorded payload without some fields, or with others."""
    changed = payload(**changes)
    return json.dumps({name: value for name, value in changed.items() if value is not ...}).encode()


def decoded(posted: bytes) -> ReadShare:
    """The share of a valid body, with its ids from the single hashes."""
    share = decode_share(posted, vote_commitment=b"", nullifier=b"")
    commitment = proofs.vote_commitment(share.round_id, share.shares_hash, share.proposal_id, share.vote_decision)
    nullifier = proofs.share_nullifier(commitment, share.share_index, share.primary_blind)
    return share._replace(vote_commitment=commitment, nullifier=nullifier)


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_read_shares_recorded_payload_keeps_all_values(number: int) -> None:
    posted = json.dumps(PAYLOADS[number]).encode()
    assert proofs.read_shares([posted]) == [decoded(posted)]


def test_read_shares_mutated_payloads_are_decoded_or_refused() -> None:
    mutated = list(itertools.islice(Mutator(PAYLOADS, random.Random(11)), MUTATED))
    results = proofs.read_shares(mutated)
    accepted = [(posted, read) for posted, read in zip(mutated, results, strict=True) if isinstance(read, ReadShare)]
    assert accepted, "some mutations change nothing that matters"
    for posted, share in accepted:
        assert share == decoded(posted)
    for invalid in results:
        if isinstance(invalid, InvalidShare):
            assert str(invalid_share(invalid)).startswith(f"{invalid.field}: ")


SEALED = PAYLOADS[0]["enc_share"]
TEXT = body().decode()


@pytest.mark.parametrize(
    ("posted", "invalid"),
    [
        (b"", InvalidShare("body", "not-json")),
        (b"null", InvalidShare("body", "type")),
        (b"\xff", InvalidShare("body", "not-utf8")),
        (without(enc_share=[SEALED["c1"], SEALED["c2"], 0]), InvalidShare("enc_share", "type")),
        (without(enc_share={**SEALED, "c1": SEALED["c2"]}), InvalidShare("share_comms[0]", "share_comm")),
        (without(enc_share={**SEALED, "share_index": 16}), InvalidShare("enc_share.share_index", "range")),
        (without(enc_share={**SEALED, "share_index": 3}), InvalidShare("share_comms[3]", "share_comm")),
        (without(enc_share={**SEALED, "c2": b64(bytes(32))}), InvalidShare("enc_share.c2", "identity")),
        (without(enc_share={**SEALED, "c2": OFF_CURVE}), InvalidShare("enc_share.c2", "off-curve")),
        (without(tree_position=...), InvalidShare("tree_position", "missing")),
        (without(tree_position=1 << 24), InvalidShare("tree_position", "range")),
        (without(tree_position=2.0), InvalidShare("tree_position", "type")),
        (without(share_comms=PAYLOADS[0]["share_comms"][:15]), InvalidShare("share_comms", "count", 15)),
        (without(share_comms=[b64(bytes(31))] * 16), InvalidShare("share_comms[0]", "length", 31)),
        (without(shares_hash=PAYLOADS[0]["primary_blind"]), InvalidShare("shares_hash", "shares_hash")),
        (without(shares_hash=PAYLOADS[0]["shares_hash"].rstrip("=")), InvalidShare("shares_hash", "not-base64")),
        (without(shares_hash=NON_CANONICAL), InvalidShare("shares_hash", "non-canonical")),
        (without(vote_round_id=payload()["vote_round_id"][:-2]), InvalidShare("vote_round_id", "not-hex")),
        (body(share_comms=[0] * SMALL_BODY), InvalidShare("body", "too-large")),
    ],
)
def test_read_shares_invalid_body_returns_field_and_reason(posted: bytes, invalid: InvalidShare) -> None:
    assert proofs.read_shares([body(), posted, body()])[1] == invalid


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
def test_read_shares_wallet_variations_are_accepted(posted: bytes, fields: dict[str, int]) -> None:
    (read,) = proofs.read_shares([posted])
    assert isinstance(read, ReadShare)
    assert read == decoded(posted)
    assert {name: getattr(read, name) for name in fields} == fields
    assert "ReadShare(…)" in repr([read]), "nothing of a witness is shown"


async def test_validator_wrong_hash_is_refused_after_cached_right_one() -> None:
    checker = ShareValidator(proofs)
    await checker.read(body())
    other = [*PAYLOADS[0]["share_comms"]]
    other[15], other[14] = other[14], other[15]
    with pytest.raises(WireError, match="is not the hash of share_comms"):
        await checker.read(body(share_comms=other))


class Batches(FakeChecks):
    """Notes what comes together; each batch waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.begun: Callable[[], None] = lambda: None

    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
        self.batches.append(len(bodies))
        self.threads.add(threading.current_thread().name)
        self.begun()
        assert self.go_on.wait(30)
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
    checks.go_on.set()
    found = await ShareValidator(checks).read(body() + b" " * SMALL_BODY)
    assert (found.share, checks.batches) == (parse_share(body()), [1])
    assert threading.current_thread().name not in checks.threads


NOISE = b'"pad":[' + b"[]," * ((MAX_BODY - 8_000) // 3) + b"1]"
"""A member that takes orjson 80 ms to read."""


def noisy(posted: bytes) -> bytes:
    """The same body with an unknown member that makes it nearly as large as one may be."""
    return posted.rstrip()[:-1] + b"," + NOISE + b"}"


async def test_validator_large_bodies_share_one_worker_thread() -> None:
    under_way, most, threads = 0, 0, set[str]()

    class Counted(FakeChecks):
        def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            threads.add(threading.current_thread().name)
            results = super().read_shares(bodies)
            under_way -= 1
            return results

    checker = ShareValidator(Counted())
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


class FailingBatches(FakeChecks):
    """Fails for batches, and for one body."""

    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
        if len(bodies) > 1 or bodies[0] == b"fails":
            raise ProofsError("internal error")
        return super().read_shares(bodies)


async def test_validator_failed_batch_is_read_one_by_one() -> None:
    checker = ShareValidator(FailingBatches())
    posted = [body(), without(tree_position=...), b"fails"]
    found, missing, failed = await asyncio.gather(*map(checker.read, posted), return_exceptions=True)
    assert isinstance(found, CheckedShare)
    assert found.share == parse_share(body())
    assert (type(missing), str(missing)) == (WireError, "tree_position: is missing")
    assert isinstance(failed, ShareRefused)
    assert (failed.status, str(failed)) == (400, "the share could not be validated")
