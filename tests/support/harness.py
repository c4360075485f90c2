"""A helper as a real process, for tests that kill, restart and look from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from devnet import ballot
from devnet.wallet import CastVote, Wallet
from tests.support.devnet import DevChain
from tests.support.postgres import Cluster
from tests.support.process import TIMEOUT_SECONDS, ChildProcess
from tests.support.queue_storage import PostgresSchema, QueueStorage, SqliteFile

WARM_UP_TIMEOUT_SECONDS = 180.0
"""Seconds until provers are warm: they step back for everything else, and other tests may fill the machine."""

STAND_IN_PROGRAM = ("-m", "tests.support.service")
REAL_PROGRAM = ("-m", "helper", "serve")
CHAIN_ID = "svote-devnet-1"


class HelperProcess(ChildProcess):
    """A helper for a chain; with `STAND_IN_PROGRAM` its proofs are stand-ins. Its queue is in a file of its folder,
    or in a schema of its own in a cluster.
    """

    def __init__(
        self,
        folder: Path,
        http: httpx.AsyncClient,
        chain: DevChain,
        /,
        *,
        program: Sequence[str] = REAL_PROGRAM,
        nodes: int = 1,
        cluster: Cluster | None = None,
        **sections: Any,
    ) -> None:
        self.db = Path(sections.get("helper", {}).get("db_path", folder / "queue.db"))
        self.storage: QueueStorage = SqliteFile(self.db) if cluster is None else PostgresSchema(cluster, folder)
        if self.storage.store_section:
            sections["store"] = {**self.storage.store_section, **sections.get("store", {})}
        config = folder / "helper.toml"
        config.write_text(_render_config(self.db, chain.nodes[:nodes], sections))
        super().__init__("helper", folder, (*program, "--config", str(config)))
        self.config = config
        self._http = http
        self._chain = chain

    @property
    def url(self) -> str:
        return str(self.ready_data["url"])

    async def wait_until_ready(self) -> None:
        """Wait until it says so."""
        async with self.timeout("is ready", WARM_UP_TIMEOUT_SECONDS):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await self._http.get(f"{self.url}/shielded-vote/v1/status")
                    if answer.status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def operator_get(self, path: str) -> Any:
        """Ask over the control socket."""
        transport = httpx.AsyncHTTPTransport(uds=self.ready_data["socket"], verify=False)
        settings: dict[str, Any] = {"base_url": "http://helper", "timeout": TIMEOUT_SECONDS, "trust_env": False}
        async with httpx.AsyncClient(transport=transport, **settings) as socket:
            answer = await socket.get(path)
            answer.raise_for_status()
            return answer.json()

    async def service_counts(self) -> dict[str, int]:
        """The service's counters since its start."""
        counts: dict[str, int] = (await self.service_stats())["counts"]
        return counts

    def create_wallet(self, chain_url: str | None = None) -> Wallet:
        """A wallet that posts all shares at once."""
        return Wallet(chain_url or self._chain.url, [self.url], mode="parallel", rng=random.Random(7))

    async def wait_for_leaf(self, round_id: bytes, position: int) -> None:
        """Wait until a leaf is in its copy of the round's tree."""
        query = (
            "SELECT coalesce(max(start_index + length(leaves) / 32), 0) FROM tree_leaves"
            " JOIN round_keys ON no = round_no WHERE round_id = ?"
        )
        async with self.timeout("knows a leaf"):
            while self.query_rows(query, round_id)[0][0] <= position:
                await asyncio.sleep(0.02)

    async def post_share(self, body: object) -> httpx.Response:
        """POST one share."""
        return await self._http.post(f"{self.url}/shielded-vote/v1/shares", json=body, timeout=30)

    async def share_status(self, round_id: bytes, nullifier: bytes) -> str:
        """pending or confirmed."""
        path = f"/shielded-vote/v1/share-status/{round_id.hex()}/{nullifier.hex()}"
        answer = await self._http.get(f"{self.url}{path}")
        return str(answer.json()["status"])

    async def wait_until_confirmed(self, vote: CastVote) -> None:
        """Wait until every share of a vote is confirmed."""
        waiting = [share.nullifier for share in vote.shares]
        async with self.timeout("has confirmed a vote"):
            while waiting:
                if await self.share_status(vote.ballot.round_id, waiting[0]) == "confirmed":
                    waiting.pop(0)
                else:
                    await asyncio.sleep(0.05)

    async def service_stats(self) -> dict[str, Any]:
        """What only the running daemon knows."""
        facts: dict[str, Any] = (await self.operator_get("/stats"))["service"]
        return facts

    async def worker_pids(self) -> list[int]:
        """The process ids of its provers."""
        return [int(pid) for pid in (await self.service_stats())["provers"]["pids"]]

    async def wait_until(self, description: str, condition: Callable[[dict[str, Any]], object]) -> None:
        """Wait until this holds of the daemon's own facts."""
        async with self.timeout(description):
            while not condition(await self.service_stats()):
                await asyncio.sleep(0.05)

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Read what it keeps beside it, as an operator's tool would; a ? stands for each value."""
        return self.storage.query_rows(query, *values)

    def bytes_on_disk(self) -> bytes:
        """Every byte of the files in which it keeps that."""
        return self.storage.bytes_on_disk()


