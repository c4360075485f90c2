"""Batch validation: results of the native call, batches, large bodies."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import pytest

import proofs
from helper.core.refusals import Situation, TemporaryRefusal
from helper.errors import ClientLeft, ShareRefused
from helper.ingest import validator
from helper.ingest.validator import SMALL_BODY_BYTES, CheckedShare, ShareValidator, checked_share, invalid_share
from proofs import InvalidShare, ProofsError, ReadShare
from tests.campaign.mutations import PayloadMutator
from tests.support.payloads import as_read_share, decode_share
from tests.unit.ingest.admission_fixtures import (
    COMMITMENT,
    NULLIFIER,
    PAYLOADS,
    FakeChecks,
    create_body,
    create_payload,
    parse_share,
)

MUTATED = 30_000


def changed_payload(**changes: Any) -> bytes:
    """The first recorded payload with fields removed or replaced."""
    changed = create_payload(**changes)
    return json.dumps({name: value for name, value in changed.items() if value is not ...}).encode()


def decoded(posted: bytes) -> ReadShare:
    """The share of a valid body; its ids are computed from the single hashes."""
    share = decode_share(posted)
    commitment = proofs.vote_commitment(share.round_id, share.shares_hash, share.proposal_id, share.vote_decision)
    nullifier = proofs.share_nullifier(commitment, share.share_index, share.primary_blind)
    return as_read_share(share, vote_commitment=commitment, nullifier=nullifier)


def test_read_shares_mutated_payloads_are_decoded_or_refused() -> None:
    mutated = list(itertools.islice(PayloadMutator(PAYLOADS, random.Random(11)), MUTATED))
    results = proofs.read_shares(mutated)
    accepted = [(posted, read) for posted, read in zip(mutated, results, strict=True) if isinstance(read, ReadShare)]
    assert accepted, "some mutations have no relevant effect"
    for posted, share in accepted:
        assert share == decoded(posted)
    for invalid in results:
        if isinstance(invalid, InvalidShare):
            assert invalid_share(invalid).field == invalid.field


SEALED = PAYLOADS[0]["enc_share"]


@pytest.mark.rule("R1", "R2", "W3")
@pytest.mark.parametrize(
    ("posted", "fields"),
    [
        (changed_payload(submit_at=...), {"submit_at": 0}),
        (changed_payload(submit_at=None), {"submit_at": 0}),
        (changed_payload(submit_at=0), {"submit_at": 0}),
        (changed_payload(submit_at=(1 << 63) - 1), {"submit_at": (1 << 63) - 1}),
        (changed_payload(all_enc_shares=..., share_index=0, submit_at=1_800_000_000), {"submit_at": 1_800_000_000}),
        (changed_payload(enc_share={"c1": SEALED["c1"], "c2": SEALED["c2"]}), {"share_index": 0}),
        (changed_payload(enc_share={**SEALED, "share_index": None}), {"share_index": 0}),
        (changed_payload(share_index=0), {}),
        (changed_payload(all_enc_shares=[SEALED]), {}),
        (changed_payload(vote_round_id=create_payload()["vote_round_id"].upper()), {}),
    ],
)
def test_read_shares_wallet_variations_are_accepted(posted: bytes, fields: dict[str, int]) -> None:
    (read,) = proofs.read_shares([posted])
    assert isinstance(read, ReadShare)
    assert read == decoded(posted)
    share = checked_share(read).share
    assert {name: getattr(share, name) for name in fields} == fields
    assert "ReadShare(…)" in repr([read]), "no part of a witness is shown"


async def test_validator_wrong_hash_is_refused_after_cached_right_one() -> None:
    checker = ShareValidator(proofs)
    await checker.validate_body(create_body())
    other = [*PAYLOADS[0]["share_comms"]]
    other[15], other[14] = other[14], other[15]
    with pytest.raises(ShareRefused, match="is not the hash of share_comms"):
        await checker.validate_body(create_body(share_comms=other))


class RecordingChecks(FakeChecks):
    """Records the batches; each batch waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.threads = set[threading.Thread]()
        self.proceed = threading.Event()
        self.on_batch: Callable[[], object] = lambda: None

    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
        self.batches.append(len(bodies))
        self.threads.add(threading.current_thread())
        self.on_batch()
        assert self.proceed.wait(30)
        return super().read_shares(bodies)


