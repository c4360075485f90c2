"""What all tests share: the asyncio backend, and the recorded round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent / "recorded" / "round"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def recorded_lines(name: str) -> list[dict[str, Any]]:
    """The rows of one recorded .jsonl file."""
    return [json.loads(line) for line in (RECORDED / name).read_text().splitlines()]


@pytest.fixture(scope="session")
def recorded_shares() -> list[dict[str, Any]]:
    return recorded_lines("shares.jsonl")


@pytest.fixture(scope="session")
def recorded_reveals() -> list[dict[str, Any]]:
    return recorded_lines("reveals.jsonl")


@pytest.fixture(scope="session")
def recorded_exchanges() -> list[dict[str, Any]]:
    return recorded_lines("exchanges.jsonl")


@pytest.fixture(scope="session")
def recorded_blocks() -> list[dict[str, Any]]:
    return recorded_lines("blocks.jsonl")
