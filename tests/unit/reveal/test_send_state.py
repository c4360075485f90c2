"""Send states of shares: claims, refusals, stuck shares and the maximum number of states."""

from __future__ import annotations

from helper.chain.verdicts import Verdict
from helper.reveal.send_state import SendState, SendStates

FIRST_TX, SECOND_TX = b"1" * 32, b"2" * 32


def test_claim_is_exclusive_until_released() -> None:
    states = SendStates(limit=10)
    assert states.claim(1, fence=7)
    assert not states.claim(1, fence=8)
    assert states.get(1).fence == 7
    assert states.claim(2, fence=8)
    states.release(1)
    assert not states.get(1).is_in_flight
    assert states.claim(1, fence=8)


def test_unknown_share_has_an_empty_state_that_is_not_stored() -> None:
    states = SendStates(limit=10)
    states.get(1).note_first_send(5.0)
    assert states.get(1) == SendState()


def test_first_send_is_recorded_once() -> None:
    state = SendState()
    state.note_first_send(5.0)
    state.note_first_send(6.0)
    assert state.first_sent_at == 5.0


def test_refusals_belong_to_one_message() -> None:
    state = SendState()
    assert state.refusals_of(FIRST_TX) == {}
    state.add_refusal(FIRST_TX, "a", Verdict.BAD_PROOF)
    state.add_refusal(FIRST_TX, "b", Verdict.PERMANENT)
    assert state.refusals_of(FIRST_TX) == {"a": Verdict.BAD_PROOF, "b": Verdict.PERMANENT}
    assert state.refusals_of(SECOND_TX) == {}
    state.add_refusal(SECOND_TX, "b", Verdict.BAD_PROOF)
    assert state.refusals_of(FIRST_TX) == {}
    assert state.refusals_of(SECOND_TX) == {"b": Verdict.BAD_PROOF}
    state.clear_refusals()
    assert state.refusals_of(SECOND_TX) == {}


def test_stuck_shares_are_counted_once_each() -> None:
    states = SendStates(limit=10)
    for share_id in (1, 2):
        states.claim(share_id, fence=0)
        states.set_stuck(share_id, is_stuck=True)
        states.set_stuck(share_id, is_stuck=True)
    assert states.stuck == 2
    states.set_stuck(1, is_stuck=False)
    assert states.stuck == 1
    states.release(2)
    states.confirm(2)
    assert states.stuck == 0
    states.set_stuck(2, is_stuck=True)
    assert states.stuck == 0, "nothing is recorded for a share without a state"


def test_confirmation_drops_the_state_and_returns_the_first_send() -> None:
    states = SendStates(limit=10)
    states.claim(1, fence=0)
    states.get(1).note_first_send(5.0)
    states.release(1)
    assert states.confirm(1) == 5.0
    assert states.confirm(1) is None
    assert states.get(1) == SendState()


def test_confirmation_during_a_send_keeps_the_claim_only() -> None:
    states = SendStates(limit=10)
    states.claim(1, fence=7)
    states.get(1).note_first_send(5.0)
    states.get(1).sent_to["a"] = 5.0
    assert states.confirm(1) == 5.0
    assert states.get(1) == SendState(fence=7)
    assert not states.claim(1, fence=7)
    states.release(1)
    assert states.claim(1, fence=8)


def test_new_lease_term_forgets_ends_only() -> None:
    states = SendStates(limit=10)
    states.claim(1, fence=0)
    states.get(1).last_ended_at = 6.0
    states.get(1).sent_to["a"] = 5.0
    states.release(1)
    states.forget_ends()
    assert states.get(1) == SendState(sent_to={"a": 5.0})


def test_state_unused_for_longest_is_dropped_above_the_limit() -> None:
    states = SendStates(limit=2)
    for share_id in (1, 2, 1, 3):
        states.claim(share_id, fence=0)
        states.get(share_id).last_ended_at = float(share_id)
        states.set_stuck(share_id, is_stuck=True)
        states.release(share_id)
    assert [states.get(share_id).last_ended_at for share_id in (1, 2, 3)] == [1.0, None, 3.0]
    assert states.stuck == 2


def test_state_in_flight_is_never_dropped() -> None:
    states = SendStates(limit=1)
    states.claim(1, fence=0)
    states.claim(2, fence=0)
    assert not states.claim(1, fence=0)
    assert not states.claim(2, fence=0)
