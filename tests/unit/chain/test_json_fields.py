"""Untrusted JSON: twice the input takes at most twice the steps."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import orjson
import pytest

from helper.chain.broadcast_outcome import sanitize_text
from helper.chain.json_fields import MAX_TEXT_CHARACTERS, Fields, limit_stored_values, loads
from helper.errors import InvalidResponse


def count_steps(work: Callable[[], object]) -> int:
    """Return the number of bytecode instructions and calls of `work`, including those that end in a refusal."""
    steps = 0

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal steps
        steps += 1
        frame.f_trace_opcodes = True
        return trace

    previous = sys.gettrace()
    gc.disable()  # a collection would run, and count, the finalizers of earlier tests
    sys.settrace(trace)
    try:
        with contextlib.suppress(InvalidResponse):
            work()
    finally:
        sys.settrace(previous)
        gc.enable()
    return steps


def one_field(value: object) -> Fields:
    return Fields({"a": value}, "source")


CASES: dict[str, Callable[[int], Callable[[], object]]] = {
    "document": lambda size: partial(loads, orjson.dumps([1] * size), "source"),
    "not JSON": lambda size: lambda: loads(b"<" * size, "source"),
    "white space": lambda size: lambda: loads(b" " * size, "source"),
    "tiny values": lambda size: lambda: loads(b"[]," * 40 * size, "source"),
    "stored values": lambda size: lambda: limit_stored_values(b"[]," * 40 * size, "source"),
    "names": lambda size: Fields({str(number): 0 for number in range(size)}, "source").names,
    "digits": lambda size: lambda: one_field("9" * size).uint("a"),
    "text": lambda size: lambda: one_field("\x00" * size).text("a"),
    "hex": lambda size: lambda: one_field("0" * size).hex_bytes("a"),
    "base64": lambda size: lambda: one_field("A" * size).base64_bytes("a", 32),
    "time": lambda size: lambda: one_field("2026-01-01T00:00:00." + "0" * size).timestamp("a"),
    "list": lambda size: lambda: one_field([0] * size).items("a"),
    "objects": lambda size: lambda: one_field([{}] * size).children("a"),
    "no objects": lambda size: lambda: one_field([{}] * size + [0]).children("a"),
}


@pytest.mark.parametrize("name", CASES)
def test_twice_the_input_takes_at_most_twice_the_steps(name: str) -> None:
    steps, doubled = (count_steps(CASES[name](size)) for size in (1000, 2000))
    assert 0 < doubled <= 2 * steps


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    assert one_field("\x7f" * (16 << 20)).text("a") == " " * MAX_TEXT_CHARACTERS
    assert sanitize_text("a" + " " * 10_000 + "b") == "a"
