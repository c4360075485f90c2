"""Pause reasons: every text, and comparison by value."""

from __future__ import annotations

import pytest

from helper.core.pause import PauseCause, PauseReason, text_of

TEXTS = {
    PauseCause.STARTING.reason(): "starting",
    PauseCause.CHAIN_NOT_READ.reason(): "starting: chain state not read yet",
    PauseCause.QUEUE_UNWRITABLE.reason(): "the queue cannot be written",
    PauseCause.DATABASE_MOVED.reason("the file is {away}"): "the file is {away}",
    PauseCause.CLOCK_OFF_CHAIN.reason(): "this machine's clock differs too much from the chain's",
    PauseCause.CLOCK_OFF_DATABASE.reason(2.5, "behind"): "this machine's clock is 2.5 s behind the database's",
    PauseCause.QUEUE_USED_ELSEWHERE.reason("a"): "host 'a' uses this queue or a copy of it",
    PauseCause.LEASE_HOLDER_UNKNOWN.reason(): "not known yet whether another host uses this queue",
    PauseCause.LEASE_UNREACHABLE.reason(): ("lease storage unreachable for too long: another host may hold the lease"),
    PauseCause.NO_NODE_IN_SYNC.reason(): "no chain node is in sync",
    PauseCause.BLOCKS_UNREAD.reason(): "reading the blocks since the last shutdown",
    PauseCause.ROUND_FROZEN.reason("its end changed"): "its end changed",
    PauseCause.ROUND_TREE_CONTRADICTED.reason(): "no node returns a consistent tree of the round",
    PauseCause.ROUND_END_UNCONFIRMED.reason(): "a change of the round's end is not confirmed yet",
    PauseCause.ROUND_STATUS_UNCONFIRMED.reason(): "a change of the round's status is not confirmed yet",
    PauseCause.CIRCUIT_REFUSED.reason("k11", "k10"): (
        'the chain rejects valid k11 proofs: it uses the other circuit; set [prover] circuit = "auto" or "k10"'
    ),
    PauseCause.EVERY_CIRCUIT_REFUSED.reason("both circuits"): (
        "the chain rejects valid proofs of both circuits: check its nodes"
    ),
    PauseCause.REFUSAL_SEEN_BY_SENDER.reason("a reason"): "a reason",
}


@pytest.mark.parametrize(("reason", "text"), TEXTS.items(), ids=[reason.cause.name for reason in TEXTS])
def test_reason_has_its_text(reason: PauseReason, text: str) -> None:
    assert str(reason) == text_of(reason) == text


def test_every_cause_has_a_tested_text() -> None:
    assert {reason.cause for reason in TEXTS} == set(PauseCause)


def test_reasons_are_equal_if_cause_and_details_are() -> None:
    assert PauseCause.ROUND_FROZEN.reason("a") == PauseCause.ROUND_FROZEN.reason("a")
    assert PauseCause.ROUND_FROZEN.reason("a") != PauseCause.ROUND_FROZEN.reason("b")
    assert PauseCause.DATABASE_MOVED.reason("a") != PauseCause.ROUND_FROZEN.reason("a")


def test_no_reason_has_no_text() -> None:
    assert text_of(None) is None
