"""A dev chain and a helper as real processes, for tests that kill, restart and look from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from devnet import ballot
from devnet.wallet import CastVote, Wallet

PATIENCE = 120.0
"""Seconds after which something that was waited for counts as not happening."""
PROPOSALS = [{"title": f"Proposal {number}", "options": ["Support", "Oppose"]} for number in (1, 2, 3)]
STAND_IN = ("-m", "tests.support.service")
REAL = ("-m", "helper", "serve")


class Process:
    """A child that says by a file when it listens."""

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._ready = folder / f"{name}.ready"
        self._arguments = (*arguments, "--ready-file", str(self._ready))
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
        self._env.update(env or {})
        self.process: asyncio.subprocess.Process | None = None
        self.told: dict[str, Any] = {}

    async def start(self, **env: str) -> None:
        """Start it and wait until it listens."""
        self._ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *self._arguments, stdout=log, stderr=log, env={**self._env, **env}
            )
        async with asyncio.timeout(PATIENCE):
            while not self._ready.exists():
                if self.process.returncode is not None:
                    raise AssertionError(f"{self.name} ended at start:\n{self.log.read_text()[-4000:]}")
                await asyncio.sleep(0.02)
        self.told = json.loads(self._ready.read_text())

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.ended()

    async def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end; its status, minus the signal's number where one ended it."""
        assert self.process is not None
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


class Chain(Process):
    """A dev chain."""

    def __init__(self, folder: Path, http: httpx.AsyncClient, *flags: str) -> None:
        super().__init__("chain", folder, ("-m", "devnet", "--rest-port", "0", "--rpc-port", "0", *flags))
        self._http = http

    @property
    def url(self) -> str:
        return str(self.told["rest"])

    async def get(self, path: str, **params: object) -> Any:
        answer = await self._http.get(f"{self.url}{path}", params={key: str(value) for key, value in params.items()})
        answer.raise_for_status()
        return answer.json()

    async def post(self, path: str, body: object) -> Any:
        answer = await self._http.post(f"{self.url}{path}", json=body)
        answer.raise_for_status()
        return answer.json()

    async def open_round(self, seconds: float = 3600.0, **fields: object) -> bytes:
        """A round that takes votes, and its id."""
        made = await self.post("/devnet/rounds", {"proposals": PROPOSALS, "seconds": seconds, "status": 1, **fields})
        await self.mine()
        return bytes.fromhex(made["vote_round_id"])

    async def mine(self, blocks: int = 1) -> None:
        """Blocks now, on top of those that the timer makes."""
        await self.post("/devnet/mine", {"blocks": blocks})

    async def faults(self, **switches: object) -> None:
        """Set fault switches."""
        await self.post("/devnet/faults", switches)

    async def requests(self) -> list[dict[str, Any]]:
        """The whole request log, oldest first."""
        entries: list[dict[str, Any]] = []
        while True:
            after = entries[-1]["seq"] if entries else 0
            page = (await self.get("/devnet/requests", after=after))["requests"]
            if not page:
                return entries
            entries += page

    async def reveals(self) -> list[dict[str, Any]]:
        """The broadcasts among them."""
        return [entry for entry in await self.requests() if entry["route"] == "reveal-share"]

    async def spent(self, round_id: bytes) -> dict[str, int]:
        """Nullifiers (hex) that counted, each with the number of times."""
        page, found = 1, dict[str, int]()
        query = f"\"reveal_share.vote_round_id='{round_id.hex()}'\""
        while True:
            answer = await self._http.get(
                f"{self.told['rpc']}/tx_search", params={"query": query, "per_page": 100, "page": page}
            )
            if answer.status_code != 200:
                return found
            for tx in answer.json()["result"]["txs"]:
                if tx["tx_result"]["code"] == 0:
                    for nullifier in _nullifiers(tx["tx_result"]["events"]):
                        found[nullifier] = found.get(nullifier, 0) + 1
            page += 1


def _nullifiers(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        attribute["value"]
        for event in events
        if event["type"] == "reveal_share"
        for attribute in event["attributes"]
        if attribute["key"] == "share_nullifier"
    ]


