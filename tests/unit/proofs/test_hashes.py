"""Hashes are the protocol's compositions of Poseidon."""

from __future__ import annotations

import pytest

import proofs
from tests.unit.proofs.votes import Vote, encode_element, seeded_element


def test_vote_commitment_and_nullifier_follow_protocol(vote: Vote) -> None:
    parts = (encode_element(1), vote.round_id, vote.shares_hash, encode_element(3), encode_element(1))
    assert vote.commitment == proofs.poseidon(*parts)
    tag = b"share spend".ljust(32, b"\0")
    expected = proofs.poseidon(tag, vote.commitment, encode_element(9), vote.blinds[9])
    assert proofs.share_nullifier(vote.commitment, 9, vote.blinds[9]) == expected


def test_shares_hash_is_poseidon_of_the_commitments(vote: Vote) -> None:
    comms = [vote.share_comms[i : i + 32] for i in range(0, 512, 32)]
    assert vote.shares_hash == proofs.poseidon(*comms)


def test_hash_depends_on_input_length() -> None:
    element = seeded_element("one")
    hashes = {proofs.poseidon(element, *[encode_element(0)] * zeros) for zeros in range(16)}
    assert len(hashes) == 16


def test_malformed_elements_are_named() -> None:
    def refusal(*elements: bytes) -> tuple[str, str]:
        with pytest.raises(proofs.EncodingError) as caught:
            proofs.poseidon(*elements)
        return caught.value.field, caught.value.reason

    assert refusal() == ("elements", "range")
    assert refusal(*[encode_element(0)] * 17) == ("elements", "range")
    assert refusal(encode_element(0), b"\xff" * 32) == ("elements[1]", "non-canonical")
    assert refusal(encode_element(0), b"") == ("elements[1]", "length")


def test_random_elements_are_canonical_and_differ() -> None:
    drawn = {proofs.random_field() for _ in range(50)}
    assert len(drawn) == 50
    for value in drawn:
        proofs.check_encoding("drawn", value)
