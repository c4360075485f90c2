"""Audits of the recorded rounds: every check passes that the data allows, and every alteration is found."""

from __future__ import annotations

import json
import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import proofs
from audit.auditor import Audit, Progress, audit_round
from audit.check_results import CHECKS, Findings, Verdict
from audit.documents import parse_round_facts
from audit.own_shares import ShareSearch, read_share_file
from audit.source import AuditTx
from audit.tally_checks import check_contributions
from audit.transactions import Contribution, decode
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import AuditError, NotFound, UsageError
from tests.support.audit_rounds import MemorySource, read_lines, single_key_round, threshold_round, verify_each_once

Change = Callable[[MemorySource, random.Random], None]


@pytest.fixture(autouse=True)
def _verify_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "verify_each", verify_each_once)


async def audit(source: MemorySource, **arguments: Any) -> Audit:
    return await audit_round(source, source.round_id, **arguments)


def of_verdict(result: Audit, verdict: Verdict) -> set[str]:
    return {check.id for check in result.result.checks if check.verdict is verdict}


def why(result: Audit, check_id: str) -> str:
    return next(check.why for check in result.result.checks if check.id == check_id)


# ---------------------------------------------------------------------- as recorded


async def test_audit_threshold_round_passes_all_but_node_comparison() -> None:
    result = await audit(threshold_round())
    assert of_verdict(result, Verdict.PASSED) == CHECKS.keys() - {"E"}
    assert of_verdict(result, Verdict.NOT_CHECKED) == {"E"}
    assert result.result.verdict is Verdict.NOT_CHECKED
    counts = {check.id: check.count for check in result.result.checks}
    assert (counts["A1"], counts["A3"], counts["C3"], counts["D1"], counts["D2"]) == (152, 16, 2, 3, 2)
    assert result.totals == {(1, 1): 1}
    assert result.counts == {(1, 1): 16}


async def test_audit_with_heads_of_two_nodes_passes() -> None:
    source = threshold_round()
    source.documents["heads"] = heads(("a", "A", "S"), ("b", "A", "S"))
    result = await audit(source)
    assert result.result.verdict is Verdict.PASSED
    assert all(not check.why and check.count for check in result.result.checks)


async def test_audit_reveals_only_passes_what_they_allow() -> None:
    result = await audit(single_key_round())
    assert of_verdict(result, Verdict.PASSED) == {"A2", "A3", "A4", "B1", "B2", "C1", "C2", "C5", "D3"}
    assert of_verdict(result, Verdict.FAILED) == set()


async def test_audit_reports_progress() -> None:
    steps: list[Progress] = []
    await audit(threshold_round(), on_progress=steps.append)
    assert steps[0] == Progress(135, 0, 16)
    assert steps[-1] == Progress(286, 16, 16)


def test_partial_decryptions_in_store_equal_those_in_blocks() -> None:
    """The consensus RPC's store has the entries of the transactions, byte for byte."""
    sent = [raw for _, _, raw in threshold_round().find(0x0D)]
    stored = read_lines("threshold-round", "partials-store.jsonl")
    assert [row["index"] for row in stored] == [2, 3]
    for raw, row in zip(sent, stored, strict=True):
        assert b64decode(row["value"]) in raw


# ---------------------------------------------------------------------- single altered bits


def flip(value: bytes, rng: random.Random) -> bytes:
    bit = rng.randrange(8 * len(value))
    return bytes(byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(value))


def flip_reveal(field: str) -> Change:
    def change(source: MemorySource, rng: random.Random) -> None:
        height, at, raw = rng.choice(source.find(0x04))
        message = RevealMessage.from_tx(raw)
        value = getattr(message, field)
        altered: Any = flip(value, rng) if isinstance(value, bytes) else value ^ (1 << rng.randrange(4))
        source.replace_tx(height, at, replace(message, **{field: altered}).to_tx())

    return change


def flip_transaction(tag: int, prefix: bytes, length: int) -> Change:
    def change(source: MemorySource, rng: random.Random) -> None:
        height, at, raw = source.find(tag)[-1]
        start = raw.index(prefix) + len(prefix)
        altered = flip(raw[start : start + length], rng)
        source.replace_tx(height, at, raw[:start] + altered + raw[start + length :])

    return change


def flip_document(*path: str | int) -> Change:
    """Flip a bit of a base64 value or of the four lowest bits of a number."""

    def change(source: MemorySource, rng: random.Random) -> None:
        place, last = find_place(source, path[:-1]), path[-1]
        value = place[last]
        if isinstance(value, int):
            place[last] = value ^ (1 << rng.randrange(4))
        else:
            place[last] = b64encode(flip(b64decode(value), rng)).decode()

    return change


