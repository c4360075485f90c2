"""Invalid responses of nodes are rejected with an error that describes the problem."""

from __future__ import annotations

import contextlib
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from helper.chain.chain_data import Proposal
from helper.chain.json_fields import MAX_VALUES, loads
from helper.chain.rest_client import (
    ChainClient,
    LeafReading,
    parse_head,
    parse_leaves,
    parse_round,
    parse_rounds,
    parse_syncing,
    parse_tree,
    parse_tx,
)
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.rpc_client import RpcClient
from helper.errors import ChainResponseError
from tests.unit.chain.fakes import (
    ROUND_ID,
    create_client,
    create_rpc_client,
    json_response,
    read_recorded,
    recorded_round,
)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<!doctype html><title>Welcome</title>", "the response is HTML"),
        (b"", "the response is empty"),
        (b'{"rounds":[{"vote_round_id":"eob', "not valid JSON"),
        (b"[]", "expected an object, got a list"),
        (b'{"rounds":{}}', "expected a list, got an object"),
        (b'{"rounds":[7]}', "expected an object, got a number"),
        (b'{"rounds":"\xff\xfe"}', "not valid JSON"),
        (b'{"rounds":[' + b"{}," * 8192 + b"{}]}", "rounds: 8193, more than 8192"),
        (b"[" * 50_000, "not valid JSON"),
        (b"[" * 100_000, "too many values"),
        (b'{"rounds":[' + b"{}," * 100_000 + b"{}]}", "too many values"),
        (b'{"rounds":[' + b'{"abcdefghijkl":0},' * 100_000 + b"{}]}", "too many values"),
        (b'{"rounds":[' + b'"",' * 100_000 + b'""]}', "too many values"),
        (b'{"rounds":[' + b'"abcdefgh",' * MAX_VALUES + b'""]}', "too many values"),
    ],
)
async def test_rounds_invalid_response_is_rejected(body: bytes, problem: str) -> None:
    with pytest.raises(ChainResponseError, match=problem):
        await create_client(httpx.Response(200, content=body)).rounds()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("vote_round_id", "eobB", "expected 32 bytes, got 3"),
        ("vote_round_id", "!!", "expected base64"),
        ("vote_round_id", 7, "expected a string, got a number"),
        ("vote_end_time", -1, "out of range"),
        ("vote_end_time", 1.5, "expected a whole number, got a fraction"),
        ("vote_end_time", True, "expected a whole number, got a boolean"),
        ("vote_end_time", 2**63 // 1000 + 1, "out of range"),  # a share that is due then could not be stored
        ("status", "active", "expected a whole number"),
        ("status", 0, "is not a round status"),
        ("proposals", {"id": 1}, "expected a list"),
    ],
)
def test_parse_round_invalid_field_is_named(field: str, value: object, problem: str) -> None:
    with pytest.raises(ChainResponseError, match=rf"response.round.{field}.*{problem}"):
        parse_round({"round": recorded_round(1) | {field: value}})


@pytest.mark.parametrize(
    ("invalid", "problem"),
    [
        ({"vote_end_time": -1}, "response.rounds[1].vote_end_time: -1 is out of range"),
        ({"proposals": [{}] * 257}, "response.rounds[1].proposals: has more than 256 proposals or options"),
        ({"proposals": [{"options": [{}] * 257}]}, "has more than 256 proposals or options"),
        ({"proposals": [{"id": "one"}]}, "response.rounds[1].proposals[0].id: expected a whole number"),
        ({"vote_round_id": recorded_round(1)["vote_round_id"]}, "listed twice"),
    ],
)
def test_parse_rounds_invalid_round_does_not_affect_others(invalid: dict[str, object], problem: str) -> None:
    other = {"vote_round_id": b64encode(b"\x07" * 32).decode()}
    listed = parse_rounds({"rounds": [recorded_round(1), recorded_round(1) | other | invalid]})
    twice = "vote_round_id" in invalid
    assert [known.round_id for known in listed.rounds] == ([] if twice else [ROUND_ID])
    assert list(listed.invalid) == [ROUND_ID if twice else b"\x07" * 32]
    assert problem in next(iter(listed.invalid.values()))


@pytest.mark.parametrize("status", [0, 5, 200])
def test_parse_rounds_unknown_status_is_listed_separately(status: int) -> None:
    other = recorded_round(1) | {"vote_round_id": b64encode(b"\x07" * 32).decode(), "status": status}
    listed = parse_rounds({"rounds": [recorded_round(1), other]})
    assert [known.round_id for known in listed.rounds] == [ROUND_ID]
    assert listed.invalid == {}
    assert listed.unknown_status == {b"\x07" * 32: f"status {status} is unknown to this version"}


@pytest.mark.parametrize(("title", "label"), [("Budget", "Yes"), (5, {}), (None, None)])
def test_texts_of_a_round_are_only_displayed(title: object, label: object) -> None:
    proposal = {"id": 1, "title": title, "options": [{"index": 0, "label": label}]}
    known = parse_round({"round": recorded_round(1) | {"proposals": [proposal], "ea_pk": title}})
    assert known.proposals == (Proposal(1, (0,)),)
    shown = known.proposals[0].title, known.proposals[0].labels, known.authority_key
    assert shown == (("Budget", ("Yes",), b"") if title == "Budget" else ("", ("",), b""))


