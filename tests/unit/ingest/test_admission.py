"""What must hold before a share is taken, in which order, and what is held for the next regular sync."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from helper.chain.models import RoundStatus
from helper.core.share import Share
from helper.errors import ShareRefused, StoreError, StoreFull
from helper.ingest import admission as intake_module
from helper.ingest.admission import AdmissionController
from helper.ingest.payload import parse_share
from helper.ingest.validator import ShareValidator
from helper.store.rows import Enqueued
from proofs import EncodingError, ProofsError, ShareRuleError
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
    body,
    make_round,
)

pytestmark = pytest.mark.anyio


class House:
    """An intake with everything around it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.chain = FakeChain(self.clock)
        self.store = FakeStore()
        self.checks = FakeChecks()
        self.woken = 0
        self.due = 0.0
        self.pause: str | None = None
        self.intake = AdmissionController(
            store=self.store,
            rounds=self.chain,
            trees=self.chain,
            checker=ShareValidator(self.checks),
            clock=self.clock,
            wake=self.wake,
            paused=lambda: self.pause,
            round_paused=self.chain.frozen,
        )

    def wake(self, due: float) -> None:
        self.woken += 1
        self.due = due

    async def refused(self, share: Share) -> ShareRefused:
        with pytest.raises(ShareRefused) as caught:
            await self.intake.accept(share)
        assert self.store.kept == []
        assert self.woken == 0
        return caught.value


@pytest.fixture
def house() -> House:
    return House()


def make_share(**changes: Any) -> Share:
    return dataclasses.replace(parse_share(body()), **changes)


def in_round(house: House, status: RoundStatus) -> None:
    house.chain.rounds[ROUND_ID] = make_round(status)


def no_leaf(house: House) -> None:
    house.chain.leaves.clear()


def grow(house: House) -> Callable[[], None]:
    """A sync that brings the share's leaf."""
    return lambda: house.chain.leaves.update({(ROUND_ID, POSITION): COMMITMENT})


def idle() -> None:
    """A sync that brings nothing."""


@pytest.mark.rule("R8", "R13")
async def test_a_share_that_passes_is_kept_and_wakes_the_processor(house: House) -> None:
    share = make_share()
    assert await house.intake.accept(share) is Enqueued.QUEUED
    assert house.store.kept == [share]
    assert (house.woken, house.due) == (1, max(share.submit_at, house.clock.time))
    assert house.store.asked == ["enqueue"], "the store itself tells what is known or spent"
    assert house.chain.waits == []


@pytest.mark.rule("R10")
async def test_the_same_share_again_is_a_duplicate_whatever_its_time(house: House) -> None:
    await house.intake.accept(make_share(submit_at=END - 60))
    for again in (0, END - 60, END, END + 1):
        assert await house.intake.accept(make_share(submit_at=again)) is Enqueued.DUPLICATE
    assert [share.submit_at for share in house.store.kept] == [END - 60]
    assert house.woken == 1


async def test_a_round_that_another_host_has_closed_takes_no_share(house: House) -> None:
    house.store.over = True
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "vote_round_id")


@pytest.mark.rule("R10")
@pytest.mark.parametrize("status", [RoundStatus.TALLYING, RoundStatus.FINALIZED])
async def test_a_known_share_is_a_duplicate_also_after_the_round(house: House, status: RoundStatus) -> None:
    house.store.known.add(make_share().key)
    in_round(house, status)
    assert await house.intake.accept(make_share()) is Enqueued.DUPLICATE


@pytest.mark.rule("R13")
@pytest.mark.parametrize(
    ("error", "field"),
    [
        (EncodingError("enc_share.c1", "off-curve"), "enc_share.c1"),
        (EncodingError("share_comms[3]", "non-canonical"), "share_comms[3]"),
        (ShareRuleError("shares_hash"), "shares_hash"),
        (ShareRuleError("share_comm"), "share_comms[0]"),
        (ProofsError("?"), None),
    ],
)
async def test_what_the_hashes_refuse_goes_no_further(house: House, error: Exception, field: str | None) -> None:
    house.checks.error = error
    house.chain.rounds.clear()  # the hashes come before the round is looked up
    house.pause = "no node"
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, field)
    assert house.store.asked == []


