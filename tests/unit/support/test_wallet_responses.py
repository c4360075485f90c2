"""A wallet of library version 5.3.0 believes a response only if it has exactly the expected form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from devnet.clients.responses import (
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
from helper.server.edge import JsonResponse, ingress_receipt

TOKEN = "0123456789abcdef" * 4
RECEIPT = {"error": {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": TOKEN}}
TOKEN_TWICE = json.dumps(RECEIPT).encode().replace(b'"attempt"', b'"attempt": "", "attempt"')
HTML = b"<!doctype html><title>Sign in</title>"
ERROR = {"error": "no"}


def response_with(status: int, body: object, content_type: str = "application/json") -> WalletResponse:
    return WalletResponse(status, content_type, body if isinstance(body, bytes) else json.dumps(body).encode())


PAGE = response_with(200, HTML, "text/html")
NOT_SENT, NO_RESPONSE = WalletResponse(None, was_sent=False), WalletResponse(None, was_sent=True)


@pytest.mark.rule("N4")
def test_receipt_of_this_service_is_believed() -> None:
    sent = JsonResponse(ingress_receipt(TOKEN), 408)
    response = WalletResponse(sent.status_code, sent.headers["content-type"], bytes(sent.body))
    assert is_receipt(response, TOKEN)


CHANGES: list[dict[str, Any]] = [
    *({"attempt": attempt} for attempt in (TOKEN.upper(), TOKEN[:-1], "f" * 64, [TOKEN, TOKEN])),
    *({"version": version} for version in (2, True, 1.0)),
    {"dispatch": "started"},
    {"note": "unknown"},
]


@pytest.mark.parametrize(
    "response",
    [
        *(response_with(408, {"error": {**RECEIPT["error"], **change}}) for change in CHANGES),
        *(response_with(status, RECEIPT) for status in (200, 400)),
        *(response_with(408, RECEIPT, content_type) for content_type in ("text/html", "")),
        response_with(408, TOKEN_TWICE),
        response_with(408, {**RECEIPT, "status": "error"}),
        response_with(408, {"error": {name: value for name, value in RECEIPT["error"].items() if name != "code"}}),
        response_with(408, json.dumps(RECEIPT).encode() + b"{}"),
        response_with(408, HTML),
        WalletResponse(408, "application/json", None),
    ],
)
def test_receipt_with_any_deviation_is_not_believed(response: WalletResponse) -> None:
    assert not is_receipt(response, TOKEN)
    assert classify_share_response(response, TOKEN) in (ShareOutcome.REFUSED, ShareOutcome.UNKNOWN)
    assert classify_chain_response(response, TOKEN, is_batch=False).outcome is ChainOutcome.UNKNOWN


SHARE_OUTCOMES = {
    ShareOutcome.ACCEPTED: [
        response_with(200, {"status": "queued"}),
        response_with(200, {"status": "duplicate", "more": 1}, "Application/JSON; a=b"),
    ],
    ShareOutcome.UNKNOWN: [
        *(response_with(200, body) for body in ({"status": "accepted"}, {}, ["queued"], b'{"status":"queued"')),
        response_with(200, {"status": "queued"}, "text/plain"),
        response_with(200, b'{"status":"queued"' + b" " * MAX_SHARE_RESPONSE_BYTES + b"}"),
        WalletResponse(200, "application/json", None),
        *(response_with(status, ERROR) for status in (500, 502, 503, 504)),
        PAGE,
        NO_RESPONSE,
    ],
    ShareOutcome.REPEATABLE: [response_with(429, ERROR), response_with(408, RECEIPT), NOT_SENT],
    ShareOutcome.REFUSED: [
        *(response_with(status, ERROR) for status in (400, 401, 404, 408, 409, 413)),
        *(response_with(status, HTML, "text/html") for status in (301, 302, 307, 308)),
    ],
}


@pytest.mark.parametrize("outcome", SHARE_OUTCOMES)
def test_share_response_has_the_outcome_of_the_table(outcome: ShareOutcome) -> None:
    for response in SHARE_OUTCOMES[outcome]:
        assert classify_share_response(response, TOKEN) is outcome, response


ACCEPTED: dict[str, Any] = {"tx_hash": "AB" * 32, "code": 0}
BATCH = {**ACCEPTED, "batch_digest": "ab" * 32}
CHAIN_OUTCOMES: dict[tuple[ChainOutcome, bool], list[WalletResponse]] = {
    (ChainOutcome.ACCEPTED, False): [response_with(200, ACCEPTED), response_with(200, {**ACCEPTED, "log": ""})],
    (ChainOutcome.ACCEPTED, True): [response_with(200, BATCH)],
    (ChainOutcome.REFUSED, False): [response_with(422, {"code": 1, "log": "nullifier already spent"})],
    (ChainOutcome.NOT_STARTED, False): [NOT_SENT],
    (ChainOutcome.NOT_STARTED, True): [response_with(408, RECEIPT)],
    (ChainOutcome.NO_ROUTE, True): [response_with(404, ERROR), response_with(405, ERROR)],
    (ChainOutcome.UNKNOWN, False): [
        *(
            response_with(200, {**ACCEPTED, **change})
            for change in (BATCH, {"height": 7}, {"code": False}, {"code": 1}, {"tx_hash": "AB"})
        ),
        response_with(200, ACCEPTED, "text/html"),
        response_with(422, {"code": 0, "log": "odd"}),
        *(response_with(status, ERROR) for status in (302, 400, 429, 502, 503)),
        PAGE,
        NO_RESPONSE,
    ],
    (ChainOutcome.UNKNOWN, True): [
        response_with(200, ACCEPTED),
        response_with(200, {**ACCEPTED, "batch_digest": "xy"}),
        response_with(408, {"error": "timeout"}),
        response_with(404, {**ERROR, "status": "error"}),
        response_with(404, HTML, "text/html"),
    ],
}


@pytest.mark.parametrize(("outcome", "is_batch"), CHAIN_OUTCOMES)
def test_chain_response_has_the_outcome_of_the_table(outcome: ChainOutcome, is_batch: bool) -> None:
    for response in CHAIN_OUTCOMES[outcome, is_batch]:
        assert classify_chain_response(response, TOKEN, is_batch=is_batch).outcome is outcome, response


EVENTS = [{"type": "cast_vote", "attributes": [{"key": "leaf_index", "value": "1,2"}]}]
INCLUDED: dict[str, Any] = {"height": "7", "code": 0, "log": "", "events": EVENTS}
TX_STATES = {
    TxState.SUCCEEDED: [response_with(200, INCLUDED)],
    TxState.FAILED: [response_with(422, {**INCLUDED, "code": 5})],
    TxState.ABSENT: [response_with(404, {"error": "tx not found"})],
    TxState.UNKNOWN: [
        *(
            response_with(200, {**INCLUDED, **change})
            for change in ({"code": 5}, {"height": 7}, {"log": None}, {"events": [{"type": "cast_vote"}]})
        ),
        response_with(404, ERROR),
        response_with(404, {"error": "tx not found", "status": "error"}),
        response_with(502, {"error": "tx not found"}),
        PAGE,
        NO_RESPONSE,
    ],
}


@pytest.mark.parametrize("state", TX_STATES)
def test_transaction_response_has_the_state_of_the_table(state: TxState) -> None:
    for response in TX_STATES[state]:
        reply = classify_tx_response(response)
        assert reply.state is state, response
        assert reply.events == ({"cast_vote": {"leaf_index": "1,2"}} if state is TxState.SUCCEEDED else {})


def test_status_responses_are_read_only_as_json() -> None:
    assert is_ready(response_with(200, {"status": "ok", "tree": {}}))
    for response in (response_with(200, {"status": "ok"}, "text/html"), response_with(503, {"status": "ok"}), NOT_SENT):
        assert not is_ready(response)
    assert is_confirmed(response_with(200, {"status": "confirmed"})) is True
    assert is_confirmed(response_with(200, {"status": "pending"})) is False
    for said_nothing in (response_with(200, {"status": "counted"}), PAGE, response_with(503, {"status": "confirmed"})):
        assert is_confirmed(said_nothing) is None
    assert not is_missing_route(response_with(200, ERROR))
