"""Pages, redirects, unknown fields and false values instead of what a node usually responds, for every query."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helper.chain.broadcast_outcome import BroadcastOutcome
from helper.chain.rest_client import ChainClient
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.rpc_client import RpcClient
from helper.errors import ChainError
from tests.unit.chain.fakes import ROUND_ID, json_response, read_recorded

Query = Callable[[ChainClient, RpcClient], Awaitable[object]]


def recorded(name: str) -> Any:
    return read_recorded(name)["response"]


def recorded_rpc(name: str) -> Any:
    return read_recorded(name, "blocks.jsonl")["response"]


TX = {"code": 0, "height": "106", "log": "", "events": [{"type": "tx", "attributes": [{"key": "fee", "value": ""}]}]}
QUERIES: dict[str, tuple[Query, Callable[[], Any]]] = {
    "rounds": (lambda rest, _: rest.rounds(), lambda: recorded("rounds")),
    "round": (lambda rest, _: rest.round(ROUND_ID), lambda: recorded("round, status 1")),
    "totals": (lambda rest, _: rest.totals(ROUND_ID), lambda: recorded("tally results")),
    "tree": (lambda rest, _: rest.tree_latest(ROUND_ID), lambda: recorded("tree, latest")),
    "tree at": (lambda rest, _: rest.tree_at(ROUND_ID, 84), lambda: recorded("tree at a height with a root")),
    "leaves": (lambda rest, _: rest.leaves(ROUND_ID, 1, 900), lambda: recorded("leaves")),
    "latest block": (lambda rest, _: rest.latest_block(), lambda: recorded("latest block")),
    "block": (lambda rest, _: rest.block(106), lambda: recorded_rpc("block with raw transactions")),
    "tx": (lambda rest, _: rest.tx(b"\1" * 32), lambda: TX),
    "syncing": (lambda rest, _: rest.is_syncing(), lambda: recorded("syncing")),
    "node info": (lambda rest, _: rest.node_info(), lambda: recorded("node info")),
    "readiness": (lambda rest, _: rest.unready_reason(), lambda: {"status": "warming"}),
    "validator": (lambda rest, _: rest.validator_status("svvaloper1"), lambda: recorded("one validator")),
    "status": (lambda _, rpc: rpc.status(), lambda: recorded_rpc("status")),
    "block results": (lambda _, rpc: rpc.block_results(106), lambda: recorded_rpc("block results 106")),
    "spent": (
        lambda _, rpc: rpc.is_spent(ROUND_ID, b"\1" * 32),
        lambda: {"result": {"response": {"code": 0, "value": "AQ=="}}},
    ),
}
PAGE = b"<!doctype html><title>vote round not found, tx not found</title>"
PAGES = {
    "page": httpx.Response(200, content=PAGE, headers={"content-type": "text/html"}),
    "page that is called JSON": httpx.Response(200, content=PAGE, headers={"content-type": "application/json"}),
    "page 500": httpx.Response(500, content=PAGE),
    "page 502": httpx.Response(502, content=PAGE),
    "301": httpx.Response(301, headers={"location": "https://elsewhere.example.org/"}),
    "302 with a result": httpx.Response(302, json={"syncing": False}, headers={"location": "/"}),
    "307": httpx.Response(307, headers={"location": "http://127.0.0.1:1/"}),
}


async def run_query(name: str, response: httpx.Response) -> object:
    """Run a query on a node that responds so to every request."""

    def reply(request: httpx.Request) -> httpx.Response:
        assert request.url.host == "node"
        return response

    transport = httpx.MockTransport(reply)
    query, _ = QUERIES[name]
    return await query(ChainClient("http://node", transport=transport), RpcClient("http://node", transport=transport))


def add_unknown_fields(value: Any) -> Any:
    """Add fields of several types to every object."""
    if isinstance(value, list):
        return [add_unknown_fields(entry) for entry in value]
    if isinstance(value, dict):
        known = {key: add_unknown_fields(entry) for key, entry in value.items()}
        return {"new": {"a": [1, None]}, **known, "proxy_delegation": 7.5, "": "x"}
    return value


@pytest.mark.parametrize("name", QUERIES)
async def test_unknown_fields_of_a_response_change_nothing(name: str) -> None:
    response = QUERIES[name][1]()
    usual = await run_query(name, json_response(200, response))
    assert usual is not None
    assert await run_query(name, json_response(200, add_unknown_fields(response))) == usual


@pytest.mark.rule("N14")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", QUERIES)
async def test_page_or_redirect_is_an_error_and_never_a_result(name: str, page: str) -> None:
    with pytest.raises(ChainError):
        await run_query(name, PAGES[page])


MESSAGE = RevealMessage(bytes(32), bytes(64), 1, 0, b"proof", ROUND_ID, 1)
ANSWERS: dict[str, tuple[Query, Callable[[], Any]]] = QUERIES | {
    "broadcast": (lambda rest, _: rest.broadcast(MESSAGE), lambda: {"code": 0, "tx_hash": "AB" * 32, "log": ""}),
}
ABSENT, REVERSED = object(), object()
SIZES = (0, 1, -1, 5, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63), 10**40)
TYPES: tuple[Any, ...] = (ABSENT, REVERSED, None, True, False, 0.5, -0.0, 1e300, [], {}, [[]], {"": None})
TEXTS = ("", "0", "-1", "1.0", "1e3", "0x10", "٣", "\ud800", "\0", "A" * 5000, "AAAA", "AA==", "/" * 43 + "=")
TIMES = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999999Z", "2026-11-21T13:33:23")
VALUES = st.one_of(
    st.sampled_from([*SIZES, *map(str, SIZES), *TYPES, *TEXTS, *TIMES]),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a value in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths(each, (*path, key))


def replace_value(document: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """The document with another value at this place, without one, or with a list turned around."""
    if not path:
        return None if new in (ABSENT, REVERSED) else new
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    before = parent[path[-1]]
    if new is ABSENT:
        del parent[path[-1]]
    elif new is REVERSED:
        parent[path[-1]] = before[::-1] if isinstance(before, list) else None
    else:
        parent[path[-1]] = new
    return changed


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=30)
@given(data=st.data())
async def test_false_value_in_a_response_is_a_result_or_an_error_of_the_chain(name: str, data: st.DataObject) -> None:
    query, create = ANSWERS[name]
    document = create()
    document = replace_value(document, data.draw(st.sampled_from(list(paths(document)))), data.draw(VALUES))
    status = data.draw(st.sampled_from([200, 200, 200, 400, 422, 500]))
    transport = httpx.MockTransport(lambda _: json_response(status, document))
    rest, rpc = ChainClient("http://node", transport=transport), RpcClient("http://node", transport=transport)
    with contextlib.suppress(ChainError):
        outcome = await query(rest, rpc)
        assert (name == "broadcast") == isinstance(outcome, BroadcastOutcome)
