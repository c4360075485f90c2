"""The recorded rounds as sources of an audit, in memory."""

from __future__ import annotations

import copy
import json
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

import proofs
from audit.documents import digest_unbound_fields, parse_round_facts
from audit.source import AuditBlock, AuditTx, DataMissing
from audit.transactions import is_of_round
from helper.chain.reveal_transaction import RevealMessage
from tests.support.payloads import reveal_fields

RECORDED = Path(__file__).parents[1] / "recorded"


@dataclass
class MemorySource:
    """Documents and blocks that tests change. `missing` is raised after the last block."""

    round_id: bytes
    documents: dict[str, Any]
    block_list: list[AuditBlock]
    has_all_blocks: bool = True
    missing: str | None = None

    async def document(self, name: str) -> object:
        name = "heads" if name.startswith("heads/") else name
        if name not in self.documents:
            raise DataMissing("not served by the node")
        if (
            name == "heads"
            and isinstance(self.documents[name], dict)
            and isinstance(self.documents[name].get(name), list)
        ):
            digest = digest_unbound_fields(parse_round_facts(self.documents["round"]))
            return {"heads": [{"round": digest, **head} for head in self.documents[name][name]]}
        return self.documents[name]

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        for block in self.block_list:
            if block.height >= first:
                yield block
        if self.missing is not None:
            raise DataMissing(self.missing)

    def replace_tx(self, height: int, at: int, raw: bytes, code: int | None = 0) -> None:
        index = next(i for i, block in enumerate(self.block_list) if block.height == height)
        txs = list(self.block_list[index].txs)
        txs[at] = AuditTx(raw, code)
        self.block_list[index] = replace(self.block_list[index], txs=tuple(txs))

    def find(self, tag: int) -> list[tuple[int, int, bytes]]:
        """Height, position and bytes of the transactions with a tag."""
        return [
            (block.height, at, tx.raw)
            for block in self.block_list
            for at, tx in enumerate(block.txs)
            if tx.raw[0] == tag
        ]


def read_lines(folder: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / folder / name).read_text().splitlines()]


