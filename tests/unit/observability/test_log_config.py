"""The log contains only the listed fields, regardless of the code that writes the line."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
from freezegun import freeze_time

import helper
from helper.core.refusals import PauseReason
from helper.errors import HelperError
from helper.observability.log_config import ALLOWED_FIELDS, configure, count_dropped_fields, describe_exception

SECRET = "c2VjcmV0"


@contextmanager
def configured_log(level: Any, form: Any, *options: Any, **named: Any) -> Iterator[io.StringIO]:
    """A log with this configuration; restores the one before."""
    root = logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    out = io.StringIO()
    with redirect_stderr(out):
        configure(level, form, *options, **named)
    try:
        yield out
    finally:
        root.handlers[:] = handlers
        root.setLevel(root_level)
        logging.getLogger("helper").setLevel(logging.NOTSET)
        structlog.reset_defaults()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A log at the most verbose level."""
    with configured_log("debug", "json") as out:
        yield out


def read_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_log_line_has_fields_and_time(stream: io.StringIO) -> None:
    structlog.get_logger("helper.test").info("a thing", count=3, reason="so")
    (line,) = read_lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "a thing", "level": "info", "logger": "helper.test", "count": 3, "reason": "so"}


def test_entries_have_the_prefix_of_their_level() -> None:
    with configured_log("info", "json", prefix=lambda level: f"<{level}>") as out:
        structlog.get_logger("helper.test").warning("a thing")
        logging.getLogger("library").error("a thing")
    assert [line.partition("{")[0] for line in out.getvalue().splitlines()] == ["<warning>", "<error>"]


def test_unlisted_field_is_dropped_and_counted(stream: io.StringIO) -> None:
    before = count_dropped_fields().get("primary_blind", 0)
    structlog.get_logger("helper.test").warning("a thing", primary_blind=SECRET, nullifier=SECRET, count=1)
    (line,) = read_lines(stream)
    assert SECRET not in stream.getvalue()
    assert (line["count"], line["dropped"]) == (1, 2)
    assert count_dropped_fields()["primary_blind"] == before + 1


@pytest.mark.parametrize("value", [SECRET.encode(), object(), [SECRET.encode()], {"a": SECRET.encode()}])
def test_field_with_non_plain_value_is_dropped(stream: io.StringIO, value: object) -> None:
    structlog.get_logger("helper.test").info("a thing", reason=value)
    assert read_lines(stream)[0]["dropped"] == 1
    assert SECRET not in stream.getvalue()


def test_bound_unlisted_field_is_dropped(stream: io.StringIO) -> None:
    structlog.get_logger("helper.test").bind(c1=SECRET).error("a thing")
    assert SECRET not in stream.getvalue()


def raise_with_secret(witness: str) -> None:
    raise ValueError(f"bad value {witness}")


def test_exception_is_logged_without_text_and_locals(stream: io.StringIO) -> None:
    try:
        raise_with_secret(SECRET)
    except ValueError:
        structlog.get_logger("helper.test").exception("a thing failed")
    (line,) = read_lines(stream)
    assert SECRET not in stream.getvalue()
    assert line["exception"].startswith("ValueError (observability/test_log_config.py:")


def test_helper_errors_keep_text_and_cause(stream: io.StringIO) -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise HelperError("the queue cannot be written") from error
    except HelperError as error:
        description = describe_exception(error)
    assert description.startswith("HelperError: the queue cannot be written (")
    assert " <- OSError: No space left on device (" in description


def test_library_lines_use_same_format(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("httpx").info("HTTP Request: GET http://node/tx/%s", SECRET)
    try:
        raise_with_secret(SECRET)
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    entries = read_lines(stream)
    assert [line["event"] for line in entries] == ["Invalid HTTP request received.", "Exception in ASGI application"]
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("library", ["aiosqlite", "httpx", "a.library.to.come"])
def test_library_lines_below_warning_are_dropped(stream: io.StringIO, library: str) -> None:
    logging.getLogger(library).debug("executing %s", (SECRET,))
    logging.getLogger(library).info("asked for %s", SECRET)
    assert stream.getvalue() == ""


def test_lines_below_level_are_dropped() -> None:
    with configured_log("warning", "auto") as out:
        structlog.get_logger("helper.test").info("not this")
        structlog.get_logger("helper.test").warning("this")
    assert [line["event"] for line in read_lines(out)] == ["this"]


def test_pretty_format_is_not_json() -> None:
    with configured_log("info", "pretty") as stream:
        structlog.get_logger("helper.test").info("a thing", count=3, reason=PauseReason.STARTING)
    assert "a thing" in stream.getvalue()
    assert "count=3" in stream.getvalue()
    assert f"reason={PauseReason.STARTING}" in stream.getvalue()
    assert "{" not in stream.getvalue()


UNSAFE_TEXTS = "gas\x00 \x1b]0;title\x07 \x9b2J one\ntwo \u202e \ud800"


@pytest.mark.parametrize("format_", ["json", "pretty"])
def test_configure_control_characters_never_reach_the_output(format_: Literal["json", "pretty"]) -> None:
    with configured_log("info", format_) as stream:
        log = structlog.get_logger("helper.test")
        log.info(UNSAFE_TEXTS, reason=UNSAFE_TEXTS, counts={UNSAFE_TEXTS: [UNSAFE_TEXTS]})
        logging.getLogger("uvicorn.error").warning("from a library: %s", UNSAFE_TEXTS)
        try:
            raise HelperError(UNSAFE_TEXTS)
        except HelperError:
            log.exception("failed")

    text = stream.getvalue()
    text.encode()
    assert text.count("one two") >= 5
    for escaped in ("\\u001b", "\\u0000", "\\x1b", "\\x00", "\\x9b", "\\n"):
        assert escaped not in text
    assert not [char for char in text.replace("\n", "") if not char.isprintable()]


def test_configure_reported_errors_have_no_control_characters() -> None:
    reported: list[Mapping[str, Any]] = []
    with configured_log("info", "json", reported.append):
        structlog.get_logger("helper.test").error("failed", reason=UNSAFE_TEXTS)
    assert reported[0]["reason"].isprintable()


LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "bind"}
ADDED_FIELDS = {"event", "level", "logger", "timestamp", "exception", "dropped", "suppressed"}
"""Fields that the configuration of the log adds to entries."""