class Helper(Process):
    """A helper for a chain; with `STAND_IN` its proofs are stand-ins."""

    def __init__(
        self, folder: Path, http: httpx.AsyncClient, chain: Chain, *, program: Sequence[str] = REAL, **sections: object
    ) -> None:
        self.db = folder / "queue.db"
        config = folder / "helper.toml"
        config.write_text(_toml(self.db, chain, sections))
        super().__init__("helper", folder, (*program, "--config", str(config)))
        self.config = config
        self._http = http
        self._chain = chain

    @property
    def url(self) -> str:
        return str(self.told["url"])

    async def ready(self) -> None:
        """Wait until it says so."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await self._http.get(f"{self.url}/shielded-vote/v1/status")
                    if answer.status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def operator(self, path: str) -> Any:
        """Ask over the control socket."""
        transport = httpx.AsyncHTTPTransport(uds=self.told["socket"])
        async with httpx.AsyncClient(transport=transport, base_url="http://helper") as socket:
            answer = await socket.get(path)
            answer.raise_for_status()
            return answer.json()

    async def counts(self) -> dict[str, int]:
        """The service's counters since its start."""
        counts: dict[str, int] = (await self.operator("/stats"))["service"]["counts"]
        return counts

    async def post(self, body: object) -> httpx.Response:
        """POST one share."""
        return await self._http.post(f"{self.url}/shielded-vote/v1/shares", json=body, timeout=30)

    async def share_status(self, round_id: bytes, nullifier: bytes) -> str:
        """pending or confirmed."""
        path = f"/shielded-vote/v1/share-status/{round_id.hex()}/{nullifier.hex()}"
        answer = await self._http.get(f"{self.url}{path}")
        return str(answer.json()["status"])

    async def confirmed(self, vote: CastVote) -> None:
        """Wait until every share of a vote is confirmed."""
        waiting = [share.nullifier for share in vote.shares]
        async with asyncio.timeout(PATIENCE):
            while waiting:
                if await self.share_status(vote.ballot.round_id, waiting[0]) == "confirmed":
                    waiting.pop(0)
                else:
                    await asyncio.sleep(0.05)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the database file itself, as an operator's tool would."""
        with contextlib.closing(sqlite3.connect(f"file:{self.db}?mode=ro", uri=True)) as file:
            return file.execute(query, values).fetchall()

    def bytes_on_disk(self) -> bytes:
        """Every byte of the database's files."""
        return b"".join(path.read_bytes() for path in sorted(self.db.parent.glob(f"{self.db.name}*")))


def _toml(db: Path, chain: Chain, sections: Mapping[str, object]) -> str:
    settings: dict[str, dict[str, object]] = {
        "helper": {"port": 0, "db_path": str(db), "expose_queue_status": True},
        "chain": {"endpoints": [chain.url], "rpc": [chain.told["rpc"]], "poll_seconds": 0.2},
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
    chain: Chain, helper: Helper, round_id: bytes, *, proposal: int = 1, decision: int = 1, times: Sequence[int] = ()
) -> CastVote:
    """One real vote, all 16 shares posted at once."""
    async with Wallet(chain.url, [helper.url], mode="parallel", dice=random.Random(7)) as wallet:
        return await wallet.cast_vote(round_id, proposal, decision, times=times or ballot.immediate())


@contextlib.asynccontextmanager
async def running(
    folder: Path, *flags: str, program: Sequence[str] = REAL, **sections: object
) -> AsyncIterator[tuple[Chain, Helper]]:
    """A chain and a helper, both ready; killed at the end."""
    async with httpx.AsyncClient(timeout=30) as http:
        chain = Chain(folder, http, "--block-seconds", "0.3", *flags)
        await chain.start()
        try:
            helper = Helper(folder, http, chain, program=program, **sections)
            await helper.start()
            try:
                await helper.ready()
                yield chain, helper
            finally:
                await helper.kill()
        finally:
            await chain.kill()


def soon(seconds: float) -> int:
    """The unix second at least so far ahead."""
    return int(time.time() + seconds) + 1