@pytest.mark.rule("R13")
async def test_a_leaf_that_is_not_the_commitment_is_refused(house: House) -> None:
    house.chain.leaves[ROUND_ID, POSITION] = b"\x33" * 32
    house.store.known.add(make_share().key)  # looked at only after the leaf
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "tree_position")
    assert house.store.asked == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"proposal_id": 3}, "proposal_id"),
        ({"proposal_id": 50}, "proposal_id"),
        ({"vote_decision": 2}, "vote_decision"),
    ],
)
async def test_proposal_and_option_are_the_rounds_own(house: House, changes: dict[str, int], field: str) -> None:
    refused = await house.refused(make_share(**changes))
    assert (refused.status, refused.field) == (400, field)


@pytest.mark.parametrize("status", [s for s in RoundStatus if s is not RoundStatus.ACTIVE])
async def test_a_round_that_is_not_active_takes_nothing_new(house: House, status: RoundStatus) -> None:
    in_round(house, status)
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "vote_round_id")
    assert house.store.asked == ["known"]


@pytest.mark.rule("R3")
async def test_a_time_after_the_rounds_end_is_refused(house: House) -> None:
    refused = await house.refused(make_share(submit_at=END + 1))
    assert (refused.status, refused.field) == (400, "submit_at")


@pytest.mark.rule("R3")
async def test_the_rounds_end_itself_is_taken_and_reported(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(intake_module.log, "warning", lambda event, **_: warned.append(event))
    assert await house.intake.accept(make_share(submit_at=END - 1)) is Enqueued.QUEUED
    assert warned == []
    assert await house.intake.accept(make_share(submit_at=END, share_index=1)) is Enqueued.QUEUED
    assert warned == ["share_due_too_late"]


@pytest.mark.rule("R12", "R13")
async def test_a_share_that_another_helper_revealed_is_a_duplicate_and_not_kept(house: House) -> None:
    house.store.spent.add((ROUND_ID, NULLIFIER))
    assert await house.intake.accept(make_share()) is Enqueued.DUPLICATE
    assert house.store.kept == []
    assert house.woken == 0


@pytest.mark.parametrize("error", [StoreFull("no space"), StoreError("I/O error")])
async def test_a_store_that_cannot_write_takes_nothing(house: House, error: StoreError) -> None:
    house.store.error = error
    assert (await house.refused(make_share())).status == 503


async def test_a_share_before_its_leaf_is_held_for_the_next_sync(house: House) -> None:
    no_leaf(house)
    house.chain.syncs = [grow(house)]
    assert await house.intake.accept(make_share()) is Enqueued.QUEUED
    assert len(house.chain.waits) == 1


async def test_a_sync_that_was_under_way_may_miss_the_leaf(house: House) -> None:
    no_leaf(house)
    house.chain.behind = 0.6
    house.chain.syncs = [idle, grow(house)]
    assert await house.intake.accept(make_share()) is Enqueued.QUEUED
    assert sum(house.chain.waits[1:]) <= 1.5


async def test_a_share_before_its_round_is_held_too(house: House) -> None:
    known = house.chain.rounds.pop(ROUND_ID)
    house.chain.syncs = [lambda: house.chain.rounds.update({ROUND_ID: known})]
    assert await house.intake.accept(make_share()) is Enqueued.QUEUED


async def test_what_the_chain_lacks_is_refused_after_the_syncs(house: House) -> None:
    no_leaf(house)
    house.chain.syncs = [idle, idle, grow(house)]
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "tree_position")
    house.chain.rounds.clear()
    house.chain.syncs = [idle, idle]
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "vote_round_id")


async def test_a_leaf_of_a_closed_round_is_not_waited_for(house: House) -> None:
    no_leaf(house)
    in_round(house, RoundStatus.FINALIZED)
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "vote_round_id")
    assert "not active" in str(refused)
    assert house.chain.waits == []


async def test_no_share_is_held_longer_than_two_seconds(house: House) -> None:
    no_leaf(house)
    began = house.clock.monotonic()
    assert (await house.refused(make_share())).status == 429
    assert house.clock.monotonic() - began <= intake_module.HOLD_SECONDS


async def test_a_slow_sync_is_not_waited_for_beyond_the_limit(house: House) -> None:
    no_leaf(house)
    house.chain.seconds = 1.5
    house.chain.behind = 5.0
    house.chain.syncs = [idle, grow(house)]
    assert (await house.refused(make_share())).status == 429
    assert sum(house.chain.waits[:1]) == intake_module.HOLD_SECONDS


