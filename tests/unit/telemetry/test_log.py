"""The log: nothing but the fields on the list, whoever writes the line."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import helper
from helper.errors import HelperError
from helper.telemetry.log import FIELDS, configure, describe, dropped_fields

SECRET = "c2VjcmV0"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A log at its most talkative; everything is as before afterwards."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    out = io.StringIO()
    configure("debug", "json", out)
    yield out
    root.handlers[:], level = before
    root.setLevel(level)
    logging.getLogger("helper").setLevel(logging.NOTSET)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_its_fields_and_a_time(stream: io.StringIO) -> None:
    structlog.get_logger("helper.test").info("a thing", count=3, reason="so")
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "a thing", "level": "info", "logger": "helper.test", "count": 3, "reason": "so"}


def test_a_field_that_is_not_on_the_list_is_dropped_and_counted(stream: io.StringIO) -> None:
    before = dropped_fields().get("primary_blind", 0)
    structlog.get_logger("helper.test").warning("a thing", primary_blind=SECRET, nullifier=SECRET, count=1)
    (line,) = lines(stream)
    assert SECRET not in stream.getvalue()
    assert (line["count"], line["dropped"]) == (1, 2)
    assert dropped_fields()["primary_blind"] == before + 1


@pytest.mark.parametrize("value", [SECRET.encode(), object(), [SECRET.encode()], {"a": SECRET.encode()}])
def test_a_value_that_is_not_plain_is_dropped(stream: io.StringIO, value: object) -> None:
    structlog.get_logger("helper.test").info("a thing", reason=value)
    assert lines(stream)[0]["dropped"] == 1
    assert SECRET not in stream.getvalue()


def test_a_field_bound_earlier_is_dropped_too(stream: io.StringIO) -> None:
    structlog.get_logger("helper.test").bind(c1=SECRET).error("a thing")
    assert SECRET not in stream.getvalue()


def fail_with(witness: str) -> None:
    raise ValueError(f"bad value {witness}")


def test_an_exception_is_its_type_and_places_without_texts_and_locals(stream: io.StringIO) -> None:
    try:
        fail_with(SECRET)
    except ValueError:
        structlog.get_logger("helper.test").exception("a thing failed")
    (line,) = lines(stream)
    assert SECRET not in stream.getvalue()
    assert line["exception"].startswith("ValueError (telemetry/test_log.py:")


def test_our_own_errors_keep_their_texts_and_causes(stream: io.StringIO) -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise HelperError("the queue cannot be written") from error
    except HelperError as error:
        told = describe(error)
    assert told.startswith("HelperError: the queue cannot be written (")
    assert " <- OSError: No space left on device (" in told


def test_lines_of_libraries_come_the_same_way(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("httpx").info("HTTP Request: GET http://node/tx/%s", SECRET)
    try:
        fail_with(SECRET)
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    told = lines(stream)
    assert [line["event"] for line in told] == ["Invalid HTTP request received.", "Exception in ASGI application"]
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("library", ["aiosqlite", "httpx", "a.library.to.come"])
def test_what_libraries_tell_below_a_warning_is_never_written(stream: io.StringIO, library: str) -> None:
    logging.getLogger(library).debug("executing %s", (SECRET,))
    logging.getLogger(library).info("asked for %s", SECRET)
    assert stream.getvalue() == ""


def test_what_is_below_the_level_is_not_written() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    out = io.StringIO()
    configure("warning", "auto", out)
    structlog.get_logger("helper.test").info("not this")
    structlog.get_logger("helper.test").warning("this")
    root.handlers[:], level = before
    root.setLevel(level)
    logging.getLogger("helper").setLevel(logging.NOTSET)
    structlog.reset_defaults()
    assert [line["event"] for line in lines(out)] == ["this"]


def test_pretty_is_for_eyes(stream: io.StringIO) -> None:
    configure("info", "pretty", stream)
    structlog.get_logger("helper.test").info("a thing", count=3)
    assert "a thing" in stream.getvalue()
    assert "count=3" in stream.getvalue()
    assert "{" not in stream.getvalue()


LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "bind"}


def logged_fields() -> Iterator[tuple[str, str]]:
    """Every field that a line of code in helper/ logs, with the place."""
    root = Path(helper.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "log" and node.func.attr in LEVELS:
                for keyword in node.keywords:
                    yield f"{path.relative_to(root)}:{node.lineno}", str(keyword.arg)


def test_every_field_that_the_code_logs_is_on_the_list() -> None:
    found = list(logged_fields())
    assert len(found) > 10
    assert [(place, name) for place, name in found if name not in FIELDS | {"exc_info"}] == []
