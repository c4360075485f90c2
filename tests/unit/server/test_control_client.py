"""The client of the control socket: bodies, early refusals, and processes that hang."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from helper.server import control_client
from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, request_control_socket

REFUSED = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "helper.sock"


def serve(path: Path, respond: Callable[[socket.socket], None]) -> threading.Thread:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def work() -> None:
        with listener, listener.accept()[0] as connection:
            respond(connection)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def receive_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        received += connection.recv(1 << 16)
    return received


def test_post_sends_json_or_chunks(path: Path) -> None:
    requests = []
    for body, end in ((b"{}", b"{}"), (iter([b"one\n", b"two\n"]), b"0\r\n\r\n")):
        path.unlink(missing_ok=True)

        def respond(connection: socket.socket, end: bytes = end) -> None:
            requests.append(receive_until(connection, end))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = serve(path, respond)
        assert request_control_socket(path, "/queue/retry?dry_run=1", body) == (200, b"{}")
        thread.join()
    assert all(request.startswith(b"POST /queue/retry?dry_run=1 HTTP/1.1\r\n") for request in requests)
    assert requests[0].endswith(b"\r\n\r\n{}")
    assert requests[1].endswith(b"\r\n\r\n4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\n")


def test_post_refused_before_its_end_returns_response(path: Path) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(1 << 10)
        connection.sendall(REFUSED)

    thread = serve(path, refuse)
    assert request_control_socket(path, "/queue/import", (bytes(1 << 16) for _ in range(1000)), timeout=60) == (
        413,
        b"{}",
    )
    thread.join()


def test_ask_without_listener_reads_nothing_of_the_body(path: Path) -> None:
    body = iter([b"line"])
    with pytest.raises(DaemonNotRunningError):
        request_control_socket(path, "/queue/import", body)
    assert next(body) == b"line"


def test_ask_process_not_accepting_connections_is_unresponsive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "CONNECT_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(DaemonUnresponsiveError, match="accepts no connections"):
            request_control_socket(path, "/stats")
        for client in waiting:
            client.close()


def test_ask_process_without_response_is_unresponsive(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(DaemonUnresponsiveError, match=r"no response within 0\.1 s"):
            request_control_socket(path, "/stats", timeout=0.1)
