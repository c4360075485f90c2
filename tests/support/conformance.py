"""Runs the conformance kit and helpers to check in this process, and restarts a helper at the kit's request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from conformance.checks import CheckResult
from conformance.dev_chain import DevChain
from conformance.http_requests import HelperClient, parse_address
from conformance.runner import run_checks, select_checks
from conformance.session import Session
from helper.clock import Clock, SystemClock
from tests.support.harness import HelperProcess
from tests.support.tasks import running


class _StopwatchOfSlowMachine(SystemClock):
    """A clock by which a response takes a twentieth of its time, which other processes on the machine prolong."""

    def monotonic(self) -> float:
        return super().monotonic() / 20


async def run_kit(
    url: str,
    *,
    chain_url: str | None = None,
    shares_file: Path | None = None,
    restart_command: str | None = None,
    token: str = "",
    within: float = 60.0,
    only: Sequence[str] = (),
    clock: Clock | None = None,
    measures_responses: bool = False,
) -> list[CheckResult]:
    """Check the helper at `url`. Time limits of responses count only if `measures_responses`."""
    clock, checks = clock or SystemClock(), select_checks(only)
    stopwatch = clock if measures_responses else _StopwatchOfSlowMachine()
    client = HelperClient(parse_address(url), token, stopwatch)
    chain = DevChain(chain_url) if chain_url else None
    try:
        session = Session(
            client,
            clock,
            chain=chain,
            shares_file=shares_file,
            restart_command=restart_command,
            share_count=sum(check.shares for check in checks),
            reveal_seconds=within,
        )
        return await run_checks(session, checks)
    finally:
        await client.aclose()
        if chain is not None:
            await chain.aclose()


@contextlib.asynccontextmanager
async def open_kit_chain(url: str) -> AsyncIterator[DevChain]:
    """The kit's client of a dev chain."""
    chain = DevChain(url)
    try:
        yield chain
    finally:
        await chain.aclose()


class _Server(uvicorn.Server):
    """A server that leaves the signals of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_app(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application on this event loop. Yields its base URL."""
    # with the protocol, asyncio disables Nagle's algorithm, which delays each response by 40 ms
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="off",
        http="httptools",
        ws="none",
        timeout_keep_alive=60,  # on a busy machine, a shorter one ends while the client reuses the connection
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


def failed_ids(results: Sequence[CheckResult], level: str) -> set[str]:
    return {result.check.id for result in results if result.verdict == "failed" and result.check.level == level}


def describe_failures(results: Sequence[CheckResult]) -> str:
    return "\n".join(
        f"{result.check.id} ({result.check.level}) {result.check.name}: {result.seen}"
        for result in results
        if result.verdict == "failed"
    )


@contextlib.asynccontextmanager
async def restart_on_request(helper: HelperProcess, directory: Path) -> AsyncIterator[str]:
    """Yield a shell command that kills and starts a helper of this test."""
    asked, done = directory / "restart-asked", directory / "restart-done"

    async def serve() -> None:
        while not asked.exists():
            await asyncio.sleep(0.02)
        await helper.kill()
        await helper.start()
        done.touch()

    async with running(serve()):
        yield f"touch {asked}; until [ -e {done} ]; do sleep 0.05; done"
