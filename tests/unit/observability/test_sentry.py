"""What leaves for Sentry: a line of our own log, by the log's own list, and nothing else of this process."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import sentry_sdk
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.errors import ConfigError, HelperError
from helper.observability.log_config import FIELDS, configure
from helper.observability.sentry import AGAIN, KEPT, Reporter, start, strip
from helper.server.application import wrapped
from tests.support.clock import FakeClock

CANARY = "canary-7f3a91"
PATIENCE = 20.0


class Project:
    """A Sentry project on loopback, that keeps every byte that comes."""

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.head: list[str] = []
        self.got = threading.Event()
        project = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                project.head.append(f"{self.path}\n{self.headers}")
                zipped = self.headers.get("Content-Encoding") == "gzip"
                project.came.append(gzip.decompress(body) if zipped else body)
                project.got.set()
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.dsn = f"http://public@127.0.0.1:{self.server.server_port}/7"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events in all envelopes that came."""
        return [json.loads(envelope.split(b"\n")[2]) for envelope in self.came]


@pytest.fixture
def project() -> Iterator[Project]:
    serving = Project()
    serving.thread.start()
    yield serving
    serving.server.shutdown()
    serving.thread.join()
    serving.server.server_close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reporter(project: Project, clock: FakeClock) -> Iterator[Reporter]:
    """The log reports to the project; everything is as before afterwards."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    made = start(project.dsn, clock)
    configure("debug", "json", io.StringIO(), made.report)
    yield made
    made.close()
    root.handlers[:], level = before
    root.setLevel(level)
    logging.getLogger("helper").setLevel(logging.NOTSET)
    structlog.reset_defaults()


def fails(primary_blind: str) -> None:
    """Raise with a secret in a local variable, in the text, and in the cause's text."""
    witness = {"share_comms": primary_blind}
    try:
        raise ValueError(f"{witness}")
    except ValueError as error:
        raise KeyError(primary_blind) from error


def test_an_error_is_told_by_its_line_and_fields(project: Project, reporter: Reporter) -> None:
    structlog.get_logger("helper.test").error("a thing broke", reason="so it is", count=3)
    reporter.close()
    (event,) = project.events
    assert event["logentry"] == {"formatted": "a thing broke"}
    assert event["extra"] == {"reason": "so it is", "count": 3}
    assert (event["level"], event["logger"]) == ("error", "helper.test")
    assert event["release"].startswith("svote-helper@")
    assert set(event) <= {*KEPT, "logentry", "extra", "fingerprint"}


async def broken(request: Request) -> Response:
    await request.body()
    fails(CANARY)
    return Response()


@pytest.mark.anyio
async def test_no_secret_gets_out_whatever_is_done(
    project: Project, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SVOTE_SECRET", CANARY)
    monkeypatch.setattr(sys, "argv", ["serve", CANARY])
    sentry_sdk.add_breadcrumb(message=CANARY)
    sentry_sdk.set_tag("secret", CANARY)
    log = structlog.get_logger("helper.test")
    log.error("unlisted fields", primary_blind=CANARY, nullifier=CANARY, client=CANARY)
    log.error("a value that is not plain", reason=CANARY.encode(), error=[object(), CANARY.encode()])
    try:
        fails(CANARY)
    except KeyError:
        log.exception("an exception of others")
    structlog.get_logger("uvicorn.error").error(f"a library quotes {CANARY}")
    logging.getLogger("asyncio").error("a library quotes %s", CANARY)
    app = wrapped([Route("/broken", broken, methods=["POST"])])
    transport = httpx.ASGITransport(app, client=("203.0.113.77", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://helper") as client:
        headers = {"Authorization": f"Bearer {CANARY}", "X-Helper-Token": CANARY, "User-Agent": CANARY}
        answer = await client.post(f"/broken?token={CANARY}", content=CANARY, headers=headers)
    assert answer.status_code == 500
    reporter.close()
    told = b"".join(project.came).decode()
    assert len(project.events) == 4, "libraries' lines are not sent"
    assert CANARY not in told
    assert CANARY not in "".join(project.head)
    for hidden in ("203.0.113.77", socket.gethostname(), os.environ["HOME"], "share_comms"):
        assert hidden not in told, hidden
    last = project.events[-1]
    assert last["logentry"]["formatted"] == "request_failed"
    assert last["extra"]["exception"].startswith("KeyError (")
    assert last["extra"]["request_id"] == answer.headers["x-request-id"]


def test_only_errors_are_sent_and_each_kind_once_a_minute(
    project: Project, reporter: Reporter, clock: FakeClock
) -> None:
    log = structlog.get_logger("helper.test")
    log.warning("a warning")
    for number in range(50):
        log.error("again and again", count=number)
    log.error("another")
    clock.advance(AGAIN)
    log.error("again and again", count=50)
    reporter.close()
    told = [(event["logentry"]["formatted"], event["extra"].get("count")) for event in project.events]
    assert sorted(told, key=str) == [("again and again", 0), ("again and again", 50), ("another", None)]


def test_what_the_library_adds_is_taken_away() -> None:
    event: Any = {
        "event_id": "1",
        "level": "error",
        "server_name": CANARY,
        "request": {"data": CANARY},
        "breadcrumbs": {"values": [CANARY]},
        "contexts": {"runtime": CANARY},
        "modules": {CANARY: "1"},
        "exception": {"values": [{"stacktrace": {"frames": [{"vars": {"a": CANARY}}]}}]},
        "extra": {"reason": "kept", "sys.argv": [CANARY]},
        "user": {"ip_address": CANARY},
    }
    made = strip(event, {})
    assert CANARY not in repr(made)
    assert made["extra"] == {"reason": "kept"}
    assert "request_id" in FIELDS


def test_a_project_that_is_away_holds_nothing_up(clock: FakeClock) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        made = start(f"http://public@127.0.0.1:{deaf.getsockname()[1]}/7", clock)

        def report() -> None:
            for number in range(300):
                made.report({"event": str(number)})

        done = threading.Thread(target=report)
        done.start()
        done.join(PATIENCE)
        assert not done.is_alive(), "what does not fit into the queue is dropped"
    made._client.close(timeout=0.1)


@pytest.mark.parametrize("dsn", ["http://127.0.0.1/", "http://public@127.0.0.1/", "nonsense"])
def test_what_is_no_dsn_is_told(dsn: str, clock: FakeClock) -> None:
    with pytest.raises(ConfigError, match="not a valid Sentry DSN"):
        start(dsn, clock)


def test_without_the_library_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with pytest.raises(HelperError) as caught:
        start("http://public@127.0.0.1/7", clock)
    assert "svote-helper[sentry]" in caught.value.advice


def test_a_report_that_fails_takes_no_line_with_it() -> None:
    out = io.StringIO()

    def broken_report(_line: object) -> None:
        raise RuntimeError

    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    configure("info", "json", out, broken_report)
    structlog.get_logger("helper.test").error("a thing broke")
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()
    assert json.loads(out.getvalue())["event"] == "a thing broke"
