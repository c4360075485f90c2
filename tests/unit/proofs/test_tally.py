"""Sums, partial decryptions and totals: published test vectors, and everything that must be refused."""

from __future__ import annotations

from typing import Any

import pytest

import proofs
from proofs import Partial
from tests.unit.proofs.votes import off_curve_point

SCALAR_MODULUS = 0x40000000000000000000000000000000224698FC0994A8DD8C46EB2100000001
FIELD_MODULUS = 0x40000000000000000000000000000000224698FC094CF91B992D30ED00000001

GENERATOR = "63c975b884721a8d0ca1707be30c7f0c5f445f3e7c188d3b06d6f128b32355b7"
MULTIPLES = {
    0: "00" * 32,
    1: GENERATOR,
    2: "05ab49e47fb5617d6d96dd5ed73b9c41576ac815ca47f77f6a57c9ba5800ea88",
    7: "5a00365400336a7f800460a1d06b2863efa5ac9f0005f35f8e0fe2b89b51fbbb",
    42: "e20f4c32bd3e302ecf03310e70152a8f08c34c16393abff62105f9a3a55a879e",
    1000: "cd8ea10c5c1a85b4ae3f88b2529a4d7a2d809527f746177437b84ba6e5c7458d",
}
# f = 7 + 3x + 11x²; the ciphertext encrypts 3.
COMMITMENTS = [
    bytes.fromhex(text)
    for text in (
        MULTIPLES[7],
        "f230ed27abda07c276f06cd290e60b3ebb523edfdf4fa6c749c24cefee24c9bf",
        "142ae0d0a3df39f03e4c747183e820728e21a3b3a6e1161e622d5dd0a32b5816",
    )
]
CIPHERTEXT = bytes.fromhex(
    "19a19f3a0dfbd6404eb7b7760307c911a8af2314fd75f27c0b1d5a952d811d24"
    "ce6bf8ce1e1590ca8f189330658af01a12b3fc1db7694c5fcf62357b960c569a"
)
SHARES = {1: 21, 2: 57, 4: 195}
PARTIALS = [
    Partial(index, bytes.fromhex(point), bytes.fromhex(proof))
    for index, point, proof in (
        (
            1,
            "9864f90ee91a94bf945097be638bd33364d17dff54091bc85efb17aaa45b4d86",
            (
                "869f8a7ab53ff1d74c355928d64d061c5391d46f19c2d817182b025e564fd737"
                "d8b015566553be7ed36cbf7e2a0e59cb86f4e5e878e754bac1a5a303410c2e36"
            ),
        ),
        (
            2,
            "1abe4a9978350cf7ab653403ac854650cb315970b4030389bcfeb98da52c64b8",
            (
                "35215ff6c939e04300e492b4116ea53399443b963f98b3c3e28801b643aee50f"
                "47e95a0b6233738c8c42fa91928440640646bd86199a3879518ecaff5bdb3c10"
            ),
        ),
        (
            4,
            "bf4bf9b3cba083119a28dc6b2eef0eef31587c572c929e4915c72ee40ab62482",
            (
                "2c5693ee0aa26577678de4fbfe7a3f79f55ecc5905550f162c5c48c13ce7541f"
                "016a84930882098852df8d30917bea0c6ce6a4be3d47b85dd430756a58ed0c2e"
            ),
        ),
    )
]
WHOLE_KEY_PROOF = bytes.fromhex(
    "5dbf92b256ce4f31ea97eb23e3ba0f90cf2bd744d761b5b8864be36cc31db908"
    "59f9070ac41df21b1eff34d76dfd55b2d0d34d129c10fb642dde6ddb3e306e23"
)
ADDENDS = (
    (
        "849f628443528697f8ec00e2b468b215f0a46cfd0f032d9b39e1b74d6bd0909e"
        "9d86f6e70fb032bfc5b9813f8944a886b10e39f69ced60ff6b32e2aae53aab0a"
    ),
    (
        "6922b40b29bd46e8feebe973b3a0d7cb292e2eff59dac8e3997d95cd3fadf13c"
        "8dbf07a5aadc876a8954aa153df1d32d13079678c4ca2e01584858c0fea7598c"
    ),
)
SUM = (
    "3de6b9eb87b43e7de7bdb22876b37ac781c2a5f136b8494e279bba0e4f68db99"
    "72a401370ed4c5561760608ff4a07630d585fe6e3cb225e3da55289bf6056ba6"
)


