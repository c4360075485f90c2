"""The explorer finds no broken promise in a small bound, and finds each planted bug. `make explorer` goes further."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from helper.chain import agreement
from helper.chain.agreement import Pruned, RoundFacts
from helper.core.share import TRANSITIONS, ShareState
from helper.reveal import round_closing, send_policy
from helper.reveal.round_closing import RoundClosing
from helper.reveal.sender import Sender
from helper.store import ledger, messages, rounds, shares
from helper.store.ledger import BlockRange, Ledger
from tests.explorer.one_liar import all_explorations
from tests.explorer.search import BrokenPromiseError
from tests.explorer.two_hosts import HostTransaction, StepStore, two_host_models

SMALL = all_explorations(2)
BLOCK_STEPS = {"grow", "catch_up", "read", "wait_or_crash", "rescan"}


@pytest.mark.parametrize("name", SMALL)
def test_no_state_breaks_a_promise(name: str) -> None:
    result = SMALL[name]()
    assert result.states > 10
    expected = BLOCK_STEPS if name.startswith("blocks") else {"grow", "catch_up", "list"}
    assert set(result.kinds) >= expected - {"wait_or_crash"}, "every kind of step led to a new state"


def believe_one(said: Mapping[str, Any], needed: int) -> Any:
    return Counter(said.values()).most_common(1)[0][0] if said else None


def believe_any_of_a_tie(said: Mapping[str, Any], needed: int) -> Any:
    ranked = Counter(said.values()).most_common(1)
    return ranked[0][0] if ranked and ranked[0][1] >= min(needed, 1) else None


def highest(heads: Mapping[str, int], needed: int) -> int | None:
    return max(heads.values(), default=None)


def give_up_with_two(said: Mapping[str, Any], needed: int, configured: int) -> Any:
    if sum(isinstance(fact, Pruned) for fact in said.values()) >= min(needed, 1):
        return Pruned()
    return agreement.agreed_fact({name: fact for name, fact in said.items() if not isinstance(fact, Pruned)}, needed)


def mark_all_below(position: Ledger, first: int, last: int) -> Ledger:
    return Ledger(position.first, max(position.top, last))


def next_up_to_any_head(
    position: Ledger, within: BlockRange, deferred: Mapping[int, float], now: float, limit: int
) -> Any:
    return next_heights(position, (within[0], within[1] + 1), deferred, now, limit)


def next_without_deferral(
    position: Ledger, within: BlockRange, deferred: Mapping[int, float], now: float, limit: int
) -> Any:
    return next_heights(position, within, {}, now, limit)


def next_only_above_top(
    position: Ledger, within: BlockRange, deferred: Mapping[int, float], now: float, limit: int
) -> Any:
    return next_heights(position._replace(unread=()), within, deferred, now, limit)


def read_if_top_reached(position: Ledger, first: int, last: int) -> bool:
    return last <= position.top


def believe_late_answers(said: Mapping[str, Any], needed: int, *, known: RoundFacts, height: int) -> RoundFacts:
    return agreed_round(said, needed, known=known._replace(height=0), height=height)


def never_change(said: Mapping[str, Any], needed: int, *, known: RoundFacts, height: int) -> RoundFacts:
    return known if known.is_complete else agreed_round(said, needed, known=known, height=height)


def trust_claimed_heights(said: Mapping[str, Any], needed: int, *, known: RoundFacts, height: int) -> RoundFacts:
    return agreed_round(said, needed, known=known, height=max([height, *(at for at, _ in said.values())]))


mark_read, next_heights, agreed_round = ledger.mark_read, ledger.next_heights, agreement.agreed_round
PLANTED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (agreement, "agreed_fact", believe_one),
    (agreement, "agreed_fact", believe_any_of_a_tie),
    (agreement, "agreed_height", highest),
    (agreement, "agreed_block", give_up_with_two),
    (agreement, "agreed_round", believe_late_answers),
    (agreement, "agreed_round", never_change),
    (agreement, "agreed_round", trust_claimed_heights),
    (ledger, "mark_read", mark_all_below),
    (ledger, "next_heights", next_up_to_any_head),
    (ledger, "next_heights", next_without_deferral),
    (ledger, "next_heights", next_only_above_top),
    (ledger, "is_read", read_if_top_reached),
)


@pytest.mark.parametrize(("module", "name", "bug"), PLANTED, ids=[bug.__name__ for _, _, bug in PLANTED])
def test_planted_bug_is_found(module: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, bug)
    explorations = all_explorations(2).values()
    with pytest.raises(BrokenPromiseError):
        sum(exploration().states for exploration in explorations)


def test_two_hosts_break_no_promise_and_cause_every_transition() -> None:
    edges = set[tuple[ShareState, ShareState]]()
    for create in two_host_models(0).values():
        model = create()
        model.explore()
        edges |= model.edges
    assert edges == {(state, target) for state, targets in TRANSITIONS.items() for target in targets}


def believe_last(said: Mapping[str, Any], needed: int) -> Any:
    return [*said.values()][-1]


def decide_before_due(reveal: Any, process: Any, nodes: Any) -> Any:
    return decide(reveal, process._replace(now_ms=reveal.due_ms), nodes)


def resend_only_at_a_height(reveal: Any, process: Any, nodes: Any) -> Any:
    last = reveal.row.last_sent_height
    if last is not None and process.head <= last:
        return send_policy.Wait(process.now + 1, last + 1)
    return decide(reveal, process, nodes)


def is_old_after_one_block(first: int, last: int, outcome: str | None, height: int) -> bool:
    return height > last


async def report_before_failing(self: Any, stored: Any) -> Any:
    await self.store.run(rounds.mark_closed, stored.round_id, 1.0)
    await self.store.run(rounds.mark_alerted, stored.round_id, 1.0)
    await self.store.run_batches(rounds.fail_unconfirmed, stored.round_id, note="")
    return stored


async def commit_after_send(self: Any, op: Any, *args: Any, **options: Any) -> Any:
    if op is messages.mark_sending:
        self.unsaved = options
        return True
    if op is messages.record_outcome:
        await run_operation(self, messages.mark_sending, *args, **self.unsaved)
    return await run_operation(self, op, *args, **options)


def forget_sends(tx: Any, row: Any, *args: Any, **options: Any) -> Any:
    requeued = requeue_failed(tx, row, *args, **options)
    tx.conn.execute("DELETE FROM history WHERE share_id = ?", (row.id,))
    return requeued


def close_without_waiting(tx: Any, *args: Any, **options: Any) -> tuple[int, bool]:
    return fail_batch(tx, *args, **options) if rounds_in_progress(tx) else (0, False)


def rounds_in_progress(tx: Any) -> bool:
    return bool(tx.conn.execute("SELECT 1 FROM shares WHERE state <> 0").fetchall())


def yes(*args: Any) -> bool:
    return True


decide, requeue_failed, fail_batch = send_policy.decide, shares.requeue_failed, rounds.fail_unconfirmed
run_operation = StepStore.run
PLANTED_IN_HOSTS: tuple[tuple[str, Any, str, Callable[..., Any]], ...] = (
    ("shares", send_policy, "decide", decide_before_due),
    ("heads", send_policy, "decide", resend_only_at_a_height),
    ("heads", send_policy, "_had_its_blocks", is_old_after_one_block),
    ("close", RoundClosing, "_report", report_before_failing),
    ("sends", StepStore, "run", commit_after_send),
    ("hosts", Sender, "_may_send", yes),
    ("sends", agreement, "agreed_fact", believe_last),
    ("refusals", shares, "requeue_failed", forget_sends),
    ("close", round_closing, "fail_unconfirmed", close_without_waiting),
    ("hosts", HostTransaction, "has_claim", yes),
)


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "bug"), PLANTED_IN_HOSTS, ids=[bug.__name__ for *_, bug in PLANTED_IN_HOSTS]
)
def test_bug_planted_in_hosts_is_found(
    name: str, owner: Any, attribute: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, bug)
    with pytest.raises(BrokenPromiseError):
        two_host_models(int(name == "refusals"))[f"two hosts, {name}"]().explore()
