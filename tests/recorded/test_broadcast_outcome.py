"""Classification of every recorded response to a broadcast, and of responses that cannot be recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helper.chain.broadcast_outcome import MESSAGE_REFUSALS, REFUSALS, Verdict, classify_response, create_unanswered
from tests.conftest import read_recorded_lines

VERDICT_BY_EXCHANGE = {
    "reveal after the round closed": Verdict.ROUND_CLOSED,
    "reveal: malformed JSON": Verdict.PERMANENT,
    "reveal: anchor height zero": Verdict.PERMANENT,
    "reveal: short ciphertext": Verdict.PERMANENT,
    "reveal: empty proof": Verdict.PERMANENT,
    "reveal: unknown round": Verdict.ROUND_UNKNOWN,
    "reveal: the very same bytes again, round closed": Verdict.ROUND_CLOSED,
    "reveal: the very same bytes again, round active": Verdict.ACCEPTED,
    "reveal: proof does not verify": Verdict.BAD_PROOF,
    "reveal: no root at the anchor height": Verdict.BEHIND,
    "reveal: nullifier already spent (another helper was first)": Verdict.SPENT,
    "reveal: unknown round, active chain": Verdict.ROUND_UNKNOWN,
    "node lost its consensus RPC while broadcasting": Verdict.AMBIGUOUS,
}
RECORDED_POSTS = [row for row in read_recorded_lines("exchanges.jsonl") if row["path"].endswith("/reveal-share")]


def test_verdicts_cover_every_recorded_broadcast() -> None:
    assert {row["name"] for row in RECORDED_POSTS} == set(VERDICT_BY_EXCHANGE)


@pytest.mark.parametrize("row", RECORDED_POSTS, ids=lambda row: row["name"])
def test_recorded_refusal_has_expected_verdict(row: dict[str, Any]) -> None:
    outcome = classify_response(row["status"], json.dumps(row["response"]).encode())
    assert outcome.verdict is VERDICT_BY_EXCHANGE[row["name"]]


def test_recorded_acceptance_has_accepted_verdict(recorded_reveals: list[dict[str, Any]]) -> None:
    outcomes = [classify_response(200, json.dumps(row["response"]).encode()) for row in recorded_reveals]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.ACCEPTED] * 16
    assert [outcome.tx_hash for outcome in outcomes] == [row["response"]["tx_hash"] for row in recorded_reveals]


@pytest.mark.rule("R11", "R12")
def test_only_refusals_of_the_message_can_cost_an_attempt() -> None:
    # All other verdicts are not caused by the message: an outage, a reveal by another helper, the end of a round, a
    # refusal without a verdict on the proof.
    assert {Verdict.BAD_PROOF, Verdict.PERMANENT} == MESSAGE_REFUSALS


def refusal_response(code: int, log: str, status: int = 422) -> Verdict:
    body = json.dumps({"tx_hash": "AB", "code": code, "log": log}).encode()
    return classify_response(status, body).verdict


@pytest.mark.parametrize(
    ("code", "log", "verdict"),
    [
        (2, "", Verdict.SPENT),
        (3, "", Verdict.ROUND_UNKNOWN),
        (4, "", Verdict.ROUND_CLOSED),
        (5, "", Verdict.BAD_PROOF),
        (7, "", Verdict.REFUSED_ANCHOR),
        (8, "", Verdict.PERMANENT),
        (9, "", Verdict.PERMANENT),
        (13, "", Verdict.PERMANENT),
        (1, "vote_end_time 1795268195 <= block_time 1795268200", Verdict.ROUND_CLOSED),
        (20, "mempool is full: number of txs 5000", Verdict.UNAVAILABLE),
        (19, "tx already exists in cache", Verdict.ACCEPTED),
        (1, "an error of no known version", Verdict.REFUSED),
        # The log is more specific than the code.
        (5, "invalid zero-knowledge proof: no commitment tree root at height 85", Verdict.BEHIND),
        (5, "nullifier already spent: ab", Verdict.SPENT),
    ],
)
def test_verdict_depends_on_code_and_log(code: int, log: str, verdict: Verdict) -> None:
    assert refusal_response(code, log) is verdict
    assert refusal_response(code, log, status=200) is verdict, "a 200 with a code has the verdict of that code"


def test_verdict_of_mempool_duplicate_is_accepted() -> None:
    body = {"tx_hash": "AB", "code": 0, "log": "tx pending in mempool (duplicate submission)"}
    assert classify_response(200, json.dumps(body).encode()).verdict is Verdict.ACCEPTED


@pytest.mark.parametrize("status", [429, 503, 404, 401, 301, 307])
def test_verdict_of_unprocessed_request_is_unavailable(status: int) -> None:
    assert classify_response(status, b"<html>").verdict is Verdict.UNAVAILABLE


def test_verdict_of_request_that_the_node_did_not_read_in_time_is_unavailable() -> None:
    body = b'{"error":"read body: read tcp 10.0.0.1:1317->10.0.0.2:4711: i/o timeout"}'
    assert classify_response(400, body).verdict is Verdict.UNAVAILABLE


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>welcome</html>"),
        (200, b'{"tx_hash":"AB","co'),
        (200, b"{}"),
        (200, b"[]"),
        (200, b'{"code":"zero"}'),
        (200, b'{"code":true,"tx_hash":"AB"}'),
        (422, b"<html>"),
        (422, b"{}"),
        (400, b"<html>bad request</html>"),
        (500, b'{"error":"oops"}'),
        (502, b"<html>"),
        (504, b""),
    ],
)
def test_verdict_of_unclear_response_is_ambiguous(status: int, body: bytes) -> None:
    assert classify_response(status, body).verdict is Verdict.AMBIGUOUS


def test_verdict_without_response_depends_on_sent() -> None:
    lost, never_sent = create_unanswered("", may_be_sent=True), create_unanswered("", may_be_sent=False)
    assert (lost.verdict, lost.may_be_sent) == (Verdict.AMBIGUOUS, True)
    assert (never_sent.verdict, never_sent.may_be_sent) == (Verdict.UNAVAILABLE, False)


def test_verdict_log_contains_no_nullifier(recorded_exchanges: list[dict[str, Any]]) -> None:
    row = next(row for row in recorded_exchanges if "already spent" in row["name"])
    nullifier = row["response"]["log"].rsplit(" ", 1)[1]
    outcome = classify_response(row["status"], json.dumps(row["response"]).encode())
    assert outcome.log.startswith("nullifier already spent")
    assert nullifier not in outcome.log
    assert "\n" not in classify_response(422, b'{"code":1,"log":"a\\nb"}').log


def test_verdict_table_ends_with_catch_all() -> None:
    assert REFUSALS[-1] == ("", None, Verdict.REFUSED)