def find_place(source: MemorySource, path: Sequence[str | int]) -> Any:
    place: Any = source.documents
    for step in path:
        place = place[step]
    return place


def put(*path: str | int, value: Any) -> Callable[[MemorySource], None]:
    """Replace a value of a document."""
    return lambda source: find_place(source, path[:-1]).__setitem__(path[-1], value)


def reverse(*path: str | int) -> Callable[[MemorySource], None]:
    return lambda source: find_place(source, path).reverse()


def remove(*path: str | int) -> Callable[[MemorySource], None]:
    return lambda source: find_place(source, path[:-1]).__delitem__(path[-1])


def set_code(tag: int, number: int, code: int | None) -> Callable[[MemorySource], None]:
    """Replace the result of one of the transactions with a tag; None is not known."""

    def change(source: MemorySource) -> None:
        height, at, raw = source.find(tag)[number]
        source.replace_tx(height, at, raw, code=code)

    return change


def flip_total(source: MemorySource, rng: random.Random) -> None:
    height, at, raw = source.find(0x05)[0]
    source.replace_tx(height, at, raw[:-1] + bytes([raw[-1] ^ (1 << rng.randrange(7))]))


ROUND = ("round", "round")
RESULT = ("results", "results", 0)
SUMMARY = ("summary", "proposals", 0, "options", 1)
BITS: dict[str, tuple[Change, set[str]]] = {
    "nullifier of a reveal": (flip_reveal("nullifier"), {"A3"}),
    "ciphertext of a reveal": (flip_reveal("enc_share"), {"A3"}),
    "proposal of a reveal": (flip_reveal("proposal_id"), {"A1", "A3", "B2"}),
    "option of a reveal": (flip_reveal("vote_decision"), {"A1", "A3", "B2"}),
    "proof of a reveal": (flip_reveal("proof"), {"A3"}),
    "anchor of a reveal": (flip_reveal("anchor_height"), {"A3"}),
    "round of a reveal": (flip_reveal("round_id"), {"A1", "B1"}),
    "sum": (flip_document("tally/1", "tally", "1"), {"B1"}),
    "delegated leaf": (flip_document("leaves", "blocks", 0, "leaves", 0), {"A3", "D1", "D2"}),
    "authority note's leaf": (flip_document("leaves", "blocks", 1, "leaves", 0), {"A3", "D1", "D2"}),
    "vote commitment's leaf": (flip_document("leaves", "blocks", 1, "leaves", 1), {"A3", "D1", "D2"}),
    "first root": (flip_document("roots", "roots", 0, "root"), {"D2"}),
    "last root": (flip_document("roots", "roots", 1, "root"), {"D2"}),
    "leaf in a delegation": (flip_transaction(0x02, b"\x32\x20", 32), {"D1"}),
    "leaf in a cast vote": (flip_transaction(0x03, b"\x1a\x20", 32), {"D1"}),
    "election key": (flip_document(*ROUND, "ea_pk"), {"C1"}),
    "first commitment": (flip_document(*ROUND, "feldman_commitments", 0), {"C1", "C2"}),
    "second commitment": (flip_document(*ROUND, "feldman_commitments", 1), {"C2"}),
    "partial decryption": (flip_transaction(0x0D, b"\x1a\x20", 32), {"C3"}),
    "proof of a partial decryption": (flip_transaction(0x0D, b"\x22\x40", 64), {"C3"}),
    "total in the results": (flip_document(*RESULT, "total_value"), {"C4", "C6"}),
    "total in the summary": (flip_document(*SUMMARY, "total_value"), {"C6"}),
    "total in the tally transaction": (flip_total, {"C6"}),
    "number of reveals": (flip_document(*SUMMARY, "ballot_count"), {"A1"}),
    "end of voting": (flip_document(*ROUND, "vote_end_time"), {"D3"}),
    "snapshot height": (flip_document(*ROUND, "snapshot_height"), {"D3"}),
    "snapshot's block": (flip_document(*ROUND, "snapshot_blockhash"), {"D3"}),
    "proposals": (flip_document(*ROUND, "proposals_hash"), {"D3"}),
    "nullifier root of the snapshot": (flip_document(*ROUND, "nullifier_imt_root"), {"D3"}),
    "note root of the snapshot": (flip_document(*ROUND, "nc_root"), {"D3"}),
    "round id": (flip_document(*ROUND, "vote_round_id"), {"D3"}),
}


