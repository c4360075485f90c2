"""The chain's nodes as the settings name them, for commands that ask about what is public."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from helper.chain.node_pool import NodePool, create_node_pool
from helper.cli.settings import read_settings
from helper.clock import SystemClock
from helper.errors import ChainUnavailable
from helper.observability.log_config import configure


@asynccontextmanager
async def chain_of(config: Path | None) -> AsyncIterator[NodePool]:
    """The nodes, probed once.

    Raises:
        ChainUnavailable: none of them is of use; says why.
    """
    configure("warning")
    settings = read_settings(config).config
    endpoints = create_node_pool(settings, SystemClock())
    try:
        await endpoints.check()
        if not endpoints.usable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in endpoints.reasons().items())
            raise ChainUnavailable(f"no node can be asked ({reasons})")
        yield endpoints
    finally:
        await endpoints.aclose()
