"""All campaigns, in the order in which they run."""

from __future__ import annotations

import importlib

from tests.campaign.base import Campaign

NAMES = (
    "crash",
    "writes",
    "restarts",
    "disk",
    "corruption",
    "outage",
    "replies",
    "tarpit",
    "stale",
    "clock",
    "herd",
    "contention",
    "backup",
    "retention",
    "eavesdropper",
    "hostile",
    "hosts",
    "roles",
    "lease",
)
"""Each is a module of this package with a `CAMPAIGN`."""
HURRIED = ("disk", "tarpit", "stale", "clock", "herd", "contention", "eavesdropper", "hostile")
"""Those that promise something within a second or so: a test suite runs them with nothing beside them."""


def campaign(name: str) -> Campaign:
    """The campaign of this name."""
    found = importlib.import_module(f"tests.campaign.{name}").CAMPAIGN
    assert isinstance(found, Campaign)
    return found
