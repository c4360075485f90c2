"""The onion service of docs/operations.md in a private Tor network: set up, used by a voter, monitored.

The commands of the section run in its order. `systemctl` is replaced by this test, which starts and stops the helper
and the service's tor with the files that the commands have installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from devnet.clients.client_wallet import MAX_POSTS
from helper.cli.config import render_example
from helper.runtime.network_clients import open_socks_stream
from tests.acceptance.document_commands import DocumentShell, parse_blocks
from tests.acceptance.test_operations import BIN, PAGE, ROOT, write_executable
from tests.campaign.wallet_clients import create_waiting_bodies
from tests.support.command import run_command
from tests.support.devnet import DevChain
from tests.support.harness import CHAIN_ID, STAND_IN_PROGRAM, HelperProcess, run_chain
from tests.support.process import ChildProcess, child_pids
from tests.tor.tor_network import TOR, TOR_GENCERT, TorNetwork, TorProcess

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which(TOR) and shutil.which(TOR_GENCERT)), reason="needs tor (Debian: apt install tor)"
    ),
]

NETWORK_SECONDS = 120.0
"""Time limit for the first consensus and circuit of the network."""
VOTE_COUNT = 20
"""Votes of 16 shares each: 320 shares."""
SHARE_SECONDS = 60.0
"""Time limit of a posted share."""
SYSTEMCTL = (
    "import socket, sys\n"
    "connection = socket.socket(socket.AF_UNIX)\n"
    "connection.connect(sys.argv[1])\n"
    "connection.sendall(' '.join(sys.argv[2:]).encode() + b'\\n')\n"
    "sys.exit(int(connection.makefile().readline()))\n"
)
LISTEN_STATE = "0A"


class OnionMachine:
    """The machine that the section describes, in a directory: its files, and what systemctl does."""

    def __init__(self, directory: Path, helper: HelperProcess, network: TorNetwork) -> None:
        self.helper = helper
        self.tor: TorProcess | None = None
        self._directory = directory
        self._network = network
        self._systemctl = directory / "systemctl.sock"
        folders = ("/etc/systemd/system", "/etc/tor", "/var/lib/tor", "/run/tor", "/run/svote-helper")
        places = {name: str(directory / name.strip("/")) for name in folders}
        for path in (*places.values(), str(directory / "tools")):
            Path(path).mkdir(parents=True)
        Path(places["/run/svote-helper"]).rmdir()  # systemd creates it
        (directory / "deploy").symlink_to(ROOT / "deploy")
        program = directory / "tools" / "systemctl.py"
        program.write_text(SYSTEMCTL)
        write_executable(
            directory / "tools" / "systemctl", f'exec {sys.executable} -I -S {program} {self._systemctl} "$@"'
        )
        env = {
            "PATH": f"{directory}/tools:{BIN}:{os.environ['PATH']}",
            "SVOTE_HELPER_CONFIG": str(helper.config),
            "SVOTE_HELPER_SERVER_TOR_SOCKS": f"unix:{places['/run/tor']}/socks",
        }
        env |= {name: os.environ[name] for name in ("PYTHONPATH", "HOME") if name in os.environ}
        self.shell = DocumentShell(directory, env, {**places, "/etc/svote-helper/helper.toml": str(helper.config)})

    async def serve_systemctl(self) -> asyncio.Server:
        """Start to execute the commands of the replaced systemctl."""
        return await asyncio.start_unix_server(self._serve_systemctl, str(self._systemctl))

    async def _serve_systemctl(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._execute((await reader.readline()).decode().strip())
            status = 0
        except Exception as error:
            print(f"systemctl failed: {error!r}", file=sys.stderr)
            status = 1
        writer.write(b"%d\n" % status)
        writer.close()

    async def _execute(self, command: str) -> None:
        match command:
            case "daemon-reload":
                pass
            case "stop svote-helper":
                assert await self.helper.stop() == 0
            case "start svote-helper":
                await self.helper.start()
                await self.helper.wait_until("is ready", lambda facts: facts["ready"])
            case "enable --now svote-helper-onion.socket":
                self._create_socket_directory()
            case "restart tor@default":
                await self.stop_tor()
                torrc = (self._directory / "etc" / "tor" / "torrc").read_text()
                options = self.shell.localize(torrc)
                self.tor = TorProcess(self._directory, "service", options, self._network.testing_defaults)
                self.tor.start()
                async with asyncio.timeout(NETWORK_SECONDS):
                    await self.tor.wait_until_bootstrapped()
            case _:
                raise AssertionError(f"unexpected: systemctl {command}")

    def _create_socket_directory(self) -> None:
        """Do what systemd does with the unit, except to listen: the helper then listens itself."""
        unit = (self._directory / "etc" / "systemd" / "system" / "svote-helper-onion.socket").read_text()
        (path,) = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ListenStream=")]
        Path(self.shell.localize(path)).parent.mkdir()

    async def stop_tor(self) -> None:
        """Stop the service's tor, if it runs."""
        if self.tor is not None:
            await self.tor.stop()

    async def find_onion_result(self, **env: str) -> dict[str, Any]:
        """Return what doctor reports of the onion service."""
        report = await run_command("doctor", "--skip-proof", "--json", "--config", str(self.helper.config), env={**env})
        (result,) = [found for found in json.loads(report.stdout)["findings"] if found["subject"] == "onion service"]
        return dict(result)