def test_parse_rounds_round_without_id_rejects_list() -> None:
    with pytest.raises(ChainResponseError, match=r"rounds\[0\].vote_round_id: expected 32 bytes"):
        parse_rounds({"rounds": [recorded_round(1) | {"vote_round_id": "eobB"}]})


@pytest.mark.parametrize(
    "tree",
    [
        {"root": "AAAA", "next_index_at_root": 1, "height": 5},
        {"root": read_recorded("tree, latest")["response"]["tree"]["root"], "height": 5},
        read_recorded("tree, latest")["response"]["tree"] | {"next_index_at_root": 2**24 + 1},
    ],
)
def test_parse_tree_invalid_is_rejected(tree: dict[str, Any]) -> None:
    with pytest.raises(ChainResponseError, match=r"response\.tree\."):
        parse_tree({"tree": tree})


def test_parse_invalid_leaves_heads_and_transactions() -> None:
    with pytest.raises(ChainResponseError, match=r"blocks\[0\].leaves\[0\]: expected 32 bytes, got 3"):
        parse_leaves({"blocks": [{"height": 5, "leaves": ["AAAA"]}]})
    header = {"chain_id": "svote-1", "height": "5", "time": "2026-11-21T13:33:23Z"}
    assert parse_head({"block": {"header": header}}).height == 5
    bad_headers: list[dict[str, object]] = [
        {"chain_id": ""},
        {"chain_id": "a\nb"},
        {"height": "five"},
        {"height": "0"},
        {"time": "noon"},
        {"time": "2026-11-21T13:33:23"},
    ]
    for bad in bad_headers:
        with pytest.raises(ChainResponseError):
            parse_head({"block": {"header": header | bad}})
    with pytest.raises(ChainResponseError, match="syncing: missing"):
        parse_syncing({})
    with pytest.raises(ChainResponseError, match="height: missing"):
        parse_tx({"code": 0})


async def test_leaves_follows_cursor_and_windows() -> None:
    ranges: list[tuple[int, int]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        first, last = int(request.url.params["from_height"]), int(request.url.params["to_height"])
        ranges.append((first, last))
        assert last - first <= 1000
        leaf = read_recorded("leaves")["response"]["blocks"][0]["leaves"]
        block = {"height": first, "start_index": len(ranges) - 1, "leaves": leaf}
        more = {"next_from_height": first + 400} if first + 400 <= last else {}
        return json_response(200, {"blocks": [block], **more})

    blocks = await create_client(handle).leaves(ROUND_ID, 1, 1500)
    assert ranges == [(1, 1001), (401, 1401), (801, 1500), (1201, 1500)]
    assert [block.start_index for block in blocks] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ({"next_from_height": 10}, "does not increase"),
        ({"blocks": [{"height": 9}]}, "outside the requested range"),
        ({"blocks": [{"height": 100}]}, "outside the requested range"),
    ],
)
async def test_leaves_rejects_endless_or_unrequested_pages(page: dict[str, Any], problem: str) -> None:
    with pytest.raises(ChainResponseError, match=problem):
        await create_client(json_response(200, page)).leaves(ROUND_ID, 10, 99)


class FakeLeafBlocks:
    """A node with the same number of leaves in each block; records the requested heights."""

    def __init__(self, leaves: int) -> None:
        self.requested_ranges: list[tuple[int, int]] = []
        self._leaves = [b64encode(bytes(32)).decode()] * leaves

    def __call__(self, request: httpx.Request) -> httpx.Response:
        first, last = int(request.url.params["from_height"]), int(request.url.params["to_height"])
        self.requested_ranges.append((first, last))
        blocks = [{"height": h, "start_index": 0, "leaves": self._leaves} for h in range(first, last + 1)]
        return json_response(200, {"blocks": blocks})

    def client(self) -> ChainClient:
        return create_client(self)


async def test_leaves_halves_span_when_page_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.chain.rest_client.PAGE_LIMIT_BYTES", 50_000)
    node = FakeLeafBlocks(leaves=100)  # About 5,000 bytes per block.
    blocks = await node.client().leaves(ROUND_ID, 1, 40)
    assert [block.height for block in blocks] == list(range(1, 41))
    assert node.requested_ranges[:3] == [(1, 40), (1, 20), (1, 10)]
    assert len(node.requested_ranges) < 20


async def test_leaves_rejects_block_longer_than_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.chain.rest_client.PAGE_LIMIT_BYTES", 4_000)
    node = FakeLeafBlocks(leaves=100)
    with pytest.raises(ChainResponseError, match="longer than 4000 bytes"):
        await node.client().leaves(ROUND_ID, 1, 4)
    assert node.requested_ranges == [(1, 4), (1, 2), (1, 1)]


async def test_leaves_stops_at_maximum_number() -> None:
    node = FakeLeafBlocks(leaves=1)
    with pytest.raises(ChainResponseError, match="more than 1500"):
        await node.client().read_leaves(ROUND_ID, LeafReading(1), 2**40, max_count=1500)
    assert len(node.requested_ranges) == 2


