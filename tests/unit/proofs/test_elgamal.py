"""ElGamal: decryption inverts encryption, and ciphertexts add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest

import proofs
from tests.unit.proofs.votes import MODULUS, Vote, encode_element, off_curve_point

SCALAR_MODULUS = 0x40000000000000000000000000000000224698FC0994A8DD8C46EB2100000001

Keypair = tuple[bytes, bytes]


@pytest.mark.parametrize("value", [0, 1, 2, 999, 1_000, 1_001, 123_456, 2**32])
def test_encrypt_and_decrypt_round_trip(keypair: Keypair, value: int) -> None:
    secret, public = keypair
    c1, c2 = proofs.elgamal_encrypt(public, value)
    assert proofs.elgamal_decrypt(secret, c1 + c2, 2**32) == value


def test_decrypt_value_above_limit_fails(keypair: Keypair) -> None:
    secret, public = keypair
    ciphertext = b"".join(proofs.elgamal_encrypt(public, 1_001))
    assert proofs.elgamal_decrypt(secret, ciphertext, 1_001) == 1_001
    with pytest.raises(proofs.ProofsError, match="above 1000"):
        proofs.elgamal_decrypt(secret, ciphertext, 1_000)


def test_ciphertexts_are_additive(keypair: Keypair, vote: Vote) -> None:
    ciphertexts = [c1 + c2 for c1, c2 in vote.ciphertexts]
    total = reduce(proofs.elgamal_add, ciphertexts, bytes(64))
    assert proofs.elgamal_decrypt(keypair[0], total, 16_000) == sum(vote.values)
    assert proofs.elgamal_add(total, bytes(64)) == total
    assert proofs.elgamal_decrypt(keypair[0], bytes(64), 0) == 0


def test_keypair_is_determined_by_seed() -> None:
    assert proofs.elgamal_keygen(b"seed") == proofs.elgamal_keygen(b"seed")
    assert proofs.elgamal_keygen(b"seed") != proofs.elgamal_keygen(b"another")
    assert proofs.elgamal_keygen() != proofs.elgamal_keygen()


def test_encryption_is_randomized(keypair: Keypair) -> None:
    public = keypair[1]
    assert proofs.elgamal_encrypt(public, 1) != proofs.elgamal_encrypt(public, 1)
    fixed = encode_element(7)
    assert proofs.elgamal_encrypt(public, 1, fixed) == proofs.elgamal_encrypt(public, 1, fixed)


def test_decrypt_with_other_key_fails(keypair: Keypair) -> None:
    other_secret, _ = proofs.elgamal_keygen(b"other")
    ciphertext = b"".join(proofs.elgamal_encrypt(keypair[1], 5))
    with pytest.raises(proofs.ProofsError, match="above"):
        proofs.elgamal_decrypt(other_secret, ciphertext, 1_000)


def test_malformed_arguments_are_named(keypair: Keypair) -> None:
    secret, public = keypair
    good = b"".join(proofs.elgamal_encrypt(public, 5))
    bad: list[tuple[Callable[[], object], str, str]] = [
        (lambda: proofs.elgamal_encrypt(bytes(32), 1), "public", "identity"),
        (lambda: proofs.elgamal_encrypt(off_curve_point(), 1), "public", "off-curve"),
        (lambda: proofs.elgamal_encrypt(public[:31], 1), "public", "length"),
        (lambda: proofs.elgamal_encrypt(public, -1), "value", "range"),
        (lambda: proofs.elgamal_encrypt(public, 2**64), "value", "range"),
        (lambda: proofs.elgamal_encrypt(public, 1, bytes(32)), "randomness", "range"),
        (lambda: proofs.elgamal_encrypt(public, 1, encode_element(SCALAR_MODULUS)), "randomness", "non-canonical"),
        (lambda: proofs.elgamal_add(good, good[:63]), "b", "length"),
        (lambda: proofs.elgamal_add(encode_element(MODULUS) + good[32:], good), "a.c1", "non-canonical"),
        (lambda: proofs.elgamal_decrypt(secret[:5], good, 9), "secret", "length"),
        (lambda: proofs.elgamal_decrypt(secret, good + b"\0", 9), "ciphertext", "length"),
        (lambda: proofs.elgamal_decrypt(secret, good, 2**41), "limit", "range"),
    ]
    for call, field, reason in bad:
        with pytest.raises(proofs.EncodingError) as caught:
            call()
        assert (caught.value.field, caught.value.reason) == (field, reason)
