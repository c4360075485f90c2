"""Consensus RPC (CometBFT) in URI form: `status`, `block_results`, `tx_search`, `abci_query`."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from devnet.blocks import block_results, rpc_status, tx_search_row
from devnet.gojson import b64
from devnet.node_view import NodeView
from devnet.responses import ResponseError, get_view, json_response
from devnet.tx import decode_entry

_ROUND_CONDITION = re.compile(r"reveal_share\.vote_round_id\s*=\s*'([0-9a-f]{64})'")
_HEIGHT_CONDITION = re.compile(r"tx\.height\s*(>=|<=)\s*([0-9]+)")
_PER_PAGE, _MAX_PER_PAGE = 30, 100


async def get_status(request: Request) -> Response:
    """Network, newest block, and whether the node is catching up."""
    return _rpc_result(rpc_status(get_view(request)))


async def get_block_results(request: Request) -> Response:
    """Results of a block, by default of the newest; HTTP 500 for a future height."""
    view = get_view(request)
    height = _int_param(request, "height", view.height)
    if height <= 0:
        raise _rpc_error(f"height must be greater than 0, but got {height}")
    block = view.block(height)
    if block is None:
        raise _rpc_error(f"height {height} must be less than or equal to the current blockchain height {view.height}")
    return _rpc_result(block_results(block))


async def get_tx_search(request: Request) -> Response:
    """A page of the confirmed reveals of a round, optionally in a range of heights; HTTP 500 past the last page."""
    view = get_view(request)
    query = _text_param(request, "query")
    condition = _ROUND_CONDITION.search(query)
    if condition is None:
        raise _rpc_error("the dev chain only supports searches for reveal_share.vote_round_id='<hex>'")
    bounds = {comparison: int(height) for comparison, height in _HEIGHT_CONDITION.findall(query)}
    heights = range(bounds.get(">=", 0), bounds.get("<=", view.height) + 1)
    matches = [tx for tx in view.reveals(bytes.fromhex(condition.group(1))) if tx.height in heights]
    if _text_param(request, "order_by") == "desc":
        matches = matches[::-1]
    size = min(max(_int_param(request, "per_page", _PER_PAGE), 1), _MAX_PER_PAGE)
    pages = max(1, -(-len(matches) // size))
    page = _int_param(request, "page", 1)
    if not 1 <= page <= pages:
        raise _rpc_error(f"page should be within [1, {pages}] range, given {page}")
    rows = matches[(page - 1) * size : page * size]
    return _rpc_result({"txs": [tx_search_row(row) for row in rows], "total_count": str(len(matches))})


async def get_abci_query(request: Request) -> Response:
    """A key of the vote store.

    0x01 0x02, round, nullifier: 0x01 if the nullifier is spent. 0x12, round, validator index, proposal, decision: the
    partial decryption.
    """
    view = get_view(request)
    data = _text_param(request, "data").removeprefix("0x")
    try:
        key = bytes.fromhex(data)
    except ValueError:
        raise _rpc_error("invalid data: not hex") from None
    is_key = len(key) == 66 and key[:2] == b"\x01\x02" and _text_param(request, "path") == "/store/vote/key"
    spent = is_key and view.is_spent(key[2:34], key[34:])
    value = b"\x01" if spent else _find_partial(view, key)
    response = {
        "code": 0,
        "log": "",
        "info": "",
        "index": "0",
        "key": b64(key),
        "value": b64(value) if value else None,
        "proofOps": None,
        "height": str(view.height),
        "codespace": "",
    }
    return _rpc_result({"response": response})


def _find_partial(view: NodeView, key: bytes) -> bytes | None:
    """The partial decryption with a key of the vote store."""
    round_view = view.round(key[1:33]) if len(key) == 45 and key[0] == 0x12 else None
    if round_view is None:
        return None
    index, proposal, decision = (int.from_bytes(key[at : at + 4], "big") for at in (33, 37, 41))
    for entry in round_view[0].partials.get(index, ()):
        values = decode_entry(entry)
        if (values.get(1, 0), values.get(2, 0)) == (proposal, decision):
            return entry
    return None


ROUTES = [
    Route("/status", get_status),
    Route("/block_results", get_block_results),
    Route("/tx_search", get_tx_search),
    Route("/abci_query", get_abci_query),
]


def _rpc_result(result: dict[str, Any]) -> Response:
    """A JSON-RPC response to a URI call, which has no id."""
    return json_response({"jsonrpc": "2.0", "id": -1, "result": result})


def _rpc_error(data: str) -> ResponseError:
    """A JSON-RPC error, HTTP 500."""
    error = {"code": -32603, "message": "Internal error", "data": data}
    return ResponseError(500, {"jsonrpc": "2.0", "id": -1, "error": error})


def _text_param(request: Request, name: str) -> str:
    """A string parameter, without the quotes of the URI form."""
    return request.query_params.get(name, "").strip('"')


def _int_param(request: Request, name: str, default: int) -> int:
    text = _text_param(request, name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise _rpc_error(f"failed to convert param {name} to int") from None
