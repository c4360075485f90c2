"""Sends requests over new connections until SIGTERM, then prints the outcomes as JSON. Standard library only.

    request_client.py ADDRESS PATH

`ADDRESS` is HOST:PORT or the path of a unix socket. Every second request is a POST of an invalid share.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import time
from collections import Counter

TIMEOUT_SECONDS = 60.0
PAUSE_SECONDS = 0.02


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


def send_request(address: str, path: str, *, post: bool) -> str:
    """Return the status of the response, or the name of the error."""
    kind = UnixConnection if address.startswith("/") else http.client.HTTPConnection
    connection = kind(address, timeout=TIMEOUT_SECONDS)
    try:
        if post:
            connection.request("POST", f"{path}/shares", b"{}", {"Content-Type": "application/json"})
        else:
            connection.request("GET", f"{path}/status")
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def main(address: str, path: str) -> None:
    """Send requests until SIGTERM."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    print("started", flush=True)
    while not stopped:
        started = time.monotonic()
        outcomes[send_request(address, path, post=outcomes.total() % 2 == 1)] += 1
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(PAUSE_SECONDS)
    print(json.dumps({"outcomes": outcomes, "slowest": slowest}))


if __name__ == "__main__":
    main(*sys.argv[1:])
