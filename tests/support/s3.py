"""S3 store for tests: moto's server in a child process, with the faults of real stores.

`python -m tests.support.s3 --ready-file FILE` listens on loopback. Requests are processed one at a time, because
moto checks a condition and writes in two steps, which must be atomic here. A request is processed only after it was
received completely, so a host that was stopped while sending does not block others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import httpx

from helper.clock import SystemClock
from helper.object_store.bucket import BucketLocation, S3Settings
from helper.object_store.s3 import S3Bucket, open_bucket
from tests.support.process import ChildProcess

CREDENTIALS_ENV: Final = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_REGION": "us-east-1",
}
BUCKET_NAME: Final = "svote-tests"


class FaultInjection:
    """WSGI middleware that injects faults before or instead of moto's response.

    A POST to `/_faults` replaces all switches. A GET returns the number of requests by method since then.

        delay               delay of every request in seconds
        unavailable         number of next requests that get 503 without effect
        forbidden           number of next requests that get 403
        conflict            number of next writes that get 409, as after a concurrent write
        lost_response       number of next writes that take effect and get 500
        ignores_conditions  whether conditions are ignored
    """

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app
        self._switches: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            response = self._handle(environ, start_response)
            try:
                return list(response)
            finally:
                getattr(response, "close", lambda: None)()

    def _handle(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        if environ["PATH_INFO"] == "/_faults":
            if method == "POST":
                self._switches = json.load(environ["wsgi.input"])
                self._counts.clear()
            return _respond(start_response, "200 OK", json.dumps(self._counts).encode())
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
        left = self._switches.get(name, 0)
        self._switches[name] = max(0, left - 1)
        return bool(left)


def _respond(start_response: StartResponse, status: str, body: bytes) -> Iterable[bytes]:
    start_response(status, [("content-length", str(len(body)))])
    return [body]


class ObjectStoreProcess(ChildProcess):
    """A running store with one bucket."""

    def __init__(self, directory: Path) -> None:
        super().__init__("s3", directory, ("-m", "tests.support.s3"))

    async def start(self, **env: str) -> None:
        """Start the store and create the bucket."""
        await super().start(**env)
        async with httpx.AsyncClient() as http:
            (await http.put(f"{self.url}/{BUCKET_NAME}")).raise_for_status()

    @property
    def url(self) -> str:
        """The endpoint URL."""
        return str(self.ready_data["url"])

    def open_bucket_client(
        self, path: str = "", *, seconds: float = 10, name: str = BUCKET_NAME, **settings: Any
    ) -> S3Bucket:
        """Open the bucket with the product's client."""
        section = S3Settings(endpoint=self.url, **settings)
        return open_bucket(section, BucketLocation(name, path), clock=SystemClock(), env={}, seconds=seconds)

    async def set_faults(self, **switches: object) -> None:
        """Set the faults and reset the counts."""
        async with httpx.AsyncClient() as http:
            (await http.post(f"{self.url}/_faults", json=switches)).raise_for_status()

    async def request_counts(self) -> dict[str, int]:
        """Return the number of requests by method since the faults were set."""
        async with httpx.AsyncClient() as http:
            counts: dict[str, int] = (await http.get(f"{self.url}/_faults")).json()
        return counts


@contextlib.asynccontextmanager
async def run_object_store(directory: Path) -> AsyncIterator[ObjectStoreProcess]:
    """Run a store for one test. Kills it at the end."""
    store = ObjectStoreProcess(directory)
    await store.start()
    try:
        yield store
    finally:
        await store.kill()


def main() -> None:
    """Serve until killed."""
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - in the child alone
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args()
    server = make_server("127.0.0.1", 0, FaultInjection(DomainDispatcherApplication(create_backend_app)), threaded=True)
    partial = options.ready_file.with_suffix(".partial")
    partial.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}))
    partial.replace(options.ready_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