@pytest.mark.parametrize("name", BITS)
async def test_audit_finds_altered_bit(name: str) -> None:
    change, expected = BITS[name]
    for seed in range(1 if "leaf" in name else 3):  # with another leaf, all proofs are invalid
        source = threshold_round()
        change(source, random.Random(f"{name} {seed}"))
        result = await audit(source)
        failed = of_verdict(result, Verdict.FAILED)
        # A sum or a leaf that is not on the curve or not canonical cannot be checked, which is not "passed" either.
        open_checks = failed | of_verdict(result, Verdict.NOT_CHECKED)
        assert expected <= open_checks, f"seed {seed}"
        assert expected & failed, f"seed {seed}"


async def test_audit_altered_contribution_fails_c2() -> None:
    source = threshold_round()
    for entry in source.documents["round"]["round"]["dkg_contributions"]:
        entry["feldman_commitments"] = entry["feldman_commitments"][::-1]
    assert "C2" not in of_verdict(await audit(source), Verdict.FAILED)  # the transactions add up
    for height, at, raw in source.find(0x0E):
        start = raw.index(b"\x1a\x20") + 2
        source.replace_tx(height, at, raw[:start] + source.round_id + raw[start + 32 :])
    assert "C2" in of_verdict(await audit(source), Verdict.FAILED)


def test_check_contributions_of_a_repeated_ceremony_with_other_validators() -> None:
    """A validator that contributed to the first attempt only, and one that was removed after the second."""
    source = threshold_round()
    known = source.documents["round"]["round"]
    known["ceremony_validators"].pop(0)
    known["dkg_contributions"].pop()
    facts = parse_round_facts(source.documents["round"])
    sent = [decode(raw, source.round_id) for _, _, raw in source.find(0x0E)]
    contributions = [message for message in sent if isinstance(message, Contribution)]

    def verdict(*before: Contribution) -> Verdict:
        findings = Findings()
        check_contributions(facts, [*before, *contributions], findings, all_read=True)
        return findings.result("C2").verdict

    assert verdict() is Verdict.PASSED
    assert verdict(contributions[0]) is Verdict.PASSED
    assert verdict(replace(contributions[0], creator="another")) is Verdict.NOT_CHECKED


def exchange_labels(source: MemorySource) -> None:
    """Show the totals of the summary for the other option."""
    for options in (proposal["options"] for proposal in source.documents["summary"]["proposals"]):
        options[0]["label"], options[1]["label"] = options[1]["label"], options[0]["label"]


def forge_contributions(source: MemorySource) -> None:
    """Publish commitments that match the listed contributions, but not those in the transactions."""
    known = source.documents["round"]["round"]
    listed = [entry["feldman_commitments"] for entry in known["dkg_contributions"]]
    listed[0][1] = listed[0][0]
    known["feldman_commitments"][1] = b64encode(proofs.sum_points([b64decode(c[1]) for c in listed])).decode()


def spend_non_canonical_nullifier(source: MemorySource) -> None:
    height, at, raw = source.find(0x03)[0]
    start = raw.index(b"\x0a\x20") + 2
    source.replace_tx(height, at, raw[:start] + b"\xff" * 32 + raw[start + 32 :])


def anchor_in_block_without_leaves(source: MemorySource) -> None:
    """A root exists only for blocks that append leaves."""
    source.documents["leaves"]["blocks"].append({"height": 163, "start_index": 3, "leaves": []})
    for height, at, raw in source.find(0x04):
        source.replace_tx(height, at, replace(RevealMessage.from_tx(raw), anchor_height=163).to_tx())


# ---------------------------------------------------------------------- other frauds


def heads(*nodes: tuple[str, str, str]) -> dict[str, Any]:
    return {"heads": [{"node": n, "height": 287, "block_id": i, "app_hash": a} for n, i, a in nodes]}


def insert(source: MemorySource, height: int, raw: bytes) -> None:
    index = height - source.block_list[0].height
    block = source.block_list[index]
    source.block_list[index] = replace(block, txs=(*block.txs, AuditTx(raw, 0)))


def repeat(tag: int, height: int) -> Callable[[MemorySource], None]:
    """Include the first transaction with a tag again in a later block."""
    return lambda source: insert(source, height, source.find(tag)[0][2])


