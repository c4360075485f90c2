"""Short forms of the campaigns with time limits of about a second, run without concurrent tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.campaign import CampaignRun
from tests.campaign.registry import CAMPAIGN_NAMES, TIMING_SENSITIVE, load_campaign
from tests.campaign.test_quick import assert_held


def test_timing_sensitive_names_are_campaigns() -> None:
    assert set(TIMING_SENSITIVE) < set(CAMPAIGN_NAMES)


@pytest.mark.parametrize("name", TIMING_SENSITIVE)
async def test_campaign_quick_run_alone_keeps_promises(name: str, tmp_path: Path) -> None:
    assert_held(await load_campaign(name).run(CampaignRun(seed=1, is_quick=True, directory=tmp_path)))
