"""What nodes report alike: every combination of few nodes, and a node that reports anything."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.chain.agreement import (
    Pruned,
    RoundFacts,
    Said,
    agreed_block,
    agreed_fact,
    agreed_height,
    agreed_height_at,
    agreed_round,
    needed_nodes,
)
from helper.chain.chain_data import BlockHead, Proposal, Round, RoundStatus

HONEST, LIAR = "honest", "liar"
YES_NO = (Proposal(1, (0, 1)),)


def said(*facts: object) -> dict[str, object]:
    """Statements of nodes a, b, …; None is a silent node."""
    return {chr(ord("a") + number): fact for number, fact in enumerate(facts) if fact is not None}


@pytest.mark.parametrize(
    ("configured", "agree", "needed"), [(1, 2, 1), (2, 2, 2), (3, 2, 2), (9, 2, 2), (2, 1, 1), (3, 1, 1), (0, 2, 1)]
)
def test_two_nodes_are_needed_unless_fewer_are_configured_or_the_operator_asks_for_one(
    configured: int, agree: int, needed: int
) -> None:
    assert needed_nodes(configured, agree) == needed


@pytest.mark.parametrize(
    ("facts", "needed", "fact"),
    [
        (("x",), 1, "x"),
        (("x",), 2, None),
        ((None, "x"), 1, "x"),
        (("x", "y"), 1, None),  # with `agree = 1`, two nodes that differ still agree on nothing
        (("x", "x"), 2, "x"),
        (("x", "y"), 2, None),
        (("x", None, "x"), 2, "x"),
        (("x", "y", "y"), 2, "y"),
        (("x", "x", "y", "y"), 2, None),
        (("x", "x", "y", "y", "y"), 2, "y"),
        (((), ()), 2, ()),  # an empty block is a fact
        ((), 1, None),
    ],
)
def test_fact_is_agreed_if_enough_nodes_and_more_than_for_any_other_report_it(
    facts: tuple[object, ...], needed: int, fact: object
) -> None:
    for order in permutations(facts):
        assert agreed_fact(said(*order), needed) == fact


def test_every_combination_of_four_nodes_with_one_liar_agrees_on_the_truth_or_nothing() -> None:
    for honest in range(4):
        for truths, lie in product(product((None, "true"), repeat=honest), (None, "true", "false")):
            configured = honest + 1
            result = agreed_fact(said(*truths, lie), needed_nodes(configured))
            if configured == 1:
                assert result == lie  # the only node is believed
            elif truths.count("true") >= 2:
                assert result == "true", "a liar delays nothing that two others report"
            else:
                assert result in (None, "true")


@pytest.mark.parametrize(
    ("heads", "needed", "height"),
    [
        ((7,), 1, 7),
        ((7,), 2, None),
        ((7, 9), 2, 7),
        ((7, 99, 8), 2, 8),
        ((7, 1, 8), 2, 7),
        ((5, 9), 1, 9),
        ((), 1, None),
    ],
)
def test_height_is_agreed_as_far_as_enough_nodes_have_reached_it(
    heads: tuple[int, ...], needed: int, height: int | None
) -> None:
    for order in permutations(heads):
        assert agreed_height(dict(zip("abc", order, strict=False)), needed) == height


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 10**18))
def test_false_head_moves_the_height_no_further_than_another_node_has_it(honest: list[int], false: int) -> None:
    height = agreed_height({LIAR: false} | {f"{HONEST}{n}": head for n, head in enumerate(honest)}, 2)
    assert height is not None
    assert height <= max(honest)
    assert len(honest) < 2 or height >= sorted(honest)[-2]


@pytest.mark.parametrize(
    ("heads", "needed", "height"),
    [
        (((20, 100), (20, 100)), 2, 20),
        (((20, 100), (17, 85)), 2, None),
        (((20, 100), (25, 125)), 2, 25),  # only one node is known to have reached the time at 20
        (((20, 100), (10, 100), (10, 50)), 2, 20),  # the time of one block and the height of another are no fact
        (((20, 100), (1, 999), (20, 100)), 2, 20),
        (((20, 100), (999, 999), (21, 105)), 2, 21),
        (((20, 100),), 2, None),
        (((20, 100), (18, 90)), 1, 18),
    ],
)
def test_time_is_reached_at_the_lowest_height_by_which_two_nodes_report_it(
    heads: tuple[tuple[int, float], ...], needed: int, height: int | None
) -> None:
    for order in permutations(heads):
        assert agreed_height_at([BlockHead("svote-1", *head) for head in order], needed, 90) == height


@given(st.lists(st.integers(1, 50), max_size=3), st.integers(0, 60), st.integers(0, 10**6), st.integers(1, 50))
def test_false_head_ends_no_round_before_its_last_block(
    honest: list[int], false_height: int, false_time: int, end: int
) -> None:
    heads = [BlockHead("svote-1", height, float(height)) for height in honest]
    height = agreed_height_at([*heads, BlockHead("svote-1", false_height, float(false_time))], 2, end)
    ended = sorted(each for each in honest if each >= end)
    assert height is None or height >= end
    assert len(ended) < 2 or (height is not None and height <= ended[1])


@pytest.mark.parametrize(
    ("facts", "needed", "result"),
    [
        (("block", "block"), 2, "block"),
        (("block", "other"), 2, None),
        (("block", Pruned()), 2, None),  # the other node may still return it
        ((Pruned(), None), 2, None),
        ((Pruned(), None), 1, None),
        ((Pruned(), Pruned()), 2, Pruned()),
        ((Pruned(), Pruned(), None), 2, None),
        ((Pruned(), Pruned(), Pruned()), 2, Pruned()),
        (("block", Pruned(), "block"), 2, "block"),
        (("block", Pruned(), Pruned(), "block"), 2, "block"),
        ((Pruned(),), 1, Pruned()),
    ],
)
def test_block_is_given_up_only_if_every_node_has_pruned_it(
    facts: tuple[object, ...], needed: int, result: object
) -> None:
    statements: Mapping[str, str | Pruned] = {
        name: fact for name, fact in said(*facts).items() if isinstance(fact, str | Pruned)
    }
    assert agreed_block(statements, needed, len(facts)) == result


# Rounds


def listed(
    end: int = 100,
    status: RoundStatus = RoundStatus.ACTIVE,
    proposals: tuple[Proposal, ...] = YES_NO,
    created: int = 5,
    at: int = 10,
) -> Said[Round]:
    return Said(at, Round(b"r" * 32, status, end, proposals, created))


TRUE = RoundFacts(5, 100, YES_NO, RoundStatus.ACTIVE, 10)


def listings(*rounds: Said[Round] | None) -> dict[str, Said[Round]]:
    return {str(number): listing for number, listing in enumerate(rounds) if listing is not None}


@pytest.mark.parametrize(
    ("false", "missing"),
    [
        (listed(end=99), "vote_end_time"),
        (listed(proposals=()), "proposals"),
        (listed(created=4), "created_at_height"),
        (None, None),
    ],
)
def test_first_listing_needs_two_nodes_for_each_field(false: Said[Round] | None, missing: str | None) -> None:
    alone = agreed_round(listings(listed(), false), 2, known=RoundFacts(), height=10)
    if false is None:
        assert alone == RoundFacts()
    else:
        assert missing is not None
        assert alone._asdict() == TRUE._asdict() | {missing: None}
        assert not alone.is_complete
    assert agreed_round(listings(listed(), false, listed()), 2, known=RoundFacts(), height=10) == TRUE
    assert TRUE.is_complete


@pytest.mark.parametrize(
    ("statuses", "agreed_status"),
    [
        ("ACTIVE TALLYING", "ACTIVE"),
        ("ACTIVE FINALIZED", "ACTIVE"),
        ("TALLYING FINALIZED", "TALLYING"),
        ("PENDING TALLYING FINALIZED", "TALLYING"),
        ("PENDING PENDING FINALIZED", "ACTIVE"),  # as known: a status never goes back
    ],
)
def test_status_advances_as_far_as_two_nodes_have_reached_it(statuses: str, agreed_status: str) -> None:
    rounds = listings(*(listed(status=RoundStatus[name]) for name in statuses.split()))
    assert agreed_round(rounds, 2, known=TRUE, height=10).status is RoundStatus[agreed_status]


def test_change_of_a_field_needs_two_nodes_and_statements_since_the_last_change() -> None:
    changed = agreed_round(listings(listed(end=200, at=20), listed(at=20)), 2, known=TRUE, height=20)
    assert changed == TRUE
    changed = agreed_round(
        listings(listed(end=200, at=21), listed(end=200, at=20), listed(at=12)), 2, known=TRUE, height=20
    )
    assert changed == TRUE._replace(vote_end_time=200, height=20)
    # A node behind that change and a liar with the same value do not change it back.
    back = agreed_round(listings(listed(at=19), listed(at=99), listed(end=200, at=21)), 2, known=changed, height=21)
    assert back == changed


def test_height_of_creation_never_changes() -> None:
    assert agreed_round(listings(listed(created=9), listed(created=9)), 2, known=TRUE, height=30) == TRUE


FALSE_ROUNDS = st.builds(
    listed,
    end=st.integers(0, 3),
    status=st.sampled_from(RoundStatus),
    proposals=st.sampled_from([(), YES_NO]),
    created=st.integers(0, 3),
    at=st.integers(0, 20),
)


@given(st.lists(st.none() | FALSE_ROUNDS, max_size=8))
def test_one_false_node_of_two_or_three_never_changes_a_known_round(lies: list[Said[Round] | None]) -> None:
    for honest in (1, 2):
        known = TRUE
        for lie in lies:
            known = agreed_round(listings(lie, *[listed()] * honest), 2, known=known, height=10)
        assert known == TRUE