def move(tag: int, height: int) -> Callable[[MemorySource], None]:
    def change(source: MemorySource) -> None:
        for old, at, raw in source.find(tag):
            source.replace_tx(old, at, raw, code=1)
            insert(source, height, raw)

    return change


def add_leaf(source: MemorySource) -> None:
    """Fork the tree: one more leaf with a consistent root."""
    source.documents["leaves"]["blocks"].append(
        {"height": 170, "start_index": 3, "leaves": [source.documents["leaves"]["blocks"][0]["leaves"][0]]}
    )
    tree = proofs.CommitmentTree()
    for block in source.documents["leaves"]["blocks"]:
        tree.append(b"".join(b64decode(leaf) for leaf in block["leaves"]))
    source.documents["roots"]["roots"].append({"height": 170, "root": b64encode(tree.root()).decode()})


def change_index(source: MemorySource) -> None:
    for entry in source.documents["round"]["round"]["ceremony_validators"]:
        entry["shamir_index"] = {1: 1, 2: 3, 3: 2}[entry["shamir_index"]]


def add_result(source: MemorySource) -> None:
    source.documents["results"]["results"].append(
        {"vote_round_id": b64encode(source.round_id).decode(), "proposal_id": 2, "total_value": 9}
    )


def add_sum(source: MemorySource) -> None:
    source.documents["tally/2"] = {"tally": {"0": source.documents["tally/1"]["tally"]["1"]}}


def other_partials(source: MemorySource) -> None:
    """A node that lists other partial decryptions than those in the blocks."""
    source.documents["partials"] = {
        "entries": [
            {
                "validator_index": 2,
                "proposal_id": 1,
                "vote_decision": 1,
                "partial_decrypt": b64encode(bytes(32)).decode(),
                "dleq_proof": b64encode(bytes(64)).decode(),
            }
        ]
    }


def differing_heads(at: int) -> Callable[[MemorySource], None]:
    def change(source: MemorySource) -> None:
        second = ["b", "A", "S"]
        second[at] = "X"
        source.documents["heads"] = heads(("a", "A", "S"), (second[0], second[1], second[2]))

    return change


FRAUDS: dict[str, tuple[Callable[[MemorySource], None], set[str]]] = {
    "a reveal is left out": (set_code(0x04, 3, 1), {"A1", "B1"}),
    "a reveal is counted twice": (repeat(0x04, 200), {"A1", "A2", "B1"}),
    "reveals are counted after the end": (move(0x04, 286), {"A4"}),
    "reveals are counted before their anchor": (move(0x04, 161), {"A4"}),
    "a reveal for another option is added to a sum": (add_sum, {"B2"}),
    "a sum is left out": (put("tally/1", value={}), {"B2"}),
    "reveals without a cast vote": (lambda source: drop_tag(source, 0x03), {"A5", "D1"}),
    "a vote without a delegation": (lambda source: drop_tag(source, 0x02), {"D1", "D4"}),
    "a vote is cast twice": (repeat(0x03, 200), {"D1", "D4"}),
    "notes are delegated twice": (repeat(0x02, 200), {"D1", "D4"}),
    "a leaf without a transaction": (add_leaf, {"D1"}),
    "leaves are swapped": (reverse("leaves", "blocks", 1, "leaves"), {"A3", "D1", "D2"}),
    "blocks of leaves are swapped": (reverse("leaves", "blocks"), {"D1"}),
    "a root is left out": (remove("roots", "roots", -1), {"D2"}),
    "indices of validators are swapped": (change_index, {"C3"}),
    "an index is used twice": (put(*ROUND, "ceremony_validators", 0, "shamir_index", value=2), {"C1"}),
    "another threshold": (put(*ROUND, "threshold", value=3), {"C1"}),
    "fewer partial decryptions than the threshold": (set_code(0x0D, 1, 1), {"C4"}),
    "partial decryptions of one validator twice": (repeat(0x0D, 285), {"C3"}),
    "other partial decryptions are listed": (other_partials, {"C3"}),
    "a result without reveals": (add_result, {"C6"}),
    "a result is left out": (put("results", "results", value=[]), {"C4", "C6"}),
    "an impossible result": (put(*RESULT, "total_value", value=1 << 28), {"C4", "C5", "C6"}),
    "partial decryptions before the end": (move(0x0D, 250), {"C7"}),
    "a tally before the end": (move(0x05, 250), {"C7"}),
    "two tallies": (lambda source: insert(source, 286, source.find(0x05)[0][2]), {"C6"}),
    "labels in the summary are exchanged": (exchange_labels, {"C6"}),
    "a title in the summary is another": (put("summary", "proposals", 0, "title", value="Proposal B"), {"C6"}),
    "contributions are forged": (forge_contributions, {"C2", "C3"}),
    "a nullifier is not canonical": (spend_non_canonical_nullifier, {"D4"}),
    "an anchor is a block without leaves": (anchor_in_block_without_leaves, {"A3"}),
    "nodes report different blocks": (differing_heads(1), {"E"}),
    "nodes report different states": (differing_heads(2), {"E"}),
}


