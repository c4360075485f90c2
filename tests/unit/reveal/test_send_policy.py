"""What to do with a prepared message, node by node and block by block; penalties of nodes; states of sends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.chain.broadcast_outcome import BroadcastOutcome, Verdict
from helper.chain.node import NO_PENALTY, Penalty
from helper.chain.node_pool import RESEND_SECONDS
from helper.reveal.send_policy import (
    AVOIDANCE_SECONDS,
    INCLUSION_WAIT_BLOCKS,
    MAX_DISPUTE_SECONDS,
    MAX_REPROVE_SECONDS,
    PROBE_SECONDS,
    RECHECK_SECONDS,
    REPROVE_BLOCKS,
    REPROVE_SECONDS,
    SPENT_WAIT_BLOCKS,
    STUCK_HEIGHT_SECONDS,
    NodeFacts,
    ProcessFacts,
    ProveAnew,
    Send,
    SendState,
    SendStates,
    Step,
    Wait,
    begin_probe,
    choose_node,
    decide,
    decide_height,
    is_disputed,
    next_penalty,
)
from helper.store.messages import SentReveal
from helper.store.table_rows import RevealRow

NOW = 1000.0
NODES = (NodeFacts("a"), NodeFacts("b"))
OUTCOMES = [None, *(verdict.name for verdict in Verdict)]


def reveal(
    *, sends: int = 1, first: int | None = 100, last: int | None = 100, outcome: str | None = None
) -> SentReveal:
    row = RevealRow(1, b"m", b"h" * 32, 90, "k10", 99, sends, first if sends else None, last if sends else None)
    return SentReveal(row._replace(last_outcome=outcome), round_id=b"r" * 32, nullifier=b"n" * 32)


def step_at(height: int, *, nodes: tuple[NodeFacts, ...] = NODES, process: Any = None, **sent: Any) -> Step:
    """The step when all nodes are at a height, 5 s a block after the first send."""
    began_at = NOW - 5.0 * (height - 100)
    heights = {"head": height, "agreed": height, "greatest": height}
    facts = {**heights, "began_at": began_at, "ended_at": NOW - 1.0, **(process or {})}
    return decide(reveal(**sent), ProcessFacts(NOW, 0, **facts), nodes)


def kinds(heights: range, **sent: Any) -> list[type[Step]]:
    return [type(step_at(height, **sent)) for height in heights]


def test_unsent_message_is_sent_immediately() -> None:
    assert step_at(100, sends=0, process={"ended_at": None}) == Send("a")


def test_message_is_not_sent_before_its_due_time() -> None:
    early = ProcessFacts(NOW, -2500, head=100, agreed=100, greatest=100)
    assert decide(reveal(sends=0), early, NODES) == Wait(NOW + 2.5, 101)
    sent = early._replace(head=110, agreed=110, greatest=110, began_at=NOW - 60, ended_at=NOW - 60)
    assert isinstance(decide(reveal(outcome="AMBIGUOUS"), sent, NODES), Wait), "the clock was set back since"


def test_nothing_is_sent_without_a_node_in_sync_or_a_new_block() -> None:
    assert step_at(103, process={"head": None}) == Wait(NOW + RECHECK_SECONDS, 0)
    stale = tuple(node._replace(has_turn=False) for node in NODES)
    assert step_at(103, nodes=stale) == Wait(NOW + RECHECK_SECONDS, 104)
    assert step_at(103, nodes=(stale[0], NODES[1])) == Send(NODES[1].name), "only a node that has the block gets it"
    assert step_at(103, nodes=()) == Wait(NOW + RECHECK_SECONDS, 104)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_message_is_not_sent_twice_at_one_height(outcome: str | None) -> None:
    assert isinstance(step_at(100, outcome=outcome), Wait)


def test_accepted_message_waits_three_blocks() -> None:
    assert kinds(range(101, 104), outcome="ACCEPTED") == [Wait, Wait, Send]
    assert step_at(101, outcome="ACCEPTED") == Wait(NOW - 1 + STUCK_HEIGHT_SECONDS, 103)
    assert step_at(100, outcome="ACCEPTED", process={"greatest": 101}) == Wait(NOW - 1 + RESEND_SECONDS, 103)
    assert INCLUSION_WAIT_BLOCKS == 3


@pytest.mark.rule("R11")
@pytest.mark.parametrize("outcome", [None, "AMBIGUOUS", "UNAVAILABLE", "BEHIND", "SPENT", "BAD_PROOF", "PERMANENT"])
def test_lost_reply_outage_and_report_of_one_node_resend_after_one_block(outcome: str | None) -> None:
    assert step_at(101, outcome=outcome) == Send("a")


def test_share_that_every_node_reports_as_spent_waits_ten_blocks_and_is_never_proven_anew() -> None:
    nodes = tuple(node._replace(verdict=Verdict.SPENT) for node in NODES)
    assert kinds(range(101, 112), outcome="SPENT", nodes=nodes) == [Wait] * 9 + [Send] * 2
    assert step_at(101, outcome="SPENT", nodes=(nodes[0], NODES[1])) == Send("a")
    assert isinstance(step_at(200, last=195, outcome="SPENT"), Send)
    assert SPENT_WAIT_BLOCKS == 10


def test_unconfirmed_after_ten_blocks_needs_new_proof() -> None:
    assert kinds(range(109, 111), last=108, outcome="ACCEPTED") == [Wait, ProveAnew]
    assert REPROVE_BLOCKS == 10


def test_message_that_one_node_calls_spent_is_disputed_until_enough_others_have_checked_it() -> None:
    for verdicts, needed, expected in (
        ([Verdict.SPENT, Verdict.ACCEPTED], 2, True),
        ([Verdict.SPENT, Verdict.BAD_PROOF], 2, True),
        ([Verdict.SPENT, Verdict.BEHIND], 2, True),
        ([Verdict.SPENT, Verdict.BAD_PROOF, Verdict.ACCEPTED], 2, False),
        ([Verdict.BAD_PROOF, Verdict.ACCEPTED], 2, False),
    ):
        assert is_disputed(reveal(outcome="ACCEPTED"), verdicts, needed) is expected
        assert not is_disputed(reveal(outcome="SPENT"), verdicts, needed)
        assert not is_disputed(reveal(outcome="BEHIND"), verdicts, needed)


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [
        ({}, 0),
        ({"sent_before": 120}, 120),
        ({"sent_before": 120, "seconds_left": 100}, 50),
        ({"sent_before": 9000}, MAX_REPROVE_SECONDS),
        ({"sent_before": 240, "is_disputed": True}, 720),
        ({"sent_before": 9000, "is_disputed": True}, MAX_DISPUTE_SECONDS),
    ],
)
def test_later_proofs_of_a_share_are_made_at_growing_intervals_up_to_a_limit(
    facts: dict[str, Any], seconds: float
) -> None:
    for age, expected in ((seconds, ProveAnew), (seconds - 1, Send)):
        process = {**facts, "began_at": NOW - age, "ended_at": NOW - age}
        if age >= 0:
            assert isinstance(step_at(154, last=150, outcome="ACCEPTED", process=process), expected)
            refused = {**process, "is_circuit_refused": True, "is_disputed": False}
            assert isinstance(step_at(154, last=150, outcome="BAD_PROOF", process=refused), ProveAnew)


def test_after_ten_blocks_of_outage_resends_before_new_proof() -> None:
    assert isinstance(step_at(150), Send)
    assert kinds(range(150, 154), sends=2, last=150, outcome="ACCEPTED") == [Wait] * 3 + [ProveAnew]
    assert isinstance(step_at(151, sends=2, last=150, outcome="AMBIGUOUS"), ProveAnew)


@pytest.mark.parametrize(
    ("process", "outcome", "expected"),
    [
        ({"agreed": 101, "began_at": NOW - 59}, "ACCEPTED", Send),
        ({"agreed": 101, "began_at": NOW - 60}, "ACCEPTED", ProveAnew),  # one of two nodes is silent
        ({"agreed": 110, "began_at": NOW - 20}, "ACCEPTED", ProveAnew),
        ({"head": 105, "agreed": 105, "began_at": NOW - 60}, "REFUSED_ANCHOR", ProveAnew),
        ({"head": 100, "agreed": 100, "began_at": NOW - 60}, "BEHIND", ProveAnew),  # one of two nodes is stuck
        ({"head": 105, "agreed": 105, "began_at": NOW - 60}, "ACCEPTED", Wait),
        ({"head": 40, "agreed": 40, "began_at": NOW - 60}, "ACCEPTED", ProveAnew),  # it was sent at a false height
        ({"head": 40, "agreed": 40, "began_at": NOW - 59, "ended_at": NOW - RESEND_SECONDS}, "ACCEPTED", Send),
        ({"head": 40, "agreed": 40, "began_at": NOW - 59, "ended_at": NOW - RESEND_SECONDS + 1}, "ACCEPTED", Wait),
    ],
)
def test_time_decides_where_heights_stand_still_or_are_false(
    process: dict[str, Any], outcome: str, expected: type[Step]
) -> None:
    assert type(step_at(110, last=108, outcome=outcome, process=process)) is expected
    assert REPROVE_SECONDS == 60.0


@pytest.mark.parametrize("outcome", ["ACCEPTED", "BEHIND", "REFUSED_ANCHOR", "AMBIGUOUS"])
def test_message_waits_for_blocks_while_the_chain_stands(outcome: str) -> None:
    """Seed 3789: the first block after a halt is not ten blocks."""
    long_ago = {"began_at": NOW - 600, "ended_at": NOW - 600}
    first_block = ProveAnew if outcome == "REFUSED_ANCHOR" else Send
    for height, greatest, expected in (
        (108, 108, Wait),
        (108, 109, first_block),
        (108, 117, first_block),
        (108, 118, ProveAnew),
        (107, 108, ProveAnew),
    ):
        process = {**long_ago, "head": height, "agreed": height, "greatest": greatest}
        assert type(step_at(108, first=108, last=108, outcome=outcome, process=process)) is expected


def test_agreed_height_that_stands_still_below_the_decision_ends_no_wait_but_the_time_does() -> None:
    """Seed 8226: one of two nodes reported one height, just above that of the last send."""
    for greatest, ended_at, expected in (
        (102, NOW - 600, Wait),  # the decision's height is 103
        (103, NOW - STUCK_HEIGHT_SECONDS, Send),
        (103, NOW - STUCK_HEIGHT_SECONDS + 1, Wait),
    ):
        process = {"head": 101, "agreed": 101, "greatest": greatest, "ended_at": ended_at}
        assert type(step_at(101, outcome="ACCEPTED", process=process)) is expected


@pytest.mark.parametrize(("outcome", "greatest", "expected"), [("BEHIND", 110, ProveAnew), ("BEHIND", 109, Send)])
def test_share_is_proven_anew_after_ten_blocks_of_any_node_if_the_agreed_height_stands(
    outcome: str, greatest: int, expected: type[Step]
) -> None:
    long_ago = {"began_at": NOW - 60, "ended_at": NOW - 60}
    process = {"head": 102, "agreed": 102, "greatest": greatest, **long_ago}
    assert type(step_at(102, last=102, outcome=outcome, process=process)) is expected


def test_message_whose_anchor_no_node_knows_is_sent_at_each_height_and_proven_anew_after_ten_blocks() -> None:
    nodes = tuple(node._replace(verdict=Verdict.BEHIND) for node in NODES)
    steps = [type(step_at(height, last=height - 1, outcome="BEHIND", nodes=nodes)) for height in range(101, 111)]
    assert steps == [Send] * 9 + [ProveAnew]
    slow = {"head": 105, "agreed": 105, "began_at": NOW - 600}
    assert isinstance(step_at(105, last=104, outcome="BEHIND", nodes=nodes, process=slow), Send)


def test_share_of_a_refused_circuit_is_proven_anew_unless_its_message_may_be_in_a_mempool() -> None:
    refused = {"is_circuit_refused": True}
    assert isinstance(step_at(101, sends=0, process=refused), ProveAnew)
    assert isinstance(step_at(101, outcome="BAD_PROOF", process=refused), ProveAnew)
    assert isinstance(step_at(101, outcome="BEHIND", process=refused), Send)


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("last", [100, 106, 108, 109, 110, 113])
def test_decision_height_is_the_first_at_which_there_is_something_to_do(last: int, outcome: str | None) -> None:
    height = decide_height(first=100, last=last, outcome=outcome)
    found = kinds(range(95, height + 1), sends=2, last=last, outcome=outcome, process={"began_at": NOW})
    assert [kind is Wait for kind in found] == [True] * (len(found) - 1) + [False]


@pytest.mark.rule("N18")
@given(
    first=st.integers(1, 1000),
    waits=st.lists(st.integers(0, 12), max_size=40),
    outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=1),
)
def test_any_outcomes_give_one_send_per_height_and_one_proof_in_ten_blocks(
    first: int, waits: list[int], outcomes: list[str | None]
) -> None:
    height, sends, last, first_height = first, 0, None, None
    heights: list[int] = []
    for index, wait in enumerate(waits):
        height += wait
        sent = reveal(sends=sends, first=first_height, last=last, outcome=outcomes[index % len(outcomes)])
        process = ProcessFacts(NOW, 0, height, height, height, began_at=NOW, ended_at=NOW if sends else None)
        match decide(sent, process, NODES):
            case Send():
                heights.append(height)
                first_height, last, sends = height if first_height is None else first_height, height, sends + 1
            case ProveAnew():
                assert first_height is not None
                assert height - first_height >= REPROVE_BLOCKS
                first_height, last, sends = None, None, 0
                height += 1
    assert len(heights) == len(set(heights))


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, "a"),
        ({"sent_at": 990.0}, {}, "b"),
        ({"sent_at": 990.0}, {"sent_at": 995.0}, "a"),
        ({"verdict": Verdict.BAD_PROOF, "sent_at": 995.0}, {"sent_at": 990.0}, "b"),
        ({"refuses_circuit": True}, {}, "b"),
        ({"refuses_circuit": True}, {"sent_at": 995.0}, "a"),
        ({"penalty": Penalty(avoid_until=1001.0)}, {}, "b"),
        ({"penalty": Penalty(avoid_until=1000.0)}, {}, "a"),
        ({"penalty": Penalty(avoid_until=1001.0)}, {"sent_at": 990.0}, "a"),
        ({"has_pending_call": True, "sent_at": 975.0}, {"sent_at": 990.0}, "b"),
        ({"has_pending_call": True, "sent_at": 970.0}, {"sent_at": 990.0}, "a"),
        ({"penalty": Penalty(990.0, 11.0)}, {"sent_at": 990.0}, "b"),
        ({"penalty": Penalty(990.0, 10.0)}, {"sent_at": 990.0}, "a?"),
        ({"penalty": Penalty(999.0, 10.0, 1001.0)}, {"penalty": Penalty(999.0, 10.0, 1000.0)}, "b?"),
        ({"penalty": Penalty(999.0, 10.0, 1001.0)}, {"penalty": Penalty(999.0, 10.0, 1001.0)}, None),
        ({"penalty": Penalty(999.0, 10.0)}, {"has_pending_call": True, "sent_at": 999.0}, "a?"),
    ],
)
def test_node_is_chosen_by_what_it_did_last(first: Any, second: Any, expected: str | None) -> None:
    nodes = (NodeFacts("a", **first), NodeFacts("b", **second))
    chosen = choose_node(nodes, NOW)
    assert (None if chosen is None else chosen.node + "?" * chosen.is_probe) == expected


@pytest.mark.rule("N16")
def test_penalty_follows_the_responses() -> None:
    asked = next_penalty(NO_PENALTY, BroadcastOutcome(Verdict.UNAVAILABLE, retry_after=7), NOW)
    assert asked == Penalty(NOW, 7, NOW + PROBE_SECONDS, NOW + AVOIDANCE_SECONDS)
    assert [asked.is_held(NOW + seconds) for seconds in (6.9, 7.0)] == [True, False]
    lost = next_penalty(NO_PENALTY, BroadcastOutcome(Verdict.AMBIGUOUS), NOW)
    assert lost == Penalty(avoid_until=NOW + AVOIDANCE_SECONDS)
    assert next_penalty(lost, BroadcastOutcome(Verdict.SPENT), NOW) == lost
    assert next_penalty(asked, BroadcastOutcome(Verdict.ACCEPTED), NOW) == NO_PENALTY
    assert begin_probe(asked, NOW + 1, math.inf) == asked._replace(probe_at=NOW + 1 + PROBE_SECONDS)
    assert begin_probe(asked, NOW + 7, math.inf)[:2] == (NOW + 7, PROBE_SECONDS)


@pytest.mark.parametrize(("seconds_left", "hold"), [(45.0, 4.5), (300.0, 30.0), (3600.0, 60.0)])
def test_hold_is_limited_to_a_tenth_of_the_time_until_the_end(seconds_left: float, hold: float) -> None:
    penalty = Penalty(NOW, 60.0)
    assert penalty.is_held(NOW + hold - 0.1, seconds_left - (hold - 0.1))
    assert not penalty.is_held(NOW + hold + 0.1, seconds_left - (hold + 0.1))


# ---------------------------------------------------------------- states of sends


def test_claim_is_exclusive_until_released() -> None:
    states = SendStates(limit=10)
    assert states.claim(1, fence=7)
    assert not states.claim(1, fence=8)
    assert states.claim(2, fence=8)
    states.release(1, None)
    assert states.claim(1, fence=8)
    assert states.get(3) == SendState(), "a state that is not stored"


def test_verdicts_belong_to_one_message_and_times_to_the_share() -> None:
    state = SendState()
    state.start_send(b"1", "a", 5.0)
    state.verdicts["a"] = Verdict.BAD_PROOF
    state.start_send(b"1", "b", 6.0)
    assert (state.first_sent_at, state.message_sent_at, state.verdicts) == (5.0, 5.0, {"a": Verdict.BAD_PROOF})
    state.start_send(b"2", "b", 7.0)
    assert (state.first_sent_at, state.message_sent_at, state.verdicts) == (5.0, 7.0, {})
    assert state.sent_at == {"a": 5.0, "b": 7.0}


def test_waiting_shares_are_left_out_and_come_last_afterwards() -> None:
    states = SendStates(limit=10)
    for share_id, wait in ((1, Wait(20.0, 9)), (2, Wait(10.0, 9)), (3, Wait(30.0, 5)), (4, None)):
        states.claim(share_id, fence=0)
        states.release(share_id, wait)
    assert states.waiting == 3
    assert states.select([1, 2, 3, 4], now=15.0, height=4, limit=9) == [4, 2]
    assert states.select([1, 2, 3, 4], now=15.0, height=5, limit=9) == [3, 4, 2]
    assert states.select([1, 2, 3, 4], now=20.0, height=4, limit=9) == [4, 2, 1]
    assert states.select([1, 2, 3, 4], now=20.0, height=4, limit=2) == [4, 2]
    states.forget(2)
    states.start_term()
    assert states.waiting == 0


def test_forgotten_share_keeps_its_claim_only() -> None:
    states = SendStates(limit=10)
    states.claim(1, fence=7)
    states.get(1).start_send(b"1", "a", 5.0)
    assert states.forget(1) == 5.0
    assert states.get(1) == SendState(fence=7)
    assert not states.claim(1, fence=7)
    states.release(1, None)
    assert states.forget(1) is None
    assert states.get(1) == SendState()


def test_new_lease_term_forgets_ends_only() -> None:
    states = SendStates(limit=10)
    states.claim(1, fence=0)
    states.get(1).ended_at = 6.0
    states.get(1).sent_at["a"] = 5.0
    states.release(1, None)
    states.start_term()
    assert states.get(1) == SendState(sent_at={"a": 5.0})


def test_state_unused_for_longest_is_dropped_above_the_limit_unless_in_flight() -> None:
    states = SendStates(limit=2)
    for share_id in (1, 2, 1, 3):
        states.claim(share_id, fence=0)
        states.get(share_id).ended_at = float(share_id)
        states.release(share_id, None)
    assert [states.get(share_id).ended_at for share_id in (1, 2, 3)] == [1.0, None, 3.0]
    in_flight = SendStates(limit=1)
    assert [in_flight.claim(share_id, fence=0) for share_id in (1, 2, 1, 2)] == [True, True, False, False]