def check(partials: list[Partial] = PARTIALS, **changes: Any) -> proofs.TallyCheck:
    arguments = {"ciphertext": CIPHERTEXT, "commitments": COMMITMENTS, "threshold": 3, "total": 3, **changes}
    return proofs.check_tally(partials=partials, **arguments)


def flip(value: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(value))


@pytest.mark.parametrize(("scalar", "point"), MULTIPLES.items())
def test_multiply_generator_vectors(scalar: int, point: str) -> None:
    assert proofs.multiply_generator(scalar.to_bytes(32, "little")).hex() == point


def test_elgamal_sum_vector() -> None:
    addends = [bytes.fromhex(text) for text in ADDENDS]
    assert proofs.elgamal_sum(bytes(64), addends).hex() == SUM
    assert proofs.elgamal_sum(addends[0], addends[1:]).hex() == SUM
    assert proofs.elgamal_sum(bytes(64), []) == bytes(64)


def test_sum_points_adds_and_allows_identity() -> None:
    points = [bytes.fromhex(MULTIPLES[1]), bytes(32), bytes.fromhex(MULTIPLES[1])]
    assert proofs.sum_points(points).hex() == MULTIPLES[2]
    assert proofs.sum_points([]) == bytes(32)


def test_check_tally_vector_matches() -> None:
    assert check() == ([None, None, None], "matches")


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0)])
def test_check_tally_order_of_partials_does_not_matter(order: tuple[int, ...]) -> None:
    assert check([PARTIALS[at] for at in order]).total == "matches"


def test_check_tally_more_partials_than_threshold_match() -> None:
    line = [proofs.multiply_generator(value.to_bytes(32, "little")) for value in (7, 3)]
    partials = [
        Partial(index, *proofs.decrypt_partially((7 + 3 * index).to_bytes(32, "little"), CIPHERTEXT))
        for index in (1, 3, 4)
    ]
    for chosen in (partials, partials[1:], partials[::2]):
        result = proofs.check_tally(ciphertext=CIPHERTEXT, commitments=line, threshold=2, partials=chosen, total=3)
        assert result == ([None] * len(chosen), "matches")


def test_check_tally_wrong_total_differs() -> None:
    for total in (0, 2, 4, 2**63):
        assert check(total=total).total == "differs"


def test_check_tally_fewer_than_threshold_is_too_few() -> None:
    assert check(PARTIALS[:2]) == ([None, None], "too_few")
    assert check([]) == ([], "too_few")


@pytest.mark.parametrize("bit", [0, 100, 254, 256, 400, 510])
def test_check_tally_altered_bit_of_partial_is_not_valid(bit: int) -> None:
    index, point, proof = PARTIALS[1]
    altered = [Partial(index, point, flip(proof, bit))]
    if bit < 256:
        altered.append(Partial(index, flip(point, bit), proof))
    for partial in altered:
        result = check([PARTIALS[0], partial, PARTIALS[2]])
        assert [reason is None for reason in result.reasons] == [True, False, True]
        assert result.total == "too_few"


