"""A wallet of library version 5.3.0 believes a response only if it has exactly the expected form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helper.ingest.payload import ingress_receipt
from helper.server.middleware import JsonResponse
from tests.support.wallet_responses import (
    MAX_SHARE_RESPONSE_BYTES,
    ChainOutcome,
    ShareOutcome,
    TxState,
    WalletResponse,
    classify_chain_response,
    classify_share_response,
    classify_tx_response,
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


def response_with(status: int, body: object, content_type: str = "application/json") -> WalletResponse:
    return WalletResponse(status, content_type, body if isinstance(body, bytes) else json.dumps(body).encode())


def receipt_with(**changes: object) -> dict[str, object]:
    return {"error": {**RECEIPT["error"], **changes}}


@pytest.mark.rule("N4")
def test_receipt_of_this_service_is_believed() -> None:
    sent = JsonResponse(ingress_receipt(TOKEN), 408)
    response = WalletResponse(sent.status_code, sent.headers["content-type"], bytes(sent.body))
    assert is_receipt(response, TOKEN)


@pytest.mark.parametrize(
    "response",
    [
        response_with(408, receipt_with(attempt=TOKEN.upper())),
        response_with(408, receipt_with(attempt=TOKEN[:-1])),
        response_with(408, receipt_with(attempt="f" * 64)),
        response_with(408, receipt_with(attempt=[TOKEN, TOKEN])),
        response_with(408, TOKEN_TWICE),
        response_with(408, receipt_with(version=2)),
        response_with(408, receipt_with(version=True)),
        response_with(408, receipt_with(version=1.0)),
        response_with(408, receipt_with(dispatch="started")),
        response_with(408, receipt_with(note="unknown")),
        response_with(408, {**RECEIPT, "status": "error"}),
        response_with(408, {"error": {name: value for name, value in RECEIPT["error"].items() if name != "code"}}),
        response_with(408, RECEIPT, "text/html"),
        response_with(408, RECEIPT, ""),
        response_with(408, json.dumps(RECEIPT).encode() + b"{}"),
        response_with(408, HTML),
        response_with(400, RECEIPT),
        response_with(200, RECEIPT),
        WalletResponse(408, "application/json", None),
    ],
)
def test_receipt_with_any_deviation_is_not_believed(response: WalletResponse) -> None:
    assert not is_receipt(response, TOKEN)
    assert classify_share_response(response, TOKEN) in (ShareOutcome.REFUSED, ShareOutcome.UNKNOWN)
    assert classify_chain_response(response, TOKEN, is_batch=False).outcome is ChainOutcome.UNKNOWN


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (response_with(200, {"status": "queued"}), ShareOutcome.ACCEPTED),
        (
            response_with(200, {"status": "duplicate", "more": 1}, "Application/JSON; a=b"),
            ShareOutcome.ACCEPTED,
        ),
        (response_with(200, {"status": "accepted"}), ShareOutcome.UNKNOWN),
        (response_with(200, {"status": "queued"}, "text/plain"), ShareOutcome.UNKNOWN),
        (response_with(200, {}), ShareOutcome.UNKNOWN),
        (response_with(200, ["queued"]), ShareOutcome.UNKNOWN),
        (response_with(200, HTML, "text/html"), ShareOutcome.UNKNOWN),
        (response_with(200, b'{"status":"queued"'), ShareOutcome.UNKNOWN),
        (response_with(200, b'{"status":"queued"' + b" " * MAX_SHARE_RESPONSE_BYTES + b"}"), ShareOutcome.UNKNOWN),
        (WalletResponse(200, "application/json", None), ShareOutcome.UNKNOWN),
        (response_with(429, {"status": "error", "error": "later"}), ShareOutcome.REPEATABLE),
        (response_with(408, RECEIPT), ShareOutcome.REPEATABLE),
        (WalletResponse(None, was_sent=False), ShareOutcome.REPEATABLE),
        (WalletResponse(None, was_sent=True), ShareOutcome.UNKNOWN),
        *((response_with(status, {"error": "no"}), ShareOutcome.UNKNOWN) for status in (500, 502, 503, 504)),
        *((response_with(status, {"error": "no"}), ShareOutcome.REFUSED) for status in (400, 401, 404, 408, 409, 413)),
        *((response_with(status, HTML, "text/html"), ShareOutcome.REFUSED) for status in (301, 302, 307, 308)),
    ],
)
def test_share_response_has_the_outcome_of_the_table(response: WalletResponse, outcome: ShareOutcome) -> None:
    assert classify_share_response(response, TOKEN) is outcome


ACCEPTED: dict[str, Any] = {"tx_hash": HASH, "code": 0}
DIGEST = {"batch_digest": "ab" * 32}


@pytest.mark.parametrize(
    ("response", "is_batch", "outcome"),
    [
        (response_with(200, ACCEPTED), False, ChainOutcome.ACCEPTED),
        (response_with(200, {**ACCEPTED, "log": ""}), False, ChainOutcome.ACCEPTED),
        (response_with(200, {**ACCEPTED, **DIGEST}), True, ChainOutcome.ACCEPTED),
        (response_with(200, ACCEPTED), True, ChainOutcome.UNKNOWN),
        (response_with(200, {**ACCEPTED, **DIGEST}), False, ChainOutcome.UNKNOWN),
        (response_with(200, {**ACCEPTED, "batch_digest": "xy"}), True, ChainOutcome.UNKNOWN),
        (response_with(200, {**ACCEPTED, "height": 7}), False, ChainOutcome.UNKNOWN),
        (response_with(200, {**ACCEPTED, "code": False}), False, ChainOutcome.UNKNOWN),
        (response_with(200, {**ACCEPTED, "code": 1}), False, ChainOutcome.UNKNOWN),
        (response_with(200, {**ACCEPTED, "tx_hash": "AB"}), False, ChainOutcome.UNKNOWN),
        (response_with(200, ACCEPTED, "text/html"), False, ChainOutcome.UNKNOWN),
        (response_with(200, HTML, "text/html"), False, ChainOutcome.UNKNOWN),
        (response_with(422, {"code": 1, "log": "nullifier already spent"}), False, ChainOutcome.REFUSED),
        (response_with(422, {"code": 0, "log": "odd"}), False, ChainOutcome.UNKNOWN),
        (response_with(408, RECEIPT), True, ChainOutcome.NOT_STARTED),
        (response_with(408, {"error": "timeout"}), True, ChainOutcome.UNKNOWN),
        (WalletResponse(None, was_sent=False), False, ChainOutcome.NOT_STARTED),
        (WalletResponse(None, was_sent=True), False, ChainOutcome.UNKNOWN),
        (response_with(404, {"error": "not found"}), True, ChainOutcome.NO_ROUTE),
        (response_with(405, {"error": "method not allowed"}), True, ChainOutcome.NO_ROUTE),
        (response_with(404, {"error": "not found", "status": "error"}), True, ChainOutcome.UNKNOWN),
        (response_with(404, HTML, "text/html"), True, ChainOutcome.UNKNOWN),
        *(
            (response_with(status, {"error": "no"}), False, ChainOutcome.UNKNOWN)
            for status in (302, 400, 429, 502, 503)
        ),
    ],
)
def test_chain_response_has_the_outcome_of_the_table(
    response: WalletResponse, is_batch: bool, outcome: ChainOutcome
) -> None:
    assert classify_chain_response(response, TOKEN, is_batch=is_batch).outcome is outcome


INCLUDED: dict[str, Any] = {
    "height": "7",
    "code": 0,
    "log": "",
    "events": [{"type": "cast_vote", "attributes": [{"key": "leaf_index", "value": "1,2"}]}],
}


def test_transaction_in_a_block_has_its_events() -> None:
    reply = classify_tx_response(response_with(200, INCLUDED))
    assert (reply.state, reply.events) == (TxState.SUCCEEDED, {"cast_vote": {"leaf_index": "1,2"}})


@pytest.mark.parametrize(
    ("response", "state"),
    [
        (response_with(422, {**INCLUDED, "code": 5}), TxState.FAILED),
        (response_with(200, {**INCLUDED, "code": 5}), TxState.UNKNOWN),
        (response_with(200, {**INCLUDED, "height": 7}), TxState.UNKNOWN),
        (response_with(200, {name: value for name, value in INCLUDED.items() if name != "log"}), TxState.UNKNOWN),
        (response_with(200, {**INCLUDED, "events": [{"type": "cast_vote"}]}), TxState.UNKNOWN),
        (response_with(404, {"error": "tx not found"}), TxState.ABSENT),
        (response_with(404, {"error": "not found"}), TxState.UNKNOWN),
        (response_with(404, {"error": "tx not found", "status": "error"}), TxState.UNKNOWN),
        (response_with(502, {"error": "tx not found"}), TxState.UNKNOWN),
        (response_with(200, HTML, "text/html"), TxState.UNKNOWN),
        (WalletResponse(None), TxState.UNKNOWN),
    ],
)
def test_transaction_response_has_the_state_of_the_table(response: WalletResponse, state: TxState) -> None:
    assert classify_tx_response(response).state is state


def test_status_responses_are_read_only_as_json() -> None:
    assert is_ready(response_with(200, {"status": "ok", "tree": {}}))
    assert not is_ready(response_with(200, {"status": "ok"}, "text/html"))
    assert not is_ready(response_with(503, {"status": "ok"}))
    assert not is_ready(WalletResponse(None))
    assert is_confirmed(response_with(200, {"status": "confirmed"})) is True
    assert is_confirmed(response_with(200, {"status": "pending"})) is False
    for said_nothing in (
        response_with(200, {"status": "counted"}),
        response_with(200, HTML, "text/html"),
        response_with(503, {"status": "confirmed"}),
        WalletResponse(None),
    ):
        assert is_confirmed(said_nothing) is None
    assert not is_missing_route(response_with(200, {"error": "not found"}))
