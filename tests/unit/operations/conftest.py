"""A queue with its operator actions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helper.store import blocks
from tests.unit.operations.action_fixtures import OperationsHarness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[OperationsHarness]:
    harness_ = OperationsHarness(tmp_path / "queue.db")
    await harness_.open()
    await harness_.store.run(blocks.set_meta, "chain_id", "chain-1")
    yield harness_
    await harness_.store.close()