async def test_while_the_node_lags_a_share_may_come_again(house: House) -> None:
    no_leaf(house)
    house.chain.behind = 5.0
    house.chain.syncs = [idle, idle, idle, idle]
    assert (await house.refused(make_share())).status == 429
    house.chain.rounds.clear()
    house.chain.syncs = [idle, idle, idle, idle]
    assert (await house.refused(make_share())).status == 429


@pytest.mark.parametrize("kept", [None, COMMITMENT])
async def test_a_known_share_whose_leaf_cannot_be_checked_is_a_duplicate(house: House, kept: bytes | None) -> None:
    no_leaf(house)
    house.pause = "starting"
    house.store.known.add(make_share().key)
    if kept is None:
        in_round(house, RoundStatus.TALLYING)
    else:
        house.chain.unchecked[ROUND_ID, POSITION] = kept
    assert await house.intake.accept(make_share()) is Enqueued.DUPLICATE


async def test_another_vote_at_a_known_place_does_not_learn_that_it_is_known(house: House) -> None:
    no_leaf(house)
    in_round(house, RoundStatus.TALLYING)
    house.chain.unchecked[ROUND_ID, POSITION] = b"\x33" * 32
    house.store.known.add(make_share().key)
    refused = await house.refused(make_share())
    assert (refused.status, refused.field) == (400, "vote_round_id")
    assert house.store.asked == []


async def test_a_leaf_from_the_disk_is_not_enough_for_a_new_share(house: House) -> None:
    no_leaf(house)
    house.chain.unchecked[ROUND_ID, POSITION] = COMMITMENT
    assert (await house.refused(make_share())).status == 429
    assert house.store.asked == ["known"]


async def test_paused_takes_nothing_new_and_holds_nothing(house: House) -> None:
    house.pause = "no fresh node"
    assert (await house.refused(make_share())).status == 503
    no_leaf(house)
    assert (await house.refused(make_share())).status == 503
    assert house.chain.waits == []


async def test_a_frozen_round_takes_nothing_new_and_others_do(house: House) -> None:
    house.chain.cold.add(ROUND_ID)
    assert (await house.refused(make_share())).status == 503
    house.store.known.add(make_share().key)
    assert await house.intake.accept(make_share()) is Enqueued.DUPLICATE
    house.chain.cold = {bytes(32)}
    assert await house.intake.accept(make_share(share_index=1)) is Enqueued.QUEUED


@pytest.mark.parametrize("other_end", [END + 600, END - 60])
async def test_intake_end_unconfirmed_accepts_shares_before_both_ends(house: House, other_end: int) -> None:
    house.chain.other_ends[ROUND_ID] = other_end
    earlier = min(END, other_end)
    assert (await house.refused(make_share(submit_at=earlier + 1))).status == 503
    assert await house.intake.accept(make_share(submit_at=earlier)) is Enqueued.QUEUED
    assert await house.intake.accept(make_share(submit_at=0, share_index=1)) is Enqueued.QUEUED
    house.clock.time = earlier + 1.0
    with pytest.raises(ShareRefused) as caught:
        await house.intake.accept(make_share(submit_at=0, share_index=2))
    assert caught.value.status == 503, "it is due at once, and one of the two ends has passed"


@pytest.mark.parametrize("status", [RoundStatus.ACTIVE, RoundStatus.TALLYING])
async def test_intake_status_unconfirmed_answers_503_not_400(house: House, status: RoundStatus) -> None:
    house.chain.rounds[ROUND_ID] = make_round(status)
    house.chain.status_reports.add(ROUND_ID)
    assert (await house.refused(make_share())).status == 503
    house.chain.status_reports.clear()
    house.chain.rounds[ROUND_ID] = make_round()
    assert await house.intake.accept(make_share()) is Enqueued.QUEUED


async def test_intake_proposals_unconfirmed_answers_429_not_400(house: House) -> None:
    assert (await house.refused(make_share(proposal_id=40))).status == 400
    house.chain.proposal_reports.add(ROUND_ID)
    assert (await house.refused(make_share(proposal_id=40))).status == 429
    house.chain.proposal_reports.clear()
    house.chain.rounds[ROUND_ID] = dataclasses.replace(make_round(), proposals=())
    assert (await house.refused(make_share())).status == 429
    house.chain.rounds[ROUND_ID] = make_round()
    house.chain.proposal_reports.add(ROUND_ID)
    assert await house.intake.accept(make_share()) is Enqueued.QUEUED, "its choice is known"


async def test_paused_while_held_is_503(house: House) -> None:
    no_leaf(house)
    house.chain.syncs = [lambda: setattr(house, "pause", "no fresh node"), idle]
    assert (await house.refused(make_share())).status == 503


