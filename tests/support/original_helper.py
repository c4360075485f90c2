"""The helper in svoted 0.5.42 as wallets see it: it sends the responses that were recorded, and checks as little.

The texts are those of the original. It checks lengths, ranges and the leaf, but neither the hashes of a share nor that
its encodings are canonical. The node before it reads at most 1,000,000 bytes within 10 s, and reports more with
JSON-RPC.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

PREFIX: Final = "/shielded-vote/v1"
MAX_BODY_BYTES: Final = 1_000_000
READ_SECONDS: Final = 10.0
_UINT32: Final = (1 << 32) - 1
_UINT64: Final = (1 << 64) - 1
_TEXTS: Final = ("shares_hash", "vote_round_id", "primary_blind")
_NUMBERS: Final = {"proposal_id": _UINT32, "vote_decision": _UINT32, "tree_position": _UINT64, "submit_at": _UINT64}

Leaf = tuple[str, bytes, int, int]
"""Round, shares_hash, proposal and option of a vote."""


class _Refused(Exception):
    """A refusal with status 400, or another one."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class OriginalHelper:
    """The helper of a round.

    Args:
        leaves: the votes in the tree, by position.
        seconds_scale: real seconds of one second of its read timeout.
    """

    def __init__(self, leaves: Mapping[int, Leaf], end: int, seconds_scale: float = 1.0) -> None:
        self._leaves = leaves
        self._end = end
        self._read_seconds = READ_SECONDS * seconds_scale
        self.stored: dict[tuple[object, ...], dict[str, Any]] = {}

    def app(self) -> Starlette:
        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        return Starlette(routes=[Route("/{path:path}", self._serve, methods=methods)])

    async def _serve(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(self._read_seconds):
                body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)
        except TimeoutError:
            return _rpc_error("read tcp 127.0.0.1:1317->127.0.0.1:40000: i/o timeout")
        if len(body) > MAX_BODY_BYTES:
            return _rpc_error("http: request body too large")
        try:
            return self._respond(request.method, request.url.path, body)
        except _Refused as refusal:
            return JSONResponse({"status": "error", "error": str(refusal)}, refusal.status)

    def _respond(self, method: str, path: str, body: bytes) -> Response:
        if (method, path) == ("POST", f"{PREFIX}/shares"):
            return JSONResponse({"status": self._submit(_read_share(body))})
        if (method, path) == ("GET", f"{PREFIX}/status"):
            return JSONResponse({"status": "ok", "tree": {"leaf_count": len(self._leaves), "anchor_height": 9}})
        if (method, path) == ("GET", f"{PREFIX}/queue-status"):
            raise _Refused("not found", 404)
        if method == "GET" and (match := re.fullmatch(f"{PREFIX}/share-status/([^/]+)/([^/]+)", path)):
            for name, text in zip(("roundId", "nullifier"), match.groups(), strict=True):
                if len(text.strip()) != 64:
                    raise _Refused(f"{name} must be 64 hex characters")
                if not re.fullmatch("[0-9a-fA-F]*", text):
                    raise _Refused(f"invalid {name} hex")
            return JSONResponse({"status": "pending"})
        return PlainTextResponse("404 page not found\n", 404)

    def _submit(self, share: dict[str, Any]) -> str:
        _check_ranges(share)
        position = share["tree_position"]
        if position not in self._leaves:
            raise _Refused(f"invalid vote commitment: no leaf at position {position}")
        vote = (share["vote_round_id"].lower(), _decode(share, "shares_hash"), share["proposal_id"])
        if (*vote, share["vote_decision"]) != self._leaves[position]:
            raise _Refused(f"invalid vote commitment: hash mismatch at position {position}")
        if share["submit_at"] > self._end:
            raise _Refused(f"invalid submit_at: submit_at ({share['submit_at']}) > vote_end_time ({self._end})")
        key = (share["vote_round_id"], share["enc_share"]["share_index"], share["proposal_id"], position)
        content = {name: value for name, value in share.items() if name != "submit_at"}
        if key not in self.stored:
            self.stored[key] = content
            return "queued"
        if self.stored[key] != content:
            raise _Refused("conflicting share payload for round_id/share_index", 409)
        return "duplicate"


