"""All campaigns, in the order in which they run, and the stores that they run with."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.campaign.campaign import CampaignRun, Findings


class Traits(NamedTuple):
    """How a campaign runs.

    Attributes:
        is_timing_sensitive: it has time limits of about a second: a test suite runs it without concurrent tests.
        single_store: why it applies to one store only; it runs with the default store. Empty if it applies to both.
    """

    is_timing_sensitive: bool = False
    single_store: str = ""


CAMPAIGNS = {
    "crash": Traits(),
    "writes": Traits(
        single_store="the writes that it kills at are the helper's own; on PostgreSQL they are the server's"
    ),
    "restarts": Traits(),
    "disk": Traits(True, "the disk that it fills and breaks is the helper's own; on PostgreSQL it is the server's"),
    "corruption": Traits(single_store="it flips bits in the pages of a SQLite file"),
    "liar": Traits(is_timing_sensitive=True),
    "herd": Traits(is_timing_sensitive=True),
    "contention": Traits(is_timing_sensitive=True),
    "backup": Traits(single_store="it makes SQLite's online backups; PostgreSQL has its own"),
    "retention": Traits(),
    "eavesdropper": Traits(is_timing_sensitive=True),
    "hostile": Traits(is_timing_sensitive=True),
    "anonymous": Traits(is_timing_sensitive=True),
    "roles": Traits(single_store="it has PostgreSQL anyway, for hosts of all roles"),
}
"""Each is a module of this package with a function `run`."""
STORE_NAMES = ("sqlite", "postgres")


def campaign_names(store: str) -> tuple[str, ...]:
    return tuple(name for name, traits in CAMPAIGNS.items() if store == "sqlite" or not traits.single_store)


def load_campaign(name: str) -> Callable[[CampaignRun], Awaitable[Findings]]:
    run: Callable[[CampaignRun], Awaitable[Findings]] = importlib.import_module(f"tests.campaign.{name}").run
    return run
