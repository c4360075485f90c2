"""The dev chain as a process: ports, uvicorn, signals, and the ready line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from devnet.gojson import dumps
from devnet.network import DevNet, Options
from devnet.node import Node


@dataclass(frozen=True, slots=True)
class Addresses:
    """Address of the first node; port 0 selects a free one. Other nodes use the following ports, or free ones."""

    host: str = "127.0.0.1"
    rest_port: int = 11317
    rpc_port: int = 36657


class _Server(uvicorn.Server):
    """A uvicorn server that shares the event loop with others and does not handle signals."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.listening = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                self._serve_request,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_level="error",
                access_log=False,
                timeout_keep_alive=30,  # longer than the 5 s of httpx, whose POST would fail on a closing connection
                timeout_graceful_shutdown=1,
            )
        )

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, whose state has a function that aborts the connection."""

        def abort() -> None:
            for connection in self.server_state.connections:
                if connection.transport.get_extra_info("peername") == scope["client"]:
                    connection.transport.abort()

        scope["state"]["abort"] = abort
        await self._app(scope, receive, send)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port and set `listening`."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not install signal handlers."""
        yield


@contextlib.asynccontextmanager
async def serve_devnet(options: Options, addresses: Addresses) -> AsyncIterator[dict[str, Any]]:
    """Run a dev chain with all ports open. Yields the content of the ready line."""
    sockets = _open_sockets(addresses, options.extra_nodes + 1)
    devnet = DevNet(options)
    nodes = [Node(devnet, f"node{number}") for number in range(options.extra_nodes + 1)]
    apps = [app for node in nodes for app in (node.rest, node.rpc)]
    servers = [_Server(app) for app in apps]
    running: list[asyncio.Task[None]] = []
    try:
        await devnet.start()
        for server, sock in zip(servers, sockets, strict=True):
            running.append(asyncio.create_task(server.serve(sockets=[sock])))
        for server in servers:
            await server.listening.wait()
        yield _ready_line(devnet, nodes, sockets)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running, return_exceptions=True)
        for sock in sockets:
            sock.close()
        await devnet.close()


async def run(options: Options, addresses: Addresses, ready_file: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT. The ready line is the first on stdout, and the content of `ready_file`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve_devnet(options, addresses) as ready:
        line = dumps(ready).decode()
        if ready_file is not None:
            _write_atomically(ready_file, line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        await stop.wait()


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _open_sockets(addresses: Addresses, nodes: int) -> list[socket.socket]:
    """Bind the sockets, REST and RPC of each node."""
    firsts = (addresses.rest_port, addresses.rpc_port)
    ports = [first + number if first else 0 for number in range(nodes) for first in firsts]
    opened: list[socket.socket] = []
    try:
        for port in ports:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            opened.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((addresses.host, port))
    except OSError as error:
        for sock in opened:
            sock.close()
        raise SystemExit(f"cannot listen on {addresses.host}:{port}: {error.strerror}") from None
    return opened


def _ready_line(devnet: DevNet, nodes: Sequence[Node], sockets: Sequence[socket.socket]) -> dict[str, Any]:
    """The ready line: chain id, circuit, and the URLs of all nodes (those of the first node also at the top level)."""
    urls = ["http://{}:{}".format(*sock.getsockname()) for sock in sockets]
    listed = [
        {"name": node.name, "rest": rest, "rpc": rpc}
        for node, rest, rpc in zip(nodes, urls[0::2], urls[1::2], strict=True)
    ]
    first = {"rest": urls[0], "rpc": urls[1]}
    return {
        "chain_id": devnet.chain.chain_id,
        "circuit": devnet.verifier.circuit,
        "pid": os.getpid(),
        **first,
        "nodes": listed,
    }
