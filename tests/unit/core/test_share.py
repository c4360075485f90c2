"""States, legal transitions, and the representation of a share."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helper.core.share import TRANSITIONS, Share, ShareKey, ShareState
from tests.unit.store.fixtures import make_posted_share

LEGAL_TRANSITIONS = {
    ("WAITING", "PROVING"),
    ("WAITING", "FAILED"),
    ("PROVING", "WAITING"),
    ("PROVING", "SENT"),
    ("PROVING", "FAILED"),
    ("SENT", "WAITING"),
    ("SENT", "FAILED"),
    ("FAILED", "WAITING"),
    ("WAITING", "CONFIRMED"),
    ("PROVING", "CONFIRMED"),
    ("SENT", "CONFIRMED"),
    ("FAILED", "CONFIRMED"),
}

keys = st.builds(
    ShareKey,
    round_id=st.binary(min_size=32, max_size=32),
    share_index=st.integers(0, 15),
    proposal_id=st.integers(1, 50),
    tree_position=st.integers(0, 2**24 - 1),
    vote_decision=st.integers(0, 7),
    shares_hash=st.binary(min_size=32, max_size=32),
)


def test_transitions_are_exactly_the_legal_ones() -> None:
    moves = {(a.name, b.name) for a, b in product(ShareState, ShareState) if b in TRANSITIONS[a]}

    assert moves == LEGAL_TRANSITIONS


def test_state_codes_and_json_names_equal_original_helper() -> None:
    assert {state.json_name: state.value for state in ShareState} == {
        "received": 0,
        "witnessed": 1,
        "submitted": 2,
        "failed": 3,
        "broadcast": 4,
    }


@pytest.mark.parametrize("state", ShareState)
def test_state_is_parsed_from_label_and_json_name(state: ShareState) -> None:
    assert {ShareState.parse(text) for text in (state.label, state.json_name, state.label.upper())} == {state}


def test_unknown_state_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="one of waiting, proving, confirmed, failed, sent"):
        ShareState.parse("pending")


@given(keys, keys)
def test_share_key_encoding_is_unique(a: ShareKey, b: ShareKey) -> None:
    assert len(a.encode()) == 78
    assert (a.encode() == b.encode()) == (a == b)


def test_share_key_excludes_time_and_witness() -> None:
    share = make_posted_share(1).share
    other = replace(share, submit_at=99, primary_blind=bytes(32))

    assert share.key == other.key
    for change in ({"tree_position": 5}, {"vote_decision": 7}, {"shares_hash": bytes(32)}):
        assert share.key != replace(share, **change).key


def test_share_repr_shows_no_witness() -> None:
    share = make_posted_share(1).share
    text = repr(share)

    for name in ("shares_hash", "share_comms", "primary_blind", "c1", "c2", "tree_position"):
        assert name not in text
        assert repr(getattr(share, name)) not in text
    assert "proposal_id=2" in text
    assert isinstance(share, Share)
