"""Notifications to the service manager, and the sockets that it passes."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from helper.errors import HelperError
from helper.runtime.systemd import ServiceManager, adopt_inherited_listener, is_journal, priority_prefix
from tests.support.clock import FakeClock
from tests.support.process import TIMEOUT_SECONDS, ChildProcess, find_free_port

STARTING_STATUS = "starting: chain state not read yet"
UNREACHABLE_NODE_CONFIG = '[chain]\nendpoints = ["http://127.0.0.1:1"]\n'


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[socket.socket]:
    """The manager's notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
        notify_socket.bind(str(tmp_path / "notify"))
        notify_socket.setblocking(False)
        yield notify_socket


async def receive_message(channel: socket.socket) -> list[str]:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        message = await asyncio.get_running_loop().sock_recv(channel, 4096)
    return message.decode().split("\n")


def create_manager(channel: socket.socket, clock: FakeClock, **more: str) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": channel.getsockname(), **more}, 7, clock)


async def test_watchdog_notifies_at_requested_interval(channel: socket.socket) -> None:
    clock = FakeClock()
    manager = create_manager(channel, clock, WATCHDOG_USEC="30000000", WATCHDOG_PID="7")
    assert manager.watchdog_seconds == 30

    async def report_status() -> str:
        return "well"

    task = asyncio.create_task(manager.run_heartbeat(report_status))
    for _ in range(3):
        assert await receive_message(channel) == ["WATCHDOG=1", "STATUS=well"]
        clock.advance(9.9)
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            channel.recv(1)
        clock.advance(0.1)
    task.cancel()


async def test_watchdog_stops_while_a_check_hangs(channel: socket.socket) -> None:
    clock = FakeClock()
    manager = create_manager(channel, clock, WATCHDOG_USEC="30000")
    hanging, probes = True, 0

    async def report_status() -> str:
        nonlocal probes
        probes += 1
        if hanging:
            await asyncio.Event().wait()
        return "well"

    task = asyncio.create_task(manager.run_heartbeat(report_status))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while probes < 5:
            clock.advance(1)
            await asyncio.sleep(0.005)
    with pytest.raises(BlockingIOError):
        channel.recv(1)
    hanging = False
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            clock.advance(1)
            await asyncio.sleep(0.005)
            try:
                assert channel.recv(99) == b"WATCHDOG=1\nSTATUS=well"
                break
            except BlockingIOError:
                continue
    task.cancel()


async def test_notify_status_with_line_break_stays_one_assignment(channel: socket.socket) -> None:
    create_manager(channel, FakeClock()).notify("STATUS=not ready: bad\nSTOPPING=1\ud800")
    assert await receive_message(channel) == ["STATUS=not ready: bad STOPPING=1 "]


async def test_notify_without_manager_does_nothing(tmp_path: Path) -> None:
    env = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "8", "NOTIFY_SOCKET": str(tmp_path / "missing")}
    manager_of_other = ServiceManager(env, 7, FakeClock())
    assert manager_of_other.watchdog_seconds is None  # the variable is set for another process
    assert env == {}
    manager_of_other.notify("READY=1")
    manager = ServiceManager({}, 7, FakeClock())
    manager.notify("READY=1")

    async def report_status() -> str:
        raise AssertionError("unexpected call")

    await manager.run_heartbeat(report_status)


async def test_notify_abstract_socket_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0svote-helper-test-{os.getpid()}")
        abstract.setblocking(False)
        ServiceManager({"NOTIFY_SOCKET": f"@svote-helper-test-{os.getpid()}"}, 7, FakeClock()).notify("READY=1")
        assert await receive_message(abstract) == ["READY=1"]


def test_journal_is_recognized_by_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "other").open("w") as other:
        status = os.fstat(journal.fileno())
        env = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert is_journal(env, journal)
        assert not is_journal(env, other), "another standard error, for example of a child process"
        assert not is_journal({}, journal)
    assert not is_journal(env, io.StringIO())


@pytest.mark.parametrize(
    ("level", "prefix"),
    [("debug", "<7>"), ("info", "<6>"), ("warning", "<4>"), ("error", "<3>"), ("critical", "<2>")],
)
def test_priority_prefix_of_level(level: str, prefix: str) -> None:
    assert priority_prefix(level) == prefix


def test_socket_activation_without_manager_uses_no_sockets() -> None:
    assert adopt_inherited_listener({}, 7) is None
    assert adopt_inherited_listener({"LISTEN_PID": "8", "LISTEN_FDS": "1"}, 7) is None
    assert adopt_inherited_listener({"LISTEN_PID": "7", "LISTEN_FDS": "0"}, 7) is None