def drop_tag(source: MemorySource, tag: int) -> None:
    for height, at, raw in source.find(tag):
        source.replace_tx(height, at, raw, code=5)


@pytest.mark.parametrize("name", FRAUDS)
async def test_audit_finds_fraud(name: str) -> None:
    change, expected = FRAUDS[name]
    source = threshold_round()
    change(source)
    assert expected <= of_verdict(await audit(source), Verdict.FAILED)


async def test_audit_shows_the_first_problems_and_counts_the_rest() -> None:
    source = threshold_round()
    move(0x04, 286)(source)
    reason = why(await audit(source), "A4")
    assert reason.count("counted after the end of voting") == 3
    assert reason.endswith("; and 13 more")


async def test_audit_other_signed_key_fails_c1() -> None:
    source = threshold_round()
    key = b64decode(source.documents["round"]["round"]["ea_pk"])
    assert "C1" in of_verdict(await audit(source, signed_ea_pk=key), Verdict.PASSED)
    result = await audit(source, signed_ea_pk=bytes(32))
    assert "C1" in of_verdict(result, Verdict.FAILED)
    assert why(result, "C1") == "the election key is not the one in the signed configuration"


# ---------------------------------------------------------------------- data that is missing


def pruned_after(blocks: int) -> Callable[[MemorySource], None]:
    def change(source: MemorySource) -> None:
        source.block_list = source.block_list[:blocks]
        source.missing = "lowest height is 999"

    return change


def end_without_tally(dropped: int, end: float | None = None) -> Callable[[MemorySource], None]:
    def change(source: MemorySource) -> None:
        source.block_list = source.block_list[:-dropped]
        last = source.block_list[-1]
        source.block_list[-1] = replace(last, time=end or last.time)

    return change


def not_yet_confirmed(source: MemorySource) -> None:
    known = source.documents["round"]["round"]
    for name in ("ea_pk", "feldman_commitments", "dkg_contributions", "threshold"):
        known.pop(name)
    known["status"] = 4
    source.block_list = source.block_list[:1]
    source.documents |= {"leaves": {}, "results": {}, "tally/1": {}, "roots": {"roots": []}}


def still_running(source: MemorySource) -> None:
    put(*ROUND, "status", value=1)(source)
    source.documents["results"] = {}
    source.block_list = source.block_list[:100]


def tally_timed_out(source: MemorySource) -> None:
    source.documents["round"]["round"]["tally_timed_out"] = True
    source.documents["results"] = {}
    for entry in source.documents["summary"]["proposals"][0]["options"]:
        entry.pop("total_value", None)
    drop_tag(source, 0x05)


def without_reveals(source: MemorySource) -> None:
    for tag in (0x02, 0x03, 0x04, 0x05, 0x0D):
        drop_tag(source, tag)
    source.documents |= {"leaves": {}, "results": {}, "tally/1": {}, "roots": {"roots": []}}
    for option in source.documents["summary"]["proposals"][0]["options"]:
        option.pop("ballot_count", None)
        option.pop("total_value", None)


def vote_in_batches(source: MemorySource) -> None:
    for height, at, _ in [*source.find(0x02), *source.find(0x03)]:
        source.replace_tx(height, at, b"\x07" + source.round_id)


def lengthen_proof(source: MemorySource) -> None:
    height, at, raw = source.find(0x04)[0]
    message = RevealMessage.from_tx(raw)
    source.replace_tx(height, at, replace(message, proof=message.proof + b"\0").to_tx())


