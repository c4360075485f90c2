"""What to do next with a reveal that may have been sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.chain.verdicts import Verdict
from helper.reveal.resend_policy import PATIENCE_BLOCKS, REPROVE_BLOCKS, Next, next_step


def step(height: int, *, sends: int = 1, first: int = 100, last: int = 100, outcome: str | None = "ACCEPTED") -> Next:
    return next_step(sends=sends, first_height=first, last_height=last, outcome=outcome, height=height)


def test_a_message_stored_and_never_sent_goes_out_at_once() -> None:
    assert next_step(sends=0, first_height=None, last_height=None, outcome=None, height=100) is Next.SEND


@pytest.mark.parametrize("verdict", list(Verdict))
def test_never_twice_at_one_height(verdict: Verdict) -> None:
    assert step(100, outcome=verdict.name) is Next.WAIT


def test_an_accepted_message_is_given_three_blocks() -> None:
    assert [step(height) for height in (101, 102, 103)] == [Next.WAIT, Next.WAIT, Next.SEND]
    assert PATIENCE_BLOCKS == 3


@pytest.mark.rule("R11")
@pytest.mark.parametrize("outcome", [None, "AMBIGUOUS", "UNAVAILABLE", "BEHIND"])
def test_a_lost_reply_or_an_outage_is_the_same_bytes_one_block_later(outcome: str | None) -> None:
    assert step(101, outcome=outcome) is Next.SEND


def test_after_ten_blocks_a_new_proof() -> None:
    assert step(109, last=108) is Next.WAIT
    assert step(110, last=108) is Next.PROVE
    assert REPROVE_BLOCKS == 10


def test_after_ten_blocks_away_the_same_bytes_first_and_their_time_then_a_new_proof() -> None:
    assert step(150, last=100, outcome=None) is Next.SEND
    assert [step(height, sends=2, last=150) for height in (150, 151, 152, 153)] == [Next.WAIT] * 3 + [Next.PROVE]
    assert step(151, sends=2, last=150, outcome="AMBIGUOUS") is Next.PROVE


@given(
    first=st.integers(1, 1000),
    waits=st.lists(st.integers(0, 12), max_size=40),
    outcomes=st.lists(st.sampled_from([None, *(verdict.name for verdict in Verdict)]), min_size=1),
)
def test_whatever_the_answers_one_send_a_height_and_one_proof_in_ten_blocks(
    first: int, waits: list[int], outcomes: list[str | None]
) -> None:
    height, sends, last, begun = first, 0, None, None
    heights: list[int] = []
    for index, wait in enumerate(waits):
        height += wait
        outcome = outcomes[index % len(outcomes)]
        move = next_step(sends=sends, first_height=begun, last_height=last, outcome=outcome, height=height)
        if move is Next.SEND:
            heights.append(height)
            begun, last, sends = begun if begun is not None else height, height, sends + 1
        elif move is Next.PROVE:
            assert begun is not None
            assert height - begun >= REPROVE_BLOCKS
            begun, last, sends = None, None, 0
            height += 1
    assert len(heights) == len(set(heights))
