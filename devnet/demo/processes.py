"""Chain and helper as child processes, on free ports."""

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

from devnet.postgres import Cluster

START_TIMEOUT_SECONDS = 240.0
"""Timeout in seconds for the start of a process."""


class StartError(RuntimeError):
    """A process did not start. The text contains the end of its log."""


@contextlib.asynccontextmanager
async def run_chain(directory: Path, circuit: str) -> AsyncIterator[dict[str, Any]]:
    """Run a dev chain of two nodes, which an audit compares. Yields its ready line (`rest`, `rpc`, `nodes`, …)."""
    arguments = ("-m", "devnet", "--rest-port", "0", "--rpc-port", "0", "--circuit", circuit, "--extra-nodes", "1")
    async with _run_process("chain", directory, arguments) as ready:
        yield ready


@contextlib.asynccontextmanager
async def run_helper(directory: Path, db: Path, ready_chain: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Run a helper for this chain, with its page.

    Yields its ready line (`url`, `socket`) with the operator `token`, the `urls` of all wallet APIs and the control
    `sockets` of all hosts.
    """
    token = secrets.token_urlsafe(16)
    async with _run_service(
        "helper", directory, ready_chain, _page_config(directory, ready_chain, token), db=db
    ) as ready:
        yield {**ready, "token": token, "urls": [ready["url"]], "sockets": [ready["socket"]]}


@contextlib.asynccontextmanager
async def run_fleet(directory: Path, count: int, ready_chain: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Run independent helpers for this chain, the first one with the page. Yields like `run_helper`.

    The helpers share the processor cores of this machine.
    """
    token, provers = secrets.token_urlsafe(16), max(1, len(os.sched_getaffinity(0)) // count)
    async with contextlib.AsyncExitStack() as stack:

        async def helper(number: int) -> dict[str, Any]:
            settings = "\n[admin]\ndisable = true\n" if number > 1 else _page_config(directory, ready_chain, token)
            return await stack.enter_async_context(
                _run_service(f"helper-{number}", directory, ready_chain, settings, provers=provers)
            )

        helpers = [await helper(number) for number in range(1, count + 1)]
        urls, sockets = [ready["url"] for ready in helpers], [ready["socket"] for ready in helpers]
        yield {**helpers[0], "token": token, "urls": urls, "sockets": sockets}


@contextlib.asynccontextmanager
async def run_hosts(directory: Path, ready_chain: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Run one host per role with a temporary PostgreSQL cluster. Yields like `run_helper`, for the host with the API.

    Raises:
        ClusterError: PostgreSQL is not installed or does not start.
    """
    token, keys = secrets.token_urlsafe(16), directory / "store.key"
    keys.touch(0o600)
    keys.write_text(secrets.token_hex(32))
    async with _run_database() as url, contextlib.AsyncExitStack() as stack:
        store = f"[store]\nurl = {json.dumps(url)}\nkey_file = {json.dumps(str(keys))}\n"

        async def host(role: str, more: str = "") -> dict[str, Any]:
            settings = f'{more}\n{store}host = "{role}"\n'
            return await stack.enter_async_context(_run_service(role, directory, ready_chain, settings, role=role))

        # sequentially, because the first host creates the tables
        ready = await host("api", _page_config(directory, ready_chain, token))
        others = [await host(role, "\n[admin]\ndisable = true\n") for role in ("prover", "sender")]
        sockets = [host_ready["socket"] for host_ready in (ready, *others)]
        yield {**ready, "token": token, "urls": [ready["url"]], "sockets": sockets}


@contextlib.asynccontextmanager
async def _run_database() -> AsyncIterator[str]:
    """Run a temporary PostgreSQL cluster. Yields its URL."""
    cluster = await asyncio.to_thread(Cluster, "demo")
    try:
        await asyncio.to_thread(cluster.start)
        yield cluster.url
    finally:
        cluster.remove()


def _page_config(directory: Path, ready_chain: dict[str, Any], token: str) -> str:
    """Configuration of the helper with the page, starting within [operator]."""
    return (
        f"token = {json.dumps(token)}\n\n"
        f'[admin]\ndb_path = {json.dumps(str(directory / "admin.db"))}\nmode = "development"\n'
        f'config_url = "{ready_chain["rest"]}/devnet/voting-config?wait=9"\n\n[ui]\nenable = true\n'
    )


@contextlib.asynccontextmanager
async def _run_service(
    name: str,
    directory: Path,
    ready_chain: dict[str, Any],
    operator_config: str,
    *,
    db: Path | None = None,
    role: str = "all",
    provers: int = 0,
) -> AsyncIterator[dict[str, Any]]:
    """Run one helper. `operator_config` continues the section [operator]; 0 `provers` means one per core."""
    settings, db = directory / f"{name}.toml", db or directory / f"{name}.db"
    settings.write_text(
        f'[helper]\nport = 0\nrole = "{role}"\ndb_path = {json.dumps(str(db))}\nexpose_queue_status = true\n'
        f"max_concurrent_proofs = {provers}\n\n"
        f'[chain]\nendpoints = ["{ready_chain["rest"]}"]\nrpc = ["{ready_chain["rpc"]}"]\n\n'
        f"[operator]\nsocket = {json.dumps(str(directory / f'{name}.sock'))}\n{operator_config}"
    )
    async with _run_process(name, directory, ("-m", "helper", "serve", "--config", str(settings))) as ready:
        yield ready


@contextlib.asynccontextmanager
async def _run_process(name: str, directory: Path, arguments: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """Run a child process. Yields when its ready file exists; terminates it at the end, and kills it after 15 s."""
    ready_file, log_file = directory / f"{name}.ready", directory / f"{name}.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, "--ready-file", str(ready_file), stdout=log, stderr=log, env=environment
        )
    try:
        yield await _wait_until_ready(name, process, ready_file, log_file)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(15):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _wait_until_ready(
    name: str, process: asyncio.subprocess.Process, ready_file: Path, log_file: Path
) -> dict[str, Any]:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while process.returncode is None:
                if ready_file.exists():
                    ready: dict[str, Any] = json.loads(ready_file.read_text())
                    return ready
                await asyncio.sleep(0.05)
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])
    raise StartError(f"the {name} did not start:\n{tail}")
