"""Node pool of the settings, for commands that query public chain data."""

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
async def open_node_pool(config: Path | None) -> AsyncIterator[NodePool]:
    """Create the node pool and check it once.

    Raises:
        ChainUnavailable: no node is usable; the message has the reasons.
    """
    configure("warning")
    settings = read_settings(config).config
    nodes = create_node_pool(settings, SystemClock())
    try:
        await nodes.probe_all()
        if not nodes.has_usable_node:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in nodes.unusable_reasons().items())
            raise ChainUnavailable(f"no node is usable ({reasons})")
        yield nodes
    finally:
        await nodes.aclose()
