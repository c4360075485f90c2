"""The short forms of the campaigns that can wait for their turn on a busy machine; the others: `test_quick_alone`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.base import Setting
from tests.campaign.registry import HURRIED, NAMES, campaign


@pytest.mark.anyio
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HURRIED])
async def test_campaign(name: str, tmp_path: Path) -> None:
    findings = await campaign(name).run(Setting(seed=1, quick=True, folder=tmp_path))
    assert findings.goals, "a campaign that promises nothing shows nothing"
    assert findings.held, findings.broken
