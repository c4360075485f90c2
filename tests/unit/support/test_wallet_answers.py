"""A wallet of library version 5.3.0 believes an answer only if it has exactly the expected form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helper.ingest.payload import ingress_receipt
from helper.server.middleware import JsonResponse
from tests.support.wallet_answers import (
    MAX_SHARE_ANSWER_BYTES,
    Answer,
    ChainOutcome,
    ShareOutcome,
    TxState,
    classify_chain_answer,
    classify_share_answer,
    classify_tx_answer,
    is_confirmed,
    is_missing_route,
    is_ready,
    is_receipt,
)

TOKEN = "0123456789abcdef" * 4
RECEIPT = {"error": {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": TOKEN}}
TOKEN_TWICE = json.dumps(RECEIPT).encode().replace(b'"attempt"', b'"attempt": "", "attempt"')
HTML = b"<!doctype html><title>Sign in</title>"
HASH = "AB" * 32


def answer_with(status: int, body: object, content_type: str = "application/json") -> Answer:
    return Answer(status, content_type, body if isinstance(body, bytes) else json.dumps(body).encode())


def receipt_with(**changes: object) -> dict[str, object]:
    return {"error": {**RECEIPT["error"], **changes}}


@pytest.mark.rule("N4")
def test_receipt_of_this_service_is_believed() -> None:
    response = JsonResponse(ingress_receipt(TOKEN), 408)
    answer = Answer(response.status_code, response.headers["content-type"], bytes(response.body))
    assert is_receipt(answer, TOKEN)


@pytest.mark.parametrize(
    "answer",
    [
        answer_with(408, receipt_with(attempt=TOKEN.upper())),
        answer_with(408, receipt_with(attempt=TOKEN[:-1])),
        answer_with(408, receipt_with(attempt="f" * 64)),
        answer_with(408, receipt_with(attempt=[TOKEN, TOKEN])),
        answer_with(408, TOKEN_TWICE),
        answer_with(408, receipt_with(version=2)),
        answer_with(408, receipt_with(version=True)),
        answer_with(408, receipt_with(version=1.0)),
        answer_with(408, receipt_with(dispatch="started")),
        answer_with(408, receipt_with(note="unknown")),
        answer_with(408, {**RECEIPT, "status": "error"}),
        answer_with(408, {"error": {name: value for name, value in RECEIPT["error"].items() if name != "code"}}),
        answer_with(408, RECEIPT, "text/html"),
        answer_with(408, RECEIPT, ""),
        answer_with(408, json.dumps(RECEIPT).encode() + b"{}"),
        answer_with(408, HTML),
        answer_with(400, RECEIPT),
        answer_with(200, RECEIPT),
        Answer(408, "application/json", None),
    ],
)
def test_receipt_with_any_deviation_is_not_believed(answer: Answer) -> None:
    assert not is_receipt(answer, TOKEN)
    assert classify_share_answer(answer, TOKEN) in (ShareOutcome.REFUSED, ShareOutcome.UNKNOWN)
    assert classify_chain_answer(answer, TOKEN, is_batch=False).outcome is ChainOutcome.UNKNOWN


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (answer_with(200, {"status": "queued"}), ShareOutcome.ACCEPTED),
        (
            answer_with(200, {"status": "duplicate", "more": 1}, "Application/JSON; a=b"),
            ShareOutcome.ACCEPTED,
        ),
        (answer_with(200, {"status": "accepted"}), ShareOutcome.UNKNOWN),
        (answer_with(200, {"status": "queued"}, "text/plain"), ShareOutcome.UNKNOWN),
        (answer_with(200, {}), ShareOutcome.UNKNOWN),
        (answer_with(200, ["queued"]), ShareOutcome.UNKNOWN),
        (answer_with(200, HTML, "text/html"), ShareOutcome.UNKNOWN),
        (answer_with(200, b'{"status":"queued"'), ShareOutcome.UNKNOWN),
        (answer_with(200, b'{"status":"queued"' + b" " * MAX_SHARE_ANSWER_BYTES + b"}"), ShareOutcome.UNKNOWN),
        (Answer(200, "application/json", None), ShareOutcome.UNKNOWN),
        (answer_with(429, {"status": "error", "error": "later"}), ShareOutcome.REPEATABLE),
        (answer_with(408, RECEIPT), ShareOutcome.REPEATABLE),
        (Answer(None, was_sent=False), ShareOutcome.REPEATABLE),
        (Answer(None, was_sent=True), ShareOutcome.UNKNOWN),
        *((answer_with(status, {"error": "no"}), ShareOutcome.UNKNOWN) for status in (500, 502, 503, 504)),
        *((answer_with(status, {"error": "no"}), ShareOutcome.REFUSED) for status in (400, 401, 404, 408, 409, 413)),
        *((answer_with(status, HTML, "text/html"), ShareOutcome.REFUSED) for status in (301, 302, 307, 308)),
    ],
)
def test_share_answer_has_the_outcome_of_the_table(answer: Answer, outcome: ShareOutcome) -> None:
    assert classify_share_answer(answer, TOKEN) is outcome


ACCEPTED: dict[str, Any] = {"tx_hash": HASH, "code": 0}
DIGEST = {"batch_digest": "ab" * 32}


@pytest.mark.parametrize(
    ("answer", "is_batch", "outcome"),
    [
        (answer_with(200, ACCEPTED), False, ChainOutcome.ACCEPTED),
        (answer_with(200, {**ACCEPTED, "log": ""}), False, ChainOutcome.ACCEPTED),
        (answer_with(200, {**ACCEPTED, **DIGEST}), True, ChainOutcome.ACCEPTED),
        (answer_with(200, ACCEPTED), True, ChainOutcome.UNKNOWN),
        (answer_with(200, {**ACCEPTED, **DIGEST}), False, ChainOutcome.UNKNOWN),
        (answer_with(200, {**ACCEPTED, "batch_digest": "xy"}), True, ChainOutcome.UNKNOWN),
        (answer_with(200, {**ACCEPTED, "height": 7}), False, ChainOutcome.UNKNOWN),
        (answer_with(200, {**ACCEPTED, "code": False}), False, ChainOutcome.UNKNOWN),
        (answer_with(200, {**ACCEPTED, "code": 1}), False, ChainOutcome.UNKNOWN),
        (answer_with(200, {**ACCEPTED, "tx_hash": "AB"}), False, ChainOutcome.UNKNOWN),
        (answer_with(200, ACCEPTED, "text/html"), False, ChainOutcome.UNKNOWN),
        (answer_with(200, HTML, "text/html"), False, ChainOutcome.UNKNOWN),
        (answer_with(422, {"code": 1, "log": "nullifier already spent"}), False, ChainOutcome.REFUSED),
        (answer_with(422, {"code": 0, "log": "odd"}), False, ChainOutcome.UNKNOWN),
        (answer_with(408, RECEIPT), True, ChainOutcome.NOT_STARTED),
        (answer_with(408, {"error": "timeout"}), True, ChainOutcome.UNKNOWN),
        (Answer(None, was_sent=False), False, ChainOutcome.NOT_STARTED),
        (Answer(None, was_sent=True), False, ChainOutcome.UNKNOWN),
        (answer_with(404, {"error": "not found"}), True, ChainOutcome.NO_ROUTE),
        (answer_with(405, {"error": "method not allowed"}), True, ChainOutcome.NO_ROUTE),
        (answer_with(404, {"error": "not found", "status": "error"}), True, ChainOutcome.UNKNOWN),
        (answer_with(404, HTML, "text/html"), True, ChainOutcome.UNKNOWN),
        *((answer_with(status, {"error": "no"}), False, ChainOutcome.UNKNOWN) for status in (302, 400, 429, 502, 503)),
    ],
)
def test_chain_answer_has_the_outcome_of_the_table(answer: Answer, is_batch: bool, outcome: ChainOutcome) -> None:
    assert classify_chain_answer(answer, TOKEN, is_batch=is_batch).outcome is outcome


INCLUDED: dict[str, Any] = {
    "height": "7",
    "code": 0,
    "log": "",
    "events": [{"type": "cast_vote", "attributes": [{"key": "leaf_index", "value": "1,2"}]}],
}


def test_transaction_in_a_block_has_its_events() -> None:
    reply = classify_tx_answer(answer_with(200, INCLUDED))
    assert (reply.state, reply.events) == (TxState.SUCCEEDED, {"cast_vote": {"leaf_index": "1,2"}})


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (answer_with(422, {**INCLUDED, "code": 5}), TxState.FAILED),
        (answer_with(200, {**INCLUDED, "code": 5}), TxState.UNKNOWN),
        (answer_with(200, {**INCLUDED, "height": 7}), TxState.UNKNOWN),
        (answer_with(200, {name: value for name, value in INCLUDED.items() if name != "log"}), TxState.UNKNOWN),
        (answer_with(200, {**INCLUDED, "events": [{"type": "cast_vote"}]}), TxState.UNKNOWN),
        (answer_with(404, {"error": "tx not found"}), TxState.ABSENT),
        (answer_with(404, {"error": "not found"}), TxState.UNKNOWN),
        (answer_with(404, {"error": "tx not found", "status": "error"}), TxState.UNKNOWN),
        (answer_with(502, {"error": "tx not found"}), TxState.UNKNOWN),
        (answer_with(200, HTML, "text/html"), TxState.UNKNOWN),
        (Answer(None), TxState.UNKNOWN),
    ],
)
def test_transaction_answer_has_the_state_of_the_table(answer: Answer, state: TxState) -> None:
    assert classify_tx_answer(answer).state is state


def test_status_answers_are_read_only_as_json() -> None:
    assert is_ready(answer_with(200, {"status": "ok", "tree": {}}))
    assert not is_ready(answer_with(200, {"status": "ok"}, "text/html"))
    assert not is_ready(answer_with(503, {"status": "ok"}))
    assert not is_ready(Answer(None))
    assert is_confirmed(answer_with(200, {"status": "confirmed"})) is True
    assert is_confirmed(answer_with(200, {"status": "pending"})) is False
    for said_nothing in (
        answer_with(200, {"status": "counted"}),
        answer_with(200, HTML, "text/html"),
        answer_with(503, {"status": "confirmed"}),
        Answer(None),
    ):
        assert is_confirmed(said_nothing) is None
    assert not is_missing_route(answer_with(200, {"error": "not found"}))