BLOCKS = {"A1", "A2", "A3", "A4", "A5", "B1", "B2", "C3", "C4", "C6", "C7", "D1", "D4"}
VOTES = {"A5", "D1", "D4"}
TALLY = {"C3", "C4", "C5", "C6", "C7"}
INCOMPLETE: dict[str, tuple[Callable[[MemorySource], object], set[str]]] = {
    "no leaves": (remove("leaves"), {"A3", "D1", "D2"}),
    "no roots": (remove("roots"), {"D2"}),
    "no summary": (remove("summary"), {"A1", "C6"}),
    "no results": (remove("results"), TALLY),
    "no sum": (remove("tally/1"), {"B1", "B2"}),
    "no validators": (remove(*ROUND, "ceremony_validators"), {"C1"}),
    **{f"pruned after {blocks} blocks": (pruned_after(blocks), BLOCKS) for blocks in (0, 40, 57, 140)},
    "a gap in the blocks": (lambda source: source.block_list.pop(52), BLOCKS),
    "no tally": (end_without_tally(1), {"C3", "C4", "C6"}),
    "no tally and one partial decryption": (end_without_tally(2), {"C3", "C4", "C6"}),
    # The end of voting is in block 283.
    "no tally and no partial decryption": (end_without_tally(3, end=1795426279.0), {"C3", "C4", "C6"}),
    "the key ceremony has not ended": (not_yet_confirmed, {"A1", "B1", "B2", "C1", "C2"} | TALLY),
    "the round is running": (still_running, {"A1", "B1", "B2"} | TALLY),
    "the tally timed out": (tally_timed_out, TALLY),
    "no reveals": (without_reveals, set()),
    "the result of a reveal is unknown": (set_code(0x04, 0, None), BLOCKS),
    "the result of a delegation is unknown": (set_code(0x02, 0, None), BLOCKS),
    "the result of a vote is unknown": (set_code(0x03, 0, None), BLOCKS),
    "votes in batches only": (vote_in_batches, VOTES),
    "a batch of votes": (lambda source: insert(source, 200, b"\x06" + source.round_id), VOTES),
    "a transaction that cannot be decoded": (
        lambda source: insert(source, 200, b"\x03\x0a\x20" + source.round_id + b"\x0b"),
        BLOCKS,
    ),
    "a proof of unknown length": (lengthen_proof, {"A3"}),
}
REASONS = {"pruned after 40 blocks": ("A1", "lowest height is 999"), "a proof of unknown length": ("A3", "4001 bytes")}


@pytest.mark.parametrize("name", INCOMPLETE)
async def test_audit_of_incomplete_data_is_not_checked_and_fails_no_check(name: str) -> None:
    change, expected = INCOMPLETE[name]
    source = threshold_round()
    change(source)
    result = await audit(source)
    assert of_verdict(result, Verdict.FAILED) == set()
    assert of_verdict(result, Verdict.NOT_CHECKED) == expected | {"E"}
    check_id, text = REASONS.get(name, ("E", ""))
    assert text in why(result, check_id)


async def test_audit_of_incomplete_archive_without_summary_is_no_failure() -> None:
    source = single_key_round()
    del source.documents["summary"]
    source.block_list.pop()
    result = await audit(source)
    assert of_verdict(result, Verdict.FAILED) == set()
    assert of_verdict(result, Verdict.PASSED) <= {"C1", "C2", "C5", "D2", "D3"}


async def test_audit_checks_a_limited_number_of_partial_decryptions() -> None:
    """A node may list any number; each takes time that grows with the threshold."""
    source = threshold_round()
    drop_tag(source, 0x05)
    other_partials(source)
    source.documents["partials"]["entries"] *= 1500
    result = await audit(source)
    assert "proposal 1, option 1: 1500 partial decryptions" in why(result, "C3")
    assert next(check.count for check in result.result.checks if check.id == "C3") == 1000


async def test_audit_round_with_an_impossible_threshold_is_an_error() -> None:
    source = threshold_round()
    source.documents["round"]["round"]["threshold"] = 1001
    with pytest.raises(AuditError, match="threshold: 1001 is out of range"):
        await audit(source)


async def test_audit_reason_has_only_the_beginning_of_a_long_name() -> None:
    source = threshold_round()
    source.documents["tally/1"]["tally"]["1" * 100_000] = ""
    assert len(why(await audit(source), "B1")) < 100


async def test_audit_one_node_is_not_a_comparison() -> None:
    source = threshold_round()
    source.documents["heads"] = heads(("a", "A", "S"))
    result = await audit(source)
    assert "E" in of_verdict(result, Verdict.NOT_CHECKED)
    source.documents["heads"] = heads(("a", "A", "S"), ("a", "A", "S"))
    assert "E" in of_verdict(await audit(source), Verdict.NOT_CHECKED)
    source.documents["heads"]["heads"] = heads(("a", "A", "S"), ("b", "A", "S"))["heads"]
    for entry in source.documents["heads"]["heads"]:
        entry["round"] = ""
    assert "E" in of_verdict(await audit(source), Verdict.NOT_CHECKED)
    for entry in source.documents["heads"]["heads"]:
        del entry["round"]
        entry["height"] = 286  # its app hash is from before the last block that was read
    assert "E" in of_verdict(await audit(source), Verdict.NOT_CHECKED)


