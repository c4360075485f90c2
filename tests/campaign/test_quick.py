"""The short forms of the campaigns that can wait for their turn on a busy machine; the others: `test_quick_alone`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.campaign import Findings, Setting
from tests.campaign.registry import HURRIED, NAMES, ONE_STORE, campaign, names
from tests.campaign.stores import cluster_of
from tests.support.postgres import binaries

SHARED = ("crash",) if binaries() is not None else ()
"""Those of which the short form is tried with PostgreSQL too; all others are by hand (`--store postgres`)."""


def test_each_has_a_store() -> None:
    assert set(ONE_STORE) < set(NAMES)
    assert set(SHARED) < set(names("postgres"))


@pytest.mark.anyio
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HURRIED])
async def test_campaign(name: str, tmp_path: Path) -> None:
    judge(await campaign(name).run(Setting(seed=1, quick=True, folder=tmp_path)))


@pytest.mark.anyio
@pytest.mark.parametrize("name", SHARED)
async def test_campaign_with_postgres(name: str, tmp_path: Path) -> None:
    with cluster_of("postgres") as cluster:
        judge(await campaign(name).run(Setting(seed=1, quick=True, folder=tmp_path, cluster=cluster)))


def judge(findings: Findings) -> None:
    assert findings.goals, "a campaign that promises nothing shows nothing"
    assert findings.held, findings.broken