@pytest.mark.parametrize(
    ("partial", "reason"),
    [
        (PARTIALS[0]._replace(validator_index=0), "index out of range"),
        (PARTIALS[0]._replace(validator_index=-1), "index out of range"),
        (PARTIALS[0]._replace(validator_index=2**32), "index out of range"),
        (PARTIALS[0]._replace(validator_index=3), "dleq_proof: not valid"),  # the key of another validator
        (PARTIALS[1], "repeated index"),
        (PARTIALS[0]._replace(proof=bytes(64)), "dleq_proof: not valid"),
        (PARTIALS[0]._replace(proof=PARTIALS[0].proof[:63]), "dleq_proof: length"),
        (PARTIALS[0]._replace(proof=PARTIALS[0].proof + b"\0"), "dleq_proof: length"),
        (PARTIALS[0]._replace(point=bytes(31)), "partial_decrypt: length"),
        (PARTIALS[0]._replace(point=FIELD_MODULUS.to_bytes(32, "little")), "partial_decrypt: non-canonical"),
        (PARTIALS[0]._replace(point=off_curve_point()), "partial_decrypt: off-curve"),
    ],
)
def test_check_tally_invalid_partial_has_reason(partial: Partial, reason: str) -> None:
    assert check([PARTIALS[1], PARTIALS[2], partial]).reasons == [None, None, reason]


@pytest.mark.parametrize("half", [0, 32])
def test_check_tally_non_canonical_proof_is_refused(half: int) -> None:
    # Challenge or response plus the group's order: the same number, another encoding.
    index, point, proof = PARTIALS[0]
    number = int.from_bytes(proof[half : half + 32], "little") + SCALAR_MODULUS
    altered = proof[:half] + number.to_bytes(32, "little") + proof[half + 32 :]
    assert check([Partial(index, point, altered)]).reasons == ["dleq_proof: non-canonical"]


def test_check_tally_identity_as_c1_or_key_is_never_proven() -> None:
    assert check(ciphertext=bytes(32) + CIPHERTEXT[32:]).reasons == ["the key or C1 is the identity"] * 3
    result = check([PARTIALS[0]], commitments=[bytes(32)], threshold=1)
    assert result.reasons == ["the key or C1 is the identity"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ciphertext": CIPHERTEXT[:63]},
        {"ciphertext": FIELD_MODULUS.to_bytes(32, "little") + CIPHERTEXT[32:]},
        {"ciphertext": CIPHERTEXT[:32] + b"\xff" * 32},
        {"commitments": [*COMMITMENTS[:2], b"\xff" * 32]},
        {"commitments": COMMITMENTS[:2]},
        {"threshold": 2},
        {"threshold": 0, "commitments": []},
        {"total": -1},
        {"total": 2**64},
    ],
)
def test_check_tally_malformed_input_raises(changes: dict[str, Any]) -> None:
    with pytest.raises(proofs.EncodingError):
        check(**changes)


def test_decrypt_partially_makes_valid_partials() -> None:
    partials = [
        Partial(index, *proofs.decrypt_partially(share.to_bytes(32, "little"), CIPHERTEXT))
        for index, share in SHARES.items()
    ]
    assert [partial.point for partial in partials] == [partial.point for partial in PARTIALS]
    assert check(partials) == ([None, None, None], "matches")


def test_verify_decryption_vector() -> None:
    public = bytes.fromhex(MULTIPLES[7])
    assert proofs.verify_decryption(public, CIPHERTEXT, 3, WHOLE_KEY_PROOF)
    assert not proofs.verify_decryption(public, CIPHERTEXT, 4, WHOLE_KEY_PROOF)
    assert not proofs.verify_decryption(bytes.fromhex(MULTIPLES[2]), CIPHERTEXT, 3, WHOLE_KEY_PROOF)
    assert not proofs.verify_decryption(public, CIPHERTEXT, 3, bytes(64))
    assert not proofs.verify_decryption(bytes(32), CIPHERTEXT, 3, WHOLE_KEY_PROOF)
    # Valid for the share of a validator whose key is 7·G, but with the tag of partial decryptions.
    _, proof = proofs.decrypt_partially((7).to_bytes(32, "little"), CIPHERTEXT)
    assert not proofs.verify_decryption(public, CIPHERTEXT, 3, proof)