def test_socket_activation_with_two_unnamed_sockets_is_refused() -> None:
    env = {"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "one:other"}
    with pytest.raises(HelperError, match="2 sockets"):
        adopt_inherited_listener(env, 7)
    assert env == {}


def write_config(directory: Path) -> Path:
    """Write the settings of a service without a queue, which starts quickly."""
    file = directory / "helper.toml"
    database = directory / "queue.db"
    disabled_parts = "[admin]\ndisable = true\n[ui]\nenable = true\n"
    file.write_text(f'[helper]\nport = 0\ndb_path = "{database}"\n{UNREACHABLE_NODE_CONFIG}{disabled_parts}')
    return file


@pytest.mark.parametrize("disable", [True, False], ids=["admin only", "queue"])
async def test_service_notifies_manager_from_start_to_stop(
    tmp_path: Path, channel: socket.socket, disable: bool
) -> None:
    config = write_config(tmp_path)
    process = ChildProcess("helper", tmp_path, ("-m", "helper", "serve", "--config", str(config)))
    address = str(channel.getsockname())
    await process.start(NOTIFY_SOCKET=address, WATCHDOG_USEC="600000", SVOTE_HELPER_HELPER_DISABLE=str(disable).lower())
    try:
        lines: list[str] = []
        while "READY=1" not in lines:
            lines = await receive_message(channel)
        while "WATCHDOG=1" not in lines:
            lines = await receive_message(channel)
        status = next(line for line in lines if line.startswith("STATUS="))
        assert status == f"STATUS={'accepts no shares ([helper] disable)' if disable else STARTING_STATUS}"
        os.kill(process.pid, signal.SIGSTOP)
        await has_no_notification(channel)
        os.kill(process.pid, signal.SIGCONT)
        assert "WATCHDOG=1" in await receive_message(channel)
        assert await process.stop() == 0
        while "STOPPING=1" not in lines:
            lines = await receive_message(channel)
        announced = f"created a new, empty queue: {tmp_path / 'queue.db'}" in process.log.read_text()
        assert announced is not disable
    finally:
        if process.process is not None and process.process.poll() is None:
            await process.kill()


async def has_no_notification(channel: socket.socket) -> None:
    """Wait until no notification arrives for the length of the watchdog timeout."""
    quiet = 0
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while quiet < 8:
            await asyncio.sleep(0.1)
            quiet += 1
            try:
                while channel.recv(4096):
                    quiet = 0
            except BlockingIOError:
                continue


def socket_passing_commands(address: str) -> dict[str, tuple[str, ...]]:
    """Programs that listen on a port or a unix socket and start the given command with it.

    The first needs only a shell.
    """
    host, _, port = address.rpartition(":")
    unix = "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    tcp = f"s = socket.create_server(({host!r}, int({port!r})))"
    script = (
        f"import os, socket, sys; {tcp if host else unix};"
        "os.dup2(s.fileno(), 3); os.set_inheritable(3, True);"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', LISTEN_FDNAMES='any');"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    launchers: dict[str, tuple[str, ...]] = {"inherited": (sys.executable, "-c", script, address)}
    if activate := shutil.which("systemd-socket-activate"):
        launchers["systemd"] = (activate, "-l", address, "--fdname=wallets")
    return launchers


@pytest.mark.parametrize("is_unix", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize("launcher", socket_passing_commands(":0"))
async def test_service_serves_on_passed_socket(tmp_path: Path, launcher: str, is_unix: bool) -> None:
    path = str(tmp_path / "wallets.sock")
    address = path if is_unix else f"127.0.0.1:{find_free_port()}"
    process = ChildProcess("helper", tmp_path, ("-m", "helper", "serve", "--config", str(write_config(tmp_path))))
    settings = {"SVOTE_HELPER_SERVER_UNIX_SOCKET": path} if is_unix else {}
    process.spawn(wrapper=socket_passing_commands(address)[launcher], SVOTE_HELPER_HELPER_DISABLE="true", **settings)
    try:
        transport = httpx.AsyncHTTPTransport(uds=path if is_unix else None)
        async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT_SECONDS) as http:
            # Under socket activation, the first connection triggers the start; it waits in any case.
            async with process.timeout("answers"):
                while True:
                    try:
                        response = await http.get("http://helper/" if is_unix else f"http://{address}/")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
            assert response.status_code == 200
            await process.wait_until_listening()
            assert process.ready_data["url"] == (f"unix:{path}" if is_unix else f"http://{address}")
        assert await process.stop() == 0
        assert Path(path).exists() == is_unix, "the file belongs to the service manager"
    finally:
        if process.process is not None and process.process.poll() is None:
            await process.kill()
