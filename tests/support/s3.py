"""S3 store for tests: moto, or another server, behind a process that injects faults.

`python -m tests.support.s3 --ready-file FILE` listens on loopback. Without `--server URL` it contains moto. moto checks
a condition and writes in two steps, which must be atomic here, so it processes one request at a time. A request is
processed only after it was received completely, so a host that was stopped while sending does not block others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import httpx

from helper.clock import SystemClock
from helper.config.sections import S3Section
from helper.config.value_types import BucketLocation
from helper.lease.s3_lease import NO_HOLDER, LeaseRecord
from helper.object_store import Bucket, open_bucket
from tests.support.process import TIMEOUT_SECONDS, ChildProcess, find_free_port

CREDENTIALS_ENV: Final = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_REGION": "us-east-1",
}
SERVER_ENV: Final = {
    "ROOT_ACCESS_KEY": CREDENTIALS_ENV["AWS_ACCESS_KEY_ID"],
    "ROOT_SECRET_KEY": CREDENTIALS_ENV["AWS_SECRET_ACCESS_KEY"],
}
"""Environment of a server of its own: the keys that it accepts."""
BUCKET_NAME: Final = "svote-tests"


_HOP_HEADERS: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
"""Headers of one connection, and the length, which the server of the process sets."""


class FaultInjection:
    """WSGI middleware that injects faults before or instead of the store's response.

    A POST to `/_faults` replaces all switches. A GET returns the number of requests by method since then.

        delay               delay of every request in seconds
        unavailable         number of next requests that get 503 without effect
        forbidden           number of next requests that get 403
        conflict            number of next writes that get 409, as after a concurrent write
        lost_response       number of next writes that take effect and get 500
        ignores_conditions  whether conditions are ignored; only with moto, which does not check signatures

    Args:
        app: the store.
        is_serial: whether the store processes one request at a time.
    """

    def __init__(self, app: WSGIApplication, *, is_serial: bool) -> None:
        self._app = app
        self._store_lock = threading.Lock() if is_serial else contextlib.nullcontext()
        self._switches: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        with self._store_lock:
            response = self._handle(environ, start_response)
            try:
                return list(response)
            finally:
                getattr(response, "close", lambda: None)()

    def _handle(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        if environ["PATH_INFO"] == "/_faults":
            with self._lock:
                if method == "POST":
                    self._switches = json.load(environ["wsgi.input"])
                    self._counts.clear()
                return _respond(start_response, "200 OK", json.dumps(self._counts).encode())
        with self._lock:
            self._counts[method] = self._counts.get(method, 0) + 1
        time.sleep(self._switches.get("delay", 0))
        if self._consume_fault("unavailable"):
            return _respond(start_response, "503 Slow Down", b"<Error><Code>SlowDown</Code></Error>")
        if self._consume_fault("forbidden"):
            return _respond(start_response, "403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
        if method == "PUT" and self._consume_fault("conflict"):
            body = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
            return _respond(start_response, "409 Conflict", body)
        if self._switches.get("ignores_conditions"):
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if method == "PUT" and self._consume_fault("lost_response"):
            for _ in self._app(environ, lambda *_: lambda _: None):
                pass
            return _respond(start_response, "500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>")
        return self._app(environ, start_response)

    def _consume_fault(self, name: str) -> bool:
        with self._lock:
            left = self._switches.get(name, 0)
            self._switches[name] = max(0, left - 1)
        return bool(left)


def _respond(start_response: StartResponse, status: str, body: bytes) -> Iterable[bytes]:
    start_response(status, [("content-length", str(len(body)))])
    return [body]


class Forwarder:
    """WSGI application that forwards each request to a server, with all its headers because they are signed."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        headers = {
            name.removeprefix("HTTP_").replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_") or (name == "CONTENT_TYPE" and value)
        }
        body = environ["wsgi.input"].read()
        assert self._address.hostname is not None
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, headers)
            response = connection.getresponse()
            content = response.read()
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_HEADERS]
        # A response to HEAD has no body, but the length of the object.
        length = response.getheader("content-length") or str(len(content))
        start_response(f"{response.status} {response.reason}", [*kept, ("content-length", length)])
        return [content]