async def test_validator_bodies_during_batches_form_next_batch() -> None:
    checks = RecordingChecks()
    checker = ShareValidator(checks)

    async def post() -> None:
        payload = await checker.validate_body(create_body())
        assert (payload.vote_commitment, payload.nullifier) == (COMMITMENT, NULLIFIER)

    first = [2, *[1] * (validator.CONCURRENT_BATCHES - 1)]
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
        assert threading.current_thread() not in checks.threads
        checks.proceed.set()
    assert sorted(checks.batches) == sorted([*first, validator.MAX_BATCH, 3])


@pytest.mark.parametrize("padding", [b"", b" " * SMALL_BODY_BYTES])
async def test_validator_drops_bodies_of_disconnected_clients(padding: bytes) -> None:
    checks, outcomes = RecordingChecks(), list[bool]()
    checker, has_left = ShareValidator(checks), False

    async def post(*, leaves: bool) -> None:
        try:
            await checker.validate_body(create_body() + padding, lambda: leaves and has_left)
            outcomes.append(True)
        except ClientLeft:
            outcomes.append(False)

    running = [2, *[1] * (validator.CONCURRENT_BATCHES - 1)] if not padding else [1]
    async with anyio.create_task_group() as group:
        for number, posts in enumerate(running):
            for _ in range(posts):
                group.start_soon(partial(post, leaves=False))
            while len(checks.batches) <= number:
                await anyio.sleep(0.001)
        for leaves in [True] * 1000 + [False]:
            group.start_soon(partial(post, leaves=leaves))
        await anyio.wait_all_tasks_blocked()
        has_left = True
        checks.proceed.set()
    assert checks.batches == [*running, 1]
    assert sorted(outcomes) == [False] * 1000 + [True] * (sum(running) + 1)


async def test_validator_single_body_is_read_on_event_loop() -> None:
    checks = RecordingChecks()
    checks.proceed.set()
    checker = ShareValidator(checks)
    for _ in range(3):
        await checker.validate_body(create_body())
    assert (checks.batches, checks.threads) == ([1] * 3, {threading.current_thread()})


async def test_validator_large_body_does_not_wait_for_batch() -> None:
    checks = RecordingChecks()
    checks.proceed.set()
    payload = await ShareValidator(checks).validate_body(create_body() + b" " * SMALL_BODY_BYTES)
    assert (payload.share, checks.batches) == (parse_share(create_body()), [1])
    assert threading.current_thread() not in checks.threads


async def test_validator_large_bodies_are_limited_and_take_no_place_from_small_ones() -> None:
    checks = RecordingChecks()
    checker = ShareValidator(checks)
    large = create_body() + b" " * SMALL_BODY_BYTES
    begun, loop = asyncio.Queue[int](), asyncio.get_running_loop()
    checks.on_batch = lambda: loop.call_soon_threadsafe(begun.put_nowait, checks.batches[-1])
    async with anyio.create_task_group() as group:
        group.start_soon(checker.validate_body, large)
        assert await begun.get() == 1
        for _ in range(validator.MAX_LARGE_BODIES):
            group.start_soon(checker.validate_body, large)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(TemporaryRefusal) as caught:
            await checker.validate_body(large)
        assert caught.value.situation is Situation.TOO_MANY_REQUESTS
        for _ in range(2):
            group.start_soon(checker.validate_body, create_body())
        assert await begun.get() == 2, "the small ones do not wait"
        checks.proceed.set()
    assert checks.batches == [1, 2, *[validator.MAX_BATCH] * (validator.MAX_LARGE_BODIES // validator.MAX_BATCH)]
    assert threading.current_thread() not in checks.threads


class FailingBatches(FakeChecks):
    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
        if len(bodies) > 1 or bodies[0] == b"fails":
            raise ProofsError("internal error")
        return super().read_shares(bodies)


async def test_validator_failed_batch_is_read_one_by_one() -> None:
    checker = ShareValidator(FailingBatches())
    posted = [create_body(), changed_payload(tree_position=...), b"fails"]
    accepted, missing, failed = await asyncio.gather(*map(checker.validate_body, posted), return_exceptions=True)
    assert isinstance(accepted, CheckedShare)
    assert accepted.share == parse_share(create_body())
    assert isinstance(missing, ShareRefused)
    assert isinstance(failed, ShareRefused)
    assert (missing.status, missing.field, str(missing)) == (400, "tree_position", "is missing")
    assert (failed.status, failed.field, str(failed)) == (400, None, "the share could not be validated")