def find_loggers(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of a method of a logger, also of one that was stored in a variable before."""
    aliases = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp) and is_log_method(node.value.body)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_alias = isinstance(node.func, ast.Name) and node.func.id in aliases
            if is_alias or is_log_method(node.func):
                yield node


def is_log_method(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr not in LOG_METHODS:
        return False
    return ast.unparse(function.value).rpartition(".")[2] in ("log", "_log")


def logged_fields() -> Iterator[tuple[str, str]]:
    """Every field that code of the service logs, with its location."""
    root = Path(helper.__file__).parents[1]
    for path in sorted(path for package in ("helper", "admin", "audit") for path in (root / package).rglob("*.py")):
        for node in find_loggers(ast.parse(path.read_text())):
            for keyword in node.keywords:
                yield f"{path.relative_to(root)}:{node.lineno}", str(keyword.arg)


def test_exactly_the_logged_fields_are_listed() -> None:
    fields = list(logged_fields())
    assert [(path, name) for path, name in fields if name not in ALLOWED_FIELDS | {"exc_info"}] == []
    assert {name for _, name in fields} - {"exc_info"} | ADDED_FIELDS == ALLOWED_FIELDS


@pytest.fixture
def wall_clock() -> Iterator[Any]:
    """The time of the log records; a test sets it."""
    with freeze_time("2026-11-21 13:42:00") as frozen:
        yield frozen


def test_repeated_error_is_written_ten_times_and_then_once_a_second(stream: io.StringIO, wall_clock: Any) -> None:
    log = structlog.get_logger("helper.test")
    for number in range(1000):
        log.error("a thing", count=number)
    assert [line["count"] for line in read_lines(stream)] == list(range(10))
    wall_clock.tick(1)
    log.error("a thing", count=1000)
    log.error("a thing", count=1001)
    assert (read_lines(stream)[-1]["count"], read_lines(stream)[-1]["suppressed"], len(read_lines(stream))) == (
        1000,
        990,
        11,
    )
    wall_clock.tick(60)
    for number in range(11):
        log.error("a thing", count=number)
    assert (read_lines(stream)[11]["suppressed"], len(read_lines(stream))) == (1, 21)


def test_repeat_limit_is_per_kind_and_spares_info(stream: io.StringIO, wall_clock: Any) -> None:
    log = structlog.get_logger("helper.test")
    for number in range(20):
        log.warning("a thing")
        log.info("a thing", count=number)
    log.warning("another thing")
    structlog.get_logger("helper.other").warning("a thing")
    levels = Counter((line["level"], line["event"], line["logger"]) for line in read_lines(stream))
    assert levels == {
        ("warning", "a thing", "helper.test"): 10,
        ("info", "a thing", "helper.test"): 20,
        ("warning", "another thing", "helper.test"): 1,
        ("warning", "a thing", "helper.other"): 1,
    }


def test_repeat_limit_applies_to_library_lines(stream: io.StringIO, wall_clock: Any) -> None:
    def warn(client: str) -> None:
        logging.getLogger("some.library").warning("%s: bad request", client)

    for number in range(500):
        warn(f"client {number}")
    wall_clock.tick(1)
    warn("last client")
    assert len(read_lines(stream)) == 11
    assert read_lines(stream)[-1]["event"] == "last client: bad request (suppressed: 490)"


def test_repeat_limit_starts_over_when_the_clock_is_set_back(stream: io.StringIO, wall_clock: Any) -> None:
    log = structlog.get_logger("helper.test")
    for _ in range(20):
        log.error("a thing")
    wall_clock.move_to("2026-11-20 13:42:00")
    log.error("a thing")
    assert read_lines(stream)[-1]["suppressed"] == 10
