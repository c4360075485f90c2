"""The short forms of the campaigns that promise something within a second or so: nothing else may run beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.campaign import Setting
from tests.campaign.registry import HURRIED, NAMES, campaign


def test_each_is_a_campaign() -> None:
    assert set(HURRIED) < set(NAMES)


@pytest.mark.anyio
@pytest.mark.parametrize("name", HURRIED)
async def test_campaign(name: str, tmp_path: Path) -> None:
    findings = await campaign(name).run(Setting(seed=1, quick=True, folder=tmp_path))
    assert findings.goals, "a campaign that promises nothing shows nothing"
    assert findings.held, findings.broken
