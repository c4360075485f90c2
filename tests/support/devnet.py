"""The dev chain as a real process, with the queries that tests need."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.process import ChildProcess

OLD_ERA, NEW_ERA = "0.5", "1.6"
BOTH_ERAS = pytest.mark.parametrize("era", [OLD_ERA, NEW_ERA])
"""Runs a test on an old and on a new chain, see the fixture `era` of the integration tests."""

PROPOSALS = [{"title": f"Proposal {number}", "options": ["Support", "Oppose"]} for number in (1, 2, 3)]


def era_flags(era: str) -> tuple[str, ...]:
    return ("--era", era)


class DevChain(ChildProcess):
    def __init__(self, directory: Path, http: httpx.AsyncClient, *flags: str) -> None:
        super().__init__("chain", directory, ("-m", "devnet", "--rest-port", "0", "--rpc-port", "0", *flags))
        self.http = http

    @property
    def url(self) -> str:
        return str(self.ready_data["rest"])

    @property
    def nodes(self) -> list[dict[str, str]]:
        """Every node: its `name`, `rest` and `rpc`."""
        return list(self.ready_data["nodes"])

    def with_client(self, http: httpx.AsyncClient) -> DevChain:
        """Return the same running chain with a client of another event loop."""
        other = copy.copy(self)
        other.http = http
        return other

    def at_node(self, number: int) -> DevChain:
        """Return the same running chain as another of its nodes serves it."""
        other = copy.copy(self)
        other.ready_data = {**self.ready_data, **self.nodes[number]}
        return other

    async def get(self, path: str, **params: object) -> Any:
        response = await self.http.get(f"{self.url}{path}", params={key: str(value) for key, value in params.items()})
        response.raise_for_status()
        return response.json()

    async def post(self, path: str, body: object) -> Any:
        response = await self.http.post(f"{self.url}{path}", json=body)
        response.raise_for_status()
        return response.json()

    async def open_round(self, seconds: float = 3600.0, **fields: object) -> bytes:
        created = await self.post("/devnet/rounds", {"proposals": PROPOSALS, "seconds": seconds, "status": 1, **fields})
        await self.mine()
        return bytes.fromhex(created["vote_round_id"])

    async def delegate(self, round_id: bytes, leaves: int) -> None:
        await self.post("/devnet/delegate", {"round_id": round_id.hex(), "count": leaves})
        await self.mine()

    async def mine(self, blocks: int = 1) -> None:
        """Produce blocks now, in addition to those of the timer."""
        await self.post("/devnet/mine", {"blocks": blocks})

    async def set_faults(self, *, node: int = 0, **switches: object) -> None:
        response = await self.http.post(f"{self.nodes[node]['rest']}/devnet/faults", json=switches)
        response.raise_for_status()

    async def clear_faults(self, *, node: int = 0) -> None:
        await self.set_faults(node=node, reset=True)

    async def newest_height(self) -> int:
        """Return the newest block's height with a request that is not in the request log."""
        return int((await self.get("/devnet/stats"))["height"])

    async def request_log(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        while True:
            after = entries[-1]["seq"] if entries else 0
            page = (await self.get("/devnet/requests", after=after))["requests"]
            if not page:
                return entries
            entries += page

    async def broadcasts(self) -> list[dict[str, Any]]:
        return [entry for entry in await self.request_log() if entry["route"] == "reveal-share"]

    async def find_transactions(self, round_id: bytes) -> list[dict[str, Any]]:
        """Return all included reveals of a round in `tx_search` format: `hash`, `tx`, `tx_result`."""
        page, transactions = 1, list[dict[str, Any]]()
        query = f"\"reveal_share.vote_round_id='{round_id.hex()}'\""
        while True:
            response = await self.http.get(
                f"{self.ready_data['rpc']}/tx_search", params={"query": query, "per_page": 100, "page": page}
            )
            if response.status_code != 200:
                return transactions
            transactions += response.json()["result"]["txs"]
            page += 1

    async def transaction_hashes(self, round_id: bytes) -> dict[str, bytes]:
        """Return the hashes of confirmed transactions by nullifier (hex)."""
        succeeded = [tx for tx in await self.find_transactions(round_id) if tx["tx_result"]["code"] == 0]
        return {
            nullifier: bytes.fromhex(tx["hash"])
            for tx in succeeded
            for nullifier in _nullifiers(tx["tx_result"]["events"])
        }

    async def spent_nullifiers(self, round_id: bytes) -> dict[str, int]:
        """Return how often the chain counted each nullifier (hex)."""
        succeeded = [tx for tx in await self.find_transactions(round_id) if tx["tx_result"]["code"] == 0]
        return dict(Counter(nullifier for tx in succeeded for nullifier in _nullifiers(tx["tx_result"]["events"])))


def _nullifiers(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        attribute["value"]
        for event in events
        if event["type"] == "reveal_share"
        for attribute in event["attributes"]
        if attribute["key"] == "share_nullifier"
    ]
