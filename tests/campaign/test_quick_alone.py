"""Short forms of the campaigns with time limits of about a second, run without concurrent tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.registry import CAMPAIGNS
from tests.campaign.test_quick import check_quick_run


@pytest.mark.parametrize("name", [name for name, traits in CAMPAIGNS.items() if traits.is_timing_sensitive])
async def test_campaign_quick_run_alone_keeps_promises(name: str, tmp_path: Path) -> None:
    await check_quick_run(name, tmp_path)
