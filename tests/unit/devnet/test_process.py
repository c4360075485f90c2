"""The dev chain as a process: cut connections, and kills."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.devnet.support import API_PREFIX


@asynccontextmanager
async def run_devnet(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Run a dev chain on free ports, with blocks on demand; stop it and wait afterwards."""
    command = [sys.executable, "-m", "devnet", "--rest-port", "0", "--rpc-port", "0", "--block-seconds", "0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def mine_block(http: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = (await http.post("/devnet/mine", json=options)).json()
    return result


async def test_devnet_process_can_cut_connections() -> None:
    async with run_devnet("--stand-in-proofs") as (_, ready), httpx.AsyncClient(base_url=ready["rest"]) as http:
        for switch in ("refuse", "drop_reply"):
            await http.post("/devnet/faults", json={"routes": ["syncing"], switch: 1, "times": 1})
            with pytest.raises(httpx.TransportError):
                await http.get("/cosmos/base/tendermint/v1beta1/syncing")
        assert (await http.get("/cosmos/base/tendermint/v1beta1/syncing")).status_code == 200
        logged = (await http.get("/devnet/requests")).json()["requests"]
        assert [entry["status"] for entry in logged] == [None, None, 200]
        assert [entry["faults"] for entry in logged] == [["refuse"], ["drop_reply"], []]


async def test_devnet_process_resumes_after_kill(tmp_path: Path) -> None:
    flags = ["--stand-in-proofs", "--db", str(tmp_path / "chain.db"), "--ready-file", str(tmp_path / "ready")]
    async with run_devnet(*flags) as (process, ready), httpx.AsyncClient(base_url=ready["rest"]) as http:
        assert json.loads((tmp_path / "ready").read_text()) == ready
        created = (await http.post("/devnet/rounds", json={"status": 1})).json()
        await mine_block(http)
        await http.post("/devnet/delegate", json={"round_id": created["vote_round_id"], "count": 100})
        at = await mine_block(http)
        path = f"{API_PREFIX}/commitment-tree/{created['vote_round_id']}/latest"
        tree = (await http.get(path)).json()
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with run_devnet(*flags) as (_, ready), httpx.AsyncClient(base_url=ready["rest"]) as http:
        assert (await http.get(path)).json() == tree
        latest = (await http.get("/cosmos/base/tendermint/v1beta1/blocks/latest")).json()
        assert int(latest["block"]["header"]["height"]) == at["height"] + 1
