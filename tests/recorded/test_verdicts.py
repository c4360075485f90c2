"""Every recorded answer to a broadcast is classified right, and so is what no recording can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helper.chain.verdicts import REFUSALS, Spends, Verdict, classify
from tests.conftest import recorded_lines

MEANINGS = {
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
POSTS = [row for row in recorded_lines("exchanges.jsonl") if row["path"].endswith("/reveal-share")]


def test_every_recorded_broadcast_has_its_meaning_here() -> None:
    assert {row["name"] for row in POSTS} == set(MEANINGS)


@pytest.mark.parametrize("row", POSTS, ids=lambda row: row["name"])
def test_recorded_refusals(row: dict[str, Any]) -> None:
    outcome = classify(row["status"], json.dumps(row["response"]).encode(), sent=True)
    assert outcome.verdict is MEANINGS[row["name"]]
    assert outcome.code == row["response"].get("code")


def test_recorded_acceptances(recorded_reveals: list[dict[str, Any]]) -> None:
    outcomes = [classify(200, json.dumps(row["response"]).encode(), sent=True) for row in recorded_reveals]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.ACCEPTED] * 16
    assert [outcome.tx_hash for outcome in outcomes] == [row["response"]["tx_hash"] for row in recorded_reveals]


@pytest.mark.rule("R11", "R12")
def test_what_each_meaning_costs() -> None:
    costs = {verdict: verdict.spends for verdict in Verdict}
    attempts = {verdict for verdict, cost in costs.items() if cost is Spends.ATTEMPT}
    assert attempts == {Verdict.BAD_PROOF}
    assert [verdict for verdict, cost in costs.items() if cost is Spends.FINAL] == [Verdict.PERMANENT]
    # An outage, a race that another helper won, the end of a round, a refusal that says nothing of the proof: all else
    # is nobody's fault.
    assert {cost for verdict, cost in costs.items() if verdict not in (Verdict.BAD_PROOF, Verdict.PERMANENT)} == {
        Spends.NONE
    }


def refusal(code: int, log: str, status: int = 422) -> Verdict:
    body = json.dumps({"tx_hash": "AB", "code": code, "log": log}).encode()
    return classify(status, body, sent=True).verdict


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
        (1, "something that no version ever said", Verdict.REFUSED),
        # The log knows better than the code.
        (5, "invalid zero-knowledge proof: no commitment tree root at height 85", Verdict.BEHIND),
        (5, "nullifier already spent: ab", Verdict.SPENT),
    ],
)
def test_code_and_log_together(code: int, log: str, verdict: Verdict) -> None:
    assert refusal(code, log) is verdict
    assert refusal(code, log, status=200) is verdict, "a 200 with a code is that code"


def test_a_resend_in_the_mempool_is_accepted() -> None:
    body = {"tx_hash": "AB", "code": 0, "log": "tx pending in mempool (duplicate submission)"}
    assert classify(200, json.dumps(body).encode(), sent=True).verdict is Verdict.ACCEPTED


@pytest.mark.parametrize("status", [429, 503, 404, 401, 301, 307])
def test_not_looked_at(status: int) -> None:
    assert classify(status, b"<html>", sent=True).verdict is Verdict.UNAVAILABLE


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
def test_answers_that_leave_it_open(status: int, body: bytes) -> None:
    assert classify(status, body, sent=True).verdict is Verdict.AMBIGUOUS


def test_no_answer() -> None:
    lost, never_sent = classify(None, None, sent=True), classify(None, None, sent=False)
    assert (lost.verdict, lost.left) == (Verdict.AMBIGUOUS, True)
    assert (never_sent.verdict, never_sent.left) == (Verdict.UNAVAILABLE, False)


def test_logs_carry_no_nullifier(recorded_exchanges: list[dict[str, Any]]) -> None:
    row = next(row for row in recorded_exchanges if "already spent" in row["name"])
    nullifier = row["response"]["log"].rsplit(" ", 1)[1]
    outcome = classify(row["status"], json.dumps(row["response"]).encode(), sent=True)
    assert outcome.log.startswith("nullifier already spent")
    assert nullifier not in outcome.log
    assert "\n" not in classify(422, b'{"code":1,"log":"a\\nb"}', sent=True).log


def test_the_table_ends_with_a_row_for_everything() -> None:
    assert REFUSALS[-1] == ("", None, Verdict.REFUSED)
