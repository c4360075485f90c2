"""The chain and the helper as processes of their own, on free ports of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 240.0
"""How long a process may take until it listens."""


class StartError(RuntimeError):
    """A process did not come up; the message has the end of its log."""


@contextlib.asynccontextmanager
async def chain(folder: Path, circuit: str) -> AsyncIterator[dict[str, Any]]:
    """A dev chain; yields its ready line (`rest`, `rpc`, …)."""
    arguments = ("-m", "devnet", "--rest-port", "0", "--rpc-port", "0", "--circuit", circuit)
    async with _running("chain", folder, arguments) as ready:
        yield ready


@contextlib.asynccontextmanager
async def helper(folder: Path, db: Path, ready_chain: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A helper for that chain, with its page; yields its ready line (`url`, `socket`) and the operators' `token`."""
    settings, token = folder / "helper.toml", secrets.token_urlsafe(16)
    settings.write_text(
        f"[helper]\nport = 0\ndb_path = {json.dumps(str(db))}\nexpose_queue_status = true\n\n"
        f'[chain]\nendpoints = ["{ready_chain["rest"]}"]\nrpc = ["{ready_chain["rpc"]}"]\n\n'
        f"[operator]\nsocket = {json.dumps(str(folder / 'helper.sock'))}\ntoken = {json.dumps(token)}\n\n"
        f'[admin]\ndb_path = {json.dumps(str(folder / "admin.db"))}\nmode = "development"\n'
        f'config_url = "{ready_chain["rest"]}/devnet/voting-config?wait=9"\n\n[ui]\nenable = true\n'
    )
    async with _running("helper", folder, ("-m", "helper", "serve", "--config", str(settings))) as ready:
        yield {**ready, "token": token}


@contextlib.asynccontextmanager
async def _running(name: str, folder: Path, arguments: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """A process of ours, from its ready file to its end (asked first, then made to)."""
    ready_file, log_file = folder / f"{name}.ready", folder / f"{name}.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, "--ready-file", str(ready_file), stdout=log, stderr=log, env=environment
        )
    try:
        yield await _ready(name, process, ready_file, log_file)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(15):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _ready(name: str, process: asyncio.subprocess.Process, ready_file: Path, log_file: Path) -> dict[str, Any]:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while process.returncode is None:
                if ready_file.exists():
                    ready: dict[str, Any] = json.loads(ready_file.read_text())
                    return ready
                await asyncio.sleep(0.05)
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])
    raise StartError(f"the {name} did not start:\n{tail}")