def seconds(text: str) -> float:
    """A time with nanoseconds as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def threshold_round() -> MemorySource:
    """The round with the threshold tally: all checks pass, except for the comparison of nodes."""
    return copy.deepcopy(_threshold_round())


@cache
def _threshold_round() -> MemorySource:
    results = {row["name"]: row["response"] for row in read_lines("threshold-round", "exchanges.jsonl")}
    round_id = b64decode(results["round, finalized"]["round"]["vote_round_id"])
    documents = {
        "round": results["round, finalized"],
        "tally/1": results["tally"],
        "tally/2": results["tally of a proposal nobody voted on"],
        "results": results["tally results"],
        "summary": results["vote summary"],
        "leaves": results["leaves"],
        "roots": {
            "roots": [
                {"height": results[name]["tree"]["height"], "root": results[name]["tree"]["root"]}
                for name in ("root at 146", "root at 162")
            ]
        },
    }
    blocks: dict[int, AuditBlock] = {}
    for row in read_lines("threshold-round", "transactions.jsonl"):
        height, raw = row["height"], b64decode(row["tx"])
        block = blocks.setdefault(height, AuditBlock(height, seconds(row["time"]), ()))
        if is_of_round(raw, round_id):
            blocks[height] = replace(block, txs=(*block.txs, AuditTx(raw, row["code"])))
    return MemorySource(round_id, documents, _fill(blocks, 135))


def _fill(blocks: dict[int, AuditBlock], first: int) -> list[AuditBlock]:
    """Insert the blocks without transactions, which were not recorded, at the time of the block before."""
    filled: list[AuditBlock] = []
    for height in range(first, max(blocks) + 1):
        last_time = filled[-1].time if filled else 0.0
        filled.append(blocks.get(height, AuditBlock(height, last_time, ())))
    return filled


def single_key_round() -> MemorySource:
    """The round of one validator. Of its blocks, only those with reveals were recorded."""
    return copy.deepcopy(_single_key_round())


@cache
def _single_key_round() -> MemorySource:
    results: dict[str, Any] = {row["name"]: row["response"] for row in read_lines("round", "exchanges.jsonl")}
    round_id = b64decode(results["round, finalized"]["round"]["vote_round_id"])
    times = {
        int(row["response"]["block"]["header"]["height"]): seconds(row["response"]["block"]["header"]["time"])
        for row in read_lines("round", "blocks.jsonl")
        if row["service"] == "rest" and row["status"] == 200 and "block" in row["response"]
    }
    blocks: dict[int, AuditBlock] = {}
    for row in read_lines("round", "reveals.jsonl"):
        request, height = row["request"], int(row["tx"]["height"])
        message = RevealMessage(**reveal_fields(request))
        block = blocks.setdefault(height, AuditBlock(height, times.get(height, 1795268000.0), ()))
        blocks[height] = replace(block, txs=(*block.txs, AuditTx(message.to_tx(), row["tx"]["code"])))
    documents = {
        "round": results["round, finalized"],
        "tally/1": results["tally"],
        "tally/2": {},
        "results": results["tally results"],
        "summary": results["vote summary"],
        "leaves": results["leaves"],
    }
    return MemorySource(round_id, documents, [blocks[h] for h in sorted(blocks)], has_all_blocks=False)


@dataclass
class RecordedNodes:
    """HTTP nodes that serve a round: its documents, blocks and transaction results.

    Attributes:
        source: what they serve. An empty block follows its last one, unless a test removes blocks.
        faults: responses by host and path, instead of those.
        requests: host and path of every request.
    """

    source: MemorySource
    faults: dict[tuple[str, str], httpx.Response] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.respond)

    def respond(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.requests.append((host, path))
        if (host, path) in self.faults:
            return self.faults[host, path]
        for prefix, handler in (
            ("/cosmos/base/tendermint/v1beta1/", self._cosmos),
            ("/shielded-vote/v1/", self._vote),
            ("/", self._rpc),
        ):
            if path.startswith(prefix):
                return handler(path.removeprefix(prefix), request.url.params)
        raise AssertionError(path)

    def __post_init__(self) -> None:
        self._empty_height = self.source.block_list[-1].height + 1

    @property
    def _newest(self) -> int:
        last = self.source.block_list[-1].height
        return last + 1 if last + 1 == self._empty_height else last

    def _block(self, height: int) -> AuditBlock | None:
        if height == self._empty_height == self._newest:
            return AuditBlock(height, time.time(), ())
        return next((block for block in self.source.block_list if block.height == height), None)

    def _cosmos(self, path: str, _: httpx.QueryParams) -> httpx.Response:
        if path == "syncing":
            return httpx.Response(200, json={"syncing": False})
        if path == "node_info":
            return httpx.Response(200, json={"default_node_info": {"network": "svote-1"}})
        name = path.removeprefix("blocks/")
        height = self._newest if name == "latest" else int(name)
        block = self._block(height)
        if block is not None and name == "latest":
            block = replace(block, time=time.time())
        if block is None:
            text = f"height {height} is not available, lowest height is 135"
            return httpx.Response(500, json={"code": 2, "message": text})
        header = {
            "chain_id": "svote-1",
            "height": str(height),
            "time": datetime.fromtimestamp(block.time or 0.0, UTC).isoformat(),
            "app_hash": b64encode(b"state %d" % height).decode(),
        }
        txs = [b64encode(tx.raw).decode() for tx in block.txs]
        block_id = {"hash": b64encode(b"block %d" % height).decode()}
        return httpx.Response(200, json={"block_id": block_id, "block": {"header": header, "data": {"txs": txs}}})

    def _vote(self, path: str, params: httpx.QueryParams) -> httpx.Response:
        name, _, rest = path.partition("/")
        round_hex, _, last = rest.partition("/")
        documents = self.source.documents
        if name == "tx":
            return self._tx(rest)
        if name == "rounds":
            return httpx.Response(200, json={"rounds": [documents["round"]["round"]]})
        if round_hex != self.source.round_id.hex():
            return httpx.Response(500, json={"error": "vote round not found: key not found"})
        if name == "commitment-tree":
            return self._tree(last, params)
        known = {"round": "round", "tally-results": "results", "vote-summary": "summary", "tally": f"tally/{last}"}
        if known.get(name) in documents:
            return httpx.Response(200, json=documents[known[name]])
        return httpx.Response(404, text="404 page not found\n")

    def _tx(self, tx_hash: str) -> httpx.Response:
        for block in self.source.block_list:
            for tx in block.txs:
                if sha256(tx.raw).hexdigest().upper() == tx_hash and tx.code is not None:
                    document = {"height": str(block.height), "code": tx.code, "log": ""}
                    return httpx.Response(422 if tx.code else 200, json=document)
        return httpx.Response(404, json={"error": "tx not found"})

    def _tree(self, name: str, params: httpx.QueryParams) -> httpx.Response:
        documents = self.source.documents
        if name == "leaves":
            first, stop = int(params["from_height"]), int(params["to_height"]) + 1
            blocks = [b for b in documents["leaves"].get("blocks", []) if first <= b["height"] < stop]
            return httpx.Response(200, json={"blocks": blocks} if blocks else {})
        for entry in documents["roots"]["roots"]:
            if entry["height"] == int(name):
                return httpx.Response(200, json={"tree": entry})
        return httpx.Response(500, json={"error": "no commitment root at height"})

    def _rpc(self, path: str, params: httpx.QueryParams) -> httpx.Response:
        if path == "status":
            sync = {"latest_block_height": str(self._newest), "catching_up": False}
            sync["latest_block_time"] = datetime.fromtimestamp(time.time(), UTC).isoformat()
            return httpx.Response(200, json={"result": {"node_info": {"network": "svote-1"}, "sync_info": sync}})
        if path == "abci_query":
            rows = read_lines("threshold-round", "partials-store.jsonl")
            value = next((row["value"] for row in rows if params["data"] == f"0x{row['key']}"), None)
            return httpx.Response(200, json={"result": {"response": {"code": 0, "value": value}}})
        height = int(params["height"])
        block = self._block(height)
        assert block is not None
        codes = [{"code": tx.code} for tx in block.txs]
        return httpx.Response(200, json={"result": {"height": str(height), "txs_results": codes}})


def verify_each_once(circuit: str, items: list[tuple[bytes, proofs.Statement]]) -> list[str | None]:
    """Replaces `proofs.verify_each`: verifies each proof once for all audits. Most tests alter one reveal of 16."""
    new = [item for item in dict.fromkeys(items) if (circuit, item) not in _VERIFIED]
    _VERIFIED.update(zip([(circuit, item) for item in new], _VERIFY_EACH(circuit, new), strict=True))
    return [_VERIFIED[circuit, item] for item in items]


_VERIFY_EACH = proofs.verify_each
_VERIFIED: dict[tuple[str, tuple[bytes, proofs.Statement]], str | None] = {}