class EndlessBody(httpx.AsyncByteStream):
    """A body that never ends.

    Attributes:
        served_bytes: number of bytes read.
    """

    def __init__(self) -> None:
        self.served_bytes = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.served_bytes += 1 << 16
            yield bytes(1 << 16)


MIB = 1 << 20
LIMITS: dict[str, tuple[int, Callable[[ChainClient, RpcClient], Awaitable[object]]]] = {
    "rounds": (8 * MIB, lambda client, _: client.rounds()),
    "round": (MIB, lambda client, _: client.round(ROUND_ID)),
    "tree": (MIB, lambda client, _: client.tree_latest(ROUND_ID)),
    "leaves": (8 * MIB, lambda client, _: client.leaves(ROUND_ID, 1, 1)),
    "block": (16 * MIB, lambda client, _: client.block(5)),
    "latest block": (16 * MIB, lambda client, _: client.latest_block()),
    "tx": (MIB, lambda client, _: client.tx(bytes(32))),
    "status": (MIB, lambda _, rpc: rpc.status()),
    "block results": (16 * MIB, lambda _, rpc: rpc.block_results(5)),
    "spent": (MIB, lambda _, rpc: rpc.is_spent(ROUND_ID, bytes(32))),
}


@pytest.mark.parametrize("question", LIMITS)
async def test_node_response_is_read_up_to_size_limit(question: str) -> None:
    limit, query = LIMITS[question]
    body = EndlessBody()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=body))
    with pytest.raises(ChainResponseError, match=f"longer than {limit} bytes"):
        await query(ChainClient("http://node", transport=transport), RpcClient("http://node", transport=transport))
    assert body.served_bytes <= limit + (1 << 16)


@pytest.mark.parametrize("question", LIMITS)
async def test_large_node_response_is_parsed_in_a_thread(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, query = LIMITS[question]
    threads: list[int] = []

    def record(body: bytes, what: str) -> object:
        threads.append(threading.get_ident())
        return loads(body, what)

    for module in ("rest_client", "rpc_client"):
        monkeypatch.setattr(f"helper.chain.{module}.loads", record)
    body = b'{"filler":"' + b"x" * 300_000 + b'"}'
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    with contextlib.suppress(ChainResponseError):
        await query(ChainClient("http://node", transport=transport), RpcClient("http://node", transport=transport))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_round_with_other_id_is_rejected() -> None:
    with pytest.raises(ChainResponseError, match="another round"):
        await create_client(json_response(200, {"round": recorded_round(1)})).round(b"\x22" * 32)


@pytest.mark.rule("N15")
async def test_block_results_invalid_is_rejected() -> None:
    def rpc(value: object, status: int = 200) -> RpcClient:
        return create_rpc_client(json_response(status, value))

    event = {
        "type": "reveal_share",
        "attributes": [{"key": "vote_round_id", "value": ROUND_ID.hex()}, {"key": "share_nullifier", "value": "XY"}],
    }
    with pytest.raises(ChainResponseError, match="64 lower-case hex digits"):
        await rpc({"result": {"height": "5", "txs_results": [{"code": 0, "events": [event]}]}}).block_results(5)
    failed = await rpc({"result": {"height": "5", "txs_results": [{"code": 1, "events": [event]}]}}).block_results(5)
    assert failed is not None
    assert failed == [], "events of a failed transaction are ignored"
    with pytest.raises(ChainResponseError, match="height 5 is not available"):
        await rpc({"error": {"code": -32603, "data": "height 5 is not available"}}, 500).block_results(5)
    executing = await rpc({"error": {"data": "could not find results for height #5"}}, 500).block_results(5)
    assert executing is None


UNSAFE_TEXTS = "bad\x00 \x1b[31m\x9b gas\nmore\u202e"


async def test_node_text_with_control_characters_is_cleaned_in_results_and_errors() -> None:
    message = RevealMessage(
        nullifier=b"n" * 32,
        enc_share=b"e" * 64,
        proposal_id=1,
        vote_decision=0,
        proof=b"p",
        round_id=ROUND_ID,
        anchor_height=1,
    )
    refused = create_client(json_response(422, {"code": 9, "log": UNSAFE_TEXTS, "tx_hash": UNSAFE_TEXTS}))
    outcome = await refused.broadcast(message)
    assert outcome.log == "bad [31m gas more"
    assert outcome.tx_hash.isprintable()
    assert parse_tx({"code": 1, "height": 2, "log": UNSAFE_TEXTS}).log.isprintable()
    with pytest.raises(ChainResponseError) as caught:
        await create_client(json_response(500, {"error": UNSAFE_TEXTS})).rounds()
    assert str(caught.value).isprintable()
    node_info = {"default_node_info": {"network": UNSAFE_TEXTS}, "application_version": {"version": UNSAFE_TEXTS}}
    info = await create_client(json_response(200, node_info)).node_info()
    assert info.chain_id.isprintable()
    assert info.version.isprintable()
