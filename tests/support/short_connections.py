"""Posts shares over a new connection each, as wallets do over Tor, with little CPU time of its own.

`python -m tests.support.short_connections URL BODIES` posts each line of a file and prints the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

SHARES_PATH = "/shielded-vote/v1/shares"
POLL_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
"""Time limit of a request from its connect call, as in wallets."""
_BIND_WITHOUT_PORT = 24
"""IP_BIND_ADDRESS_NO_PORT of Linux: the port is chosen by `connect`, which may use one again sooner."""
_PENDING = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


@dataclass(slots=True)
class LoadResult:
    """Result of posting.

    Attributes:
        responses: number of responses by status code and `status` field, such as "200 queued", and of errors.
        seconds: from the first connection to the last response.
        latencies: seconds from the connect call of each request to the end of its response, in order of completion.
        resumed: number of connections with a resumed TLS session.
    """

    responses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    resumed: int = 0
    cpu_seconds: float = 0.0


class ShortConnectionPoster:
    """Posts bodies over new connections, a fixed number at once. Certificates are not verified.

    Args:
        source: local address of the connections; None for the default.
        resumes: whether a connection offers the TLS session of an earlier one.
    """

    def __init__(
        self, url: str, *, source: str | None = None, resumes: bool = False, headers: Sequence[str] = ()
    ) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self.host, self.source, self.resumes = address.hostname, source, resumes
        self.peer = (socket.gethostbyname(self.host), address.port)
        self.context: ssl.SSLContext | None = None
        if address.scheme == "https":
            self.context = ssl.create_default_context()
            self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
            self.context.set_alpn_protocols(["http/1.1"])
        lines = [f"POST {SHARES_PATH} HTTP/1.1", f"Host: {address.netloc}", "Content-Type: application/json", *headers]
        self.head = "\r\n".join([*lines, "Content-Length: "])
        self.session: ssl.SSLSession | None = None

    def run(self, bodies: Sequence[bytes], connections: int) -> LoadResult:
        result, poll, remaining = LoadResult(), select.epoll(), iter(bodies)
        open_exchanges: dict[int, _Exchange] = {}
        started_at, cpu_started_at = time.perf_counter(), time.process_time()
        for _ in range(connections):
            self._start_next(remaining, poll, open_exchanges)
        while open_exchanges:
            for file, _ in poll.poll(POLL_SECONDS):
                exchange = open_exchanges[file]
                if not exchange.advance():
                    poll.modify(file, exchange.interest)
                    continue
                del open_exchanges[file]
                exchange.record(result)
                exchange.connection.close()
                self._start_next(remaining, poll, open_exchanges)
            oldest_allowed = time.perf_counter() - TIMEOUT_SECONDS
            for file, exchange in list(open_exchanges.items()):
                if exchange.started_at < oldest_allowed:
                    del open_exchanges[file]
                    result.responses["timeout"] += 1
                    exchange.connection.close()
                    self._start_next(remaining, poll, open_exchanges)
        poll.close()
        result.seconds, result.cpu_seconds = time.perf_counter() - started_at, time.process_time() - cpu_started_at
        return result

    def _start_next(self, bodies: Iterator[bytes], poll: select.epoll, open_exchanges: dict[int, _Exchange]) -> None:
        body = next(bodies, None)
        if body is not None:
            exchange = _Exchange(self, f"{self.head}{len(body)}\r\n\r\n".encode() + body)
            file = exchange.connection.fileno()
            open_exchanges[file] = exchange
            poll.register(file, exchange.interest)


class _Exchange:
    """One connection with one request."""

    __slots__ = ("_is_connected", "_poster", "_received", "_unsent", "connection", "error", "interest", "started_at")

    def __init__(self, poster: ShortConnectionPoster, request: bytes) -> None:
        self._poster = poster
        self._unsent = memoryview(request)
        self._received = b""
        self._is_connected = False
        self.error = ""
        self.interest = select.EPOLLOUT
        self.started_at = time.perf_counter()
        plain = socket.socket()
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if poster.source is not None:
            plain.setsockopt(socket.IPPROTO_IP, _BIND_WITHOUT_PORT, 1)
            plain.bind((poster.source, 0))
        plain.connect_ex(poster.peer)
        self.connection: socket.socket = plain

    def advance(self) -> bool:
        """Do what is possible now. Returns whether the exchange has ended."""
        try:
            return self._advance()
        except _PENDING as pending:
            self.interest = select.EPOLLOUT if isinstance(pending, ssl.SSLWantWriteError) else select.EPOLLIN
            return False
        except OSError as error:
            self.error = type(error).__name__
            return True

    def _advance(self) -> bool:
        if not self._is_connected:
            self._finish_connecting()
        while self._unsent:
            try:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            except BlockingIOError:
                self.interest = select.EPOLLOUT
                return False
        while chunk := self.connection.recv(1 << 14):
            self._received += chunk
            if self._is_complete():
                return True
        return True

    def _finish_connecting(self) -> None:
        poster = self._poster
        if error := self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        if poster.context is not None:
            if not isinstance(self.connection, ssl.SSLSocket):
                self.connection = poster.context.wrap_socket(
                    self.connection,
                    do_handshake_on_connect=False,
                    suppress_ragged_eofs=True,
                    server_hostname=poster.host,
                    session=poster.session,
                )
            self.connection.do_handshake()
        self._is_connected = True

    def _is_complete(self) -> bool:
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return bool(end) and bool(length) and len(body) >= int(length)

    def record(self, result: LoadResult) -> None:
        head, _, body = self._received.partition(b"\r\n\r\n")
        if self.error or not head:
            result.responses[self.error or "closed"] += 1
            return
        try:
            status = json.loads(body).get("status", "")
        except ValueError:
            status = "not JSON"
        result.responses[f"{head[9:12].decode()} {status}"] += 1
        result.latencies.append(time.perf_counter() - self.started_at)
        if isinstance(self.connection, ssl.SSLSocket):
            result.resumed += bool(self.connection.session_reused)
            if self._poster.resumes:
                self._poster.session = self.connection.session  # with TLS 1.3 it arrives after the handshake


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("bodies", type=Path)
    parser.add_argument("--connections", type=int, default=64, help="connections open at once")
    parser.add_argument("--resume", action="store_true", help="resume TLS sessions")
    options = parser.parse_args()
    poster = ShortConnectionPoster(options.url, resumes=options.resume)
    result = poster.run(options.bodies.read_bytes().splitlines(), options.connections)
    json.dump({part.name: getattr(result, part.name) for part in fields(result)}, sys.stdout)


if __name__ == "__main__":
    main()