@pytest.fixture
async def machine_and_chain() -> AsyncIterator[tuple[OnionMachine, TorNetwork, DevChain]]:
    """A network, a chain and a helper. The directory's path is short, because it contains unix sockets."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onion-")))
        network = TorNetwork(directory / "net")
        stack.push_async_callback(network.stop)
        chain = await stack.enter_async_context(run_chain(directory, "--block-seconds", "0.3", "--extra-nodes", "1"))
        helper = HelperProcess(directory, chain.http, chain, program=STAND_IN_PROGRAM)
        stack.push_async_callback(kill_if_running, helper)
        try:
            await asyncio.gather(network.start(NETWORK_SECONDS), start_helper(helper, chain))
        except TimeoutError:
            print(network.describe())
            raise
        machine = OnionMachine(directory / "m", helper, network)
        stack.push_async_callback(machine.stop_tor)
        yield machine, network, chain


async def kill_if_running(process: ChildProcess) -> None:
    if process.process is not None and process.process.poll() is None:
        await process.kill()


async def start_helper(helper: HelperProcess, chain: DevChain) -> None:
    """Start a helper with the settings file of `config init`."""
    settings = {
        "helper.port": 0,
        "helper.db_path": str(helper.db),
        "chain.endpoints": tuple(node["rest"] for node in chain.nodes),
        "chain.rpc": tuple(node["rpc"] for node in chain.nodes),
        "chain.chain_id": CHAIN_ID,
        "chain.poll_seconds": 0.2,
    }
    helper.config.write_text(render_example(settings))
    helper.config.chmod(0o600)
    await helper.start()
    await helper.wait_until("is ready", lambda facts: facts["ready"])


async def post_share(socks: str, address: str, body: bytes) -> tuple[float, bytes]:
    """Post a share over a new stream. Returns the time in seconds, and the response."""
    started_at = time.monotonic()
    async with asyncio.timeout(SHARE_SECONDS):
        reader, writer = await open_socks_stream(socks, address, 80)
        try:
            head = (
                f"POST /shielded-vote/v1/shares HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            response = await reader.read()
        finally:
            writer.close()
    return time.monotonic() - started_at, response


async def post_shares(socks: str, address: str, bodies: Sequence[bytes]) -> list[float]:
    """Post all shares, at most `MAX_POSTS` at once. Each must be accepted. Returns the times in seconds, sorted."""
    slots = asyncio.Semaphore(MAX_POSTS)

    async def post(body: bytes) -> float:
        async with slots:
            seconds, response = await post_share(socks, address, body)
        head, _, content = response.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), response
        assert json.loads(content)["status"] == "queued"
        return seconds

    return sorted(await asyncio.gather(*map(post, bodies)))


def tcp_listeners(pid: int) -> list[str]:
    """The TCP sockets on which a process listens, as lines of /proc/net/tcp. Requires root: the helper is hardened."""
    links = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return [line for line in lines if line.split()[3] == LISTEN_STATE and line.split()[9] in inodes]


async def test_onion_service_section_works_in_a_private_network(
    machine_and_chain: tuple[OnionMachine, TorNetwork, DevChain], capsys: pytest.CaptureFixture[str]
) -> None:
    machine, network, chain = machine_and_chain
    helper = machine.helper
    can_list = os.geteuid() == 0
    assert not can_list or len(tcp_listeners(helper.pid)) == 1, "the port of the wallet API, before the change"
    _, bodies = await create_waiting_bodies(chain, helper, VOTE_COUNT)
    random.Random(7).shuffle(bodies)
    blocks = {block.name: block for block in parse_blocks(PAGE) if block.kind == "onion"}
    assert list(blocks) == ["helper", "tor", "address"]
    async with await machine.serve_systemctl():
        for block in blocks.values():
            await anyio.to_thread.run_sync(machine.shell.run_block, block)
    for pid in (helper.pid, *child_pids(helper.pid)):
        assert not can_list or tcp_listeners(pid) == []
    own_socks = f"unix:{machine.shell.localize('/run/tor/socks')}"
    published = await machine.find_onion_result(SVOTE_HELPER_SERVER_TOR_SOCKS=own_socks)
    assert published["level"] == "ok"
    address = published["message"].split()[0]

    started_at = time.monotonic()
    times = await post_shares(network.client_socks, address, bodies)
    seconds = time.monotonic() - started_at
    stored = (await helper.operator_get("/stats"))["total"]
    assert stored["received"] == len(bodies) == 16 * VOTE_COUNT
    with capsys.disabled():
        p50, p99 = (times[len(times) * percent // 100] for percent in (50, 99))
        print(f"\n{len(times)} shares through Tor in {seconds:.1f} s: p50 {p50:.2f} s, p99 {p99:.2f} s")

    await machine.stop_tor()
    gone = await machine.find_onion_result(SVOTE_HELPER_SERVER_TOR_SOCKS=network.client_socks)
    assert (gone["level"], f"{address} is not reachable" in gone["message"]) == ("fail", True)
    unknown = await machine.find_onion_result(SVOTE_HELPER_SERVER_TOR_SOCKS=own_socks)
    assert (unknown["level"], "cannot use tor" in unknown["message"]) == ("warn", True)
