"""The explorer finds no broken promise in a small bound, and finds each planted bug. `make explorer` goes further."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from helper.chain import agreement
from helper.chain.agreement import Pruned, RoundFacts
from helper.store import ledger
from helper.store.ledger import BlockRange, Ledger
from tests.explorer.one_liar import all_explorations
from tests.explorer.search import BrokenPromiseError

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
    return agreement.agreed({name: fact for name, fact in said.items() if not isinstance(fact, Pruned)}, needed)


def take_out_all_below(position: Ledger, first: int, last: int) -> Ledger:
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


take_out, next_heights, agreed_round = ledger.take_out, ledger.next_heights, agreement.agreed_round
PLANTED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (agreement, "agreed", believe_one),
    (agreement, "agreed", believe_any_of_a_tie),
    (agreement, "agreed_height", highest),
    (agreement, "agreed_block", give_up_with_two),
    (agreement, "agreed_round", believe_late_answers),
    (agreement, "agreed_round", never_change),
    (agreement, "agreed_round", trust_claimed_heights),
    (ledger, "take_out", take_out_all_below),
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
