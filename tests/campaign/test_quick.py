"""Short forms of the campaigns that tolerate a busy machine; the others are in `test_quick_alone`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.campaign import CampaignRun, run_cluster
from tests.campaign.registry import CAMPAIGNS, load_campaign
from tests.support.postgres import find_binaries

SHARED_STORE_CAMPAIGNS = ("crash",) if find_binaries() is not None else ()
"""Campaigns whose short form also runs with PostgreSQL; the others run manually (`--store postgres`)."""


@pytest.mark.parametrize("name", [name for name, traits in CAMPAIGNS.items() if not traits.is_timing_sensitive])
async def test_campaign_quick_run_keeps_promises(name: str, tmp_path: Path) -> None:
    await check_quick_run(name, tmp_path)


@pytest.mark.parametrize("name", SHARED_STORE_CAMPAIGNS)
async def test_campaign_quick_run_with_postgres_keeps_promises(name: str, tmp_path: Path) -> None:
    await check_quick_run(name, tmp_path, store="postgres")


async def check_quick_run(name: str, directory: Path, store: str = "sqlite") -> None:
    with run_cluster(store) as cluster:
        findings = await load_campaign(name)(CampaignRun(seed=1, is_quick=True, directory=directory, cluster=cluster))
    assert findings.goals, "a campaign without goals proves nothing"
    assert findings.is_held, findings.broken_goals
