"""The helper as a real process, for tests that kill, restart and observe it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

from devnet import ballot
from devnet.wallet import CastVote, Wallet
from tests.support.devnet import DevChain
from tests.support.postgres import Cluster
from tests.support.process import TIMEOUT_SECONDS, ChildProcess
from tests.support.queue_storage import PostgresSchema, QueueStorage, SqliteFile

WARM_UP_TIMEOUT_SECONDS = 180.0
"""Timeout until real provers have created keys, in seconds. They run at low priority, with other tests."""

STAND_IN_PROGRAM = ("-m", "tests.support.service")
REAL_PROGRAM = ("-m", "helper", "serve")
CHAIN_ID = "svote-devnet-1"


class HelperProcess(ChildProcess):
    """A helper for a chain. With `STAND_IN_PROGRAM` its proofs are fake.
    Its queue is in a file in its directory, or in its own schema of a cluster.
    """

    def __init__(
        self,
        directory: Path,
        http: httpx.AsyncClient,
        chain: DevChain,
        /,
        *,
        program: Sequence[str] = REAL_PROGRAM,
        nodes: int = 1,
        cluster: Cluster | None = None,
        **sections: Any,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.db = Path(sections.get("helper", {}).get("db_path", directory / "queue.db"))
        self.storage: QueueStorage = SqliteFile(self.db) if cluster is None else PostgresSchema(cluster, directory)
        if self.storage.store_section:
            sections["store"] = {**self.storage.store_section, **sections.get("store", {})}
        config = directory / "helper.toml"
        config.write_text(_render_config(self.db, chain.nodes[:nodes], sections))
        super().__init__("helper", directory, (*program, "--config", str(config)))
        self.config = config
        self._http = http
        self._chain = chain

    @property
    def url(self) -> str:
        return str(self.ready_data["url"])

    async def wait_until_ready(self) -> None:
        async with self.timeout("is ready", WARM_UP_TIMEOUT_SECONDS):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    response = await self._http.get(f"{self.url}/shielded-vote/v1/status")
                    if response.status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def operator_get(self, path: str) -> Any:
        """Send a GET request over the control socket."""
        transport = httpx.AsyncHTTPTransport(uds=self.ready_data["socket"], verify=False)
        settings: dict[str, Any] = {"base_url": "http://helper", "timeout": TIMEOUT_SECONDS, "trust_env": False}
        async with httpx.AsyncClient(transport=transport, **settings) as socket:
            response = await socket.get(path)
            response.raise_for_status()
            return response.json()

    async def service_counts(self) -> dict[str, int]:
        counts: dict[str, int] = (await self.service_stats())["counts"]
        return counts

    def create_wallet(self, chain_url: str | None = None) -> Wallet:
        return Wallet(chain_url or self._chain.url, [self.url], mode="parallel", rng=random.Random(7))

    async def wait_for_leaf(self, round_id: bytes, position: int) -> None:
        """Wait until a leaf is in the helper's copy of the round's tree."""
        query = (
            "SELECT coalesce(max(start_index + length(leaves) / 32), 0) FROM tree_leaves"
            " JOIN round_keys ON no = round_no WHERE round_id = ?"
        )
        await self.wait_for("knows a leaf", lambda: self.query_rows(query, round_id)[0][0] > position)

    async def post_share(self, body: object) -> httpx.Response:
        return await self._http.post(f"{self.url}/shielded-vote/v1/shares", json=body, timeout=30)

    async def share_status(self, round_id: bytes, nullifier: bytes) -> str:
        path = f"/shielded-vote/v1/share-status/{round_id.hex()}/{nullifier.hex()}"
        response = await self._http.get(f"{self.url}{path}")
        return str(response.json()["status"])

    async def wait_until_confirmed(self, vote: CastVote, seconds: float = TIMEOUT_SECONDS) -> None:
        waiting = [share.nullifier for share in vote.shares]
        async with self.timeout("has confirmed a vote", seconds):
            while waiting:
                if await self.share_status(vote.ballot.round_id, waiting[0]) == "confirmed":
                    waiting.pop(0)
                else:
                    await asyncio.sleep(0.05)

    async def service_stats(self) -> dict[str, Any]:
        facts: dict[str, Any] = (await self.operator_get("/stats"))["service"]
        return facts

    async def worker_pids(self) -> list[int]:
        """Return the process ids of all provers. The helper is ready before it has started the last one."""
        provers: dict[str, Any] = {}

        def have_started(facts: dict[str, Any]) -> bool:
            provers.update(facts["provers"])
            return bool(len(provers["pids"]) == provers["workers"])

        await self.wait_until("has started all provers", have_started)
        return list(provers["pids"])

    async def wait_until(self, description: str, condition: Callable[[dict[str, Any]], object]) -> None:
        async with self.timeout(description):
            while not condition(await self.service_stats()):
                await asyncio.sleep(0.05)

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the database of the running helper, like an operator's tool. A ? stands for each value."""
        return self.storage.query_rows(query, *values)

    def count_rows(self, table: str = "shares") -> int:
        return int(self.query_rows(f"SELECT count(*) FROM {table}")[0][0])

    async def wait_for_response(self, path: str, status: int) -> None:
        """Wait until a GET has a response with this status."""

        async def has_status() -> bool:
            return (await self._http.get(self.url + path)).status_code == status

        await self.wait_for(f"responds {status} to {path}", has_status)

    def bytes_on_disk(self) -> bytes:
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
    """Cast one real vote and post all 16 shares concurrently."""
    async with helper.create_wallet(chain.url) as wallet:
        return await wallet.cast_vote(round_id, proposal, decision, times=times or ballot.immediate_times())


