"""Responses of older and newer chains are read alike."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import anyio
import httpx
import pytest

from helper.chain import node_http
from helper.chain.broadcast_outcome import Verdict, classify_response
from helper.chain.node_http import BLOCK_LIMIT_BYTES
from helper.chain.reveal_transaction import is_counted
from helper.errors import ChainError, ChainResponseError, ChainUnavailable, InvalidResponse
from tests.unit.chain.fakes import ROUND_ID, create_client, create_rpc_client, json_response
from tests.unit.chain.test_node_http import MESSAGE

MEBIBYTE = 1 << 20


@pytest.mark.rule("N14")
@pytest.mark.parametrize("status", [400, 404, 500])
async def test_error_text_decides_and_not_its_status(status: int) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        text = "tx not found" if "/tx/" in path else "desc = vote round not found: key not found"
        text = "desc = no commitment root at height 85: key not found" if "commitment-tree" in path else text
        return json_response(status, {"error": f"rpc error: code = NotFound {text}"})

    client = create_client(reply)
    assert await client.round(ROUND_ID) is None
    assert await client.tree_at(ROUND_ID, 85) is None
    assert await client.tx(b"\1" * 32) is None


@pytest.mark.rule("N14")
@pytest.mark.parametrize(
    ("response", "error"),
    [
        (json_response(404, {"error": "some other failure"}), InvalidResponse),
        (json_response(404, {"detail": "vote round not found"}), InvalidResponse),
        (httpx.Response(404, content=b"<html>vote round not found, tx not found</html>"), InvalidResponse),
        (httpx.Response(301, headers={"location": "/"}), InvalidResponse),
        (httpx.Response(200, content=b"<!doctype html>"), InvalidResponse),
        (json_response(502, {"error": "vote round not found"}), ChainUnavailable),
        (json_response(503, {"status": "warming"}), ChainUnavailable),
    ],
)
async def test_error_without_known_text_never_means_absent(response: httpx.Response, error: type[ChainError]) -> None:
    client = create_client(response)
    for call in (client.round(ROUND_ID), client.tree_at(ROUND_ID, 85), client.tx(b"\1" * 32)):
        with pytest.raises(error):
            await call


@pytest.mark.rule("N15")
@pytest.mark.parametrize(
    "events",
    [
        None,
        [],
        7,
        "garbled",
        [{"type": "reveal_share", "attributes": [{"key": "share_nullifier", "value": "\ufffd\u0000\ufffd"}]}],
    ],
)
async def test_tx_result_depends_only_on_code_and_height(events: object) -> None:
    shown = {"code": 0, "height": "106", "log": "", "events": events, "unknown": {"field": 1}}
    result = await create_client(json_response(200, shown)).tx(b"\1" * 32)
    assert result is not None
    assert is_counted(result, 106)
    failed = await create_client(json_response(422, {**shown, "code": 1})).tx(b"\1" * 32)
    assert failed is not None
    assert not is_counted(failed, 106)


@pytest.mark.rule("N16")
async def test_reveal_gets_a_minute_and_other_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: dict[str, Any] = {}

    async def reply(request: httpx.Request) -> httpx.Response:
        timeouts[request.method] = request.extensions["timeout"]
        await anyio.sleep(0.1)
        return json_response(200, {"tx_hash": MESSAGE.tx_hash().hex(), "code": 0, "syncing": False})

    client = create_client(reply, timeout=0.05)
    with pytest.raises(ChainUnavailable, match=r"no response within 0.05 s"):
        await client.is_syncing()
    assert (await client.broadcast(MESSAGE)).verdict is Verdict.ACCEPTED
    assert (timeouts["POST"]["read"], timeouts["GET"]["read"]) == (75.0, 0.05)
    monkeypatch.setattr(node_http, "SEND_TIMEOUT_SECONDS", 0.06)
    late = await client.broadcast(MESSAGE)
    assert (late.verdict, late.may_be_sent, late.log) == (Verdict.AMBIGUOUS, True, "no response within 0.06 s")


async def test_acceptance_of_another_transaction_is_ambiguous() -> None:
    client = create_client(json_response(200, {"tx_hash": "AB" * 32, "code": 0}))
    assert (await client.broadcast(MESSAGE)).verdict is Verdict.AMBIGUOUS


@pytest.mark.rule("N16")
def test_outcome_unknown_to_the_node_is_ambiguous() -> None:
    tx_hash = MESSAGE.tx_hash().hex().upper()
    body = json.dumps({"error": f"broadcast outcome unknown after retries; tx_hash={tx_hash}"}).encode()
    outcome = classify_response(502, body)
    assert (outcome.verdict, outcome.may_be_sent) == (Verdict.AMBIGUOUS, True)
    assert outcome.log.startswith("broadcast outcome unknown")
    assert tx_hash not in outcome.log


@pytest.mark.rule("N16")
@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [(503, "2", 2), (429, "9" * 15, 60), (503, "soon", None), (503, "-1", None), (503, None, None), (502, "2", None)],
)
async def test_retry_after_is_read_where_the_message_was_not_processed(
    status: int, header: str | None, seconds: int | None
) -> None:
    headers = {} if header is None else {"retry-after": header}
    outcome = await create_client(httpx.Response(status, headers=headers, json={"status": "warming"})).broadcast(
        MESSAGE
    )
    assert outcome.retry_after == seconds


@pytest.mark.rule("N16")
@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, {"status": "ready", "completed_at": "2026-11-24T12:00:00Z", "duration_ms": 5200}, None),
        (503, {"status": "not_started"}, "has not started"),
        (503, {"status": "warming", "started_at": "2026-11-24T12:00:00Z"}, "being generated"),
        (503, {"status": "failed", "error": "out of memory"}, "failed: out of memory"),
        (404, {"error": "not found"}, None),
        (405, {"error": "method not allowed"}, None),
    ],
)
async def test_readiness_reports_why_a_node_accepts_no_reveals(status: int, body: object, reason: str | None) -> None:
    reason_text = await create_client(json_response(status, body)).unready_reason()
    assert (reason_text is None) if reason is None else (reason_text is not None and reason in reason_text)


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, content=b"<html>"),
        json_response(503, {"error": "no status"}),
        json_response(200, {"status": "thawing"}),
        json_response(500, {"error": "oops"}),
        httpx.Response(302, headers={"location": "/"}),
    ],
)
async def test_readiness_in_another_form_is_an_error(response: httpx.Response) -> None:
    with pytest.raises(ChainResponseError, match="readiness"):
        await create_client(response).unready_reason()


@pytest.mark.rule("N18")
async def test_block_of_5_mebibytes_is_read() -> None:
    txs = [bytes([number]) * (785_000 * 3 // 4) for number in range(8)]
    txs.append(bytes(5 * MEBIBYTE - sum(map(len, txs))))
    data = {"txs": [b64encode(tx).decode() for tx in txs]}
    block = {"header": {"chain_id": "svote-1", "height": "9", "time": "2026-11-24T12:00:00Z"}, "data": data}
    response = json_response(200, {"block_id": {}, "block": block, "sdk_block": block})
    assert 13 * MEBIBYTE < len(response.content) < BLOCK_LIMIT_BYTES
    read = await create_client(response).block(9)
    assert read is not None
    assert read.txs == tuple(txs)


def pool_event(**values: str) -> dict[str, Any]:
    return {
        "type": "reveal_pool_share",
        "attributes": [{"key": key, "value": value} for key, value in values.items()],
    }


@pytest.mark.rule("N20")
@pytest.mark.parametrize(
    "names", [("round", "share_nf"), ("vote_round_id", "share_nullifier"), ("vote_round_id", "share_nf")]
)
async def test_reveal_for_a_pool_spends_its_nullifier(names: tuple[str, str]) -> None:
    values = {names[0]: ROUND_ID.hex(), "delegate_index": "3", names[1]: "ab" * 32}
    reveal = {
        "type": "reveal_share",
        "attributes": [
            {"key": "vote_round_id", "value": ROUND_ID.hex()},
            {"key": "share_nullifier", "value": "cd" * 32},
        ],
    }
    txs = [{"code": 0, "events": [pool_event(**values)]}, {"code": 0, "events": [reveal]}]
    txs.append({"code": 1, "events": [pool_event(**values)]})
    results = {"result": {"height": "5", "txs_results": txs}}
    rpc = create_rpc_client(json_response(200, results))
    block = await rpc.block_results(5)
    assert block is not None
    assert block == [(ROUND_ID, b"\xab" * 32), (ROUND_ID, b"\xcd" * 32)]


@pytest.mark.rule("N20")
@pytest.mark.parametrize("values", [{}, {"round": "\ufffd", "share_nf": "ab" * 32}, {"round": ROUND_ID.hex()}])
async def test_unknown_form_of_a_pool_reveal_does_not_stop_the_follower(values: dict[str, str]) -> None:
    results = {"result": {"height": "5", "txs_results": [{"code": 0, "events": [pool_event(**values)]}]}}
    rpc = create_rpc_client(json_response(200, results))
    block = await rpc.block_results(5)
    assert block is not None
    assert block == []