class ObjectStoreProcess(ChildProcess):
    """A running store with one bucket.

    Args:
        program: command of a server of its own; "{port}" and "{data}" stand for its port on 127.0.0.1 and an empty
            directory. Empty for moto.
    """

    def __init__(self, directory: Path, program: Sequence[str] = ()) -> None:
        self.data = directory / "s3-data"
        self._server_port = find_free_port() if program else 0
        places = {"port": str(self._server_port), "data": str(self.data)}
        self._program = [argument.format(**places) for argument in program]
        self._server: subprocess.Popen[bytes] | None = None
        server = ("--server", f"http://127.0.0.1:{self._server_port}") if program else ()
        super().__init__("s3", directory, ("-m", "tests.support.s3", *server))

    async def start(self, **env: str) -> None:
        if self._program:
            await self.start_server()
        await super().start(**env)

    async def start_server(self) -> None:
        """Start only the server of its own, without the process that injects faults, and without a bucket."""
        self.data.mkdir()
        with self.log.open("ab") as log:
            self._server = subprocess.Popen(self._program, stdout=log, stderr=log, env={**os.environ, **SERVER_ENV})
        async with self.timeout("listens"):
            while True:
                assert self._server.poll() is None, self.log_tail()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server_port)):
                    return
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        if self.process is not None:
            await super().kill()

    @property
    def url(self) -> str:
        return str(self.ready_data["url"])

    @property
    def server_url(self) -> str:
        """The URL of the server of its own, without injected faults."""
        return f"http://127.0.0.1:{self._server_port}"

    def open_bucket_client(
        self,
        path: str = "",
        *,
        seconds: float = 10,
        retries: int = 0,
        name: str = BUCKET_NAME,
        url: str = "",
        **settings: Any,
    ) -> Bucket:
        """Open the bucket with the product's client, at another URL of the store if one is given."""
        section = S3Section(endpoint=url or self.url, **settings)
        return open_bucket(section, BucketLocation(name, path), clock=SystemClock(), seconds=seconds, retries=retries)

    async def set_faults(self, **switches: object) -> None:
        async with httpx.AsyncClient() as http:
            (await http.post(f"{self.url}/_faults", json=switches)).raise_for_status()

    async def request_counts(self) -> dict[str, int]:
        """Return the number of requests by method since the faults were set."""
        async with httpx.AsyncClient() as http:
            counts: dict[str, int] = (await http.get(f"{self.url}/_faults")).json()
        return counts


async def put_released_lease(bucket: Bucket, *, seconds: float, name: str = "sender.json") -> None:
    """Store a released lease, so that the first host does not need to wait."""
    record = LeaseRecord(holder=NO_HOLDER, host="", fence=0, beat=0, seconds=seconds, released=True, written=0)
    await bucket.put(name, record.to_bytes())


@contextlib.asynccontextmanager
async def run_object_store(directory: Path, program: Sequence[str] = ()) -> AsyncIterator[ObjectStoreProcess]:
    """Run a store for one test. Kills it at the end."""
    store = ObjectStoreProcess(directory, program)
    try:
        await store.start()
        yield store
    finally:
        await store.kill()


def main() -> None:
    from werkzeug.serving import make_server  # noqa: PLC0415 - in the child alone

    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--server", default="")
    options = parser.parse_args()
    store = FaultInjection(Forwarder(options.server) if options.server else create_moto(), is_serial=not options.server)
    server = make_server("127.0.0.1", 0, store, threaded=True)
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=announce, args=(url, options.ready_file), daemon=True).start()
    server.serve_forever()


def create_moto() -> WSGIApplication:
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - in the child alone
        DomainDispatcherApplication,
        create_backend_app,
    )

    app: WSGIApplication = DomainDispatcherApplication(create_backend_app)
    return app


def announce(url: str, ready_file: Path) -> None:
    create_client(url).create_bucket(Bucket=BUCKET_NAME)
    partial = ready_file.with_suffix(".partial")
    partial.write_text(json.dumps({"url": url}))
    partial.replace(ready_file)


def create_client(url: str) -> Any:
    """Create a client of another make, for what the product's client does not offer."""
    import boto3  # noqa: PLC0415 - slow to import

    keys = CREDENTIALS_ENV["AWS_ACCESS_KEY_ID"], CREDENTIALS_ENV["AWS_SECRET_ACCESS_KEY"]
    return boto3.client("s3", "us-east-1", endpoint_url=url, aws_access_key_id=keys[0], aws_secret_access_key=keys[1])


if __name__ == "__main__":
    main()