@contextlib.asynccontextmanager
async def run_chain(directory: Path, *flags: str) -> AsyncIterator[DevChain]:
    """Run a chain for one test. Yields when it is ready; kills it at the end."""
    async with httpx.AsyncClient(timeout=30) as http:
        chain = DevChain(directory, http, *flags)
        await chain.start()
        try:
            yield chain
        finally:
            await chain.kill()


@contextlib.asynccontextmanager
async def run_chain_and_helper(
    directory: Path, *flags: str, program: Sequence[str] = REAL_PROGRAM, cluster: Cluster | None = None, **sections: Any
) -> AsyncIterator[tuple[DevChain, HelperProcess]]:
    """Run a chain and a helper for one test. Yields when both are ready; kills them at the end."""
    async with (
        run_chain(directory, "--block-seconds", "0.3", *flags) as chain,
        run_helper(directory, chain.http, chain, program=program, cluster=cluster, **sections) as helper,
    ):
        yield chain, helper


@contextlib.asynccontextmanager
async def run_helper(
    directory: Path,
    http: httpx.AsyncClient,
    chain: DevChain,
    /,
    *,
    program: Sequence[str] = STAND_IN_PROGRAM,
    nodes: int = 1,
    cluster: Cluster | None = None,
    env: Mapping[str, str] | None = None,
    until: Literal["spawned", "listening", "ready"] = "ready",
    **sections: Any,
) -> AsyncIterator[HelperProcess]:
    """Run a helper for the first `nodes` nodes of a chain, with `env` added to the environment.

    Yields when it is ready, or as `until` says; kills it at the end.
    """
    helper = HelperProcess(directory, http, chain, program=program, nodes=nodes, cluster=cluster, **sections)
    helper.spawn(**(env or {}))
    try:
        if until != "spawned":
            await helper.wait_until_listening()
        if until == "ready":
            await helper.wait_until_ready()
        yield helper
    finally:
        await helper.kill()


def unix_time_in(seconds: float) -> int:
    """Return a Unix second that is at least this many seconds ahead."""
    return int(time.time() + seconds) + 1
