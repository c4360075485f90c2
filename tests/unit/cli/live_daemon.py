"""The operator application of a running helper over a real store and control socket, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer
from typing import Any, TypeVar

import anyio

from helper.chain.chain_data import RoundAuthentication
from helper.server.edge import Edge
from helper.server.listening import Server, listen_unix
from helper.server.operator_json import KnownRound
from helper.server.operator_routes import KnownRounds, create_operator_app
from helper.store.models import StoredRound
from tests.support.service_state import partial_state
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import NOW, OperationsHarness

T = TypeVar("T")
ServerT = TypeVar("ServerT", bound=BaseServer)

DATABASE = Path("svote-helper.db")
"""The default path, in the directory of a test."""
SERVICE_STATUS: dict[str, Any] = {"ready": True, "endpoints": [{"name": "node:80"}]}


async def read_rounds() -> KnownRounds:
    stored = StoredRound(ROUND_ID, 1, END, 50, (), None, None)
    return [KnownRound(stored, 7, is_closed=False, authentication=RoundAuthentication.NOT_LISTED)], NOW


class SilentHandler(BaseHTTPRequestHandler):
    """Serves requests on a socket of any kind, and logs nothing."""

    def address_string(self) -> str:
        return "control socket"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.respond()

    def respond(self) -> None:
        raise NotImplementedError

    def send_body(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def run_server(server: ServerT) -> Iterator[ServerT]:
    """Serve in a thread until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def create_queue_file(
    path: Path = DATABASE, fill: Callable[[OperationsHarness], Awaitable[object]] | None = None
) -> None:
    """Create the database of a helper that does not run, with the recorded round."""

    async def create() -> None:
        harness = OperationsHarness(path)
        await harness.open()
        if fill is not None:
            await fill(harness)
        await harness.store.close()

    anyio.run(create)


class LiveDaemon:
    """A running helper."""

    def __init__(self, harness: OperationsHarness, loop: asyncio.AbstractEventLoop) -> None:
        self.harness = harness
        self._loop = loop

    def run(self, work: Callable[[OperationsHarness], Awaitable[T]]) -> T:
        """Run a coroutine function in the helper's event loop."""

        async def run_work() -> T:
            return await work(self.harness)

        return asyncio.run_coroutine_threadsafe(run_work(), self._loop).result(60)


@contextmanager
def run_live_daemon(database: Path) -> Iterator[LiveDaemon]:
    """Run a helper on a database, with its control socket in the same directory."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    live = LiveDaemon(OperationsHarness(database), loop)
    stop = asyncio.Event()
    ready = threading.Event()

    async def serve(harness: OperationsHarness) -> None:
        await harness.open()
        app = create_operator_app(
            harness.store,
            read_rounds,
            operations=harness.operations,
            service_status=lambda: partial_state(**SERVICE_STATUS),
        )
        try:
            with listen_unix(database.parent / "helper.sock") as listener:
                server = Server(Edge(app))
                task = asyncio.create_task(server.serve([listener]))
                ready.set()
                await stop.wait()
                server.stop()
                await task
        finally:
            await harness.store.close()

    serving = asyncio.run_coroutine_threadsafe(serve(live.harness), loop)
    try:
        assert ready.wait(60)
        yield live
    finally:
        loop.call_soon_threadsafe(stop.set)
        serving.result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
