"""The short form of every campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.base import Setting
from tests.campaign.registry import NAMES, campaign


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
async def test_campaign(name: str, tmp_path: Path) -> None:
    findings = await campaign(name).run(Setting(seed=1, quick=True, folder=tmp_path))
    assert findings.goals, "a campaign that promises nothing shows nothing"
    assert findings.held, findings.broken
