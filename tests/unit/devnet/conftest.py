"""A dev chain for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.devnet.support import ChainFixture, run_chain


@pytest.fixture
async def chain() -> AsyncIterator[ChainFixture]:
    async with run_chain() as running:
        yield running
