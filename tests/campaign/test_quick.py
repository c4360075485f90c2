"""Short forms of the campaigns that tolerate a busy machine; the others are in `test_quick_alone`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.registry import CAMPAIGN_NAMES, SINGLE_STORE, TIMING_SENSITIVE, campaign_names, load_campaign
from tests.campaign.stores import run_cluster
from tests.support.postgres import find_binaries

SHARED_STORE_CAMPAIGNS = ("crash",) if find_binaries() is not None else ()
"""Campaigns whose short form also runs with PostgreSQL; the others run manually (`--store postgres`)."""


def test_campaigns_each_has_a_store() -> None:
    assert set(SINGLE_STORE) < set(CAMPAIGN_NAMES)
    assert set(SHARED_STORE_CAMPAIGNS) < set(campaign_names("postgres"))


@pytest.mark.parametrize("name", [name for name in CAMPAIGN_NAMES if name not in TIMING_SENSITIVE])
async def test_campaign_quick_run_keeps_promises(name: str, tmp_path: Path) -> None:
    assert_held(await load_campaign(name).run(CampaignRun(seed=1, is_quick=True, directory=tmp_path)))


@pytest.mark.parametrize("name", SHARED_STORE_CAMPAIGNS)
async def test_campaign_quick_run_with_postgres_keeps_promises(name: str, tmp_path: Path) -> None:
    with run_cluster("postgres") as cluster:
        assert_held(
            await load_campaign(name).run(CampaignRun(seed=1, is_quick=True, directory=tmp_path, cluster=cluster))
        )


def assert_held(findings: Findings) -> None:
    assert findings.goals, "a campaign without goals proves nothing"
    assert findings.is_held, findings.broken_goals
