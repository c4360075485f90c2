"""All campaigns, in the order in which they run, and the stores that they run with."""

from __future__ import annotations

import importlib

from tests.campaign.campaign import Campaign

CAMPAIGN_NAMES = (
    "crash",
    "writes",
    "restarts",
    "disk",
    "corruption",
    "liar",
    "herd",
    "contention",
    "backup",
    "retention",
    "eavesdropper",
    "hostile",
    "anonymous",
    "roles",
)
"""Each is a module of this package with a `CAMPAIGN`."""
TIMING_SENSITIVE = (
    "disk",
    "liar",
    "herd",
    "contention",
    "eavesdropper",
    "hostile",
    "anonymous",
)
"""Campaigns with time limits of about a second: a test suite runs them without concurrent tests."""
SINGLE_STORE = {
    "writes": "the writes that it kills at are the helper's own; on PostgreSQL they are the server's",
    "disk": "the disk that it fills and breaks is the helper's own; on PostgreSQL it is the server's",
    "corruption": "it flips bits in the pages of a SQLite file",
    "backup": "it makes SQLite's online backups; PostgreSQL has its own",
    "roles": "it has PostgreSQL anyway, for hosts of all roles",
}
"""Campaigns that apply to one store only, with the reason; they run with the default store."""
STORE_NAMES = ("sqlite", "postgres")


def campaign_names(store: str) -> tuple[str, ...]:
    return tuple(name for name in CAMPAIGN_NAMES if store == "sqlite" or name not in SINGLE_STORE)


def load_campaign(name: str) -> Campaign:
    campaign = importlib.import_module(f"tests.campaign.{name}").CAMPAIGN
    assert isinstance(campaign, Campaign)
    return campaign