async def test_audit_unknown_round_is_not_found() -> None:
    source = threshold_round()
    del source.documents["round"]
    with pytest.raises(NotFound):
        await audit(source)


@pytest.mark.parametrize("document", [None, [], {}, {"round": {}}, {"round": {"vote_round_id": 7}}])
async def test_audit_malformed_round_is_an_error(document: object) -> None:
    source = threshold_round()
    source.documents["round"] = document
    with pytest.raises(AuditError):
        await audit(source)


@pytest.mark.parametrize("name", ["leaves", "roots", "summary", "results", "tally/1", "heads", "partials"])
@pytest.mark.parametrize(
    "document", [[], {"blocks": 1, "roots": 1, "proposals": 1, "results": 1, "heads": 1, "entries": 1, "tally": 1}]
)
async def test_audit_malformed_document_is_never_passed(name: str, document: object) -> None:
    source = threshold_round()
    source.documents[name] = document
    result = await audit(source)
    assert result.result.verdict is not Verdict.PASSED
    assert name.partition("/")[0] in {"heads", "partials"} or len(of_verdict(result, Verdict.NOT_CHECKED)) > 1


def list_twice(*path: str | int) -> Callable[[MemorySource], None]:
    """List a wrong entry first. Only one of the two is right, and a reader may see the other one."""

    def change(source: MemorySource) -> None:
        entries = find_place(source, path)
        wrong = {**entries[0], **{name: value + 1 for name, value in entries[0].items() if name == "total_value"}}
        entries.insert(0, wrong)

    return change


def list_sum_twice(source: MemorySource) -> None:
    tally = source.documents["tally/1"]["tally"]
    source.documents["tally/1"]["tally"] = {"01": b64encode(bytes(64)).decode(), **tally}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (list_twice("summary", "proposals"), {"A1", "C6"}),
        (list_twice("summary", "proposals", 0, "options"), {"A1", "C6"}),
        (list_twice("roots", "roots"), {"D2"}),
        (list_sum_twice, {"B1", "B2"}),
    ],
)
async def test_audit_entry_listed_twice_is_not_checked(
    change: Callable[[MemorySource], None], expected: set[str]
) -> None:
    source = threshold_round()
    change(source)
    result = await audit(source)
    assert of_verdict(result, Verdict.NOT_CHECKED) == expected | {"E"}
    assert all("listed twice" in why(result, check_id) for check_id in expected)


@pytest.mark.parametrize(
    "path", [("proposals",), ("proposals", 0, "options"), ("ceremony_validators",)], ids=lambda path: path[-1]
)
async def test_audit_round_with_an_entry_listed_twice_is_an_error(path: tuple[str | int, ...]) -> None:
    source = threshold_round()
    list_twice(*ROUND, *path)(source)
    with pytest.raises(AuditError, match="listed twice"):
        await audit(source)


async def test_audit_key_without_threshold_uses_proofs_of_decryption() -> None:
    source = single_key_round()
    source.has_all_blocks = True
    known = source.documents["round"]["round"]
    for name in ("feldman_commitments", "dkg_contributions", "threshold"):
        known.pop(name)
    secret, key = proofs.elgamal_keygen(b"whole key")
    known["ea_pk"] = b64encode(key).decode()
    result = await audit(source)
    assert secret
    assert of_verdict(result, Verdict.FAILED) <= {"A1", "A5", "D1", "D4"}
    assert {"C2", "C3", "C4"} <= of_verdict(result, Verdict.NOT_CHECKED)
    assert why(result, "C2") == "the round has no key ceremony"


# ---------------------------------------------------------------------- own shares


def exchange_proof(source: MemorySource) -> None:
    (height, at, raw), (_, _, other) = source.find(0x04)[:2]
    source.replace_tx(height, at, replace(RevealMessage.from_tx(raw), proof=RevealMessage.from_tx(other).proof).to_tx())


fail_first_reveal = set_code(0x04, 0, 1)


def fail_first_uncounted(source: MemorySource) -> None:
    """The chain has not counted the first reveal."""
    fail_first_reveal(source)
    source.documents["summary"]["proposals"][0]["options"][1]["ballot_count"] -= 1


