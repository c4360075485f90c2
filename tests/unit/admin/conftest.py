"""An open admin application for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.admin.fixtures import AdminStack, open_admin_stack


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[AdminStack]:
    async with open_admin_stack(tmp_path / "admin.db") as opened:
        yield opened
