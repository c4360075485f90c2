"""Validation names each malformed field of a share, and accepts none."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import proofs
from helper.core.share import Share
from tests.support.payloads import share_body
from tests.unit.proofs.votes import MODULUS, Vote, encode_element, off_curve_point, seeded_element

ELEMENTS = {
    "round_id": "vote_round_id",
    "shares_hash": "shares_hash",
    "primary_blind": "primary_blind",
}
POINTS = {"c1": "enc_share.c1", "c2": "enc_share.c2"}
WRONG_LENGTHS = [b"", bytes(31), bytes(33)]


def read(vote: Vote, /, **changes: Any) -> proofs.ReadShare | proofs.InvalidShare:
    """Validate share 4 of the vote, with changes, as posted by a wallet."""
    fields = {**vote.witness(4), "shares_hash": vote.shares_hash, "tree_position": 0, "submit_at": 0, **changes}
    (result,) = proofs.read_shares([share_body(Share(**fields))])
    return result


def check_share(vote: Vote, /, **changes: Any) -> proofs.ReadShare:
    result = read(vote, **changes)
    assert isinstance(result, proofs.ReadShare)
    return result


def refusal_reason(vote: Vote, **changes: Any) -> tuple[str, str]:
    result = read(vote, **changes)
    assert isinstance(result, proofs.InvalidShare)
    return result.field, result.reason


def test_valid_share_returns_its_ids(vote: Vote) -> None:
    checked = check_share(vote)
    assert checked.vote_commitment == vote.commitment
    assert checked.nullifier == proofs.share_nullifier(vote.commitment, 4, vote.blinds[4])
    shares = [check_share(vote, **vote.witness(index)) for index in range(16)]
    assert len({share.nullifier for share in shares}) == 16


@pytest.mark.parametrize(("argument", "field"), [*ELEMENTS.items(), *POINTS.items()])
def test_invalid_length_or_element_is_refused(vote: Vote, argument: str, field: str) -> None:
    for value in WRONG_LENGTHS:
        assert refusal_reason(vote, **{argument: value}) == (field, "not-hex" if argument == "round_id" else "length")
    for value in (encode_element(MODULUS), encode_element(MODULUS + 5), b"\xff" * 32):
        assert refusal_reason(vote, **{argument: value}) == (field, "non-canonical")


@pytest.mark.parametrize(("argument", "field"), POINTS.items())
def test_invalid_point_is_refused(vote: Vote, argument: str, field: str) -> None:
    assert refusal_reason(vote, **{argument: off_curve_point()}) == (field, "off-curve")
    assert refusal_reason(vote, **{argument: bytes(32)}) == (field, "identity")


@pytest.mark.parametrize("index", [0, 3, 15])
def test_invalid_commitment_is_named(vote: Vote, index: int) -> None:
    bad = bytearray(vote.share_comms)
    bad[32 * index : 32 * index + 32] = encode_element(MODULUS)
    assert refusal_reason(vote, share_comms=bytes(bad)) == (f"share_comms[{index}]", "non-canonical")


@pytest.mark.parametrize(
    ("length", "named"),
    [
        (0, ("share_comms", "count")),
        (480, ("share_comms", "count")),
        (511, ("share_comms[15]", "length")),
        (513, ("share_comms", "count")),
        (544, ("share_comms", "count")),
    ],
)
def test_commitment_count_other_than_sixteen_is_refused(vote: Vote, length: int, named: tuple[str, str]) -> None:
    assert refusal_reason(vote, share_comms=bytes(length)) == named


@pytest.mark.parametrize(
    ("argument", "field", "limit"),
    [
        ("share_index", "enc_share.share_index", 16),
        ("proposal_id", "proposal_id", 51),
        ("vote_decision", "vote_decision", 8),
        ("tree_position", "tree_position", 2**24),
        ("submit_at", "submit_at", 2**63),
    ],
)
def test_out_of_range_number_is_refused(vote: Vote, argument: str, field: str, limit: int) -> None:
    for value in (-1, limit, 2**64 - 1, -(2**63)):
        assert refusal_reason(vote, **{argument: value}) == (field, "range")
    for value in (2**64, -(2**64), 10**40):
        assert refusal_reason(vote, **{argument: value}) == (field, "type")


def test_inconsistent_fields_are_refused(vote: Vote) -> None:
    def rule(**changes: Any) -> str:
        return refusal_reason(vote, **changes)[1]

    c1, c2 = vote.ciphertexts[4]
    swapped = vote.share_comms[32:64] + vote.share_comms[:32] + vote.share_comms[64:]
    assert rule(shares_hash=seeded_element("another")) == "shares_hash"
    assert rule(share_comms=swapped) == "shares_hash"
    assert rule(share_index=5) == "share_comm"
    assert rule(primary_blind=seeded_element("another")) == "share_comm"
    assert rule(c1=c2, c2=c1) == "share_comm"
    # The negated point has the same x-coordinate.
    assert rule(c1=c1[:31] + bytes([c1[31] ^ 0x80])) == "share_comm"


def test_encoding_errors_precede_rule_errors(vote: Vote) -> None:
    assert refusal_reason(vote, shares_hash=seeded_element("x"), c2=bytes(32)) == ("enc_share.c2", "identity")


def test_check_of_single_fields() -> None:
    proofs.check_encoding("f", encode_element(MODULUS - 1))
    proofs.check_encoding("f", encode_element(0))
    proofs.check_point("p", proofs.elgamal_keygen(b"")[1])
    with pytest.raises(proofs.EncodingError) as caught:
        proofs.check_encoding("share_comms[7]", encode_element(MODULUS))
    assert (caught.value.field, caught.value.reason) == ("share_comms[7]", "non-canonical")
    with pytest.raises(proofs.EncodingError, match=r"^enc_share\.c1: identity$"):
        proofs.check_point("enc_share.c1", bytes(32))


def test_errors_quote_no_value_and_survive_pickling(vote: Vote) -> None:
    secret = encode_element(MODULUS + 0xDEADBEEF)
    c1, c2 = vote.ciphertexts[4]
    with pytest.raises(proofs.EncodingError) as caught:
        proofs.share_commitment(secret, c1, c2)
    for error in (caught.value, proofs.ShareRuleError("share_comm")):
        _quotes_nothing(f"{error!s} {error!r}", secret)
        unpickled = pickle.loads(pickle.dumps(error))
        assert type(unpickled) is type(error)
        assert vars(unpickled) == vars(error)
        assert str(unpickled) == str(error)
    for blind in (secret, seeded_element("secret")):
        _quotes_nothing(repr(read(vote, primary_blind=blind)), blind)


def _quotes_nothing(text: str, secret: bytes) -> None:
    assert secret.hex() not in text
    assert "efbeadde" not in text
    assert "deadbeef" not in text.lower()