def _rpc_error(data: str) -> Response:
    error = {"code": -32600, "message": "Invalid Request", "data": f"error reading request body: {data}"}
    return JSONResponse({"jsonrpc": "2.0", "error": error}, 400)


def _read_share(body: bytes) -> dict[str, Any]:
    """The first JSON value as Go reads it into a structure: null is zero, and what follows the value is not read."""
    text = body.decode("utf-8", "replace").lstrip(" \t\r\n")
    try:
        value, _ = json.JSONDecoder(parse_constant=_reject).raw_decode(text)
    except (ValueError, RecursionError):
        raise _Refused("invalid JSON: invalid character looking for beginning of value") from None
    fields = _object(value)
    inner = _object(fields.get("enc_share"))
    comms = fields.get("share_comms") or []
    if not isinstance(comms, list):
        raise _wrong_type("share_comms")
    share: dict[str, Any] = {name: _text(fields.get(name), name) for name in _TEXTS}
    share |= {name: _number(fields.get(name), name, limit) for name, limit in _NUMBERS.items()}
    share["share_comms"] = [_text(comm, "share_comms") for comm in comms]
    sealed: dict[str, Any] = {name: _text(inner.get(name), f"enc_share.{name}") for name in ("c1", "c2")}
    index = _number(inner.get("share_index"), "enc_share.share_index", _UINT32)
    return {**share, "enc_share": {**sealed, "share_index": index}}


def _reject(constant: str) -> Any:
    raise ValueError(constant)


def _wrong_type(name: str) -> _Refused:
    return _Refused(f"invalid JSON: json: cannot unmarshal value into Go struct field SharePayload.{name}")


def _object(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong_type("enc_share")
    return value


def _text(value: Any, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong_type(name)
    return value


def _number(value: Any, name: str, limit: int) -> int:
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= limit:
        raise _wrong_type(name)
    return value


def _check_ranges(share: dict[str, Any]) -> None:
    sealed = share["enc_share"]
    for name in ("shares_hash", "primary_blind"):
        _decode(share, name)
    for name in ("c1", "c2"):
        _decode(sealed, name, "enc_share.")
    if sealed["share_index"] > 15:
        raise _Refused("enc_share.share_index must be 0..15")
    if share["vote_decision"] > 7:
        raise _Refused("vote_decision must be 0..7")
    if not 1 <= share["proposal_id"] <= 15:
        raise _Refused(f"proposal_id must be 1..15, got {share['proposal_id']}")
    if share["tree_position"] >= 1 << 24:
        raise _Refused(f"tree_position {share['tree_position']} exceeds maximum tree capacity")
    if not re.fullmatch("([0-9a-fA-F]{2})*", share["vote_round_id"]):
        raise _Refused("vote_round_id: encoding/hex: invalid byte")
    if len(share["vote_round_id"]) != 64:
        raise _Refused(f"vote_round_id: expected 32 bytes, got {len(share['vote_round_id']) // 2}")
    if len(share["share_comms"]) != 16:
        raise _Refused(f"share_comms: expected 16 entries, got {len(share['share_comms'])}")
    for number, comm in enumerate(share["share_comms"]):
        _decode({f"share_comms[{number}]": comm}, f"share_comms[{number}]")


def _decode(values: Mapping[str, str], name: str, prefix: str = "") -> bytes:
    """Decode base64 as Go does: line breaks and unused bits are ignored."""
    try:
        decoded = base64.b64decode(values[name].replace("\r", "").replace("\n", ""), validate=True)
    except binascii.Error:
        raise _Refused(f"{prefix}{name}: illegal base64 data at input byte 4") from None
    if len(decoded) != 32:
        raise _Refused(f"{prefix}{name}: expected 32 bytes, got {len(decoded)}")
    return decoded
