"""The recorded round: 16 real shares, the real tree, 16 real proofs that a chain accepted."""

from __future__ import annotations

import random
from base64 import b64decode
from dataclasses import dataclass, replace
from typing import Any

import pytest

import proofs
from helper.core.share import Share
from tests.support.payloads import share_body

CIRCUIT = "k11"


@dataclass(frozen=True)
class RecordedShare:
    """One share of the round: the wallet's POST and the chain's reveal."""

    payload: dict[str, Any]
    position: int
    proof: bytes
    statement: proofs.Statement
    anchor_height: int


@pytest.fixture(scope="session")
def tree(recorded_exchanges: list[dict[str, Any]]) -> proofs.CommitmentTree:
    tree = proofs.CommitmentTree()
    leaves = next(row for row in recorded_exchanges if row["name"] == "leaves")
    for block in leaves["response"]["blocks"]:
        assert block.get("start_index", 0) == len(tree)
        tree.append(b"".join(b64decode(leaf) for leaf in block["leaves"]))
    return tree


@pytest.fixture(scope="session")
def latest_tree(recorded_exchanges: list[dict[str, Any]]) -> dict[str, Any]:
    row = next(row for row in recorded_exchanges if row["name"] == "tree, latest")
    latest: dict[str, Any] = row["response"]["tree"]
    return latest


@pytest.fixture(scope="session")
def round_of_shares(
    recorded_shares: list[dict[str, Any]],
    recorded_reveals: list[dict[str, Any]],
    latest_tree: dict[str, Any],
) -> list[RecordedShare]:
    """Shares and reveals, matched by ciphertext. Reveals are in the order of inclusion."""
    reveals = {b64decode(row["request"]["enc_share"]): row["request"] for row in recorded_reveals}
    recorded = []
    for share in recorded_shares:
        enc_share = share["enc_share"]
        c1, c2 = b64decode(enc_share["c1"]), b64decode(enc_share["c2"])
        reveal = reveals[c1 + c2]
        round_id = bytes.fromhex(share["vote_round_id"])
        payload = {
            "round_id": round_id,
            "share_comms": b"".join(b64decode(comm) for comm in share["share_comms"]),
            "share_index": enc_share.get("share_index", 0),
            "proposal_id": share["proposal_id"],
            "vote_decision": share["vote_decision"],
            "primary_blind": b64decode(share["primary_blind"]),
            "c1": c1,
            "c2": c2,
            "shares_hash": b64decode(share["shares_hash"]),
        }
        statement = proofs.Statement(
            nullifier=b64decode(reveal["share_nullifier"]),
            c1=c1,
            c2=c2,
            proposal_id=reveal["proposal_id"],
            vote_decision=reveal["vote_decision"],
            root=b64decode(latest_tree["root"]),
            round_id=b64decode(reveal["vote_round_id"]),
        )
        height = reveal["vote_comm_tree_anchor_height"]
        recorded.append(RecordedShare(payload, share["tree_position"], b64decode(reveal["proof"]), statement, height))
    return recorded


def test_tree_of_recorded_leaves_has_recorded_root(tree: proofs.CommitmentTree, latest_tree: dict[str, Any]) -> None:
    assert len(tree) == latest_tree["next_index_at_root"] == 3
    assert tree.root() == b64decode(latest_tree["root"])


def test_recorded_shares_are_valid_with_recorded_nullifiers(
    round_of_shares: list[RecordedShare], tree: proofs.CommitmentTree
) -> None:
    for share in round_of_shares:
        posted = share_body(Share(tree_position=share.position, submit_at=0, **share.payload))
        (checked,) = proofs.read_shares([posted])
        assert isinstance(checked, proofs.ReadShare)
        assert checked.nullifier == share.statement.nullifier
        assert checked.vote_commitment == tree.leaf(share.position)
    assert len({share.statement.nullifier for share in round_of_shares}) == 16
    assert {share.position for share in round_of_shares} == {2}


def test_recorded_proofs_verify(round_of_shares: list[RecordedShare], latest_tree: dict[str, Any]) -> None:
    for share in round_of_shares:
        assert share.anchor_height == latest_tree["height"]
        assert proofs.verify(CIRCUIT, share.proof, share.statement)


def test_proof_with_flipped_bit_is_refused(round_of_shares: list[RecordedShare]) -> None:
    rng = random.Random(84)
    for share in round_of_shares:
        flipped = bytearray(share.proof)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        assert not proofs.verify(CIRCUIT, bytes(flipped), share.statement)


def test_proof_of_other_bytes_or_circuit_is_refused(round_of_shares: list[RecordedShare]) -> None:
    for share in round_of_shares:
        assert not proofs.verify(CIRCUIT, share.proof + b"\0", share.statement)
        assert not proofs.verify(CIRCUIT, share.proof[:-1], share.statement)
        assert not proofs.verify("k10", share.proof, share.statement)


def test_proof_for_other_share_is_refused(round_of_shares: list[RecordedShare]) -> None:
    for share, other in zip(round_of_shares, round_of_shares[1:] + round_of_shares[:1], strict=True):
        assert not proofs.verify(CIRCUIT, share.proof, other.statement)


def test_proof_with_changed_public_input_is_refused(round_of_shares: list[RecordedShare]) -> None:
    share, other = round_of_shares[:2]
    statement = share.statement
    changes: list[dict[str, Any]] = [
        {"nullifier": other.statement.nullifier},
        {"c1": other.statement.c1},
        {"c2": other.statement.c2},
        {"c1": statement.c1[:31] + bytes([statement.c1[31] ^ 0x80])},
        {"proposal_id": 2},
        {"vote_decision": 0},
        {"root": proofs.EMPTY_ROOT},
        {"round_id": statement.nullifier},
    ]
    for change in changes:
        assert not proofs.verify(CIRCUIT, share.proof, replace(statement, **change)), change


@pytest.mark.parametrize("circuit", proofs.CIRCUITS)
def test_recorded_share_new_proof_verifies(
    circuit: str, round_of_shares: list[RecordedShare], tree: proofs.CommitmentTree
) -> None:
    share = round_of_shares[7]
    witness = {name: value for name, value in share.payload.items() if name != "shares_hash"}
    proof_result = proofs.prove(circuit, path=tree.path(share.position), position=share.position, **witness)
    assert (proof_result.nullifier, proof_result.root) == (share.statement.nullifier, share.statement.root)
    assert proof_result.proof != share.proof
    assert proofs.verify(circuit, proof_result.proof, share.statement)
