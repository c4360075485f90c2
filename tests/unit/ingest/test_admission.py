"""Admission checks, their order, and requests that wait for the next scheduled sync."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from structlog.testing import capture_logs

from helper.chain.chain_data import Proposal, RoundStatus
from helper.core.refusals import PauseReason, Situation, TemporaryRefusal
from helper.core.share import Share
from helper.errors import ShareRefused, StoreError, StoreFull
from helper.ingest import admission as intake_module
from helper.ingest.admission import AdmissionController, longest_wait
from helper.ingest.validator import ShareValidator
from helper.store.models import EnqueueResult
from proofs import InvalidShare, ProofsError
from tests.support.payloads import share_body
from tests.unit.ingest.admission_fixtures import (
    COMMITMENT,
    END,
    NULLIFIER,
    POSITION,
    ROUND_ID,
    FakeChain,
    FakeChecks,
    FakeClock,
    FakeStore,
    create_body,
    make_round,
    parse_share,
)


class Harness:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.chain = FakeChain(self.clock)
        self.store = FakeStore()
        self.checks = FakeChecks()
        self.wake_count = 0
        self.due = 0.0
        self.pause: str | None = None
        self.intake = AdmissionController(
            store=self.store,
            rounds=self.chain.registry,
            trees=self.chain.trees,
            validator=ShareValidator(self.checks),
            clock=self.clock,
            wake=self.wake,
            get_pause_reason=lambda: self.pause,
            get_round_pause_reason=self.chain.round_paused,
        )

    def wake(self, due: float) -> None:
        self.wake_count += 1
        self.due = due

    async def expect_refusal(self, share: Share) -> ShareRefused:
        with pytest.raises(ShareRefused) as caught:
            await self.intake.admit(share_body(share))
        assert self.store.shares == []
        assert self.wake_count == 0
        return caught.value

    async def expect_temporary(self, share: Share) -> Situation:
        with pytest.raises(TemporaryRefusal) as caught:
            await self.intake.admit(share_body(share))
        assert self.store.shares == []
        assert self.wake_count == 0
        return caught.value.situation


@pytest.fixture
def harness() -> Harness:
    return Harness()


def make_share(**changes: Any) -> Share:
    return dataclasses.replace(parse_share(create_body()), **changes)


def change(
    harness: Harness,
    *,
    status: RoundStatus | None = RoundStatus.ACTIVE,
    proposals: bool = True,
    leaf: bytes | None = COMMITMENT,
    stored_leaf: bytes | None = None,
    pause: PauseReason | None = None,
    is_known: bool = False,
) -> None:
    """Change what the helper knows of the round (`status` None: nothing), of the vote and of the share."""
    harness.chain.rounds.clear()
    if status is not None:
        known = make_round(status)
        harness.chain.rounds[ROUND_ID] = known if proposals else dataclasses.replace(known, proposals=())
    for leaves, value in ((harness.chain.leaves, leaf), (harness.chain.stored_leaves, stored_leaf)):
        leaves.clear()
        if value is not None:
            leaves[ROUND_ID, POSITION] = value
    harness.pause = pause
    if is_known:
        harness.store.known_keys.add(make_share().key)


def remove_leaf(harness: Harness) -> None:
    harness.chain.leaves.clear()


def leaf_added(harness: Harness) -> Callable[[], None]:
    return lambda: harness.chain.leaves.update({(ROUND_ID, POSITION): COMMITMENT})


def no_change() -> None:
    """A sync without changes."""


@pytest.mark.rule("R8", "R13")
async def test_admission_valid_share_is_stored_and_wakes_dispatcher(harness: Harness) -> None:
    share = make_share()
    assert await harness.intake.admit(share_body(share)) is EnqueueResult.QUEUED
    assert harness.store.shares == [share]
    assert (harness.wake_count, harness.due) == (1, max(share.submit_at, harness.clock.time))
    assert harness.store.calls == ["enqueue"], "the store detects duplicates and spent nullifiers"
    assert harness.chain.wait_timeouts == []


@pytest.mark.rule("R10", "W6")
async def test_admission_same_share_is_duplicate_at_any_time(harness: Harness) -> None:
    await harness.intake.admit(share_body(make_share(submit_at=END - 60)))
    for again in (0, END - 60, END, END + 1):
        assert await harness.intake.admit(share_body(make_share(submit_at=again))) is EnqueueResult.DUPLICATE
    assert [share.submit_at for share in harness.store.shares] == [END - 60]
    assert harness.wake_count == 1


@pytest.mark.rule("R10", "W6")
async def test_admission_duplicate_that_moves_a_share_up_wakes_dispatcher(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def move_up(*_: object, **__: object) -> EnqueueResult:
        return EnqueueResult.MOVED_UP

    monkeypatch.setattr(harness.store, "run", move_up)
    assert await harness.intake.admit(share_body(make_share(submit_at=0))) is EnqueueResult.DUPLICATE
    assert (harness.wake_count, harness.due) == (1, harness.clock.time)


KNOWN: dict[str, dict[str, Any]] = {
    "tallying": {"status": RoundStatus.TALLYING},
    "finalized": {"status": RoundStatus.FINALIZED},
    "no leaf": {"leaf": None},
    "no round": {"leaf": None, "status": None},
    "no proposals": {"leaf": None, "proposals": False},
    "paused": {"pause": PauseReason.NO_NODE_IN_SYNC},
    "starting after the round": {"leaf": None, "status": RoundStatus.TALLYING, "pause": PauseReason.STARTING},
    "starting with a leaf": {"leaf": None, "stored_leaf": COMMITMENT, "pause": PauseReason.STARTING},
}


@pytest.mark.rule("R10", "N11")
@pytest.mark.parametrize("case", KNOWN)
async def test_admission_known_share_is_duplicate_without_waiting(harness: Harness, case: str) -> None:
    change(harness, **KNOWN[case], is_known=True)
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.DUPLICATE
    assert harness.chain.wait_timeouts == []


OTHER_LEAF = b"\x33" * 32
REFUSED: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "another vote": ({"leaf": OTHER_LEAF, "is_known": True}, {}, "tree_position"),
    "another vote after the round": (
        {"status": RoundStatus.TALLYING, "leaf": None, "stored_leaf": OTHER_LEAF, "is_known": True},
        {},
        "vote_round_id",
    ),
    "tallying": ({"status": RoundStatus.TALLYING}, {}, "vote_round_id"),
    "finalized": ({"status": RoundStatus.FINALIZED}, {}, "vote_round_id"),
    "no leaf after the round": ({"status": RoundStatus.FINALIZED, "leaf": None}, {}, "vote_round_id"),
    "unknown proposal": ({}, {"proposal_id": 3}, "proposal_id"),
    "last proposal": ({}, {"proposal_id": 50}, "proposal_id"),
    "unknown option": ({}, {"vote_decision": 2}, "vote_decision"),
    "due after the end": ({}, {"submit_at": END + 1}, "submit_at"),
}


@pytest.mark.rule("R3", "R13")
@pytest.mark.parametrize("case", REFUSED)
async def test_admission_impossible_share_is_refused_without_waiting(harness: Harness, case: str) -> None:
    situation, changes, field = REFUSED[case]
    change(harness, **situation)
    refused = await harness.expect_refusal(make_share(**changes))
    assert (refused.status, refused.field) == (400, field)
    assert harness.chain.wait_timeouts == []
    assert "enqueue" not in harness.store.calls
    assert not situation.get("is_known") or harness.store.calls == [], "the store is checked after the leaf"


async def test_admission_round_closed_by_other_host_is_refused(harness: Harness) -> None:
    harness.store.is_round_closed = True
    refused = await harness.expect_refusal(make_share())
    assert (refused.status, refused.field) == (400, "vote_round_id")


@pytest.mark.rule("R13")
@pytest.mark.parametrize(
    "invalid",
    [
        InvalidShare("enc_share.c1", "off-curve"),
        InvalidShare("share_comms[3]", "non-canonical"),
        InvalidShare("shares_hash", "shares_hash"),
        InvalidShare("share_comms[0]", "share_comm"),
    ],
)
async def test_admission_invalid_share_is_refused_before_chain_checks(harness: Harness, invalid: InvalidShare) -> None:
    harness.checks.invalid = invalid
    harness.chain.rounds.clear()  # the hashes are checked before the round
    harness.pause = PauseReason.NO_NODE_IN_SYNC
    with pytest.raises(ShareRefused) as refused:
        await harness.intake.admit(create_body())
    assert refused.value.field == invalid.field
    assert harness.store.calls == []


@pytest.mark.rule("R13")
async def test_admission_failed_native_check_refuses_before_chain_checks(harness: Harness) -> None:
    harness.checks.error = ProofsError("?")
    harness.chain.rounds.clear()
    harness.pause = PauseReason.NO_NODE_IN_SYNC
    refused = await harness.expect_refusal(make_share())
    assert (refused.status, refused.field) == (400, None)
    assert harness.store.calls == []


@pytest.mark.rule("N19")
async def test_admission_takes_proposals_1_to_50_of_the_round(harness: Harness) -> None:
    proposals = tuple(Proposal(number, (0, 1)) for number in range(52))
    harness.chain.rounds[ROUND_ID] = dataclasses.replace(make_round(), proposals=proposals)
    for number in (1, 37, 50):
        assert await harness.intake.admit(share_body(make_share(proposal_id=number))) is EnqueueResult.QUEUED
    for number in (0, 51):
        with pytest.raises(ShareRefused, match="must be from 1 to 50"):
            await harness.intake.admit(share_body(make_share(proposal_id=number)))
    assert [share.proposal_id for share in harness.store.shares] == [1, 37, 50]


async def test_admission_pending_round_refuses_temporarily(harness: Harness) -> None:
    change(harness, status=RoundStatus.PENDING)
    assert await harness.expect_temporary(make_share()) is Situation.VOTE_NOT_SYNCED


@pytest.mark.rule("R3", "N10")
async def test_admission_submit_at_equal_round_end_is_accepted_and_not_logged(harness: Harness) -> None:
    with capture_logs() as logs:
        for number in range(2):
            share = make_share(submit_at=END - number, share_index=number)
            assert await harness.intake.admit(share_body(share)) is EnqueueResult.QUEUED
    assert logs == [], "an entry would show when this share arrived and when it is due"


@pytest.mark.rule("R12", "R13")
async def test_admission_spent_nullifier_is_duplicate_and_not_stored(harness: Harness) -> None:
    harness.store.spent.add((ROUND_ID, NULLIFIER))
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.DUPLICATE
    assert harness.store.shares == []
    assert harness.wake_count == 0


@pytest.mark.rule("W5")
@pytest.mark.parametrize("error", [StoreFull("no space"), StoreError("I/O error")])
async def test_admission_store_error_is_temporary(harness: Harness, error: StoreError) -> None:
    harness.store.error = error
    assert await harness.expect_temporary(make_share()) is Situation.QUEUE_UNWRITABLE


@pytest.mark.parametrize("error_seconds", [-600.0, 600.0])
async def test_admission_under_a_wrong_clock_takes_the_earlier_time(harness: Harness, error_seconds: float) -> None:
    true_time = harness.clock.time

    def correct_clock() -> None:
        harness.clock.time = true_time
        leaf_added(harness)()

    remove_leaf(harness)
    harness.chain.syncs = [correct_clock]
    harness.clock.time = true_time + error_seconds
    assert await harness.intake.admit(share_body(make_share(submit_at=0))) is EnqueueResult.QUEUED
    assert harness.due == true_time + min(0.0, error_seconds)
    assert len(harness.chain.wait_timeouts) == 1, "the next sync is enough"


async def test_admission_leaf_missed_by_running_sync_waits_for_another(harness: Harness) -> None:
    remove_leaf(harness)
    harness.chain.syncs = [no_change, leaf_added(harness)]
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED
    assert sum(harness.chain.wait_timeouts[1:]) <= 3.0


async def test_admission_missing_round_waits_for_next_sync(harness: Harness) -> None:
    known = harness.chain.rounds.pop(ROUND_ID)
    harness.chain.syncs = [lambda: harness.chain.rounds.update({ROUND_ID: known})]
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED


@pytest.mark.rule("W4")
@pytest.mark.parametrize("missing", ["leaf", "round", "agreement"])
async def test_admission_round_or_leaf_that_is_missing_is_never_refused_for_good(
    harness: Harness, missing: str
) -> None:
    if missing == "round":
        harness.chain.rounds.clear()
    elif missing == "leaf":
        remove_leaf(harness)
    else:  # one node serves another leaf at this position
        harness.chain.served_leaves = {(ROUND_ID, POSITION): b"\x33" * 32}
        remove_leaf(harness)
    harness.chain.syncs = [no_change] * 20
    assert await harness.expect_temporary(make_share()) is Situation.VOTE_NOT_SYNCED
    assert len(harness.chain.wait_timeouts) == intake_module.MAX_WAIT_SECONDS / harness.chain.sync_seconds


async def test_admission_leaf_that_one_node_serves_is_accepted(harness: Harness) -> None:
    remove_leaf(harness)
    harness.chain.served_leaves = {(ROUND_ID, POSITION): COMMITMENT}
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED


@pytest.mark.rule("W13")
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], (3.5, 3.5, 3.5)),
        ([(b"x-vote-ingress-attempt-v1", b"5a" * 32)], (15.0, 3.5, 15.0)),
        ([(b"origin", b"chrome-extension://zafu")], (8.0, 3.5, 8.0)),
        ([(b"user-agent", b"valar-custody-voter/1.0.1")], (15.0, 3.5, 15.0)),
        ([(b"user-agent", b"zkool/1.0"), (b"x-vote-ingress-attempt-v1", b"no token")], (3.5, 3.5, 3.5)),
    ],
    ids=["unknown", "attempt", "browser", "custody-voter", "no-token"],
)
async def test_admission_hold_ends_at_limit(
    harness: Harness, headers: list[tuple[bytes, bytes]], seconds: tuple[float, float, float]
) -> None:
    remove_leaf(harness)
    for limit, pause in zip(seconds, (0.6, 61.0, 0.0), strict=True):
        started_at = harness.clock.monotonic()
        with pytest.raises(TemporaryRefusal) as caught:
            await harness.intake.admit(share_body(make_share()), wait_seconds=longest_wait(headers))
        assert caught.value.situation is Situation.VOTE_NOT_SYNCED
        assert harness.clock.monotonic() - started_at == limit
        await harness.clock.sleep(pause)


@pytest.mark.rule("W13")
async def test_admission_slow_sync_hold_ends_at_limit(harness: Harness) -> None:
    remove_leaf(harness)
    harness.chain.sync_seconds = 2.0
    harness.chain.syncs = [no_change, leaf_added(harness)]
    assert await harness.expect_temporary(make_share()) is Situation.VOTE_NOT_SYNCED
    assert sum(harness.chain.wait_timeouts[:1]) == intake_module.MAX_WAIT_SECONDS


async def test_admission_unconfirmed_stored_leaf_does_not_admit_new_share(harness: Harness) -> None:
    remove_leaf(harness)
    harness.chain.stored_leaves[ROUND_ID, POSITION] = COMMITMENT
    assert await harness.expect_temporary(make_share()) is Situation.VOTE_NOT_SYNCED
    assert harness.store.calls == ["known"]


@pytest.mark.rule("W5")
async def test_admission_paused_refuses_new_shares_without_waiting(harness: Harness) -> None:
    harness.pause = PauseReason.NO_NODE_IN_SYNC
    assert await harness.expect_temporary(make_share()) is Situation.PAUSED
    remove_leaf(harness)
    assert await harness.expect_temporary(make_share()) is Situation.PAUSED
    assert harness.chain.wait_timeouts == []


async def test_admission_frozen_round_refuses_new_shares_others_accept(harness: Harness) -> None:
    harness.chain.frozen_rounds.add(ROUND_ID)
    assert await harness.expect_temporary(make_share()) is Situation.PAUSED
    harness.store.known_keys.add(make_share().key)
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.DUPLICATE
    harness.chain.frozen_rounds = {bytes(32)}
    assert await harness.intake.admit(share_body(make_share(share_index=1))) is EnqueueResult.QUEUED


@pytest.mark.parametrize("other_end", [END + 600, END - 60])
async def test_admission_end_unconfirmed_accepts_shares_before_the_latest_end(harness: Harness, other_end: int) -> None:
    harness.chain.other_ends[ROUND_ID] = other_end
    assert await harness.expect_temporary(make_share(submit_at=END + 1)) is Situation.PAUSED
    assert await harness.intake.admit(share_body(make_share(submit_at=END))) is EnqueueResult.QUEUED
    assert await harness.intake.admit(share_body(make_share(submit_at=0, share_index=1))) is EnqueueResult.QUEUED
    harness.clock.time = END + 1.0
    with pytest.raises(TemporaryRefusal) as caught:
        await harness.intake.admit(share_body(make_share(submit_at=0, share_index=2)))
    assert caught.value.situation is Situation.PAUSED, "due immediately, after the end"


@pytest.mark.parametrize("status", [RoundStatus.ACTIVE, RoundStatus.TALLYING])
async def test_admission_status_unconfirmed_is_temporary(harness: Harness, status: RoundStatus) -> None:
    harness.chain.rounds[ROUND_ID] = make_round(status)
    harness.chain.status_reports.add(ROUND_ID)
    assert await harness.expect_temporary(make_share()) is Situation.PAUSED
    harness.chain.status_reports.clear()
    harness.chain.rounds[ROUND_ID] = make_round()
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED


@pytest.mark.rule("W4")
async def test_admission_proposals_unconfirmed_is_temporary(harness: Harness) -> None:
    assert (await harness.expect_refusal(make_share(proposal_id=40))).status == 400
    harness.chain.proposal_reports.add(ROUND_ID)
    assert await harness.expect_temporary(make_share(proposal_id=40)) is Situation.PROPOSALS_UNCONFIRMED
    harness.chain.proposal_reports.clear()
    harness.chain.rounds[ROUND_ID] = dataclasses.replace(make_round(), proposals=())
    assert await harness.expect_temporary(make_share()) is Situation.PROPOSALS_UNCONFIRMED
    harness.chain.rounds[ROUND_ID] = make_round()
    harness.chain.proposal_reports.add(ROUND_ID)
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED, "the choice is known"


async def test_admission_pause_during_hold_is_temporary(harness: Harness) -> None:
    remove_leaf(harness)
    harness.chain.syncs = [lambda: setattr(harness, "pause", PauseReason.NO_NODE_IN_SYNC), no_change]
    assert await harness.expect_temporary(make_share()) is Situation.PAUSED


@pytest.mark.rule("W5")
async def test_admission_share_waits_for_the_end_of_the_start(harness: Harness) -> None:
    harness.pause = PauseReason.CHAIN_NOT_READ
    assert await harness.expect_temporary(make_share()) is Situation.PAUSED
    assert sum(harness.chain.wait_timeouts[:1]) == intake_module.MAX_WAIT_SECONDS
    harness.chain.syncs = [lambda: setattr(harness, "pause", None)]
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED


async def test_admission_held_shares_are_limited_and_the_oldest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_WAITING", 3)
    harness = Harness()
    gate = SyncGate(harness.clock)
    monkeypatch.setattr(harness.chain, "wait_for_news", gate.wait)
    beyond = share_body(make_share(tree_position=9))
    given_up: list[int] = []

    async def post(number: int, wait_seconds: float) -> None:
        with pytest.raises(TemporaryRefusal) as caught:
            await harness.intake.admit(beyond, wait_seconds=wait_seconds)
        if caught.value.situation is Situation.TOO_MANY_WAITING:
            given_up.append(number)
        else:
            assert caught.value.situation is Situation.VOTE_NOT_SYNCED

    async with anyio.create_task_group() as group:
        for number, wait_seconds in enumerate([8.0, 3.5, 15.0, 15.0, 3.5, 3.5, 3.5]):
            before = gate.waiting
            group.start_soon(post, number, wait_seconds)
            while gate.waiting == before and number not in given_up:
                await anyio.sleep(0.001)
            await anyio.wait_all_tasks_blocked()
        assert given_up == [0, 1, 2, 3], "each new one takes the place of the oldest, however long that may wait"
        assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED
        gate.opened.set()
    assert not harness.intake._waiting._scopes, "all slots are free"


async def test_admission_waits_end_when_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    gate = SyncGate(harness.clock)
    monkeypatch.setattr(harness.chain, "wait_for_news", gate.wait)
    beyond = make_share(tree_position=9)
    situations: list[Situation] = []

    async def post() -> None:
        situations.append(await harness.expect_temporary(beyond))

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        group.start_soon(post)
        await anyio.wait_all_tasks_blocked()
        assert not situations
        harness.intake.stop_waits()
    assert await harness.expect_temporary(beyond) is Situation.STOPPING, "a share that arrives later does not wait"
    assert situations == [Situation.STOPPING] * 2
    assert await harness.intake.admit(share_body(make_share())) is EnqueueResult.QUEUED


async def test_admission_concurrent_shares_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_IN_FLIGHT", 3)
    harness = Harness()
    gate = SyncGate(harness.clock)
    with monkeypatch.context() as blocked:
        blocked.setattr(harness.store, "run", lambda *_, **__: gate.wait())
        async with anyio.create_task_group() as group:
            assert await gate.hold_shares(harness, group, 5, create_body()) == 3
            assert await harness.expect_temporary(make_share()) is Situation.TOO_MANY_REQUESTS
            gate.opened.set()
    for _ in range(4):
        await harness.intake.admit(share_body(make_share()))


class SyncGate:
    """Holds shares until it is opened, for as long as a share waits."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.opened = anyio.Event()
        self.waiting = 0

    async def wait(self, *_arguments: object) -> None:
        self.waiting += 1
        await self.opened.wait()
        self._clock.time += intake_module.LONGEST_WAIT_SECONDS

    async def hold_shares(self, harness: Harness, group: TaskGroup, count: int, posted: bytes) -> int:
        """Post shares; return how many of them wait."""
        before, refused = self.waiting, 0

        async def post() -> None:
            nonlocal refused
            try:
                await harness.intake.admit(posted)
            except TemporaryRefusal:
                refused += 1

        for _ in range(count):
            group.start_soon(post)
        while self.waiting - before + refused < count:
            await anyio.sleep(0.001)
        return self.waiting - before


async def test_admission_log_contains_no_share_data(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for level in ("debug", "info", "warning", "error"):
        monkeypatch.setattr(intake_module.log, level, lambda event, **fields: lines.append(json.dumps([event, fields])))
    share = make_share(submit_at=END, tree_position=9)
    harness.chain.leaves[ROUND_ID, 9] = COMMITMENT
    await harness.intake.admit(share_body(share))
    harness.store.error = StoreFull("no space")
    with pytest.raises(TemporaryRefusal):
        await harness.intake.admit(share_body(make_share(share_index=3, tree_position=9)))
    assert len(lines) == 1
    text = "".join(lines)
    for secret in (ROUND_ID, NULLIFIER, COMMITMENT, share.c1, share.primary_blind):
        assert secret.hex() not in text
    assert "9" not in text.replace(str(END), "")