def _render_config(db: Path, nodes: Sequence[Mapping[str, str]], sections: Mapping[str, Any]) -> str:
    settings: dict[str, dict[str, object]] = {
        "helper": {"port": 0, "db_path": str(db), "expose_queue_status": True},
        "chain": {
            "endpoints": [node["rest"] for node in nodes],
            "rpc": [node["rpc"] for node in nodes],
            "chain_id": CHAIN_ID,
            "poll_seconds": 0.2,
        },
        "log": {"level": "debug", "format": "json"},
    }
    for name, values in sections.items():
        assert isinstance(values, dict)
        settings.setdefault(name, {}).update(values)
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for name, values in settings.items()
    )


async def cast_vote(
    chain: DevChain,
    helper: HelperProcess,
    round_id: bytes,
    *,
    proposal: int = 1,
    decision: int = 1,
    times: Sequence[int] = (),
) -> CastVote:
    """One real vote, all 16 shares posted at once."""
    async with helper.create_wallet(chain.url) as wallet:
        return await wallet.cast_vote(round_id, proposal, decision, times=times or ballot.immediate_times())


@contextlib.asynccontextmanager
async def run_chain_and_helper(
    folder: Path, *flags: str, program: Sequence[str] = REAL_PROGRAM, cluster: Cluster | None = None, **sections: Any
) -> AsyncIterator[tuple[DevChain, HelperProcess]]:
    """A chain and a helper of the test's own, both ready; killed at the end."""
    async with httpx.AsyncClient(timeout=30) as http:
        chain = DevChain(folder, http, "--block-seconds", "0.3", *flags)
        await chain.start()
        try:
            async with run_helper(folder, http, chain, program=program, cluster=cluster, **sections) as helper:
                yield chain, helper
        finally:
            await chain.kill()


@contextlib.asynccontextmanager
async def run_helper(
    folder: Path,
    http: httpx.AsyncClient,
    chain: DevChain,
    /,
    *,
    program: Sequence[str] = STAND_IN_PROGRAM,
    nodes: int = 1,
    cluster: Cluster | None = None,
    env: Mapping[str, str] | None = None,
    **sections: Any,
) -> AsyncIterator[HelperProcess]:
    """A helper that is ready, for the first so many nodes of a chain, with `env` beside the environment; killed at the
    end.
    """
    helper = HelperProcess(folder, http, chain, program=program, nodes=nodes, cluster=cluster, **sections)
    await helper.start(**(env or {}))
    try:
        await helper.wait_until_ready()
        yield helper
    finally:
        await helper.kill()


def unix_time_in(seconds: float) -> int:
    """The unix second at least so far ahead."""
    return int(time.time() + seconds) + 1