@pytest.mark.rule("R10")
async def test_paused_still_knows_what_it_has(house: House) -> None:
    house.store.known.add(make_share().key)
    house.pause = "no fresh node"
    assert await house.intake.accept(make_share()) is Enqueued.DUPLICATE


async def test_held_shares_are_bounded_and_others_still_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_HELD", 2)
    house = House()
    released, holding = anyio.Event(), anyio.Event()
    waiting = 0

    async def wait(timeout: float) -> bool:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            holding.set()
        await released.wait()
        house.chain.height += 1
        return True

    monkeypatch.setattr(house.chain, "wait_next_sync", wait)
    beyond = make_share(tree_position=9)
    statuses: list[int] = []

    async def post(share: Share) -> None:
        with pytest.raises(ShareRefused) as caught:
            await house.intake.accept(share)
        statuses.append(caught.value.status)

    async with anyio.create_task_group() as group:
        group.start_soon(post, beyond)
        group.start_soon(post, beyond)
        await holding.wait()
        await post(beyond)
        assert statuses == [429]
        assert await house.intake.accept(make_share()) is Enqueued.QUEUED
        released.set()
    assert statuses == [429, 400, 400]


async def test_shares_under_check_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_IN_FLIGHT", 0)
    assert (await House().refused(make_share())).status == 429
    monkeypatch.setattr(intake_module, "MAX_IN_FLIGHT", 1)
    house = House()
    assert await house.intake.accept(make_share()) is Enqueued.QUEUED
    assert await house.intake.accept(make_share()) is Enqueued.DUPLICATE


class Gate:
    """Requests wait at it until it opens."""

    def __init__(self) -> None:
        self.opened = anyio.Event()
        self.waiting = 0

    async def wait(self, _timeout: float = 0) -> bool:
        self.waiting += 1
        await self.opened.wait()
        return False

    async def fill(self, house: House, group: TaskGroup, count: int, posted: bytes, client: bytes) -> int:
        """Post from a client; how many of its shares wait."""
        before, refused = self.waiting, 0

        async def post() -> None:
            nonlocal refused
            try:
                await house.intake.take(posted, client)
            except ShareRefused:
                refused += 1

        for _ in range(count):
            group.start_soon(post)
        while self.waiting - before + refused < count:
            await anyio.sleep(0.001)
        return self.waiting - before


async def test_admission_two_clients_holding_shares_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_HELD", 30)
    house, gate = House(), Gate()
    monkeypatch.setattr(house.chain, "wait_next_sync", gate.wait)
    beyond = body(tree_position=9)
    async with anyio.create_task_group() as group:
        assert await gate.fill(house, group, 100, beyond, b"one") == 15, "half of the places"
        assert await gate.fill(house, group, 100, beyond, b"two") == 8, "half of the others"
        assert await gate.fill(house, group, 1, beyond, b"honest") == 1
        gate.opened.set()
    gate.opened = anyio.Event()
    async with anyio.create_task_group() as group:
        assert await gate.fill(house, group, 100, beyond, b"one") == 15, "places are given back"
        gate.opened.set()


async def test_admission_two_clients_under_check_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_IN_FLIGHT", 30)
    house, gate = House(), Gate()
    monkeypatch.setattr(house.store, "enqueue", lambda *_, **__: gate.wait())
    async with anyio.create_task_group() as group:
        assert await gate.fill(house, group, 100, body(), b"one") == 15
        assert await gate.fill(house, group, 100, body(), b"two") == 8
        assert await gate.fill(house, group, 1, body(), b"honest") == 1
        gate.opened.set()


async def test_no_line_of_the_log_names_the_share(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for level in ("debug", "info", "warning", "error"):
        monkeypatch.setattr(intake_module.log, level, lambda event, **fields: lines.append(json.dumps([event, fields])))
    share = make_share(submit_at=END, tree_position=9)
    house.chain.leaves[ROUND_ID, 9] = COMMITMENT
    await house.intake.accept(share)
    house.store.error = StoreFull("no space")
    with pytest.raises(ShareRefused):
        await house.intake.accept(make_share(share_index=3, tree_position=9))
    assert len(lines) == 2
    text = "".join(lines)
    for secret in (ROUND_ID, NULLIFIER, COMMITMENT, share.c1, share.primary_blind):
        assert secret.hex() not in text
    assert "9" not in text.replace(str(END), "")
