"""Both circuit generations prove and verify; a proof is invalid for other statements."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import proofs
from tests.unit.proofs.conftest import VOTE_POSITION
from tests.unit.proofs.votes import MODULUS, Vote, encode_element, off_curve_point, seeded_element

SHARE_INDEX = 6


@dataclass(frozen=True)
class ProvenReveal:
    """A proof and its statement."""

    circuit: str
    proof: bytes
    statement: proofs.Statement


@pytest.fixture(scope="session", params=sorted(proofs.CIRCUITS))
def circuit(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    proofs.warm(name)
    return name


@pytest.fixture(scope="session")
def witness(vote: Vote, tree: proofs.CommitmentTree) -> dict[str, Any]:
    return {**vote.witness(SHARE_INDEX), "path": tree.path(VOTE_POSITION), "position": VOTE_POSITION}


@pytest.fixture(scope="session")
def reveal(circuit: str, vote: Vote, tree: proofs.CommitmentTree, witness: dict[str, Any]) -> ProvenReveal:
    proof_result = proofs.prove(circuit, **witness)
    c1, c2 = vote.ciphertexts[SHARE_INDEX]
    statement = proofs.Statement(
        nullifier=proofs.share_nullifier(vote.commitment, SHARE_INDEX, vote.blinds[SHARE_INDEX]),
        c1=c1,
        c2=c2,
        proposal_id=vote.proposal_id,
        vote_decision=vote.vote_decision,
        root=tree.root(),
        round_id=vote.round_id,
    )
    assert (proof_result.nullifier, proof_result.root) == (statement.nullifier, statement.root)
    return ProvenReveal(circuit, proof_result.proof, statement)


def test_key_fingerprints_match_protocol(circuit: str) -> None:
    info = proofs.CIRCUITS[circuit]
    assert proofs.warm(circuit) == proofs.fingerprint(circuit) == info.fingerprint
    assert info.name == circuit
    assert circuit == f"k{info.k}"


def test_verify_accepts_proof_of_its_statement(reveal: ProvenReveal) -> None:
    assert len(reveal.proof) == proofs.CIRCUITS[reveal.circuit].proof_bytes
    assert proofs.verify(reveal.circuit, reveal.proof, reveal.statement)


def test_repr_contains_no_share_data(reveal: ProvenReveal) -> None:
    statement = reveal.statement
    read = proofs.ReadShare((0, statement.c1, statement.c2), b"", statement.nullifier)
    proof_result = proofs.Proved(reveal.proof, statement.nullifier, statement.root)
    text = f"{statement!r} {read!r} {proof_result!r}"
    for value in (statement.nullifier, statement.c1, statement.c2, reveal.proof):
        assert repr(value)[2:-1] not in text
        assert value.hex() not in text


def test_verify_with_any_changed_input_fails(reveal: ProvenReveal) -> None:
    statement = reveal.statement
    negated = statement.c2[:31] + bytes([statement.c2[31] ^ 0x80])
    changes: list[dict[str, Any]] = [
        {"nullifier": seeded_element("x")},
        {"c1": statement.c2},
        {"c2": statement.c1},
        {"c2": negated},
        {"proposal_id": statement.proposal_id + 1},
        {"vote_decision": 0},
        {"root": proofs.EMPTY_ROOT},
        {"round_id": seeded_element("x")},
    ]
    for change in changes:
        assert not proofs.verify(reveal.circuit, reveal.proof, replace(statement, **change)), change


def test_verify_with_changed_proof_fails(reveal: ProvenReveal) -> None:
    rng = random.Random(reveal.circuit)
    proof = reveal.proof
    for index in rng.sample(range(len(proof)), 12):
        flipped = bytearray(proof)
        flipped[index] ^= 1 << rng.randrange(8)
        assert not proofs.verify(reveal.circuit, bytes(flipped), reveal.statement), index
    malformed = [
        b"",
        proof[:-1],
        proof[:-32],
        proof + b"\0",
        proof + proof,
        bytes(len(proof)),
        b"\xff" * len(proof),
        rng.randbytes(len(proof)),
    ]
    for other in malformed:
        assert not proofs.verify(reveal.circuit, other, reveal.statement)


def test_verify_with_other_circuit_fails(reveal: ProvenReveal) -> None:
    (other,) = set(proofs.CIRCUITS) - {reveal.circuit}
    assert not proofs.verify(other, reveal.proof, reveal.statement)
    length = proofs.CIRCUITS[other].proof_bytes
    assert not proofs.verify(other, reveal.proof.ljust(length, b"\0")[:length], reveal.statement)


def test_malformed_statement_is_named(reveal: ProvenReveal) -> None:
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"nullifier": encode_element(MODULUS)}, "share_nullifier", "non-canonical"),
        ({"root": bytes(31)}, "root", "length"),
        ({"round_id": b"\xff" * 32}, "vote_round_id", "non-canonical"),
        ({"c1": bytes(32)}, "enc_share.c1", "identity"),
        ({"c2": off_curve_point()}, "enc_share.c2", "off-curve"),
        ({"proposal_id": -1}, "proposal_id", "range"),
        ({"vote_decision": 2**32}, "vote_decision", "range"),
    ]
    for change, field, reason in bad:
        with pytest.raises(proofs.EncodingError) as caught:
            proofs.verify(reveal.circuit, reveal.proof, replace(reveal.statement, **change))
        assert (caught.value.field, caught.value.reason) == (field, reason)


@pytest.mark.parametrize("name", proofs.CIRCUITS)
def test_malformed_witness_is_named_before_proving(name: str, witness: dict[str, Any]) -> None:
    path = bytearray(witness["path"])
    path[32 * 23 :] = encode_element(MODULUS)
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"path": bytes(path)}, "path[23]", "non-canonical"),
        ({"path": bytes(767)}, "path", "length"),
        ({"position": 2**24}, "tree_position", "range"),
        ({"position": -1}, "tree_position", "range"),
        ({"share_comms": bytes(511)}, "share_comms", "length"),
        ({"primary_blind": encode_element(MODULUS)}, "primary_blind", "non-canonical"),
        ({"c1": bytes(32)}, "enc_share.c1", "identity"),
        ({"c2": off_curve_point()}, "enc_share.c2", "off-curve"),
        ({"share_index": 16}, "enc_share.share_index", "range"),
        ({"proposal_id": 2**64}, "proposal_id", "range"),
        ({"round_id": bytes(33)}, "vote_round_id", "length"),
    ]
    for change, field, reason in bad:
        with pytest.raises(proofs.EncodingError) as caught:
            proofs.prove(name, **{**witness, **change})
        assert (caught.value.field, caught.value.reason) == (field, reason)
    with pytest.raises(proofs.ShareRuleError) as broken:
        proofs.prove(name, **{**witness, "primary_blind": seeded_element("x")})
    assert broken.value.rule == "share_comm"


def test_unknown_circuit_is_refused(witness: dict[str, Any], reveal: ProvenReveal) -> None:
    calls: list[Callable[[], object]] = [
        lambda: proofs.warm("k12"),
        lambda: proofs.fingerprint(""),
        lambda: proofs.prove("K10", **witness),
        lambda: proofs.verify("k12", reveal.proof, reveal.statement),
    ]
    for call in calls:
        with pytest.raises(proofs.CircuitError, match="unknown circuit"):
            call()


def test_prove_releases_the_gil(circuit: str, witness: dict[str, Any]) -> None:
    times: list[float] = []
    done = threading.Event()

    def prove() -> None:
        times.append(time.perf_counter())
        proofs.prove(circuit, **witness)
        times.append(time.perf_counter())
        done.set()

    thread = threading.Thread(target=prove)
    ticks: list[float] = []
    thread.start()
    while not done.is_set():
        ticks.append(time.perf_counter())
        done.wait(0.001)
    thread.join()
    started, ended = times
    quarter = (ended - started) / 4
    assert any(started + quarter < tick < ended - quarter for tick in ticks)


def test_verify_each_names_the_invalid_proofs_of_many(reveal: ProvenReveal) -> None:
    proof, statement = reveal.proof, reveal.statement
    altered = bytes([proof[0] ^ 1]) + proof[1:]
    items = [(proof, statement)] * 9
    assert proofs.verify_each(reveal.circuit, items) == [None] * 9
    assert proofs.verify_each(reveal.circuit, []) == []
    items[2] = (altered, statement)
    items[3] = (proof, replace(statement, vote_decision=statement.vote_decision + 1))
    items[5] = (proof + b"\0", statement)
    items[6] = (proof, replace(statement, nullifier=encode_element(MODULUS)))
    items[8] = (proof, replace(statement, c1=bytes(32)))
    not_valid = "proof: not valid"
    assert proofs.verify_each(reveal.circuit, items) == [
        None,
        None,
        not_valid,
        not_valid,
        None,
        not_valid,
        "share_nullifier: non-canonical",
        None,
        "enc_share.c1: identity",
    ]


def test_verify_each_unknown_circuit_raises(reveal: ProvenReveal) -> None:
    with pytest.raises(proofs.CircuitError):
        proofs.verify_each("k99", [(reveal.proof, reveal.statement)])
