"""The next step for a reveal that may have been sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.chain.verdicts import Verdict
from helper.reveal.send_policy import INCLUSION_WAIT_BLOCKS, REPROVE_BLOCKS, NextStep, decide_height, next_step


def next_step_for(
    height: int, *, sends: int = 1, first: int = 100, last: int = 100, outcome: str | None = "ACCEPTED"
) -> NextStep:
    return next_step(sends=sends, first_height=first, last_height=last, outcome=outcome, height=height)


def test_unsent_message_is_sent_immediately() -> None:
    assert next_step(sends=0, first_height=None, last_height=None, outcome=None, height=100) is NextStep.SEND


@pytest.mark.parametrize("verdict", list(Verdict))
def test_message_is_not_sent_twice_at_one_height(verdict: Verdict) -> None:
    assert next_step_for(100, outcome=verdict.name) is NextStep.WAIT


def test_accepted_message_waits_three_blocks() -> None:
    assert [next_step_for(height) for height in (101, 102, 103)] == [NextStep.WAIT, NextStep.WAIT, NextStep.SEND]
    assert INCLUSION_WAIT_BLOCKS == 3


@pytest.mark.rule("R11")
@pytest.mark.parametrize("outcome", [None, "AMBIGUOUS", "UNAVAILABLE", "BEHIND"])
def test_lost_reply_or_outage_resends_after_one_block(outcome: str | None) -> None:
    assert next_step_for(101, outcome=outcome) is NextStep.SEND


def test_unconfirmed_after_ten_blocks_needs_new_proof() -> None:
    assert next_step_for(109, last=108) is NextStep.WAIT
    assert next_step_for(110, last=108) is NextStep.PROVE
    assert REPROVE_BLOCKS == 10


def test_after_ten_blocks_of_outage_resends_before_new_proof() -> None:
    assert next_step_for(150, last=100, outcome=None) is NextStep.SEND
    assert [next_step_for(height, sends=2, last=150) for height in (150, 151, 152, 153)] == [NextStep.WAIT] * 3 + [
        NextStep.PROVE
    ]
    assert next_step_for(151, sends=2, last=150, outcome="AMBIGUOUS") is NextStep.PROVE


@pytest.mark.parametrize("outcome", [None, *(verdict.name for verdict in Verdict)])
@pytest.mark.parametrize(("first", "last"), [(100, 100), (100, 106), (100, 108), (100, 109), (100, 110), (100, 113)])
def test_decision_height_is_the_first_at_which_there_is_something_to_do(
    first: int, last: int, outcome: str | None
) -> None:
    height = decide_height(sends=2, first_height=first, last_height=last, outcome=outcome)
    steps = [next_step_for(other, sends=2, first=first, last=last, outcome=outcome) for other in range(95, height + 1)]
    assert [step is NextStep.WAIT for step in steps] == [True] * (len(steps) - 1) + [False]


@pytest.mark.rule("N18")
@given(
    first=st.integers(1, 1000),
    waits=st.lists(st.integers(0, 12), max_size=40),
    outcomes=st.lists(st.sampled_from([None, *(verdict.name for verdict in Verdict)]), min_size=1),
)
def test_any_outcomes_give_one_send_per_height_and_one_proof_in_ten_blocks(
    first: int, waits: list[int], outcomes: list[str | None]
) -> None:
    height, sends, last, fault_height = first, 0, None, None
    heights: list[int] = []
    for index, wait in enumerate(waits):
        height += wait
        outcome = outcomes[index % len(outcomes)]
        move = next_step(sends=sends, first_height=fault_height, last_height=last, outcome=outcome, height=height)
        if move is NextStep.SEND:
            heights.append(height)
            fault_height, last, sends = fault_height if fault_height is not None else height, height, sends + 1
        elif move is NextStep.PROVE:
            assert fault_height is not None
            assert height - fault_height >= REPROVE_BLOCKS
            fault_height, last, sends = None, None, 0
            height += 1
    assert len(heights) == len(set(heights))
