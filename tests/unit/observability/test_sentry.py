"""Events for Sentry contain only listed fields of our own log lines."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import sentry_sdk
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.errors import ConfigError, HelperError
from helper.observability.log_config import ALLOWED_FIELDS
from helper.observability.sentry import COPIED_KEYS, REPEAT_SECONDS, SentryReporter, create_reporter, strip_event
from helper.server.edge import Edge, json_application
from tests.support.clock import FakeClock
from tests.support.edge_client import create_edge_client
from tests.unit.observability.test_log_config import configured_log

CANARY = "canary-7f3a91"
PATIENCE_SECONDS = 20.0


class FakeSentryProject:
    """A Sentry project on loopback that stores all received bytes."""

    def __init__(self) -> None:
        self.envelopes: list[bytes] = []
        self.headers: list[str] = []
        self.received = threading.Event()
        project = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                project.headers.append(f"{self.path}\n{self.headers}")
                zipped = self.headers.get("Content-Encoding") == "gzip"
                project.envelopes.append(gzip.decompress(body) if zipped else body)
                project.received.set()
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.dsn = f"http://public@127.0.0.1:{self.server.server_port}/7"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(envelope.split(b"\n")[2]) for envelope in self.envelopes]


@pytest.fixture
def project() -> Iterator[FakeSentryProject]:
    serving = FakeSentryProject()
    serving.thread.start()
    yield serving
    serving.server.shutdown()
    serving.thread.join()
    serving.server.server_close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reporter(project: FakeSentryProject, clock: FakeClock) -> Iterator[SentryReporter]:
    """Send the log to the project."""
    reporter_ = create_reporter(project.dsn, clock)
    with configured_log("debug", "json", reporter_.report):
        yield reporter_
        reporter_.close()


def raise_with_secret(primary_blind: str) -> None:
    """Raise with a secret in a local variable, in the text, and in the cause's text."""
    witness = {"share_comms": primary_blind}
    try:
        raise ValueError(f"{witness}")
    except ValueError as error:
        raise KeyError(primary_blind) from error


def test_error_is_reported_with_line_and_fields(project: FakeSentryProject, reporter: SentryReporter) -> None:
    structlog.get_logger("helper.test").error("a thing broke", reason="so it is", count=3)
    reporter.close()
    (event,) = project.events
    assert event["logentry"] == {"formatted": "a thing broke"}
    assert event["extra"] == {"reason": "so it is", "count": 3}
    assert (event["level"], event["logger"]) == ("error", "helper.test")
    assert event["release"].startswith("svote-helper@")
    assert set(event) <= {*COPIED_KEYS, "logentry", "extra", "fingerprint"}


async def failing_endpoint(request: Request) -> Response:
    await request.body()
    raise_with_secret(CANARY)
    return Response()


@pytest.mark.anyio
async def test_report_never_contains_secrets(
    project: FakeSentryProject, reporter: SentryReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SVOTE_SECRET", CANARY)
    monkeypatch.setattr(sys, "argv", ["serve", CANARY])
    sentry_sdk.add_breadcrumb(message=CANARY)
    sentry_sdk.set_tag("secret", CANARY)
    log = structlog.get_logger("helper.test")
    log.error("unlisted fields", primary_blind=CANARY, nullifier=CANARY, client=CANARY)
    log.error("a value that is not plain", reason=CANARY.encode(), error=[object(), CANARY.encode()])
    try:
        raise_with_secret(CANARY)
    except KeyError:
        log.exception("an exception of others")
    structlog.get_logger("uvicorn.error").error(f"a library quotes {CANARY}")
    logging.getLogger("asyncio").error("a library quotes %s", CANARY)
    edge = Edge(json_application([Route("/broken", failing_endpoint, methods=["POST"])]))
    async with create_edge_client(edge) as client:
        headers = {"Authorization": f"Bearer {CANARY}", "X-Helper-Token": CANARY, "User-Agent": CANARY}
        response = await client.post(f"/broken?token={CANARY}", content=CANARY, headers=headers)
    assert response.status_code == 500
    reporter.close()
    sent_text = b"".join(project.envelopes).decode()
    assert len(project.events) == 4, "log entries of libraries are not sent"
    assert CANARY not in sent_text
    assert CANARY not in "".join(project.headers)
    for hidden in ("203.0.113.77", socket.gethostname(), os.environ["HOME"], "share_comms"):
        assert hidden not in sent_text, hidden
    last = project.events[-1]
    assert last["logentry"]["formatted"] == "request_failed"
    assert last["extra"]["exception"].startswith("KeyError (")
    assert last["extra"]["request_id"] == response.headers["x-request-id"]


def test_only_errors_are_reported_once_a_minute_per_kind(
    project: FakeSentryProject, reporter: SentryReporter, clock: FakeClock
) -> None:
    log = structlog.get_logger("helper.test")
    log.warning("a warning")
    for number in range(50):
        log.error("again and again", count=number)
    log.error("another")
    clock.advance(REPEAT_SECONDS)
    log.error("again and again", count=50)
    reporter.close()
    reports = [(event["logentry"]["formatted"], event["extra"].get("count")) for event in project.events]
    assert sorted(reports, key=str) == [("again and again", 0), ("again and again", 50), ("another", None)]


def test_report_drops_data_added_by_library() -> None:
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
    stripped = strip_event(event, {})
    assert CANARY not in repr(stripped)
    assert stripped["extra"] == {"reason": "kept"}
    assert "request_id" in ALLOWED_FIELDS


def test_unreachable_project_blocks_nothing(clock: FakeClock) -> None:
    with socket.socket() as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        unresponsive.listen()
        reporter = create_reporter(f"http://public@127.0.0.1:{unresponsive.getsockname()[1]}/7", clock)

        def report() -> None:
            for number in range(300):
                reporter.report({"event": str(number)})

        reporting = threading.Thread(target=report)
        reporting.start()
        reporting.join(PATIENCE_SECONDS)
        assert not reporting.is_alive(), "reports that exceed the queue are dropped"
    reporter._client.close(timeout=0.1)


@pytest.mark.parametrize("dsn", ["http://127.0.0.1/", "http://public@127.0.0.1/", "nonsense"])
def test_invalid_dsn_is_refused(dsn: str, clock: FakeClock) -> None:
    with pytest.raises(ConfigError, match="not a valid Sentry DSN"):
        create_reporter(dsn, clock)


def test_missing_library_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with pytest.raises(HelperError) as caught:
        create_reporter("http://public@127.0.0.1/7", clock)
    assert "svote-helper[sentry]" in caught.value.advice


def test_failing_report_keeps_log_line() -> None:
    def broken_report(_line: object) -> None:
        raise RuntimeError

    with configured_log("info", "json", broken_report) as out:
        structlog.get_logger("helper.test").error("a thing broke")
    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]  # other threads may log too
    assert "a thing broke" in events