def fail_first_of_running(source: MemorySource) -> None:
    still_running(source)
    fail_first_reveal(source)


@pytest.mark.parametrize(
    ("change", "state", "proof_states", "are_counted"),
    [
        (lambda _: None, "counted", ["valid"], True),
        (repeat(0x04, 240), "counted_twice", ["valid", "valid"], False),
        (fail_first_uncounted, "missing", [], False),
        (fail_first_reveal, "not_checked", [], None),
        (exchange_proof, "counted", ["invalid"], False),
        (lengthen_proof, "counted", ["not_checked"], None),
        (remove("leaves"), "counted", ["not_checked"], None),
        (still_running, "counted", ["valid"], True),
        (fail_first_of_running, "not_checked", [], None),
        (pruned_after(2), "not_checked", [], None),
        (set_code(0x04, 0, None), "not_checked", [], None),
    ],
)
async def test_audit_says_whether_a_share_was_counted(
    change: Callable[[MemorySource], object], state: str, proof_states: list[str], are_counted: bool | None
) -> None:
    source = threshold_round()
    nullifier = RevealMessage.from_tx(source.find(0x04)[0][2]).nullifier
    change(source)
    own = (await audit(source, search=ShareSearch({nullifier: []}))).own
    assert own is not None
    (share,) = own.shares
    assert (share.nullifier, share.state) == (nullifier.hex(), state)
    assert [reveal.proof for reveal in share.reveals] == proof_states
    assert {(reveal.proposal, reveal.option) for reveal in share.reveals} <= {(1, 1)}
    assert own.are_counted is are_counted
    assert [own.counted, own.counted_twice, own.missing, own.not_checked] == [
        int(each == state) for each in ("counted", "counted_twice", "missing", "not_checked")
    ]


async def test_audit_of_own_share_uses_proofs_that_were_verified_before(monkeypatch: pytest.MonkeyPatch) -> None:
    source, valid_proofs = threshold_round(), set[bytes]()
    nullifier = RevealMessage.from_tx(source.find(0x04)[0][2]).nullifier
    await audit(source, valid_proofs=valid_proofs)
    monkeypatch.setattr(proofs, "verify_each", lambda _circuit, items: ["verified again"] * len(items))
    own = (await audit(source, search=ShareSearch({nullifier: []}), valid_proofs=valid_proofs)).own
    assert own is not None
    assert own.are_counted


HEX, OTHER = "0a" * 32, "Bb" * 32
BASE64 = b64encode(b"\x0c" * 32).decode()
ROUND_HEX = "07" * 32


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{HEX}\n\n {OTHER}\r\n{HEX}", {HEX, OTHER.lower()}),
        ("\ufeff" + HEX, {HEX}),
        (json.dumps({"shares": [{"index": 0, "nullifier": HEX}, {"nullifier": OTHER}]}), {HEX, OTHER.lower()}),
        (json.dumps([{"share_nullifier": BASE64, "vote_round_id": ROUND_HEX.upper()}]), {"0c" * 32}),
        (json.dumps([{"round": OTHER, "votes": [{"nullifier": HEX}]}, {"nullifier": OTHER}]), {OTHER.lower()}),
        (json.dumps({"round": "A title", "nullifier": HEX}), {HEX}),
        (json.dumps([{"round": ROUND_HEX, "nullifier": HEX}, {"round": OTHER, "nullifier": HEX}]), {HEX}),
    ],
)
def test_share_file_has_the_shares_of_the_round(text: str, found: set[str]) -> None:
    search = read_share_file(text.encode()).search(bytes.fromhex(ROUND_HEX))
    assert {nullifier.hex() for nullifier in search.found} == found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no nullifier"),
        (b"{}", "no nullifier"),
        (b"\xff\xfe0a", "must be text"),
        (f"{HEX}\n{HEX[:-2]}".encode(), "line 2 must be 64 hex"),
        (f"{HEX}00".encode(), "line 1 must be 64 hex"),
        (f"0x{HEX[2:]}".encode(), "line 1 must be 64 hex"),
        (BASE64.encode(), "line 1 must be 64 hex"),
        (b'{"nullifier": "0a0a"}', "nullifier must be 32 bytes in hex or base64"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "nested too deeply"),
        (b"".join(b"%064x\n" % number for number in range(1_000_001)), "at most 1000000 shares"),
    ],
)
def test_unusable_share_file_is_refused_without_its_values(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_share_file(data)
    assert HEX[:8] not in str(caught.value)
